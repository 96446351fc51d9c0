"""Where the shipped recipes and corpus cards lie, and what they say of themselves; light, so that usage is instant."""

from __future__ import annotations

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


def choices(group: str = "") -> list[str]:
    """Names that ``group=`` takes; without a group the ready recipes."""
    return sorted(path.stem for path in (shipped("recipes") / group).glob("*.yaml"))


def recipes() -> list[Entry]:
    """The ready recipes by name."""
    folder = shipped("recipes")
    return [Entry(name, **_about(folder / f"{name}.yaml")) for name in choices()]


def usage() -> str:
    """How a run is asked for, the words there are, and the ready recipes."""
    groups = [_hanging(f"  {group + '=':<9}", ", ".join(choices(group))) for group in GROUPS]
    ready = [_hanging(f"  {e.name:<17}", f"{e.shows} ({e.runs_on}, {e.takes})") for e in recipes()]
    return "\n".join(
        (
            "usage: python -m gatedlm.fit recipe=NAME [group=NAME ...] [key=value ...]",
            "",
            "a,b trains one run for each, a+b puts gates together, recipe=path/to/file.yaml takes your own file",
            "",
            "recipes",
            *ready,
            "",
            "groups",
            *groups,
            "",
            "for example: python -m gatedlm.fit recipe=quickstart gate=none,sdpa-headwise optim.lr=1e-2,3e-2",
        )
    )


def _about(path: Path) -> dict[str, str]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))["about"]


def _hanging(label: str, text: str) -> str:
    return textwrap.fill(text, 100, initial_indent=label, subsequent_indent=" " * len(label), break_on_hyphens=False)
