"""How much attention rests on the first token (F-Attn, Table 4), without ever building a T x T map."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gatedlm.probes.trace import LayerTrace
from gatedlm.shapes import Bool, Float, Int


def attention_rows(
    q: Float[Tensor, "B T H D"],
    k: Float[Tensor, "B S G D"],
    queries: Int[Tensor, " Q"],
    mask: Bool[Tensor, "b 1 T T"] | None = None,
) -> Float[Tensor, "B H Q S"]:
    """A_ij = softmax over the keys j that query i saw of q_i . k_j / sqrt(D), for the chosen queries, in fp32.

    k may stop early, at S keys, if no chosen query saw a later one. Without a mask, attention is causal.
    """
    q, k = q[:, queries].float().unflatten(2, (k.shape[2], -1)), k.float()
    with torch.autocast(q.device.type, enabled=False):
        logits = torch.einsum("bqgrd,bsgd->bgrqs", q, k).flatten(1, 2) / math.sqrt(q.shape[-1])
    keys = torch.arange(k.shape[1], device=k.device)
    seen = keys <= queries[:, None] if mask is None else mask[:, :, queries, : len(keys)]
    return logits.masked_fill(~seen, -torch.inf).softmax(-1)


def first_token_attention(
    q: Float[Tensor, "B T H D"],
    k: Float[Tensor, "B T G D"],
    mask: Bool[Tensor, "b 1 T T"] | None = None,
    chunk: int = 256,
    lse: Float[Tensor, "B H T"] | None = None,
) -> Float[Tensor, "B H T"]:
    """A_i0 = exp(q_i . k_0 / sqrt(D) - logsumexp over the keys seen), in fp32.

    ``lse`` is that second term where a trace has it; without, it is computed anew for ``chunk`` queries at a time.
    Where the mask hides key 0 (a later document of a packed row) A is 0. The mask must be causal, as the model's is.
    """
    if lse is not None:
        key = k[:, :1].float().repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        return ((q.float() * key).sum(-1).transpose(1, 2) / math.sqrt(q.shape[-1]) - lse).exp()
    queries = torch.arange(q.shape[1], device=q.device)
    starts = range(0, len(queries), chunk)
    rows = (attention_rows(q, k[:, : i + chunk], queries[i : i + chunk], mask) for i in starts)
    # A view of column 0 would keep each chunk's whole rows alive, and so the map.
    return torch.cat([row[..., 0].clone() for row in rows], dim=-1)


def attention_map(layer: LayerTrace, queries: Int[Tensor, " Q"]) -> Float[Tensor, "B H Q T"]:
    """Rows of a layer's attention map, those of the chosen queries, in fp32."""
    return attention_rows(layer.q, layer.k, queries, layer.mask)


def f_attn(first: Float[Tensor, "B H T"], skip: int = 1) -> Float[Tensor, ""]:
    """F-Attn: the mean of A_i0 over rows, heads and queries i >= skip; ``first`` is from ``first_token_attention``.

    Query 0 sees only itself, so A_00 = 1 is left out. skip=4 leaves out the next three as well, which have few keys.
    """
    return first[..., skip:].mean()


def f_attn_where(first: Float[Tensor, "B H T"], where: Bool[Tensor, "B T"]) -> Float[Tensor, ""]:
    """The mean of A_i0 over heads and the queries i that ``where`` names, such as Bigram-Backcopy's dormant ones."""
    return first.mean(1)[where].mean()


def sink_rate(first: Float[Tensor, "B H T"], threshold: float = 0.3) -> Float[Tensor, ""]:
    """The share of (row, head) whose mean of A_i0 over all queries exceeds the threshold.

    Gu et al. 2024, arXiv 2410.10781. As there, query 0 counts with A_00 = 1, which alone adds 1/T to the mean: compare
    rates only at equal T (64 there).
    """
    return (first.mean(-1) > threshold).float().mean()


def first_value(layer: LayerTrace) -> Float[Tensor, ""]:
    """|v_0|, the first token's value, averaged over rows and key/value heads."""
    return _value_size(layer)[:, 0].mean()


def value_drain(layer: LayerTrace) -> Float[Tensor, ""]:
    """|v_0| / mean over t > 0 of |v_t|, per row and key/value head, then averaged; a sink drains to far below 1."""
    return _drains(layer).mean()


def effective_sink(
    layer: LayerTrace, first: Float[Tensor, "B H T"], score: Float[Tensor, "B T _ _"] | None = None
) -> Float[Tensor, ""]:
    """The mean over rows, heads and queries i > 0 of A_i0 s_i |v_0| / mean over t > 0 of |v_t|.

    How much of the first token a head really passes on. ``first`` is A_i0; s_i is the mean over channels of the score
    that multiplies the head's SDPA output, 1 without. Query heads take the values of their own key/value head.
    """
    passed = first * _drains(layer).repeat_interleave(first.shape[1] // layer.v.shape[2], dim=1)[..., None]
    if score is not None:
        passed = passed * score.mean(-1).transpose(1, 2)
    return passed[..., 1:].mean()


def _value_size(layer: LayerTrace) -> Float[Tensor, "B T G"]:
    return layer.v.float().norm(dim=-1)


def _drains(layer: LayerTrace) -> Float[Tensor, "B G"]:
    size = _value_size(layer)
    return size[:, 0] / size[:, 1:].mean(1)
