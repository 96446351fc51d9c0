"""How a claim is judged: from differences paired by seed, against their spread."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Literal

Verdict = Literal["holds", "fails", "too small to say", "not measured"]

RULE = (
    "A claim is measured once a seed, as a number that is above 0 where the claim is true. It holds if the two-sided "
    "90 % confidence interval of the mean over seeds (Student's t) lies above 0, fails if it lies below, and is too "
    "small to say otherwise; a single seed gives no verdict, and without any the claim is not measured. A run that "
    "diverged counts with the loss it began with. Expected from scale: the smallest at which there is reason to expect "
    "the claim at all; a verdict at a smaller one says little about the paper's."
)
# Student's t at 95 %, by degrees of freedom; from the tenth on the tenth's, which only errs towards caution
T95 = (math.inf, 6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)


@dataclass(frozen=True)
class Spread:
    """Mean, standard deviation (n - 1) and the ends of the 90 % interval mean +- t sd / sqrt(n) of n seeds' numbers.

    With one number the deviation is 0 and the interval has no ends; with none the mean is not a number.
    """

    mean: float
    sd: float
    low: float
    high: float
    seeds: int


def spread(values: Mapping[int, float]) -> Spread:
    """The spread of one number per seed; numbers that are not finite are left out."""
    finite = [value for value in values.values() if math.isfinite(value)]
    if not finite:
        return Spread(math.nan, 0.0, -math.inf, math.inf, 0)
    middle, sd = mean(finite), stdev(finite) if len(finite) > 1 else 0.0
    half = T95[min(len(finite), len(T95)) - 1] * sd / math.sqrt(len(finite)) if len(finite) > 1 else math.inf
    return Spread(middle, sd, middle - half, middle + half, len(finite))


def judge(values: Mapping[int, float]) -> Verdict:
    """The verdict on a claim whose support is one number per seed, see ``RULE``."""
    found = spread(values)
    if not found.seeds:
        return "not measured"
    return "holds" if found.low > 0 else "fails" if found.high < 0 else "too small to say"


def ranks(values: list[float]) -> list[float]:
    """Rank from 1 up, equal values sharing the mean of their ranks."""
    return [sum(other < value for other in values) + (values.count(value) + 1) / 2 for value in values]


def spearman(x: list[float], y: list[float]) -> float:
    """Pearson's correlation of the ranks of x and y; not a number if either is constant."""
    a, b = ranks(x), ranks(y)
    ma, mb = mean(a), mean(b)
    top = sum((i - ma) * (j - mb) for i, j in zip(a, b, strict=True))
    below = math.sqrt(sum((i - ma) ** 2 for i in a) * sum((j - mb) ** 2 for j in b))
    return top / below if below else math.nan
