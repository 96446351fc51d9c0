"""Which rows a step reads: a function of (seed, step) alone, so that resuming needs one number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np
from torch.utils.data import Sampler

LISTED = 2**22  # rows up to which an epoch's permutation is a list, of 32 MiB at most
EPOCHS = 2  # the one a step is in, and the next
ROUNDS = 4
MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio


@lru_cache(maxsize=EPOCHS)
def _permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(n)


def keyed_permutation(places: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Where a permutation of n rows sends these places, without its list: memory for the places alone.

    A Feistel network of four rounds (Luby and Rackoff 1988) permutes the next power of four, and what it sends beyond n
    goes through it again until it lands within.
    """
    half = np.uint64(((n - 1).bit_length() + 1) // 2)
    low = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.default_rng([seed, epoch]).integers(2**63, size=ROUNDS, dtype=np.uint64)
    sent, out = places.astype(np.uint64), np.ones(len(places), bool)
    while out.any():
        left, right = sent[out] >> half, sent[out] & low
        for key in keys:
            mixed = (right ^ key) * MIX
            left, right = right, left ^ (((mixed ^ (mixed >> np.uint64(29))) * MIX >> np.uint64(32)) & low)
        sent[out] = left << half | right
        out = sent >= n
    return sent.astype(np.int64)


def batch_indices(n: int | None, batch: int, seed: int, step: int) -> np.ndarray:
    """Rows of global batch ``step``, (batch,): a slice of the epochs one after another, each a permutation of n rows.

    A batch may cross from one epoch into the next. n=None means rows without end, which are read as they come. Above
    ``LISTED`` rows memory grows with the batch alone.
    """
    first = step * batch
    if n is None:
        return np.arange(first, first + batch)
    epochs = range(first // n, (first + batch - 1) // n + 1)
    if n > LISTED:
        epoch, place = np.divmod(np.arange(first, first + batch), n)
        return np.concatenate([keyed_permutation(place[epoch == e], n, seed, e) for e in epochs])
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
