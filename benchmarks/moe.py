"""A training step of mixtures of experts from this library, transformers and LitGPT, and what more experts cost."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness import Bench, Result, timed
from benchmarks.models import NO_BF16, mixture, ours, peers, precisions, rows, training

SIZES = ((16, 2), (128, 8))
COUNTS = (8, 16, 64, 128)
BATCH, CONTEXT = 8, 256


def run(bench: Bench) -> Iterator[Result]:
    """Two mixtures beside their peers, then mixtures of 8 to 128 experts of which a token meets two."""
    for count, used in SIZES:
        yield from _compared(bench, count, used)
    yield _by_count(bench)
    if "bf16" not in precisions(bench):
        yield Result("bf16", [], (NO_BF16,))


def _compared(bench: Bench, count: int, used: int) -> Iterator[Result]:
    model, dense = ours(mixture(count, used), bench), ours(mixture(0, used), bench)
    others, notes = peers(model, CONTEXT, bench)
    batch = rows(mixture(count, used), BATCH, CONTEXT, bench)
    for precision in precisions(bench):
        models = {"ours": model, **others, "dense, same active parameters": dense}
        variants = {name: training(m, batch, precision == "bf16") for name, m in models.items()}
        seconds = bench.alternate(variants)
        table = timed(seconds, "ours")
        yield Result(f"training step, {count} experts, {used} of them used, {precision}", table, tuple(notes))


def _by_count(bench: Bench) -> Result:
    specs = {f"{count} experts": mixture(count, 2) for count in COUNTS} | {"dense": mixture(0, 2)}
    batch = rows(mixture(0, 2), BATCH, CONTEXT, bench)
    seconds = bench.alternate({name: training(ours(spec, bench), batch) for name, spec in specs.items()})
    counts = {
        name: dict(zip(("parameters", "active"), spec.parameters(), strict=False)) for name, spec in specs.items()
    }
    table = [row | counts[row["variant"]] for row in timed(seconds, f"{COUNTS[0]} experts")]
    return Result("training step by number of experts, two of them used, fp32", table)
