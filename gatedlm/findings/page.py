"""What a finding leaves behind: NAME-SCALE.json with the ledgers' figures, .md and .html to read."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib

from gatedlm.findings.finding import Claim, Finding, Row, Table, minus
from gatedlm.findings.judge import RULE, Spread, judge, spread
from gatedlm.report.drawing import DRAWING
from gatedlm.report.layout import page, pre, section
from gatedlm.report.layout import table as html_table
from gatedlm.report.names import MEANINGS
from gatedlm.training.ledger import plain, write_whole

COLUMNS = {
    "m_act": "M-Act",
    "f_attn": "F-Attn as packed",
    "f_attn_fixed_first": "F-Attn",
    "sink_rate_fixed_first": "sink rate",
    "f_attn_dormant": "F-Attn, dormant",
    "f_attn_active": "F-Attn, active",
    "effective_sink": "effective sink",
    "loss_first_kept": "loss, first kept",
    "loss_first_dropped": "loss, first dropped",
    "harm": "harm",
    "value_drain": "value drain",
    "gate_score": "gate score",
    "share_below": "scores < 0.1",
    "spikes": "spikes",
    "spikes_per_thousand": "spikes per 1000 steps",
    "recovery": "steps to recover",
    "small_before_0.01": "< 0.01 before",
    "small_after_0.01": "< 0.01 after",
    "small_before_0.001": "< 0.001 before",
    "small_after_0.001": "< 0.001 after",
    "sdpa_before": "mean abs before",
    "sdpa_after": "mean abs after",
    "needle_x1": "needles x1",
    "yarn_needle_x1": "YaRN, needles x1",
    "yarn_needle_x2": "YaRN, needles x2",
    "yarn_needle_x4": "YaRN, needles x4",
    "loss_x4": "loss x4",
    "yarn_loss_x4": "YaRN, loss x4",
}
MEANT = MEANINGS | {
    "f_attn": "the same in rows as the packing cut them",
    "f_attn_fixed_first": f"{MEANINGS['f_attn']}, in rows that begin with the end-of-text token",
    "f_attn_dormant": "share of attention that queries with nothing to copy put on the first token",
    "f_attn_active": "that of the others",
    "sink_rate_fixed_first": MEANINGS["sink_rate"],
    "value_drain": "size of the first token's value over the mean of the others', well below 1 where it is drained",
    "gate_score": "mean score over tokens, heads, channels and layers",
    "small_before_0.01": "share of attention's outputs |y| that are below 0.01 before the gate on them, and so on",
    "sdpa_before": "mean |y|; without a gate, after is before",
    "spikes": "how often in a run the training loss jumps and comes back",
}
LARGEST = math.log(sys.float_info.max)


@dataclass(frozen=True)
class Grid:
    """A table of cells under a heading, to be written as Markdown or HTML."""

    title: str
    head: list[str]
    lines: list[list[str]]


def write(finding: Finding, table: Table, about: Mapping[str, Any], out: Path) -> Path:
    """Write the three files into ``out`` and return the Markdown's path; ``about`` says which command made them.

    They are called NAME-SCALE, with -changed and a hash of the words if there were any, and with -part and the
    number of runs where a result of more has that name: it stays.
    """
    out.mkdir(parents=True, exist_ok=True)
    name = _name(finding, about)
    if _runs(out / f"{name}.json") > _count(table):
        name += f"-part-{_count(table)}"
    grids = [_measured(finding, table), _claims(finding, table), _published(finding, table)]
    grids = [grid for grid in grids if grid.lines]
    content = json.dumps(plain(_content(finding, table, about)), indent=1, allow_nan=False) + "\n"
    write_whole(out / f"{name}.json", content)
    write_whole(out / f"{name}.html", _html(finding, table, grids, about))
    write_whole(out / f"{name}.md", _markdown(finding, table, grids, about))
    return out / f"{name}.md"


def _name(finding: Finding, about: Mapping[str, Any]) -> str:
    name, words = f"{finding.name}-{about['scale']}", " ".join(about["words"])
    return f"{name}-changed-{hashlib.sha256(words.encode()).hexdigest()[:6]}" if words else name


def _count(table: Table) -> int:
    return sum(map(len, table.records.values()))


def _runs(result: Path) -> int:
    """How many runs a result holds; none where it cannot be read."""
    try:
        return sum(len(row["runs"]) for row in json.loads(result.read_text(encoding="utf-8"))["rows"])
    except (OSError, ValueError, LookupError, TypeError):
        return 0


def _content(finding: Finding, table: Table, about: Mapping[str, Any]) -> dict[str, Any]:
    rows = [
        {"label": row.label, "words": row.words, "paper": _paper(finding, row), "runs": table.records[row.label]}
        for row in table.shown
    ]
    versions = {"python": platform.python_version()} | {name: version(name) for name in ("gatedlm", "torch")}
    claims = [_judged(claim, table) for claim in finding.claims]
    return {
        **about,
        "finding": finding.name,
        "title": finding.title,
        "versions": versions,
        "claims": claims,
        "rows": rows,
    }


def _paper(finding: Finding, row: Row) -> dict[str, float]:
    return {name: value for name, value in zip(finding.paper, row.paper, strict=False) if math.isfinite(value)}


def _judged(claim: Claim, table: Table) -> dict[str, Any]:
    support = _support(claim, table)
    return {
        "claim": claim.text,
        "verdict": judge(support),
        "support": support,
        "unit": claim.unit,
        "expected": claim.expected,
    }


def _support(claim: Claim, table: Table) -> dict[int, float]:
    return {seed: value for seed, value in claim.support(table).items() if math.isfinite(value)}


def _measured(finding: Finding, table: Table) -> Grid:
    head = ["row", "loss", "perplexity", "to the baseline", *(COLUMNS[key] for key in finding.columns)]
    return Grid(
        "Measured",
        [*head, "parameters", "added", "seconds", *(f"paper: {name}" for name in finding.paper[:1])],
        [_line(finding, table, row) for row in table.shown],
    )


def _line(finding: Finding, table: Table, row: Row) -> list[str]:
    records, losses = table.records[row.label], table.losses(row.label)
    baseline = row.against or table.rows[0].label
    to_baseline = {} if baseline == row.label else minus(losses, table.losses(baseline))
    perplexity = {seed: math.exp(loss) if loss < LARGEST else math.inf for seed, loss in losses.items()}
    params = next((found["params"]["total"] for found in records.values()), None)
    first = next((found["params"]["total"] for found in table.records[baseline].values()), params)
    seconds = {seed: found["seconds"] for seed, found in records.items()}
    return [
        row.label + _diverged(records),
        cell(losses, ".3f"),
        cell(perplexity, ".2f"),
        cell(to_baseline, "+.3f"),
        *(cell(table.finals(row.label, key), ".3g") for key in finding.columns),
        "-" if params is None else f"{params:,}",
        "-" if params is None or first is None else f"{params - first:+,}",
        cell(seconds, ".0f").split(" ±")[0],
        *(f"{value:g}" if math.isfinite(value) else "-" for value in (*row.paper, math.nan)[: len(finding.paper[:1])]),
    ]


def _diverged(records: Mapping[int, Mapping[str, Any]]) -> str:
    number = [found["status"] for found in records.values()].count("diverged")
    return f" (diverged: {number} of {len(records)})" if number else ""


def cell(values: Mapping[int, float], style: str) -> str:
    """Mean and, of several seeds, standard deviation."""
    found = spread(values)
    if not found.seeds:
        return "-"
    return _figure(found.mean, style) + (f" ± {_figure(found.sd, style.strip('+'))}" if found.seeds > 1 else "")


def _figure(value: float, style: str) -> str:
    """In ``style`` below a thousand; from there on whole."""
    return f"{value:{'+' * style.startswith('+')},.0f}" if abs(value) >= 1000 else f"{value:{style}}"


def interval(found: Spread) -> str:
    """The ends of the 90 % interval, which a single seed does not have."""
    return f"{found.low:.3g} to {found.high:.3g}" if found.seeds > 1 else "-"


def _claims(finding: Finding, table: Table) -> Grid:
    lines = []
    for claim in finding.claims:
        support = _support(claim, table)
        found, by_seed = spread(support), ", ".join(f"{value:.3g}" for value in support.values())
        lines.append([claim.text, f"**{judge(support)}**", by_seed or "-", interval(found), claim.unit, claim.expected])
    return Grid("Claims", ["claim", "verdict", "by seed", "90 % interval", "measured in", "expected from scale"], lines)


def _published(finding: Finding, table: Table) -> Grid:
    rows = [row for row in table.shown if row.paper]
    figures = [[*map(_published_figure, row.paper)] + ["-"] * (len(finding.paper) - len(row.paper)) for row in rows]
    added = ["-" if row.added is None else f"{row.added:g} M" for row in rows]
    lines = [[row.label, *cells, more] for row, cells, more in zip(rows, figures, added, strict=True)]
    return Grid("The paper's figures", ["row", *finding.paper, "added"], lines)


def _published_figure(value: float) -> str:
    return f"{value:g}" if math.isfinite(value) else "-"


def _about(finding: Finding, table: Table, about: Mapping[str, Any]) -> list[str]:
    seeds = f"seeds {', '.join(map(str, about['seeds']))}" if len(about["seeds"]) > 1 else f"seed {about['seeds'][0]}"
    meant = [f"{COLUMNS[key]}: {MEANT[key]}" for key in finding.columns if key in MEANT]
    wanted = len(table.shown) * len(about["seeds"])
    missing = wanted - _count(table)
    return [
        f"Scale {about['scale']}, {about['architecture']}, {seeds}; mean ± standard deviation over seeds. Losses are "
        "in nats per token of held-out rows, differences to the baseline are paired by seed. Seconds tell "
        "fast rows from slow ones only where no other job shared the machine.",
        *[f"{'; '.join(meant)}."] * bool(meant),
        *[f"Not the finding's own settings: {' '.join(about['words'])}."] * bool(about["words"]),
        *[f"{missing} of {wanted} runs are missing."] * bool(missing),
    ]


def _markdown(finding: Finding, table: Table, grids: list[Grid], about: Mapping[str, Any]) -> str:
    parts = [f"# {finding.title}", f"`{about['command']}`", *_about(finding, table, about)]
    for grid in grids:
        parts += [f"## {grid.title}", "\n".join(map(bar, (grid.head, ["---"] * len(grid.head), *grid.lines)))]
    return "\n\n".join((*parts, *filter(None, (finding.notes,)), RULE)) + "\n"


def bar(cells: Sequence[str]) -> str:
    """One line of a Markdown table, in which a bar within a cell is no border."""
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _html(finding: Finding, table: Table, grids: list[Grid], about: Mapping[str, Any]) -> str:
    with matplotlib.rc_context(DRAWING):
        figures = "".join(draw(table) for draw in finding.figures)
    parts = [
        f"<h1>{escape(finding.title)}</h1>",
        pre(about["command"]),
        *map(_paragraph, _about(finding, table, about)),
    ]
    parts += [f'<div class="figures">{figures}</div>' if figures else "", *map(_grid, grids)]
    return page(finding.title, [*parts, *(_paragraph(text) for text in (finding.notes, RULE) if text)])


def _paragraph(text: str) -> str:
    return re.sub("`(.+?)`", r"<code>\1</code>", f"<p>{escape(text)}</p>")


def _grid(grid: Grid) -> str:
    head, lines = [*map(escape, grid.head)], [[*map(_strong, line)] for line in grid.lines]
    return section(escape(grid.title), html_table(head, lines))


def _strong(cell: str) -> str:
    text = escape(cell)
    return f"<strong>{text[2:-2]}</strong>" if text.startswith("**") else text
