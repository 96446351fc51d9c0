"""Which kernel computes softmax attention, and which devices multiply bf16 matrices."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gatedlm.shapes import Bool, Float

CPU_MULTIPLIES_BF16: bool = torch.cpu._is_avx512_bf16_supported()  # AMX comes with it
GROUPED = 512  # tokens up to which two products and a softmax beat the CPU's flash kernel in bf16


def multiplies_bf16(device: str) -> bool:
    """Whether devices of this type, such as cpu or cuda, multiply bf16 matrices faster than fp32 ones.

    CPUs do with AVX-512 BF16 and GPUs from compute capability 8; others emulate it at a fraction of their fp32 speed.
    """
    if device == "cuda":
        return torch.cuda.get_device_capability() >= (8, 0)
    return device == "cpu" and CPU_MULTIPLIES_BF16


def softmax_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S D"],
    mask: Bool[Tensor, "b 1 T S"] | None = None,
) -> Float[Tensor, "B H T D"]:
    """softmax(q k^T / sqrt(D)) v, causal or under ``mask``, by what is fastest for this device, type and length.

    That is torch's own kernel, except in bf16 on CPUs. Types, and in fp32 every bit, are that kernel's.
    """
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":
        if not CPU_MULTIPLIES_BF16:
            with torch.autocast("cpu", enabled=False):
                return _torch(q.float(), k.float(), v.float(), mask).to(q.dtype)
        if mask is None and q.shape[2] <= GROUPED:
            return grouped_attention(q, k, v)
    return _torch(q, k, v, mask)


def attention_and_lse(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S D"],
    mask: Bool[Tensor, "b 1 T S"] | None = None,
) -> tuple[Float[Tensor, "B H T D"], Float[Tensor, "B H T"] | None]:
    """``softmax_attention``, bit for bit, and log sum over the keys seen of exp(q . k / sqrt(D)) where that is free.

    Causal attention on CPUs in fp32 has it from the kernel behind torch's own call.
    """
    if mask is None and (q.device.type, q.dtype) == ("cpu", torch.float32):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    return softmax_attention(q, k, v, mask), None


def grouped_attention(
    q: Float[Tensor, "B H T D"], k: Float[Tensor, "B G T D"], v: Float[Tensor, "B G T D"]
) -> Float[Tensor, "B H T D"]:
    """Causal attention as two batched products, the query heads of a key/value head side by side as rows of one."""
    groups, tokens = k.shape[1], q.shape[2]
    rows = q.unflatten(1, (groups, -1)).flatten(2, 3).flatten(0, 1)  # (B G, R T, D)
    hidden = q.new_full((tokens, tokens), -math.inf).triu(1).repeat(q.shape[1] // groups, 1)
    scores = torch.baddbmm(hidden, rows, k.flatten(0, 1).mT, alpha=q.shape[-1] ** -0.5)
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).view_as(q)


def _torch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
