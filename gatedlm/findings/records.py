"""What a table keeps of a run: part of its ledger, the course of some probes, and figures of its spikes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from gatedlm.recipe import Run
from gatedlm.training.callbacks import read_metrics
from gatedlm.training.ledger import read_ledger

KEPT = ("status", "steps", "seconds", "params", "initial_loss", "final", "by_layer", "scores", "spikes", "spike_events")


def folder(run: Run) -> Path:
    """Where a run lies."""
    return Path(run.recipe.out, run.recipe.name)


def record(
    run: Run, curves: tuple[str, ...] = (), after: Callable[[Run], dict[str, float]] | None = None
) -> dict[str, Any] | None:
    """``KEPT`` of a run's ledger, figures taken ``after`` it, ``curves`` as (step, figure).

    None while it has no ledger.
    """
    ledger = read_ledger(folder(run))
    if not ledger:
        return None
    lines = read_metrics(folder(run) / "metrics.jsonl") if curves else []
    kept = {key: [(line["step"], line[key]) for line in lines if key in line] for key in curves}
    found = {key: ledger[key] for key in KEPT} | {"curves": kept}
    spikes = {"spikes": len(found["spike_events"]), "spikes_per_thousand": events(found), "recovery": recovery(found)}
    found["final"] |= spikes | (after(run) if after else {})
    return found


def events(record: dict[str, Any]) -> float:
    """Spike events per thousand steps."""
    return 1000 * len(record["spike_events"]) / record["steps"]


def recovery(record: dict[str, Any]) -> float | None:
    """Mean number of steps from an event's first point above the threshold to its last; None without events."""
    starts = [event["start"] for event in record["spike_events"]]
    ends = [*starts[1:], math.inf]
    points = [[p for p in record["spikes"] if start <= p < end] for start, end in zip(starts, ends, strict=False)]
    return mean(part[-1] - part[0] + 1 for part in points) if points else None
