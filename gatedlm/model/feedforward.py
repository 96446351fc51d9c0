"""What follows attention in a block: SwiGLU (Shazeer 2020, arXiv 2002.05202), alone or as a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gatedlm.shapes import Float, Int


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of ``count`` experts of which each token uses ``used``; count 0 is the dense feed-forward.

    renormalise: the weights of the used experts sum to one, instead of keeping their share of the softmax over all.
    """

    count: int = 0
    used: int = 2
    renormalise: bool = True

    def __post_init__(self) -> None:
        if self.count < 0 or (self.count and not 1 <= self.used <= self.count):
            raise ValueError(
                f"model.experts: count={self.count} used={self.used}: a token uses between 1 and `count` experts"
            )


class Routing(NamedTuple):
    """What the router decided, for the losses: N tokens of the flattened batch, E experts, K of them used."""

    logits: Float[Tensor, "N E"]
    index: Int[Tensor, "N K"]
    weight: Float[Tensor, "N K"]


class SwiGLU(nn.Module):
    """y = W_down (silu(W_silu x) * W_up x); x and y are (B, T, C), the hidden width is ``hidden``."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.silu_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Float[Tensor, "B T C"]) -> tuple[Float[Tensor, "B T C"], None]:
        return self.down_proj(F.silu(self.silu_proj(x)) * self.up_proj(x)), None


class Router(nn.Module):
    """p = softmax(W x) in fp32; the K most probable experts and their weights, renormalised to sum to one or not."""

    def __init__(self, width: int, experts: ExpertsSpec) -> None:
        super().__init__()
        self.used, self.renormalise = experts.used, experts.renormalise
        self.weight = nn.Parameter(torch.empty(experts.count, width))

    def forward(self, x: Float[Tensor, "N C"]) -> Routing:
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.weight.float())
        weight, index = logits.softmax(-1).topk(self.used)
        if self.renormalise:
            weight = weight / weight.sum(-1, keepdim=True)
        return Routing(logits, index, weight)


class MixtureOfExperts(nn.Module):
    """y = sum over the K used experts of weight_e SwiGLU_e(x); no token is dropped.

    ``up_proj`` (E, C, 2F) holds each expert's silu and up projections side by side, ``down_proj`` (E, F, C) leads back.
    """

    def __init__(self, width: int, hidden: int, experts: ExpertsSpec) -> None:
        super().__init__()
        self.router = Router(width, experts)
        self.up_proj = nn.Parameter(torch.empty(experts.count, width, 2 * hidden))
        self.down_proj = nn.Parameter(torch.empty(experts.count, hidden, width))

    def forward(self, x: Float[Tensor, "B T C"]) -> tuple[Float[Tensor, "B T C"], Routing]:
        tokens = x.flatten(0, 1)
        routing = self.router(tokens)
        return self._experts(tokens, routing).view_as(x), routing

    def _experts(self, x: Float[Tensor, "N C"], routing: Routing) -> Float[Tensor, "N C"]:
        # Each token stands K times, sorted by expert, and is put back by the inverse order: both are permutations, so
        # that neither pass adds up in an order that could change from run to run.
        experts, used = self.up_proj.shape[0], routing.index.shape[1]
        order = routing.index.flatten().argsort(stable=True)
        ends = routing.index.flatten().bincount(minlength=experts).cumsum(0).to(torch.int32)
        copies = x[:, None].expand(-1, used, -1).flatten(0, 1)[order]
        silu, up = _grouped(copies, self.up_proj, ends).chunk(2, dim=-1)
        y = _grouped(F.silu(silu) * up, self.down_proj, ends)[order.argsort()]
        return (y.unflatten(0, (-1, used)) * routing.weight[..., None].to(y.dtype)).sum(1)


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x[rows of expert e] @ weight[e]; the operation knows nothing of autocast, so the types are set here."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    return F.grouped_mm(x.to(dtype), weight.to(dtype), offs=ends)
