"""Where the shipped recipes and corpus cards lie, and what they say of themselves; light, so that usage is instant."""

from __future__ import annotations

import os
import shutil
import textwrap
from dataclasses import dataclass
from pathlib import Path

import yaml

GROUPS = ("scale", "gate", "data", "debug")


@dataclass(frozen=True)
class Entry:
    """A ready recipe and its ``about``: what one sees, on which machine, in how long."""

    name: str
    shows: str
    runs_on: str
    takes: str


def shipped(folder: str) -> Path:
    """The folder ``recipes`` or ``data`` beside the package in a checkout, inside it in an installed wheel."""
    package = Path(__file__).parent
    inside = package / "shipped" / folder
    return inside if inside.is_dir() else package.parent / folder


def expanded(path: str) -> str:
    """A path that a person wrote, with homes for ~ and ~USER. ValueError for a user who has none here."""
    found = os.path.expanduser(path)
    if found.startswith("~"):
        raise ValueError(f"{path}: there is no home of {path.split('/')[0]} here, write the path in full")
    return found


def choices(group: str = "") -> list[str]:
    """Names that ``group=`` takes; without a group the ready recipes."""
    return sorted(path.stem for path in (shipped("recipes") / group).glob("*.yaml"))


def recipes() -> list[Entry]:
    """The ready recipes by name."""
    folder = shipped("recipes")
    return [Entry(name, **_about(folder / f"{name}.yaml")) for name in choices()]


def usage() -> str:
    """How a run is asked for, the words there are, and the ready recipes, as wide as the terminal: 60 to 100."""
    groups = [_hanging(f"  {group + '=':<9}", ", ".join(choices(group))) for group in GROUPS]
    ready = [_hanging(f"  {e.name:<20}", f"{e.shows} ({e.runs_on}, {e.takes})") for e in recipes()]
    words = "a,b trains one run for each, a+b puts gates together, recipe=path/to/file.yaml takes your own file"
    return "\n".join(
        (
            _hanging("usage: ", "python -m gatedlm.fit recipe=NAME [group=NAME ...] [key=value ...]"),
            "",
            _hanging("", words),
            "",
            "recipes",
            *ready,
            "",
            "groups",
            *groups,
            "",
            _hanging("for example: ", "python -m gatedlm.fit recipe=sink gate=none,sdpa-headwise seed=0,1"),
        )
    )


def _about(path: Path) -> dict[str, str]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))["about"]


def _hanging(label: str, text: str) -> str:
    width, indent = min(max(shutil.get_terminal_size().columns, 60), 100), " " * len(label)
    wrapper = textwrap.TextWrapper(width, label, indent, break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(text)
