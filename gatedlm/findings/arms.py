"""The arms of a sweep over seeds, compared with its first arm seed by seed, as a table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich import table as terminal

from gatedlm.findings.finding import Row, Table, minus
from gatedlm.findings.judge import judge, spread
from gatedlm.findings.page import cell, interval
from gatedlm.report.names import FIGURES

LOWERED = ("val/loss", "f_attn_fixed_first", "f_attn_dormant", "m_act")  # what the paper's gate makes smaller
UNDER = "lower? holds or fails where the 90 % interval of the paired differences lies on one side of 0"


def arms_table(ledgers: Mapping[str, Mapping[str, Any]]) -> terminal.Table | None:
    """Mean ± deviation over seeds, how far below the first arm with its 90 % interval, and the verdict on "lower".

    ``ledgers`` by the label of their run; None where no arm has two seeds.
    """
    arms = _arms(ledgers)
    if max(map(len, arms.records.values()), default=0) < 2:
        return None
    first, *others = arms.rows
    shown = terminal.Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, caption=UNDER, caption_justify="left")
    for heading in ("arm", "mean ± sd", "below\nthe first", "90 % interval"):
        shown.add_column(heading, no_wrap=True, justify="left" if heading == "arm" else "right")
    shown.add_column("lower?", justify="right", min_width=9)
    for key in LOWERED:
        base = _values(arms, first.label, key)
        if base:
            shown.add_row(FIGURES[key].replace(", ", ",\n").replace(" of ", "\nof "))
            shown.add_row(_words(first), cell(base, ".3g"))
            for other in others:
                shown.add_row(_words(other), *_against(base, _values(arms, other.label, key)))
            shown.add_section()
    return shown


def _words(arm: Row) -> str:
    """A word a line: what is swept stays whole on a narrow terminal."""
    return "\n".join(f"  {word}" for word in arm.label.split(" "))


def _arms(ledgers: Mapping[str, Mapping[str, Any]]) -> Table:
    records: dict[str, dict[int, Any]] = {}
    for label, ledger in ledgers.items():
        seed = ledger["seed"]
        arm = " ".join(word for word in label.split(" ") if word != f"seed={seed}")
        records.setdefault(arm, {})[seed] = ledger
    return Table([Row(arm) for arm in records], records)


def _values(arms: Table, label: str, key: str) -> dict[int, float]:
    return arms.losses(label) if key == "val/loss" else arms.finals(label, key)


def _against(base: Mapping[int, float], values: Mapping[int, float]) -> tuple[str, str, str, str]:
    below = minus(base, values)
    found = spread(below)
    return cell(values, ".3g"), f"{found.mean:.3g}" if found.seeds else "-", interval(found), judge(below)
