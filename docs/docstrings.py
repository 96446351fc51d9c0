"""Docstrings as Markdown: what is set out in two columns there, a key and what it means, becomes a list."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Columns(griffe.Extension):
    """mkdocstrings shows each object after this has been over its docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring's paragraphs in place."""
        if obj.docstring:
            obj.docstring.value = "\n\n".join(map(as_list, obj.docstring.value.split("\n\n")))


def as_list(paragraph: str) -> str:
    """``key  text`` a line, with further lines below the text, as a list; any other paragraph as it is."""
    first = re.match(r"\S.*? {2,}(?=\S)", paragraph)
    lines = paragraph.splitlines()
    if not first or any(len(line) <= first.end() or line[first.end() - 1] != " " for line in lines):
        return paragraph
    split = ((line[: first.end()].strip(), line[first.end() :]) for line in lines)
    return "\n".join(f"- **{key}**: {text}" if key else f"  {text}" for key, text in split)
