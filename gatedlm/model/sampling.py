"""Text from a model, token by token."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gatedlm.model.cache import Cache
from gatedlm.model.lm import GatedLM
from gatedlm.shapes import Float, Int


@dataclass(frozen=True)
class Sampling:
    """p = softmax(logits / temperature), cut to the tokens that pass top_k, then top_p, then min_p.

    temperature  0 takes the most probable token
    top_k        the k most probable tokens; 0 is all
    top_p        the fewest tokens that hold this share of what top_k left (Holtzman et al. 2019, arXiv 1904.09751)
    min_p        tokens at least this many times as probable as the likeliest (Nguyen et al. 2024, arXiv 2407.01082)
    seed         row i of a batch draws with seed + i, whatever the other rows are

    Raises ValueError for numbers out of range.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for holds, why in (
            (0 <= self.temperature < math.inf, f"temperature={self.temperature}: 0 (greedy) or more, usually up to 1"),
            (self.top_k >= 0, f"top_k={self.top_k}: how many tokens, or 0 for all"),
            (0 < self.top_p <= 1, f"top_p={self.top_p}: a share above 0 and up to 1"),
            (0 <= self.min_p <= 1, f"min_p={self.min_p}: a factor from 0 to 1"),
        ):
            if not holds:
                raise ValueError(why)


def draw(logits: Float[Tensor, "B V"], sampling: Sampling, generators: list[torch.Generator]) -> Int[Tensor, " B"]:
    """A token for each row, each with its own generator; logits and generators are the CPU's."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    below = logits.double() - logits.amax(-1, keepdim=True)  # first, or a small temperature would leave inf - inf
    p, order = (below / sampling.temperature).softmax(-1).sort(descending=True)
    p[:, sampling.top_k or p.shape[1] :] = 0
    p /= p.sum(-1, keepdim=True)
    before = p.cumsum(-1) - p
    p = p.where((before < sampling.top_p) & (p >= sampling.min_p * p[:, :1]), 0)
    ranks = torch.stack([torch.multinomial(row, 1, generator=g) for row, g in zip(p, generators, strict=True)])
    return order.gather(1, ranks).flatten()


@torch.no_grad()
def generate(
    model: GatedLM,
    prompts: list[list[int]],
    tokens: int,
    sampling: Sampling,
    stop: Collection[int] = (),
    window: int | None = None,
    keep_first: int = 0,
    chunk: int = 512,
) -> Iterator[list[int | None]]:
    """Yields the next token of each prompt, ``tokens`` times or until each has ended with one of ``stop``.

    A row that has ended yields None. ``window`` and ``keep_first`` are the ``Cache``'s; prompts, of one token or more,
    are read ``chunk`` tokens at a time. ValueError where the model's logits are not finite.
    """
    device = model.embed.weight.device
    padding = max(map(len, prompts)) - torch.tensor([len(prompt) for prompt in prompts])
    cache = Cache(model.spec.layers, padding, window, keep_first)
    generators = [torch.Generator().manual_seed(sampling.seed + row) for row in range(len(prompts))]
    rows = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True, padding_side="left")
    ended = [False] * len(prompts)
    for _ in range(tokens):
        for part in rows.to(device).split(chunk, dim=1):
            logits = model(part, cache=cache).logits[:, -1]
        if not logits.isfinite().all():
            raise ValueError("the model's logits are not finite: its weights or its precision do not hold")
        drawn = draw(logits.cpu(), sampling, generators)
        step = [None if over else token for over, token in zip(ended, drawn.tolist(), strict=True)]
        yield step
        ended = [token is None or token in stop for token in step]
        if all(ended):
            return
        rows = drawn[:, None]
