"""The loss at a vocabulary of 151,936, logits whole and in parts: time and peak memory of both passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Bench, Result, Work, timed
from benchmarks.models import precisions
from gatedlm import loss

TOKENS, WIDTH, VOCAB = 2048, 512, 151_936


def run(bench: Bench) -> Iterator[Result]:
    """A table for each type; the two losses must agree to 1 in 10,000."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, TOKENS, WIDTH, generator=draw).to(bench.device).requires_grad_()
    weight = (0.02 * torch.randn(VOCAB, WIDTH, generator=draw)).to(bench.device).requires_grad_()
    targets = torch.randint(VOCAB, (1, TOKENS), generator=draw).to(bench.device)
    valid = torch.ones_like(targets, dtype=torch.bool)
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "logits whole": lambda x, weight: loss.next_token(F.linear(x, weight), targets, valid),
        "in parts": lambda x, weight: loss.read_out(x, weight, targets, valid),
    }
    for precision in precisions(bench):
        works = {name: _both_passes(way, x, weight, precision == "bf16") for name, way in ways.items()}
        whole, parts = (float(work()) / TOKENS for work in works.values())  # pyright: ignore[reportArgumentType]
        assert abs(whole - parts) < 1e-4 * whole, (whole, parts)
        peaks = {name: bench.peak(work) / 2**20 for name, work in works.items()}
        seconds = bench.alternate(works)
        table = [
            row
            | {"peak MiB": peaks[row["variant"]], "memory, whole = 1": peaks[row["variant"]] / peaks["logits whole"]}
            for row in timed(seconds, "logits whole")
        ]
        title = f"loss and gradients, {TOKENS:,} tokens, width {WIDTH}, vocabulary {VOCAB:,}, {precision}"
        yield Result(title, table, (f"loss {whole:.5f} whole, {parts:.5f} in parts",))


def _both_passes(way: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, bf16: bool) -> Work:
    def work() -> float:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
            nats = way(x, weight)
        torch.autograd.grad(nats, (x, weight))
        return nats.item()

    return work
