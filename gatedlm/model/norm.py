"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from gatedlm.shapes import Float


class RMSNorm(nn.RMSNorm):
    """y = w * x / sqrt(mean(x^2) + eps) over the last dimension, of ``dim`` channels; y has the type of x."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__(dim, eps)

    def forward(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        # The weight follows x, because a mixed pair of types misses the fused kernel.
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
