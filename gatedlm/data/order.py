"""Which rows a step reads: a function of (seed, step) alone, so that resuming needs one number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
from torch.utils.data import Sampler


@lru_cache(maxsize=2)  # the epoch a step is in, and the next
def _permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(n)


def batch_indices(n: int | None, batch: int, seed: int, step: int) -> np.ndarray:
    """Rows of global batch ``step``, (batch,): a slice of the epochs one after another, each a permutation of n rows.

    A batch may cross from one epoch into the next. n=None means rows without end, which are read as they come.
    """
    first = step * batch
    if n is None:
        return np.arange(first, first + batch)
    epochs = range(first // n, (first + batch - 1) // n + 1)
    return np.concatenate([_permutation(n, seed, epoch) for epoch in epochs])[first - epochs[0] * n :][:batch]


class StepSampler(Sampler[np.ndarray]):
    """Endless: this rank's share (batch/world,) of ``batch_indices`` for ``first_step()`` and every step after it.

    ``first_step`` is asked when an iteration begins. It has no length, so a Trainer counts steps and not epochs.
    """

    def __init__(
        self, n: int | None, batch: int, seed: int, first_step: Callable[[], int], rank: int = 0, world: int = 1
    ) -> None:
        if batch % world:
            raise ValueError(f"data.batch={batch} does not divide among {world} ranks; take a multiple of {world}")
        self.n, self.batch, self.seed, self.first_step, self.rank, self.world = n, batch, seed, first_step, rank, world

    def __iter__(self) -> Iterator[np.ndarray]:
        step = self.first_step()
        while True:
            yield batch_indices(self.n, self.batch, self.seed, step).reshape(self.world, -1)[self.rank]
            step += 1


def validation_order(n: int) -> np.ndarray:
    """One permutation for all seeds, so that the first batches of two runs are the same fair sample."""
    return np.random.default_rng(0).permutation(n)


def validation_batches(n: int, batch: int, rank: int = 0, world: int = 1) -> list[np.ndarray]:
    """This rank's shares of the whole batches in n rows; the same rows on any number of ranks, none read twice.

    Rows that fill no batch are left out; fewer rows than a batch are one batch, as far as they divide among the ranks.
    """
    size = min(batch, n) // world * world
    if not size:
        raise ValueError(f"{n} validation rows are too few for {world} ranks; raise data.holdout or lower data.context")
    return list(validation_order(n)[: n // size * size].reshape(-1, world, size // world)[:, rank])
