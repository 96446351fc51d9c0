"""Ledgers as tables on the terminal: one run's figures, or several runs side by side."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from gatedlm.report.names import FIGURES

COMPARED = {
    "val/loss": "val\nloss",
    "val/bits_per_byte": "bits/\nbyte",
    "f_attn_fixed_first": "F-Attn\nfixed",
    "f_attn_dormant": "F-Attn\ndormant",
    "f_attn_active": "F-Attn\nactive",
    "m_act": "M-Act",
    "gate_score": "gate\nscore",
}


def run_table(content: dict[str, Any]) -> Table:
    """A ledger's final figures, with the count models' losses that a model should beat."""
    table = Table("figure", "value", title=content["name"])
    rows = [(text, content["final"].get(name)) for name, text in FIGURES.items()]
    rows += [(f"{name} model's loss", value) for name, value in content["baselines"].items()]
    for text, value in rows:
        if value is not None:
            table.add_row(text, f"{value:.4g}")
    for name, count in content["params"].items():
        table.add_row(f"parameters, {name}", f"{count:,}")
    table.add_row("tokens", f"{content['tokens']:,}")
    table.add_row("tokens per second", f"{content['tokens_per_second']:,.0f}")
    table.add_row("seconds", f"{content['seconds']:.0f}")
    return table


def comparison(ledgers: dict[str, dict[str, Any]]) -> Table:
    """Runs by label, one a row: the figures that any of them has, gate parameters, thousands of all, seconds.

    F-Attn is that with a fixed first token. The last row is the bigram model, if all runs have the same to beat.
    """
    shown = [name for name in COMPARED if any(ledger["final"].get(name) is not None for ledger in ledgers.values())]
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("run", overflow="fold")
    gated = any(ledger["params"]["gate"] for ledger in ledgers.values())
    for heading in (*(COMPARED[name] for name in shown), *["gate\npar."] * gated, "k par.", "s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for label, ledger in ledgers.items():
        cells, params = [_cell(ledger["final"].get(name)) for name in shown], ledger["params"]
        cells += [f"{params['gate']}"] * gated
        ending = "" if ledger["status"] == "finished" else f" ({ledger['status']})"
        table.add_row(label + ending, *cells, f"{params['total'] / 1000:.0f}", f"{ledger['seconds']:.0f}")
    bigrams = {_cell(ledger["baselines"]["bigram"]) for ledger in ledgers.values()}
    if len(bigrams) == 1:
        table.add_row("bigram model", *(bigrams.pop() if name == "val/loss" else "" for name in shown))
    return table


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 100 else f"{value:.4g}"
