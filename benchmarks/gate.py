"""What a gate on the SDPA output adds to a training step, by itself and with the parameters it brings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.harness import Bench, Result, timed
from benchmarks.models import NARROW, ours, precisions, rows, training
from gatedlm.model.gate import GateSpec
from gatedlm.model.lm import ModelSpec

BATCH, CONTEXT = 8, 256


def run(bench: Bench) -> Iterator[Result]:
    """A table for each type."""
    for precision in precisions(bench):
        yield compared(NARROW, BATCH, CONTEXT, bench, bf16=precision == "bf16")


def compared(plain: ModelSpec, batch: int, context: int, bench: Bench, bf16: bool, compiled: bool = False) -> Result:
    """Steps of this model, with gates, and with one at the parameters that it has without."""
    elementwise = replace(plain, gates=[GateSpec()])
    specs = {
        "ungated": plain,
        "headwise": replace(plain, gates=[GateSpec(granularity="headwise")]),
        "elementwise": elementwise,
        "elementwise, ungated's parameters": elementwise.matched_to(plain),
    }
    tokens = rows(plain, batch, context, bench)
    seconds = bench.alternate(
        {name: training(ours(spec, bench, compiled), tokens, bf16) for name, spec in specs.items()}
    )
    table = [row | {"parameters": specs[row["variant"]].parameters().total} for row in timed(seconds, "ungated")]
    how = f"{'bf16' if bf16 else 'fp32'}, {'compiled' if compiled else 'eager'}"
    return Result(f"training step, width {plain.width}, {plain.layers} layers, batch {batch} x {context}, {how}", table)
