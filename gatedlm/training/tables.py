"""Ledgers as tables on the terminal: one run's figures, or several runs side by side."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from gatedlm.report.names import FIGURES

COMPARED = (
    "val/loss",
    "val/bits_per_byte",
    "f_attn_fixed_first",
    "f_attn_dormant",
    "f_attn_active",
    "m_act",
    "gate_score",
)


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
    """Runs by label, one a row: the figures that any of them has, parameters and seconds."""
    shown = [name for name in COMPARED if any(led["final"].get(name) is not None for led in ledgers.values())]
    table = Table("run", *shown, "parameters", "seconds", "status")
    for label, content in ledgers.items():
        figures = [content["final"].get(name) for name in shown]
        cells = ["-" if value is None else f"{value:.4g}" for value in figures]
        table.add_row(label, *cells, f"{content['params']['total']:,}", f"{content['seconds']:.0f}", content["status"])
    return table
