"""The idea of the paper: a gate Y' = Y * sigmoid(X W) at one of five places in attention (arXiv 2505.06708, 2.2).

To add a variant: an entry in ``ACTIVATIONS``, here or from a file of your own (lesson 10 of tutorials/), and its words
in a file of recipes/gate/ or yours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gatedlm.model.norm import RMSNorm
from gatedlm.shapes import Float

Position = Literal["query", "key", "value", "sdpa", "output"]


@dataclass(frozen=True)
class GateSpec:
    """Y' = combine(Y, act(score of the source)); without arguments the paper's best row (Table 1, row 5).

    position     where Y is taken: query (G4), key (G3), value (G2), sdpa (G1) or output (G5), Figure 1 of the paper
    granularity  elementwise: a score per channel; headwise: a score per head
    sharing      specific: scores differ by head; shared: scores are averaged over the heads
    combine      multiply: Y * score; add: Y + score; replace: the score itself
    activation   a key of ``ACTIVATIONS``: sigmoid, ns_sigmoid (1/2 + sigmoid/2, Eq. 9), silu, identity, rmsnorm (over a
                 head's channels), or one that was added there
    source       input: the pre-normed hidden state X; constant: a learned table; self: Y

    Raises ValueError, naming the fix, where the words contradict each other or the gate could not act.
    """

    position: Position = "sdpa"
    granularity: Literal["elementwise", "headwise"] = "elementwise"
    sharing: Literal["specific", "shared"] = "specific"
    combine: Literal["multiply", "add", "replace"] = "multiply"
    activation: str = "sigmoid"
    source: Literal["input", "constant", "self"] = "input"

    def __post_init__(self) -> None:
        for broken, why in _refusals(self):
            if broken:
                raise ValueError(f"gate {self}: {why}")

    def __str__(self) -> str:
        return " ".join((self.position, self.granularity, self.sharing, self.combine, self.activation, self.source))


def _refusals(gate: GateSpec) -> list[tuple[bool, str]]:
    own = gate.source == "self"
    per_channel = gate.granularity == "elementwise" and gate.sharing == "specific"
    return [
        (
            gate.activation not in ACTIVATIONS,
            f"no activation {gate.activation}: there are {', '.join(ACTIVATIONS)}, or add it to ACTIVATIONS first",
        ),
        (
            own != (gate.combine == "replace"),
            "source=self and combine=replace go together (Y' = f(Y)): set both or neither",
        ),
        (
            own and not per_channel,
            "f(Y) acts on each channel of each head: use granularity=elementwise sharing=specific",
        ),
        (own and gate.activation == "identity", "f(Y) = Y would do nothing: use activation=silu or rmsnorm"),
        (
            gate.activation == "rmsnorm" and not own,
            "rmsnorm normalises Y itself: use combine=replace source=self, or another activation",
        ),
        (
            gate.position == "output" and not per_channel,
            "the output projection has mixed the heads: use granularity=elementwise sharing=specific",
        ),
    ]


class Score(nn.Module):
    """score = act(X W) for source input, act(table) for constant, act(Y) for self; fp32, averaged over heads if shared.

    Y is (B, T, heads, dim), X is (B, T, C). The score is (B, T, heads or 1, dim or 1), ready to broadcast over Y.
    A shared score uses the full-size projection and averages after the activation (Section 3.1, Table 1 rows 12-13).
    """

    def __init__(self, spec: GateSpec, width: int, heads: int, dim: int) -> None:
        super().__init__()
        self.shape = (heads, dim if spec.granularity == "elementwise" else 1)
        self.source: Callable[[Tensor, Tensor], Tensor] = getattr(self, f"_from_{spec.source}")
        self.share = _mean_over_heads if spec.sharing == "shared" else _as_is
        self.act: Callable[[Tensor], Tensor] = ACTIVATIONS[spec.activation](dim)
        if spec.source == "input":
            self.weight = nn.Parameter(torch.empty(heads * self.shape[1], width))
        if spec.source == "constant":
            self.table = nn.Parameter(torch.empty(self.shape))

    def forward(self, y: Float[Tensor, "B T h d"], x: Float[Tensor, "B T C"]) -> Float[Tensor, ...]:
        return self.share(self.act(self.source(y, x).float()))

    def _from_input(self, y: Tensor, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).unflatten(-1, self.shape)

    def _from_constant(self, y: Tensor, x: Tensor) -> Tensor:
        return self.table.expand(*y.shape[:2], *self.shape)

    def _from_self(self, y: Tensor, x: Tensor) -> Tensor:
        return y


class Gate(nn.Module):
    """Y' = combine(Y, score), see ``GateSpec``; Y is (B, T, heads, dim), X is (B, T, C), Y' has Y's shape and type.

    width is C, heads and dim are those of Y. The submodule ``score`` is the station where a reader sees the scores.
    """

    def __init__(self, spec: GateSpec, width: int, heads: int, dim: int) -> None:
        super().__init__()
        self.score = Score(spec, width, heads, dim)
        self.combine = COMBINATIONS[spec.combine]

    def forward(self, y: Float[Tensor, "B T h d"], x: Float[Tensor, "B T C"]) -> Float[Tensor, "B T h d"]:
        return self.combine(y, self.score(y, x).to(y.dtype))


class Ungated(nn.Module):
    """Y' = Y, for the places where no gate stands."""

    def forward(self, y: Float[Tensor, "B T h d"], x: Float[Tensor, "B T C"]) -> Float[Tensor, "B T h d"]:
        return y


def _mean_over_heads(score: Tensor) -> Tensor:
    return score.mean(dim=-2, keepdim=True)


def _as_is(score: Tensor) -> Tensor:
    return score


def _take_score(y: Tensor, score: Tensor) -> Tensor:
    return score


def _ns_sigmoid(z: Tensor) -> Tensor:
    return 0.5 + 0.5 * torch.sigmoid(z)


# From the channels of a head to a function of scores (..., heads, dim or 1); what is added here has no parameters.
ACTIVATIONS: dict[str, Callable[[int], Callable[[Tensor], Tensor]]] = {
    "sigmoid": lambda dim: torch.sigmoid,
    "ns_sigmoid": lambda dim: _ns_sigmoid,
    "silu": lambda dim: F.silu,
    "identity": lambda dim: _as_is,
    "rmsnorm": RMSNorm,
}

COMBINATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "multiply": torch.mul,
    "add": torch.add,
    "replace": _take_score,
}
