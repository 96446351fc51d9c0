"""Bigram-Backcopy (Guo et al. 2024, arXiv 2410.13835): on most queries a copying head has nothing to do."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

BOS = 0
TRIGGERS = 8
CHAIN_SEED = 2410_13835  # the chain belongs to the task: every seed of a run meets the same one


@dataclass(frozen=True)
class Chain:
    """x_0 = BOS; x_{t+1} = x_{t-1} after a trigger x_t, else x_{t+1} ~ transitions[x_t].

    Symbols are the ids 1 to V-1, the triggers among them 1 to 8. ``transitions`` is (V, V); its row BOS is the law of
    the first symbol, the chain's stationary one without triggers. No two triggers follow each other: what a trigger
    copies stood before it, and only a symbol that is none draws the next from the chain.
    """

    transitions: np.ndarray

    @property
    def entropy(self) -> Tensor:
        """Least loss in nats of the target after each id, (V,): the entropy of its row, 0 after triggers.

        ``chain.entropy[inputs].mean()`` is the least mean loss of some inputs; the rest of a loss is excess.
        """
        p = self.transitions
        entropy = torch.from_numpy(-(p * np.log(np.where(p > 0, p, 1))).sum(1)).float()
        return entropy * ~active(torch.arange(len(p)))

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.transitions.tobytes()).hexdigest()[:16]


def active(inputs: Any) -> Any:
    """Queries on triggers, as a tensor or an array: their target is the token before them, which a head must copy."""
    return (inputs != BOS) & (inputs <= TRIGGERS)


def dormant(inputs: Tensor) -> Tensor:
    """Queries on other symbols: nothing to copy. BOS is neither, for it sees only itself."""
    return inputs > TRIGGERS


@lru_cache
def chain(vocab: int) -> Chain:
    """Rows drawn from Dirichlet(0.3) over V-1 symbols, the triggers' columns tripled, rows scaled back to 1."""
    if vocab < TRIGGERS + 3:
        raise ValueError(f"data.vocab={vocab}: too few for {TRIGGERS} triggers, a first token and a chain; take 64")
    symbols = vocab - 1
    p = np.random.default_rng(CHAIN_SEED).dirichlet(np.full(symbols, 0.3), size=symbols)
    p[:, :TRIGGERS] *= 3
    p /= p.sum(1, keepdims=True)
    first = np.linalg.matrix_power(p, 1024)[0]
    first[:TRIGGERS] = 0
    transitions = np.zeros((vocab, vocab))
    transitions[0, 1:], transitions[1:, 1:] = first / first.sum(), p
    return Chain(transitions)


class Backcopy(torch.utils.data.Dataset):
    """Rows of ``chain(vocab)``: ``rows[indices]`` are (B, T+1) int64, each a function of (stream, index) alone.

    ``stream`` keeps rows apart: [0, seed] for training, [1] for validation. ``count`` rows, None without end.
    """

    def __init__(self, vocab: int, context: int, stream: list[int], count: int | None = None) -> None:
        self.cumulative = chain(vocab).transitions.cumsum(1)
        self.cumulative[:, -1] = np.inf  # where rounding left it below a draw
        self.triggers = active(np.arange(vocab))
        self.context, self.stream, self.count = context, stream, count

    def __len__(self) -> int:
        assert self.count is not None
        return self.count

    def __getitem__(self, indices: np.ndarray) -> Tensor:
        uniform = np.stack([np.random.default_rng([*self.stream, index]).random(self.context) for index in indices], 1)
        symbols = np.full((self.context + 1, len(indices)), BOS)
        for t, draws in enumerate(uniform):
            drawn = (self.cumulative[symbols[t]] > draws[:, None]).argmax(1)
            symbols[t + 1] = np.where(self.triggers[symbols[t]], symbols[t - 1], drawn)
        return torch.from_numpy(np.ascontiguousarray(symbols.T))

    packed = __getitem__  # BOS stands first by the task's own rule
