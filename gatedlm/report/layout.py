"""What every page is made of: the page itself, sections, tables, charts over layers and attention maps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np
from torch import Tensor

from gatedlm.report.drawing import attention_map, chart, colour_scale, floats, palette, sentence

STYLE = Path(__file__).with_name("style.css")
PLACES = {
    "query": "the query (G4)",
    "key": "the key (G3)",
    "value": "the value (G2)",
    "sdpa": "the SDPA output (G1)",
    "output": "the output of the attention layer (G5)",
}
MAPS = """<p>Each line of a map is a query and sums to one. The first token's column is drawn wide and apart. The row
reads, from the first token on (a space is ·, a line end ↵):</p>"""
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def page(name: str, sections: Iterable[str]) -> str:
    """A page called ``name`` that needs nothing beside itself."""
    return PAGE.format(name=escape(name), style=palette() + STYLE.read_text(), body="\n".join(sections))


def section(title: str, *parts: str) -> str:
    """A heading and what stands under it; figures that follow one another share a grid."""
    body = re.sub(r"((?:<figure>.*?</figure>)+)", r'<div class="figures">\1</div>', "".join(parts), flags=re.DOTALL)
    return f"<section><h2>{title}</h2>{body}</section>"


def by_layer(
    label: str, unit: str, columns: Mapping[str, Iterable[float | None]], levels: Mapping[str, float | None]
) -> str:
    """A chart over layers: a line for each column, which holds a figure for each layer, and level lines."""
    lines = {name: (np.arange(len(values)), values) for name, values in ((k, floats(v)) for k, v in columns.items())}
    return chart(label, "layer", unit, lines, levels)


def uniform(tokens: int) -> dict[str, float]:
    """A level line: F-Attn of attention spread evenly, the mean over queries 1 <= i < T of 1 / (i + 1)."""
    return {"uniform attention": float(np.mean(1 / np.arange(2, tokens + 1)))} if tokens > 1 else {}


def attention_maps(attention: Mapping[int, Tensor], tokens: list[str], of: str = "") -> list[str]:
    """Attention maps (H, T, T) by layer on the row that reads ``tokens``; ``of`` tells models of one page apart."""
    if not attention:
        return [sentence("No attention map was kept.")]
    row = "".join(f'<span title="position {i}">{escape(_visible(token))}</span>' for i, token in enumerate(tokens))
    parts = [f'{MAPS}<p class="tokens">{row}</p>', colour_scale()]
    layers = []
    for layer, heads in attention.items():
        named = enumerate(heads.detach().double().cpu().numpy())
        figures = [attention_map(f"{of}Layer {layer}, head {i}", head) for i, head in named]
        layers.append(f'<div><h3>Layer {int(layer)}</h3><div class="maps">{"".join(figures)}</div></div>')
    return [*parts, f'<div class="layers">{"".join(layers)}</div>']


def _visible(token: str) -> str:
    return token.replace("\n", "↵").replace("\t", "→").replace(" ", "·")


def pre(text: str) -> str:
    """Text as it stands."""
    return f"<pre>{escape(text)}</pre>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose cells are HTML already; one of many columns scrolls in a box of its own on a narrow screen."""
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    lines = lines.replace(" ± ", " ±&nbsp;")  # breaks before the deviation, not within it
    head_line = "".join(f"<th>{cell}</th>" for cell in head)
    whole = f"<table><thead><tr>{head_line}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<div class="wide">{whole}</div>' if len(head) > 3 else whole
