"""Switch heads (Csordas et al. 2023, arXiv 2312.07987), which the paper sets its value gate against (Table 6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gatedlm.shapes import Float


@dataclass(frozen=True)
class SwitchSpec:
    """Each key/value head mixes ``used`` of its ``count`` projections; count 0 is the plain projection.

    on  the value projection, or key and value alike, each with scores of its own
    """

    count: int = 0
    used: int = 1
    on: Literal["value", "key_value"] = "value"

    def __post_init__(self) -> None:
        if self.count and not 1 <= self.used <= self.count:
            raise ValueError(
                f"model.switch: count={self.count} used={self.used}: a head uses between 1 and `count` projections"
            )

    def at(self, place: str) -> bool:
        """Whether the projection of ``key`` or ``value`` is a switched one."""
        return self.count > 0 and (place == "value" or self.on == "key_value")


class SwitchProjection(nn.Module):
    """y_h = sum over the K projections e of largest score of s_he W_he x, s = sigmoid(W_s x) in fp32.

    x is (B, T, C), y is (B, T, h D). With one projection a head it is the headwise value gate (Table 6, row 6). All
    projections are computed and the unused ones weighted by zero: there are few, and a head is small.
    """

    def __init__(self, width: int, heads: int, dim: int, spec: SwitchSpec) -> None:
        super().__init__()
        self.shape, self.used = (heads, spec.count, dim), spec.used
        self.experts = nn.Parameter(torch.empty(heads * spec.count * dim, width))
        self.score = nn.Parameter(torch.empty(heads * spec.count, width))

    def forward(self, x: Float[Tensor, "B T C"]) -> Float[Tensor, "B T hD"]:
        score = torch.sigmoid(F.linear(x, self.score).float().unflatten(-1, self.shape[:2]))
        best, index = score.topk(self.used)
        score = torch.zeros_like(score).scatter(-1, index, best)
        y = F.linear(x, self.experts).unflatten(-1, self.shape)
        return (y * score[..., None].to(y.dtype)).sum(-2).flatten(-2)
