"""What if: gates held open or steady, the first token hidden; hooks for as long as a ``with`` block lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gatedlm.model.lm import GatedLM

Intervention = Callable[[GatedLM], AbstractContextManager[None]]


def multiplies(model: GatedLM) -> bool:
    """Whether the model has a gate whose score multiplies, so that there is one to hold."""
    return any(gate.combine == "multiply" for gate in model.spec.gates)


@contextmanager
def hold_scores(model: GatedLM, at: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Each score s of a gate that multiplies becomes at(s), both (B, T, heads or 1, dim or 1); other gates go on."""

    def hold(score: nn.Module, args: Any, out: Tensor) -> Tensor:
        return at(out)

    positions = [gate.position for gate in model.spec.gates if gate.combine == "multiply"]
    with ExitStack() as hooks:
        for station in model.stations():
            for position in positions:
                hooks.enter_context(station.scores[position].register_forward_hook(hold))
        yield


@contextmanager
def hide_first(model: GatedLM) -> Iterator[None]:
    """A_i0 = 0 for every query i > 0, the rest of each row of the map scaled up to sum to one; query 0 sees itself.

    Takes a mask of T x T bytes, one for all rows and heads.
    """
    with ExitStack() as hooks:
        for station in model.stations():
            hooks.enter_context(station.core.register_forward_pre_hook(_without_first))
        yield


def _without_first(core: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    q, k, v, mask = args
    key = torch.arange(q.shape[1], device=q.device)
    query = key[:, None]
    seen = (key <= query)[None, None] if mask is None else mask
    return q, k, v, seen & ((key > 0) | (query == 0))


def _mean_over_tokens(score: Tensor) -> Tensor:
    return score.mean(1, keepdim=True).expand_as(score)


INTERVENTIONS: dict[str, Intervention] = {
    # s = 1: the model as if its gates were not there.
    "gate=ones": partial(hold_scores, at=torch.ones_like),
    # s = its mean over the row's tokens, per head and channel: as open as on average, but the same for every token.
    "gate=mean": partial(hold_scores, at=_mean_over_tokens),
    "mask_first=true": hide_first,
}
