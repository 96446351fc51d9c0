"""How open a gate stands: its scores' mean, histogram and share below 0.1 (Table 4)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gatedlm.shapes import Float, Int

BINS = 50


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores counted: their sum, and how many fall into each of 50 equal bins of [0, 1].

    What lies beyond, as a SiLU's scores may, counts in the first or last bin. L is empty for one layer. Counts of
    different batches add up with ``+``.
    """

    total: Float[Tensor, "*L"]
    histogram: Int[Tensor, "*L 50"]

    def __add__(self, other: Scores) -> Scores:
        return Scores(self.total + other.total, self.histogram + other.histogram)

    @property
    def mean(self) -> Float[Tensor, "*L"]:
        return self.total / self.histogram.sum(-1)

    @property
    def share_below(self) -> Float[Tensor, "*L"]:
        """The share of scores below 0.1, which is where the sixth bin begins."""
        return self.histogram[..., : BINS // 10].sum(-1) / self.histogram.sum(-1)


def count_scores(score: Float[Tensor, "B T _ _"]) -> Scores:
    """Count one layer's scores of one gate, as they stand in a ``LayerTrace``."""
    # Clamped as integers, so that a diverged run's nan has a bin too.
    bins = (score * BINS).long().clamp(0, BINS - 1)
    return Scores(score.sum(), bins.flatten().bincount(minlength=BINS))
