"""Matrix products by type, and softmax attention by kernel, type and length: what the automatic choice rests on."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Bench, Result, Work, ratios
from gatedlm.model.kernels import grouped_attention, softmax_attention

SHAPES = ((2048, 256, 768), (2048, 512, 1536), (1024, 1024, 1024))
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
LENGTHS = (128, 256, 512, 2048)
TOKENS, HEADS, KV_HEADS, DIM = 2048, 4, 2, 64


def run(bench: Bench) -> Iterator[Result]:
    """GFLOP/s of x W^T, then forward and backward of attention beside torch's own kernel in the same type."""
    yield Result("products x W^T, GFLOP/s", [_product(bench, *shape) for shape in SHAPES])
    title = f"attention, {TOKENS:,} tokens, {HEADS} heads on {KV_HEADS} of width {DIM}, forward and backward"
    yield Result(title, [_attention(bench, length, dtype) for length in LENGTHS for dtype in TYPES])


def _product(bench: Bench, tokens: int, inner: int, outer: int) -> dict[str, Any]:
    x, weight = torch.randn(tokens, inner, device=bench.device), torch.randn(outer, inner, device=bench.device)
    pairs = {name: (x.to(dtype), weight.to(dtype)) for dtype, name in TYPES.items()}
    seconds = bench.alternate({name: lambda pair=pair: F.linear(*pair) for name, pair in pairs.items()})
    speed = {name: 2e-9 * tokens * inner * outer / statistics.median(times) for name, times in seconds.items()}
    return {"shape": f"{tokens} x {inner} x {outer}"} | speed


def _attention(bench: Bench, length: int, dtype: torch.dtype) -> dict[str, Any]:
    kernels = {"torch": _by_torch, "grouped": grouped_attention, "chosen": softmax_attention}
    shapes = [(TOKENS // length, heads, length, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    inputs = [torch.randn(shape, device=bench.device, dtype=dtype).requires_grad_() for shape in shapes]
    seconds = bench.alternate({name: _both_passes(kernel, inputs) for name, kernel in kernels.items()})
    row = {"context": f"{length:,} {TYPES[dtype]}", "torch, ms": 1000 * statistics.median(seconds["torch"])}
    return row | {f"{name}, torch = 1": ratios(seconds, name, "torch") for name in ("grouped", "chosen")}


def _by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _both_passes(kernel: Callable[..., Tensor], inputs: list[Tensor]) -> Work:
    slope = torch.randn_like(inputs[0])
    return lambda: torch.autograd.grad(kernel(*inputs), inputs, slope)
