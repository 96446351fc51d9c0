"""Figures with their standard errors, and what each item adds to them, so that two models can be set side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

Advance = Callable[[int, int], None]  # takes how many are done, and of how many


@dataclass(frozen=True)
class Score:
    """A figure of a part of a task, its standard error or None, and how many units it is a mean over.

    ``influences`` say how far each item moves the figure; their sum is 0.
    """

    part: str
    metric: str
    value: float
    error: float | None
    count: int
    influences: list[float] = field(default_factory=list)


class Outcome(NamedTuple):
    """What a task found of a model: its figures, and what else there is to say of how they came about."""

    scores: list[Score]
    about: dict[str, Any]


@np.errstate(over="ignore", invalid="ignore")
def ratio(
    part: str,
    metric: str,
    values: Sequence[float],
    weights: Sequence[float] | None = None,
    exponential: bool = False,
) -> Score:
    """r = sum x / sum w, or exp r: an item's x are points or nats, its w tokens or bytes, 1 without ``weights``.

    Standard error sqrt(n / (n-1) sum (x - r w)^2) / sum w, for w = 1 the sample standard deviation / sqrt n (the ratio
    estimator, Cochran 1977, chapter 6), times exp r for an exponential; none where that is beyond all numbers.
    """
    x, w = np.array(values, float), np.ones(len(values)) if weights is None else np.array(weights, float)
    r = x.sum() / w.sum()
    value, slope = (np.exp(r), np.exp(r)) if exponential else (r, 1.0)
    influences = slope * (x - r * w) / w.sum()
    if not np.isfinite(influences).all():
        return Score(part, metric, float(value), None, int(w.sum()))
    return Score(part, metric, float(value), spread(influences), int(w.sum()), influences.tolist())


def difference(one: Score, other: Score) -> tuple[float, float | None]:
    """``other`` minus ``one``, and its standard error, paired by items; None where they are not of the same items."""
    paired = len(one.influences) == len(other.influences)
    error = spread(np.subtract(other.influences, one.influences)) if paired else None
    return other.value - one.value, error


def spread(influences: np.ndarray) -> float | None:
    """Standard error of a figure that its items move by so much; None for a single one."""
    count = len(influences)
    return math.sqrt(count / (count - 1)) * math.hypot(*influences) if count > 1 else None
