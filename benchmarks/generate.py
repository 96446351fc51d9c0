"""Time per token by position, with and without a key/value cache, and how much of the former is softmax attention."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.harness import Bench, Result, Work, ratios
from benchmarks.models import ours
from gatedlm.model.attention import SoftmaxAttention
from gatedlm.model.cache import Cache
from gatedlm.model.gate import GateSpec
from gatedlm.model.lm import GatedLM, ModelSpec

SPEC = ModelSpec(layers=8, width=512, heads=8, kv_heads=4, head_dim=64, ffn=1408, gates=[GateSpec()])
POSITIONS = (128, 512, 2048)


def run(bench: Bench) -> Iterator[Result]:
    """One row of random tokens and the initial weights; milliseconds a token."""
    net = ours(SPEC, bench).net
    assert isinstance(net, GatedLM)
    with torch.no_grad():
        table = [_row(net, position, bench) for position in POSITIONS]
    title = f"generation, {SPEC.parameters().total / 1e6:.1f} M parameters, elementwise gate, fp32, ms a token"
    yield Result(title, table)


def _row(net: GatedLM, position: int, bench: Bench) -> dict[str, Any]:
    tokens = torch.randint(net.spec.vocab, (1, position + 1), device=bench.device)
    works = {"with cache": _cached(net, tokens), "of which attention": _attention(net.spec, position, bench)}
    seconds = bench.alternate({**works, "without cache": lambda: net(tokens)})
    times = {name: 1000 * statistics.median(values) for name, values in seconds.items()}
    return {"position": position, **times, "without / with": ratios(seconds, "without cache", "with cache")}


def _cached(net: GatedLM, tokens: torch.Tensor) -> Work:
    """One token after the others; each call goes one position on."""
    cache = Cache(net.spec.layers)
    for part in tokens[:, :-1].split(512, dim=1):
        net(part, cache=cache)
    return lambda: net(tokens[:, :1], cache=cache)


def _attention(spec: ModelSpec, position: int, bench: Bench) -> Work:
    """Softmax attention of one query over ``position`` keys, in all layers."""
    q = torch.randn(1, 1, spec.heads, spec.head_dim, device=bench.device)
    k, v = torch.randn(2, 1, position, spec.kv_heads, spec.head_dim, device=bench.device)
    mask = torch.ones(1, 1, 1, position, dtype=torch.bool, device=bench.device)
    core = SoftmaxAttention()
    return lambda: [core(q, k, v, mask) for _ in range(spec.layers)]
