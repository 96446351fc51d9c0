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
    """A table for each type; the losses must agree to 1 in 10,000."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, TOKENS, WIDTH, generator=draw).to(bench.device).requires_grad_()
    weight = (0.02 * torch.randn(VOCAB, WIDTH, generator=draw)).to(bench.device).requires_grad_()
    targets = torch.randint(VOCAB, (1, TOKENS), generator=draw).to(bench.device)
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "logits whole": lambda x, weight: loss.next_token(F.linear(x, weight), targets),
        "in parts": lambda x, weight: loss.in_parts(weight, x.flatten(0, 1), targets.flatten()),
    }
    if (liger := loss.liger(bench.device.type)) is not None:
        ways["liger-kernel"] = lambda x, weight: liger(weight, x.flatten(0, 1), targets.flatten())
    for precision in precisions(bench):
        works = {name: _both_passes(way, x, weight, precision == "bf16") for name, way in ways.items()}
        values = {name: float(work()) / TOKENS for name, work in works.items()}  # pyright: ignore[reportArgumentType]
        assert max(values.values()) - min(values.values()) < 1e-4 * values["logits whole"], values
        peaks = {name: bench.peak(work) / 2**20 for name, work in works.items()}
        seconds = bench.alternate(works)
        table = [
            row
            | {"peak MiB": peaks[row["variant"]], "memory, whole = 1": peaks[row["variant"]] / peaks["logits whole"]}
            for row in timed(seconds, "logits whole")
        ]
        title = f"loss and gradients, {TOKENS:,} tokens, width {WIDTH}, vocabulary {VOCAB:,}, {precision}"
        yield Result(title, table, (", ".join(f"loss {value:.5f} {name}" for name, value in values.items()),))


def _both_passes(way: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, bf16: bool) -> Work:
    def work() -> float:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
            nats = way(x, weight)
        torch.autograd.grad(nats, (x, weight))
        return nats.item()

    return work
