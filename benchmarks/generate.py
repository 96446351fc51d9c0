"""Time per token by position, with and without a key/value cache, and how much of the former is softmax attention.

    python benchmarks/generate.py [last=2048] [device=cpu] [threads=1] [key=value ...]

Medians in milliseconds for one row of random tokens and random weights, at positions that double up to ``last``.
Further words are a recipe's: scale=tiny, gate=sdpa-headwise, model.layers=12.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from gatedlm.model.attention import SoftmaxAttention
from gatedlm.model.cache import Cache
from gatedlm.model.lm import GatedLM, ModelSpec, initialise
from gatedlm.recipe import load

WORDS = ["recipe=quickstart", "model.layers=8", "model.width=512", "model.heads=8", "model.kv_heads=4"]
WORDS += ["model.head_dim=64", "model.ffn=1408"]
FIRST, STEPS, WHOLE = 128, 33, 3


def main(words: list[str]) -> None:
    """Print the machine, the model and the table."""
    given = dict(word.split("=", 1) for word in words)
    last, device = int(given.pop("last", 2048)), torch.device(given.pop("device", "cpu"))
    torch.set_num_threads(int(given.pop("threads", 1)))
    spec = load([*WORDS, *(f"{key}={value}" for key, value in given.items())])[0].recipe.model
    model = GatedLM(spec).to(device)
    initialise(model, seed=0)
    print(_machine(device))
    print(f"{spec.parameters().total / 1e6:.1f} M parameters, {spec.layers} layers, gates: {[*map(str, spec.gates)]}")
    table = Table("position", "with cache", "of which attention", "without cache", "ratio")
    position = FIRST
    while position <= last:
        times = _cached(model, position), _attention(spec, position, device), _uncached(model, position)
        table.add_row(f"{position:,}", *(f"{t:.2f}" for t in times), f"{times[2] / times[0]:.0f}")
        position *= 2
    Console().print(table)


def _machine(device: torch.device) -> str:
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return f"{chip}, {torch.get_num_threads()} threads, Python {platform.python_version()}, torch {torch.__version__}"


@torch.no_grad()
def _cached(model: GatedLM, position: int) -> float:
    """One token after ``position`` others."""
    tokens = torch.randint(model.spec.vocab, (1, position), device=model.embed.weight.device)
    cache = Cache(model.spec.layers)
    for part in tokens.split(512, dim=1):
        model(part, cache=cache)
    return _median(lambda: model(tokens[:, :1], cache=cache), STEPS, tokens.device)


@torch.no_grad()
def _uncached(model: GatedLM, position: int) -> float:
    """All ``position`` tokens and one more, for the sake of the last."""
    tokens = torch.randint(model.spec.vocab, (1, position + 1), device=model.embed.weight.device)
    return _median(lambda: model(tokens), WHOLE, tokens.device)


def _attention(spec: ModelSpec, position: int, device: torch.device) -> float:
    """Softmax attention of one query over ``position`` keys, in all layers."""
    q = torch.randn(1, 1, spec.heads, spec.head_dim, device=device)
    k, v = torch.randn(2, 1, position, spec.kv_heads, spec.head_dim, device=device)
    mask = torch.ones(1, 1, 1, position, dtype=torch.bool, device=device)
    return spec.layers * _median(lambda: SoftmaxAttention()(q, k, v, mask), STEPS, device)


def _median(work: Callable[[], object], times: int, device: torch.device) -> float:
    """Milliseconds; the first time warms up and is left out."""
    seconds = []
    for _ in range(times + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 1000 * statistics.median(seconds[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
