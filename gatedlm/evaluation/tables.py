"""Models side by side: their figures with standard errors, and how far each is from the first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

from gatedlm.evaluation.score import Outcome, Score, difference

Told = dict[str, dict[str, Outcome]]  # by model and task


class Line(NamedTuple):
    """One figure of all models, None where one lacks it, and the differences of the others from the first."""

    task: str
    part: str
    metric: str
    count: int
    scores: dict[str, Score | None]
    differences: dict[str, tuple[float, float | None] | None]


def lines(told: Told) -> Iterator[Line]:
    """All figures that any model has, task by task."""
    figures: dict[tuple[str, str, str], dict[str, Score]] = {}
    for model, outcomes in told.items():
        for task, outcome in outcomes.items():
            for one in outcome.scores:
                figures.setdefault((task, one.part, one.metric), {})[model] = one
    first, *others = told
    for (task, part, metric), by_model in figures.items():
        of = {model: by_model.get(model) for model in told}
        base = of[first]
        apart = {other: difference(base, one) if base and (one := of[other]) else None for other in others}
        yield Line(task, part, metric, next(iter(by_model.values())).count, of, apart)


def comparison(told: Told) -> Table:
    """A row for each figure; differences are to the first model, their errors paired by items."""
    first, *others = told
    table = Table(box=box.SIMPLE_HEAD, padding=0, caption="± one standard error")
    for heading in ("task", "", "figure"):
        table.add_column(heading, overflow="fold")
    for heading in ("over", *told, *(f"{other} - {first}" for other in others)):
        table.add_column(heading, justify="right", overflow="fold")
    for line in lines(told):
        scores = [one and (one.value, one.error) for one in line.scores.values()]
        cells = (_cell(pair) for pair in (*scores, *line.differences.values()))
        table.add_row(line.task, line.part, line.metric, str(line.count), *cells)
    return table


def results(told: Told) -> dict[str, Any]:
    """What results.json holds: the table, and what else each task says, without single items."""
    return {
        "models": [*told],
        "figures": [
            {
                "task": line.task,
                "part": line.part,
                "metric": line.metric,
                "count": line.count,
                "by_model": {model: one and _pair(one.value, one.error) for model, one in line.scores.items()},
                "differences": {model: pair and _pair(*pair) for model, pair in line.differences.items()},
            }
            for line in lines(told)
        ],
        "about": {
            model: {task: {k: v for k, v in one.about.items() if k != "told"} for task, one in outcomes.items()}
            for model, outcomes in told.items()
        },
    }


def notes(told: Told) -> Iterator[str]:
    """Below the table: which text was read, and which prompts did not fit."""
    texts = {
        f"{task}: {one.about['text']}, fingerprint {one.about['fingerprint']}"
        for outcomes in told.values()
        for task, one in outcomes.items()
        if "text" in one.about
    }
    yield from sorted(texts)
    for model, outcomes in told.items():
        for task, outcome in outcomes.items():
            if cut := outcome.about.get("cut"):
                yield f"{task}: {cut} prompts were longer than the context of {model} and lost their beginning"


def _pair(value: float, error: float | None) -> dict[str, float | None]:
    return {"value": value, "error": error}


def _cell(pair: tuple[float, float | None] | None) -> str:
    if pair is None:
        return "-"
    value, error = pair
    digits = 3 if abs(value) < 100 else 1
    return f"{value:.{digits}f}" + ("" if error is None else f" ±{error:.{digits}f}")
