"""What a finding is: rows to train, the paper's figures beside them, claims about the table that results."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from gatedlm.model.lm import ModelSpec
from gatedlm.recipe import Recipe, Run, load, named
from gatedlm.report.drawing import floats

START = 10.0  # seconds that a run takes besides its steps
STEM = "row"  # runs are shared by all findings that have the row, so they bear no finding's name


@dataclass(frozen=True)
class Row:
    """One line of a table: the words that make it of the base recipe, and what the paper found.

    words    overrides as on a command line
    paper    the paper's figures, in the order of the finding's ``paper``; shorter where the paper is silent
    added    millions of parameters that the paper says it adds
    sized    further words that depend on the base's sizes, for the larger baselines
    matched  the feed-forward is narrowed until the parameters equal the base's, as in Table 2
    against  the label of the row it is compared with, without it the first
    origin   the row whose run of the same seed gives the first weights; its words come before this one's
    """

    label: str
    words: tuple[str, ...] = ()
    paper: tuple[float, ...] = ()
    added: float | None = None
    sized: Callable[[ModelSpec], tuple[str, ...]] = lambda base: ()
    matched: bool = False
    against: str = ""
    origin: Row | None = None


@dataclass(frozen=True)
class Scale:
    """How large: the words of the base recipe by architecture, and the learning rates that mean low and high here.

    rates     the two of Table 2, then all of the stability study
    multiple  what a narrowed feed-forward is rounded up to
    speed     floating-point operations a second for the estimate of a dry run
    layer     seconds that a layer takes in each step besides, which is most of it where matrices are small
    """

    name: str
    base: Mapping[str, tuple[str, ...]]
    rates: tuple[float, float]
    sweep: tuple[float, ...]
    multiple: int
    speed: float
    layer: float = 0.0

    def seconds(self, run: Run) -> float:
        """About how long a run takes: 6 operations per active parameter and token at the scale's speed, and more."""
        model, data, steps = run.recipe.model, run.recipe.data, run.recipe.trainer.steps
        operations = 6 * model.parameters().active * steps * data.batch * data.context
        return START + steps * model.layers * self.layer + operations / self.speed


class Table:
    """What the rows' runs measured: ``records`` by row label and seed; a row or run that is missing has none.

    A record is what ``gatedlm.findings.records.record`` keeps. ``rows`` are those of the whole finding, ``shown`` those
    that ``records`` names: claims are judged on the whole.
    """

    def __init__(self, rows: list[Row], records: Mapping[str, Mapping[int, dict[str, Any]]]) -> None:
        self.rows, self.shown = rows, [row for row in rows if row.label in records]
        self.records = defaultdict(dict, {row.label: dict(records.get(row.label, {})) for row in rows})

    def finals(self, label: str, key: str) -> dict[int, float]:
        """A final figure by seed, of the runs that have it; see ``losses`` for val/loss."""
        return known({seed: record["final"].get(key) for seed, record in self.records[label].items()})

    def layers(self, label: str, key: str) -> dict[int, np.ndarray]:
        """A figure layer by layer, by seed, of the runs that have it."""
        found = {seed: record["by_layer"] for seed, record in self.records[label].items()}
        return {seed: floats(layers[key]) for seed, layers in found.items() if key in layers}

    def losses(self, label: str) -> dict[int, float]:
        """Validation loss in nats by seed; of a diverged run the loss it began with, if that was finite."""
        runs, ended = self.records[label], self.finals(label, "val/loss")
        counted = {s: run["initial_loss"] if run["status"] == "diverged" else ended.get(s) for s, run in runs.items()}
        return known(counted)

    def capped(self, label: str) -> dict[int, float]:
        """min(loss, initial loss) by seed; the loss where the initial one was not finite."""
        began = known({seed: record["initial_loss"] for seed, record in self.records[label].items()})
        return {seed: min(loss, began.get(seed, loss)) for seed, loss in self.losses(label).items()}

    def best(self, labels: Iterable[str]) -> dict[int, float]:
        """The lowest loss of several rows by seed, for the seeds that all of them have."""
        return by_seed([self.losses(label) for label in labels], min)

    def below(self, label: str, other: str) -> dict[int, float]:
        """By how many nats the loss of one row lies below that of another, paired by seed."""
        return minus(self.losses(other), self.losses(label))


def known(figures: Mapping[int, float | None]) -> dict[int, float]:
    """The figures that were finite, which is what a ledger has numbers for."""
    return {seed: value for seed, value in figures.items() if value is not None}


def by_seed(figures: Sequence[Mapping[int, float]], fold: Callable[[list[float]], float] = mean) -> dict[int, float]:
    """Several figures of a seed folded into one, by default their mean, for the seeds that all of them have."""
    seeds = set.intersection(*map(set, figures or [{}]))
    return {seed: fold([figure[seed] for figure in figures]) for seed in sorted(seeds)}


def minus(a: Mapping[int, float], b: Mapping[int, float]) -> dict[int, float]:
    """a - b for the seeds that both have."""
    return {seed: a[seed] - b[seed] for seed in a if seed in b}


def halvings(a: Mapping[int, float], b: Mapping[int, float]) -> dict[int, float]:
    """log2(a / b), how often a has to be halved to be b, for the seeds that have both above 0."""
    return {seed: math.log2(a[seed] / b[seed]) for seed in a if a[seed] > 0 and b.get(seed, 0) > 0}


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, how much each seed supports it (above 0: it does), and from which scale it is expected.

    ``unit`` says what the support is measured in.
    """

    text: str
    support: Callable[[Table], dict[int, float]]
    unit: str
    expected: str


@dataclass(frozen=True)
class Finding:
    """A table or figure of the paper as runs.

    rows     for a scale and the rates that were asked for; the first is the baseline
    columns  final figures shown beside the loss
    paper    names of the paper's figures that rows carry
    figures  drawings of the table, as elements of a page
    curves   probes whose course over training is kept
    after    further figures of a finished run
    notes    what a reader should know beside the table
    """

    name: str
    title: str
    architecture: str
    rows: Callable[[Scale, tuple[float, ...]], list[Row]]
    columns: tuple[str, ...] = ()
    paper: tuple[str, ...] = ("PPL",)
    claims: tuple[Claim, ...] = ()
    figures: tuple[Callable[[Table], str], ...] = ()
    curves: tuple[str, ...] = ()
    after: Callable[[Run], dict[str, float]] | None = None
    notes: str = ""


def base(scale: Scale, architecture: str, further: tuple[str, ...]) -> Recipe:
    """The recipe that a finding's rows change; ValueError where the scale has no such architecture."""
    if architecture not in scale.base:
        raise ValueError(f"{architecture}: scale={scale.name} has {', '.join(scale.base)}, give another scale=")
    return one((*scale.base[architecture], *further)).recipe


def resolve(row: Row, scale: Scale, architecture: str, seeds: int, further: tuple[str, ...] = ()) -> dict[int, Run]:
    """The runs of a row by seed: base, row and ``further`` words, of which the later wins; named by their hash."""
    plain = base(scale, architecture, further).model
    before = row.origin.words if row.origin else ()
    words = (*scale.base[architecture], *before, *row.words, *row.sized(plain), *further)
    if row.matched:
        words = (*words, f"model.ffn={one(words).recipe.model.matched_to(plain, scale.multiple).ffn}")
    earlier = resolve(row.origin, scale, architecture, seeds, further) if row.origin else {}
    return {seed: _seeded(words, seed, row.label, earlier.get(seed)) for seed in range(seeds)}


def _seeded(words: tuple[str, ...], seed: int, label: str, earlier: Run | None) -> Run:
    origin = str(Path(earlier.recipe.out, earlier.recipe.name)) if earlier else ""
    recipe = replace(one(words).recipe, seed=seed, origin=origin)
    own = (f"seed={seed}", *((f"origin={origin}",) if origin else ()))
    return Run(named(recipe, STEM), (*words, *own), f"{label} seed={seed}")


@cache
def one(words: tuple[str, ...]) -> Run:
    """The run that words make; ValueError where they sweep."""
    first, *others = load(list(words))
    if others:
        raise ValueError(f"{first.label}, {others[0].label}: the rows of a finding do not sweep, give one value")
    return first
