"""How much faster batches come than a model can learn from them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.harness import Bench, Result, ratios
from benchmarks.models import ours, training
from gatedlm.data.module import LMData
from gatedlm.recipe import load


def run(bench: Bench) -> Iterator[Result]:
    """Batches of the quickstart's corpus and of the synthetic task beside training steps on them."""
    for name in ("quickstart", "sink"):
        recipe = load([f"recipe={name}", "trainer.accelerator=cpu"])[0].recipe
        data = LMData(recipe.data, recipe.seed)
        data.setup()
        batches = iter(data.train_dataloader())
        step = training(ours(recipe.model, bench), next(batches).to(bench.device))
        seconds = bench.alternate({"loader": lambda batches=batches: next(batches), "training": step})
        tokens = recipe.data.batch * recipe.data.context
        table = [
            {"what": what, "tokens a second": tokens / statistics.median(times)}
            | {"speed, training = 1": ratios(seconds, "training", what)}
            for what, times in seconds.items()
        ]
        yield Result(f"recipe={name}, batch {recipe.data.batch} x {recipe.data.context}", table)
