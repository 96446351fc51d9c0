"""Massive activations (Sun et al. 2024, arXiv 2402.17762): a few channels of a few tokens, far above the rest."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from gatedlm.probes.trace import LayerTrace


class Outlier(NamedTuple):
    """The largest size in a layer, and the row of the batch, the token and the channel that hold it."""

    size: float
    row: int
    token: int
    channel: int


def m_act(layer: LayerTrace) -> Outlier:
    """M-Act of one layer: max |h| over rows, tokens and channels of its output; the paper averages it over layers."""
    size = layer.hidden.abs()
    row, token, channel = (int(place) for place in torch.unravel_index(size.argmax(), size.shape))
    return Outlier(float(size[row, token, channel]), row, token, channel)


def larger(a: Outlier, b: Outlier) -> Outlier:
    """The one of larger size; nan, which a diverged run leaves, counts as larger than any number."""
    return max(a, b, key=lambda outlier: (math.isnan(outlier.size), outlier.size))
