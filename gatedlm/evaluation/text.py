"""Which text perplexity is measured on: by domain, the same for all models, and what none of them was trained on."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from dataclasses import dataclass

from gatedlm.data.cards import card
from gatedlm.data.corpora import documents
from gatedlm.data.packing import split
from gatedlm.recipe import DataSpec


@dataclass(frozen=True)
class Text:
    """Documents by domain, what they are in words, and a fingerprint of them all."""

    documents: dict[str, list[str]]
    origin: str
    fingerprint: str


def choose(asked: DataSpec | None, trained: list[DataSpec]) -> tuple[DataSpec, bool]:
    """The corpus to read, and whether only its held-out documents may be: some run has trained on the others.

    What was asked for, else what the runs were trained on, else the standard library. ValueError where they were
    trained on different texts or hold out different parts, as they do by other fields.
    """
    spec = asked or next(iter(trained), DataSpec())
    if not asked and len(set(map(_read, trained))) > 1:
        raise ValueError("these runs were trained on different texts: say which to read, data=CORPUS or data.path=FILE")
    if card(spec.corpus).kind == "backcopy":
        raise ValueError(f"data={spec.corpus}: holds no text, give data=CORPUS or data.path=FILE")
    same = [own for own in trained if _place(own) == _place(spec)]
    if len({own.holdout for own in same}) > 1:
        raise ValueError(f"data={spec.corpus}: these runs hold out different parts of it, evaluate one at a time")
    if any(_read(own) != _read(spec) for own in same):
        raise ValueError(
            f"data={spec.path or spec.corpus}: a run was trained on it by other fields and held out other rows: give "
            "its data.text_field= and data.domain_field="
        )
    return (same or [spec])[0], bool(same)


def _place(spec: DataSpec) -> tuple[str | None, ...]:
    return spec.corpus, spec.path and os.path.abspath(os.path.expanduser(spec.path))


def _read(spec: DataSpec) -> tuple[str | None, ...]:
    return *_place(spec), spec.text_field, spec.domain_field


def read_text(spec: DataSpec, held: bool, size: int) -> Text:
    """The first whole documents of each domain that hold ``size`` bytes, of the held-out ones or of all.

    ValueError, one sentence, for what cannot be read and where there is no text.
    """
    found = (document for document in documents(spec) if document.text.strip())
    if held:
        found = (document for document, out in split(found, spec.holdout) if out)
    endless = card(spec.corpus).kind == "hub"
    texts: dict[str, list[str]] = {}
    sizes, content = Counter[str](), hashlib.sha256()
    for text, domain in found:
        if sizes[domain] < size:
            texts.setdefault(domain, []).append(text)
            sizes[domain] += len(text.encode())
            content.update(f"{domain}\0{text}\0".encode())
        elif endless and min(sizes.values()) >= size:
            break
    where = spec.path or spec.corpus
    if not texts:
        raise ValueError(f"data={where}: no text in it to read, give another")
    return Text(
        dict(sorted(texts.items())), f"held-out documents of {where}" if held else where, content.hexdigest()[:16]
    )
