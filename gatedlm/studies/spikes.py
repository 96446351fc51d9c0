"""Where a curve of losses spikes, a run's or any csv or jsonl file's: read, judged and printed."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gatedlm.probes import Spikes, SpikeSpec, find_spikes
from gatedlm.studies.words import check

COLUMNS = {"step": ("step",), "loss": ("train/loss", "loss")}


def study_spikes(options: dict[str, str]) -> None:
    """Print the events of the curve ``spikes=`` names; the other options are keys of ``SpikeSpec`` and its columns."""
    defaults = asdict(SpikeSpec())
    for key in options:
        check("word", key, ("spikes", *COLUMNS, *defaults))
    readers: dict[str, Callable[[str, Any], Any]] = {
        key: _whole if isinstance(value, int) else _number for key, value in defaults.items()
    }
    spec = SpikeSpec(**{key: read(key, options[key]) for key, read in readers.items() if key in options})
    steps, losses = _curve(Path(os.path.expanduser(options["spikes"])), options)
    spikes, console = find_spikes(steps, losses, spec), Console()
    if spikes.events:
        table = Table("start", "peak", "rise, nats")
        for start, peak, rise in spikes.events:
            table.add_row(f"{start:,}", f"{peak:,}", f"{rise:.3f}" if math.isfinite(rise) else "not finite")
        console.print(table)
    console.print(_summary(steps, spikes, spec), soft_wrap=True, highlight=False)


def _summary(steps: list[int], spikes: Spikes, spec: SpikeSpec) -> str:
    if steps[-1] <= spec.skip:
        return f"all {len(steps):,} points lie in the first skip={spec.skip} steps: give skip={steps[-1] // 10} or so"
    if spikes.since is None:
        return f"no point has 20 others in the window={spec.window} steps before it: give a larger window or less skip"
    rate = 1000 * len(spikes.events) / (steps[-1] - spikes.since + 1)
    counts = f"points that spike: {len(spikes.points):,}, events: {len(spikes.events):,}"
    return f"{counts}, or {rate:.3g} per thousand steps from {spikes.since:,} to {steps[-1]:,}"


def _curve(path: Path, options: dict[str, str]) -> tuple[list[int], list[float]]:
    """Steps and losses of the lines that have a loss; a null is one that was not finite."""
    path = path / "metrics.jsonl" if path.is_dir() else path
    rows, steps, losses = _rows(path), [], []
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    step, loss = (_column(path, key, options, columns) for key in COLUMNS)
    for line, row in rows.items():
        if row.get(loss, "") != "":
            try:
                steps.append(_whole(step, row.get(step)))
                losses.append(_number(loss, row[loss]))
            except ValueError as error:
                raise ValueError(f"{path}, line {line}: {error}") from None
    if not steps:
        raise ValueError(f"{path}: no line has a {loss!r}")
    return steps, losses


def _column(path: Path, key: str, options: dict[str, str], columns: list[str]) -> str:
    names = (options[key],) if key in options else COLUMNS[key]
    found = next((name for name in names if name in columns), None)
    if found is None:
        advice = f"give {key}=COLUMN, one of {', '.join(map(repr, columns))}" if columns else "it holds no points"
        raise ValueError(f"{path}: no column {' or '.join(map(repr, names))}, {advice}")
    return found


def _number(column: str, value: Any) -> float:
    try:
        return math.nan if value is None else float(str(value))
    except ValueError:
        raise ValueError(f"{column!r} is {value!r:.60}, not a number") from None


def _whole(column: str, value: Any) -> int:
    number = _number(column, value)
    if not number.is_integer():
        raise ValueError(f"{column!r} is {value!r}, not a whole number")
    return int(number)


def _rows(path: Path) -> dict[int, dict[str, Any]]:
    """What each line holds, by column, under its number."""
    readers = {".csv": _csv, ".jsonl": _jsonl}
    if path.suffix not in readers:
        raise ValueError(f"spikes={str(path)!r}: neither the folder of a run nor a file that ends in .csv or .jsonl")
    try:
        return readers[path.suffix](path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"spikes={str(path)!r}: {error.strerror}") from None
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _csv(text: str) -> dict[int, dict[str, Any]]:
    lines, rows = csv.DictReader(io.StringIO(text)), {}
    for row in lines:
        if None in row or None in row.values():
            raise ValueError(f"line {lines.line_num} has not as many cells as the first")
        rows[lines.line_num] = row
    return rows


def _jsonl(text: str) -> dict[int, dict[str, Any]]:
    """A last line that a killed run left half written is dropped."""
    lines, rows = text.split("\n"), {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line or "{}")
        except (ValueError, RecursionError):
            row = {} if number == len(lines) else None
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is no JSON object")
        rows[number] = row
    return rows
