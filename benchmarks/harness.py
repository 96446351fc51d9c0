"""What all benchmarks share: where and how often, alternating rounds, ratios, peaks of memory, tables and JSON."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity

from benchmarks.targets import TARGETS, Target

RESULTS = Path(__file__).parent / "results"
LEAST = 0.1  # seconds that a variant is called for in each round, so that the clock's grain does not count
LIBRARIES = ("torch", "lightning", "transformers", "litgpt")
Work = Callable[[], object]


class Spread(NamedTuple):
    """Median, least and largest of the rounds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g}..{self.high:.3g})"


def spread(values: Sequence[float]) -> Spread:
    """The spread of some numbers, one or more."""
    return Spread(statistics.median(values), min(values), max(values))


class Result(NamedTuple):
    """A table: rows of columns and cells, and what is to be said under it."""

    title: str
    rows: list[dict[str, Any]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bench:
    """Where and how often: after a warm-up ``rounds`` rounds on ``device``.

    On one thread of a CPU the clock is the process's CPU time, to which other processes add little; else wall time.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rounds: int = 7
    threads: int = 1

    @classmethod
    def of(cls, rounds: str, threads: str, device: str) -> Bench:
        """From words; ValueError for a number that is none or a device that is not there."""
        for name, text in (("rounds", rounds), ("threads", threads)):
            if not text.isdecimal() or int(text) < 1:
                raise ValueError(f"{name}={text}: a whole number from 1 up")
        if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
            raise ValueError(f"device={device}: take cpu, or cuda where there is a GPU")
        torch.set_num_threads(int(threads))
        return cls(torch.device(device), int(rounds), int(threads))

    def clock(self) -> float:
        """Seconds from some beginning."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        own = self.threads == 1 and self.device.type == "cpu"
        return time.process_time() if own else time.perf_counter()

    def seconds(self, work: Work, calls: int = 1) -> float:
        """Seconds of one of so many calls."""
        began = self.clock()
        for _ in range(calls):
            work()
        return (self.clock() - began) / calls

    def alternate(self, variants: Mapping[str, Work]) -> dict[str, list[float]]:
        """Seconds a call of each variant in each round: A B C, then C B A, so that a drift of the machine cancels."""
        calls = {name: self._calls(work) for name, work in variants.items()}
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for number in range(self.rounds):
            for name in list(variants)[:: -1 if number % 2 else 1]:
                seconds[name].append(self.seconds(variants[name], calls[name]))
        return seconds

    def _calls(self, work: Work) -> int:
        self.seconds(work)
        return math.ceil(LEAST / max(self.seconds(work), 1e-6)) if self.rounds > 1 else 1

    def peak(self, work: Work) -> int:
        """Bytes of tensors that ``work`` holds at most beyond what was there before."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            work()
            return torch.cuda.max_memory_allocated() - before
        with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile:
            work()
        assert profile.profiler is not None and profile.profiler.kineto_results is not None
        events: list[Any] = profile.profiler.kineto_results.events()
        changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        return max(accumulate((change for _, change in changes), initial=0))


def ratios(seconds: dict[str, list[float]], of: str, over: str) -> Spread:
    """time(of) / time(over), round by round."""
    return spread([a / b for a, b in zip(seconds[of], seconds[over], strict=True)])


def timed(seconds: dict[str, list[float]], *references: str) -> list[dict[str, Any]]:
    """A row for each variant: its median in ms, and its time over each reference's, above 1 if it is slower."""
    return [
        {"variant": name, "ms": 1000 * statistics.median(times)}
        | {f"time, {reference} = 1": ratios(seconds, name, reference) for reference in references}
        for name, times in seconds.items()
    ]


def machine(bench: Bench) -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": _chip(bench.device),
        "cores": os.cpu_count(),
        "threads": bench.threads,
        "load": round(os.getloadavg()[0], 1),
        "clock": "CPU time" if bench.threads == 1 and bench.device.type == "cpu" else "wall",
        "rounds": bench.rounds,
        "python": platform.python_version(),
        **{name: _version(name) for name in LIBRARIES},
    }


def _chip(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", info.read_text()) if info.exists() else None
    kind = next((k for k in ("avx512_bf16", "avx512f", "avx2") if found and k in info.read_text()), "")
    return " ".join(filter(None, (found[1].strip() if found else platform.machine(), kind)))


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def judged(target: Target, result: Result) -> list[dict[str, Any]]:
    """A line for each cell of this table that the target is about: the row's name, the figure, whether it is met."""
    rows = {next(iter(row.values())): row for row in result.rows if target.column in row}
    asked = [name for name in rows if name in (target.rows or rows) and target.title in result.title]
    figures = {name: rows[name][target.column] for name in asked}
    return [
        {"target": str(target), "row": name, "measured": figure}
        | {"verdict": target.verdict(*(figure if isinstance(figure, Spread) else spread([figure])))}
        for name, figure in figures.items()
    ]


def report(name: str, results: Iterable[Result], bench: Bench, folder: Path = RESULTS) -> None:
    """Print the machine and each result as it comes, and write all to NAME.json, or NAME-cuda.json of a GPU."""
    console, place, kept, targets = Console(), machine(bench), [], TARGETS.get(name, ())
    unmeasured = [str(target) for target in targets]
    console.print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in place.items() if value), highlight=False)
    for result in results:
        verdicts = [line for target in targets for line in judged(target, result)]
        unmeasured = [target for target in unmeasured if all(line["target"] != target for line in verdicts)]
        _show(console, result, verdicts)
        kept.append({**result._asdict(), "targets": verdicts})
        folder.mkdir(exist_ok=True)
        file = folder / (f"{name}.json" if bench.device.type == "cpu" else f"{name}-{bench.device.type}.json")
        written = {"machine": place, "results": kept, "targets not measured": unmeasured}
        file.write_text(json.dumps(written, indent=1) + "\n")
    for target in unmeasured:
        console.print(f"target not measured here: {target}", highlight=False, soft_wrap=True)


def _show(console: Console, result: Result, verdicts: Sequence[Mapping[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in result.rows for key in row))
    table = Table(title=result.title, box=box.SIMPLE_HEAD, padding=(0, 1), title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in result.rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    console.print(table)
    held = (f"target: {v['target']}: {v['row']} {_cell(v['measured'])}, {v['verdict']}" for v in verdicts)
    for line in (*held, *result.notes):
        console.print(line, highlight=False, soft_wrap=True)


def _cell(value: Any) -> str:
    if isinstance(value, Spread | str):
        return str(value)
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
