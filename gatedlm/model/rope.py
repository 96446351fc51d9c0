"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864): a query and a key see each other's distance only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gatedlm.shapes import Float, Int


@dataclass(frozen=True)
class RopeSpec:
    """base: the longest wave turns once in about 2 pi base positions (10k in pre-training, 1M at 32k, Section 4.4)."""

    base: float = 10_000.0

    def __post_init__(self) -> None:
        if self.base <= 1:
            raise ValueError(f"model.rope.base={self.base}: must be above 1, usually 10000")


def angles(
    spec: RopeSpec, positions: Int[Tensor, "1 T"], dim: int
) -> tuple[Float[Tensor, "1 T 1 D"], Float[Tensor, "1 T 1 D"]]:
    """cos and sin of position x base^(-2i/D), i < D/2, each twice (rotate-half layout), in fp32.

    Computed anew in each pass: it is cheap, and a stored table would be lost when a model is built without memory.
    """
    frequency = spec.base ** -(torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    angle = positions[..., None, None].float() * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(
    x: Float[Tensor, "B T h D"], cos: Float[Tensor, "1 T 1 D"], sin: Float[Tensor, "1 T 1 D"]
) -> Float[Tensor, "B T h D"]:
    """Turn each pair (x_i, x_{i+D/2}) by its angle: x cos + (-x_2, x_1) sin, in fp32, cast back to the type of x."""
    one, two = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-two, one), dim=-1) * sin).to(x.dtype)
