"""key=value words: what they say, and one line for what they do not."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path

from gatedlm.catalogue import expanded

MOST = 2**31  # no larger number is counted to


def option(word: str) -> tuple[str, str]:
    """``key=value`` as a pair; ValueError without a value."""
    key, _, value = word.partition("=")
    if not value:
        raise ValueError(f"{word!r} lacks a value: write key=value, such as model=runs/NAME or spikes=runs/NAME")
    return key, value


def check(what: str, key: str, known: Collection[str]) -> None:
    """ValueError for a key that is not among the known ones, with the nearest."""
    if key not in known:
        near = difflib.get_close_matches(key, known, 1)
        advice = f"did you mean {near[0]}=?" if near else f"write {', '.join(f'{name}=' for name in known)}"
        raise ValueError(f"unknown {what} {key!r}: {advice}")


def whole(key: str, value: str, least: int) -> int:
    """A whole number from ``least`` up, no larger than anything that can be counted here."""
    if not value.isdecimal() or not least <= int(value) < MOST:
        raise ValueError(f"{key}={value}: must be a whole number from {least} up, below {MOST:,}")
    return int(value)


def folder(key: str, value: str) -> Path:
    """The folder that results go to, whether or not it is there yet; ValueError for a file."""
    found = Path(expanded(value))
    if found.exists() and not found.is_dir():
        raise ValueError(f"{key}={value}: a file, give the folder that results go to")
    return found
