"""Studies as tables on the terminal: a model layer by layer, models side by side, and what interventions change."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from gatedlm.report.names import BY_LAYER
from gatedlm.report.study import side_by_side


def layers_table(study: dict[str, Any]) -> Table:
    """One model, a row for each layer and one of means; the last columns say where M-Act stands."""
    shown = [name for name in BY_LAYER if name in study["by_layer"]]
    title = f"{study['name']}, on {study['rows']} x {study['tokens']} tokens: {study['text']}"
    table = _table(title, "layer", *(BY_LAYER[name] for name in shown), "at\ntoken", "chan-\nnel")
    for layer, outlier in enumerate(study["outliers"]):
        cells = [_cell(study["by_layer"][name][layer]) for name in shown]
        table.add_row(str(layer), *cells, str(outlier["token"]), str(outlier["channel"]))
    table.add_section()
    table.add_row("mean", *(_cell(study["figures"][name]) for name in shown), "", "")
    return table


def comparison(studies: list[dict[str, Any]]) -> Table:
    """Models side by side: their losses and all figures that any of them has, over layers."""
    table = _table("over layers", "", *(study["name"] for study in studies))
    for _, label, cells in side_by_side(studies):
        table.add_row(label, *map(_cell, cells))
    return table


def interventions_table(studies: list[dict[str, Any]]) -> Table:
    """What each intervention does to each model's loss, in nats per token, to F-Attn and to M-Act."""
    table = _table("interventions", "model", "what", "loss", "with it", "difference", "F-Attn", "M-Act", left=2)
    for study in studies:
        for name, changed in study["interventions"].items():
            losses = (study["loss"], changed["loss"], changed["difference"])
            after = (changed["figures"][key] for key in ("f_attn", "m_act"))
            table.add_row(study["name"], name, *map(_cell, (*losses, *after)))
    return table


def _table(title: str, *headings: str, left: int = 1) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < left else "right", overflow="fold")
    return table


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"
