"""Grouped-query attention with the five stations where a gate may stand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from gatedlm.model.cache import Past
from gatedlm.model.gate import Gate, Ungated
from gatedlm.model.kernels import softmax_attention
from gatedlm.model.norm import RMSNorm
from gatedlm.model.rope import rotate
from gatedlm.model.switch import SwitchProjection
from gatedlm.shapes import Bool, Float

if TYPE_CHECKING:
    from gatedlm.model.lm import ModelSpec


class SoftmaxAttention(nn.Module):
    """o = softmax(q k^T / sqrt(D)) v, causal or under ``mask``; H query heads share G key/value heads.

    A module of its own, so that a pre-hook sees q and k after RoPE and can rebuild any part of the map.
    """

    def forward(
        self,
        q: Float[Tensor, "B T H D"],
        k: Float[Tensor, "B S G D"],
        v: Float[Tensor, "B S G D"],
        mask: Bool[Tensor, "b 1 T S"] | None = None,
    ) -> Float[Tensor, "B T H D"]:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return softmax_attention(q, k, v, mask).transpose(1, 2)


class Attention(nn.Module):
    """y = gated attention of x; x and y are (B, T, C), x is the hidden state after the pre-norm.

    The places of the paper's Figure 1: G4 query, G3 key, G2 value, G1 sdpa, G5 output. Gates on query and key stand
    right after the projection, before QK-norm and RoPE.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        width, dim = spec.width, spec.head_dim
        heads = {"query": spec.heads, "key": spec.kv_heads, "value": spec.kv_heads, "sdpa": spec.heads, "output": 1}
        self.dim = dim
        self.q_proj = nn.Linear(width, spec.heads * dim, bias=False)
        self.k_proj, self.v_proj = (
            SwitchProjection(width, spec.kv_heads, dim, spec.switch)
            if spec.switch.at(place)
            else nn.Linear(width, spec.kv_heads * dim, bias=False)
            for place in ("key", "value")
        )
        self.o_proj = nn.Linear(spec.heads * dim, width, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(dim) if spec.qk_norm else nn.Identity() for _ in range(2))
        self.core = SoftmaxAttention()
        self.gates = nn.ModuleDict({place: Ungated() for place in heads})
        for gate in spec.gates:
            place = gate.position
            self.gates[place] = Gate(gate, width, heads[place], width if place == "output" else dim)

    def forward(
        self,
        x: Float[Tensor, "B T C"],
        rope: tuple[Float[Tensor, "1 T 1 D"], Float[Tensor, "1 T 1 D"]],
        mask: Bool[Tensor, "b 1 T S"] | None = None,
        past: Past | None = None,
    ) -> Float[Tensor, "B T C"]:
        q = self.gates["query"](self._split(self.q_proj(x)), x)
        k = self.gates["key"](self._split(self.k_proj(x)), x)
        v = self.gates["value"](self._split(self.v_proj(x)), x)
        q, k = rotate(self.q_norm(q), *rope), rotate(self.k_norm(k), *rope)
        if past is not None:
            k, v = past.extended(k, v)
        o = self.gates["sdpa"](self.core(q, k, v, mask), x)
        y = self.o_proj(o.flatten(-2)).unsqueeze(-2)
        return self.gates["output"](y, x).squeeze(-2)

    def _split(self, t: Float[Tensor, "B T hD"]) -> Float[Tensor, "B T h D"]:
        return t.unflatten(-1, (-1, self.dim))
