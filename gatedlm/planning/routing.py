"""How unevenly routers may fill experts, simulated, and what that costs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gatedlm.model.feedforward import ExpertsSpec

TILE = 128  # rows that a grouped product computes together: an expert's last tile is padded
LAYERS = 20
SPREADS = {"even": 0.0, "mild": 0.3, "strong": 1.0, "extreme": 3.0}


class Load(NamedTuple):
    """Experts of one layer in one pass: the fullest over the mean, the share without a token, rows lost to padding.

    ``padded`` is what unevenness costs here, where every rank holds all experts; with experts spread over ranks a pass
    would take ``fullest`` times as long, for all wait for one.
    """

    fullest: float
    empty: float
    padded: float


def simulated(experts: ExpertsSpec, tokens: int, spread: float) -> Load:
    """The mean over ``LAYERS`` layers whose experts are chosen with probabilities of this coefficient of variation.

    Probabilities are Gamma(1/spread^2) variates over their sum, so Dirichlet; a token's experts are drawn apart.
    """
    rng, size = np.random.default_rng(0), (LAYERS, experts.count)
    weight = rng.gamma(1 / spread**2, size=size) if spread else np.ones(size)
    counts = rng.multinomial(tokens * experts.used, weight / weight.sum(-1, keepdims=True))
    rows = -(-counts // TILE) * TILE
    fullest, empty = counts.max(-1).mean() / counts.mean(), (counts == 0).mean()
    return Load(float(fullest), float(empty), float(rows.sum() / counts.sum() - 1))
