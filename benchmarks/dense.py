"""A training step of the same dense model from this library, transformers and LitGPT, eager and compiled."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.harness import Bench, Result, timed
from benchmarks.models import NARROW, NO_BF16, WIDE, ours, peers, precisions, rows, training

SIZES = {
    "width 256, 6 layers, vocabulary 4,096, batch 8 x 256": (NARROW, 8, 256),
    "width 512, 8 layers, vocabulary 16,384, batch 4 x 512": (WIDE, 4, 512),
}


def run(bench: Bench) -> Iterator[Result]:
    """A table for each size and type."""
    for title, (spec, batch, context) in SIZES.items():
        model, batch_rows = ours(spec, bench), rows(spec, batch, context, bench)
        others, notes = peers(model, context, bench)
        models = {"ours": model, "ours, compiled": ours(spec, bench, compiled=True), **others}
        for precision in precisions(bench):
            variants = {name: training(m, batch_rows, precision == "bf16") for name, m in models.items()}
            if precision == "bf16":
                variants["ours, fp32"] = training(model, batch_rows)
            began = time.perf_counter()
            variants["ours, compiled"]()
            cold = (
                f"the first compiled step took {time.perf_counter() - began:.0f} s, with torch's cache of earlier ones"
            )
            table = timed(bench.alternate(variants), "ours", "ours, compiled")
            yield Result(f"training step, {title}, {precision}", table, (*notes, cold))
    if "bf16" not in precisions(bench):
        yield Result("bf16", [], (NO_BF16,))
