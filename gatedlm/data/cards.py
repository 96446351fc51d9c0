"""A card says where a corpus comes from, under which licence, and which reader opens it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal

from omegaconf import OmegaConf

from gatedlm.catalogue import shipped


@dataclass(frozen=True)
class Card:
    """One corpus; the table in data/README.md explains the keys."""

    name: str
    title: str
    source: str
    licence: str
    size: str
    kind: Literal["stdlib", "needles", "files", "hub", "backcopy"]
    fields: dict[str, str] = field(default_factory=dict)
    domains: list[str] = field(default_factory=list)
    hub: str = ""
    config: str | None = None
    split: str = "train"
    revision: str = "main"
    tokens: int = 0


@cache
def cards() -> dict[str, Card]:
    """Every shipped card by its name."""
    loaded: dict[str, Any] = {
        path.stem: OmegaConf.to_container(OmegaConf.load(path)) for path in sorted(shipped("data").glob("*.yaml"))
    }
    return {name: Card(name=name, **keys) for name, keys in loaded.items()}


def card(corpus: str) -> Card:
    """The card called ``corpus``, or one made up for ``org/name`` or ``org/name/config`` on the Hub.

    ValueError for any other word, with the nearest card.
    """
    known = cards()
    if corpus in known:
        return known[corpus]
    if named := re.fullmatch(r"([\w.-]+/[\w.-]+)(?:/([\w.-]+))?", corpus):
        hub, config = named.groups()
        source = f"https://huggingface.co/datasets/{hub}"
        return Card(corpus, hub, source, "see its page", "see its page", kind="hub", hub=hub, config=config)
    near = get_close_matches(corpus, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ValueError(f"data.corpus={corpus}: {hint}choose one of {', '.join(known)} or an org/name of the Hub")
