"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864): a query and a key see each other's distance only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gatedlm.shapes import Float, Int


@dataclass(frozen=True)
class RopeSpec:
    """How fast each pair of channels turns, and how that changes where a context is stretched to ``factor`` times.

    base       the longest wave turns once in about 2 pi base positions (10k in pre-training, 1M at 32k, Section 4.4)
    scaling    linear divides all frequencies by the factor (arXiv 2306.15595); ntk raises the base to
               base factor^(D/(D-2)), so that the fastest stays and the slowest is divided; yarn (arXiv 2309.00071)
               divides those that turn less than beta_slow times in the original context, leaves those that turn more
               than beta_fast times, in between a part of each, and multiplies cos and sin by 0.1 ln factor + 1
    original   tokens of the context before it was stretched, for yarn; left out, a recipe takes data.context / factor
               and a trained model the context that it was trained at
    """

    base: float = 10_000.0
    scaling: Literal["none", "linear", "ntk", "yarn"] = "none"
    factor: float = 1.0
    original: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        if self.base <= 1:
            raise ValueError(f"model.rope.base={self.base}: must be above 1, usually 10000")
        if self.factor < 1:
            raise ValueError(f"model.rope.factor={self.factor}: how many times longer the context gets, at least 1")
        if self.factor != 1 and self.scaling == "none":
            raise ValueError(f"model.rope.factor={self.factor} does nothing by itself: add model.rope.scaling=yarn")
        if self.scaling == "yarn" and self.original < 1:
            raise ValueError("model.rope.scaling=yarn: give model.rope.original=TOKENS, the context before stretching")
        if not self.beta_fast > self.beta_slow > 0:
            raise ValueError("model.rope.beta_fast: must be above model.rope.beta_slow, both above 0; usually 32 and 1")

    @property
    def attention(self) -> float:
        """What cos and sin are multiplied by, and so each logit by its square: 0.1 ln factor + 1 for yarn, else 1."""
        return 0.1 * math.log(self.factor) + 1 if self.scaling == "yarn" else 1.0


def frequencies(spec: RopeSpec, dim: int, device: torch.device | None = None) -> Float[Tensor, " half"]:
    """Radians that each pair of channels turns from one position to the next, (D/2,): base^(-2i/D), then scaled."""
    base = spec.base * spec.factor ** (dim / (dim - 2)) if spec.scaling == "ntk" and dim > 2 else spec.base
    own = base ** -(torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    if spec.scaling == "linear":
        return own / spec.factor
    return torch.lerp(own, own / spec.factor, _slow(spec, dim, device)) if spec.scaling == "yarn" else own


def _slow(spec: RopeSpec, dim: int, device: torch.device | None) -> Float[Tensor, " half"]:
    """The share of each pair that yarn divides: 0 up to the pair that turns beta_fast times, 1 from beta_slow on."""
    # Pair i turns original base^(-2i/D) / 2 pi times in the original context.
    first, last = (
        dim * math.log(spec.original / (2 * math.pi * turns)) / (2 * math.log(spec.base))
        for turns in (spec.beta_fast, spec.beta_slow)
    )
    first, last = max(math.floor(first), 0), min(math.ceil(last), dim - 1)
    pairs = torch.arange(dim // 2, device=device, dtype=torch.float32)
    return ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)


def angles(
    spec: RopeSpec, positions: Int[Tensor, "1 T"], dim: int
) -> tuple[Float[Tensor, "1 T 1 D"], Float[Tensor, "1 T 1 D"]]:
    """cos and sin of position x frequency, each twice (rotate-half layout), times ``spec.attention``, in fp32.

    Computed anew in each pass: it is cheap, and a stored table would be lost when a model is built without memory, or
    rounded when one is cast: bfloat16 has no 257.
    """
    angle = positions[..., None, None].float() * frequencies(spec, dim, positions.device)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos() * spec.attention, angle.sin() * spec.attention


def rotate(
    x: Float[Tensor, "B T h D"], cos: Float[Tensor, "1 T 1 D"], sin: Float[Tensor, "1 T 1 D"]
) -> Float[Tensor, "B T h D"]:
    """Turn each pair (x_i, x_{i+D/2}) by its angle: x cos + (-x_2, x_1) sin, in fp32, cast back to the type of x."""
    one, two = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-two, one), dim=-1) * sin).to(x.dtype)
