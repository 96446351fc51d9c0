"""What Lightning, the line in metrics.jsonl and the display add to a step of a tiny model."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from torch.nn.utils import clip_grad_norm_

from benchmarks.harness import Bench, Result, spread
from gatedlm import loss
from gatedlm.data.module import LMData
from gatedlm.model.lm import initialise
from gatedlm.recipe import Recipe, load
from gatedlm.training.callbacks import Display, Guard, Recorder
from gatedlm.training.module import LitLM
from gatedlm.training.run import _quiet, _trainer

WORDS = "recipe=sink scale=nano gate=sdpa-elementwise trainer.accelerator={} trainer.steps={}"
WARM, STEPS, TURNS = 10, 20, 10


class Watch(Callback):
    """Reads the clock after ``WARM`` steps and after ``STEPS`` more."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.read = clock, dict[int, float]()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step in (WARM, WARM + STEPS):
            self.read[trainer.global_step] = self.clock()

    @property
    def seconds(self) -> float:
        """Of one step."""
        return (self.read[WARM + STEPS] - self.read[WARM]) / STEPS


def run(bench: Bench) -> Iterator[Result]:
    """Seconds a step of both in turn; a round is ``TURNS`` short runs of each, for a machine's speed drifts."""
    words = WORDS.format("cpu" if bench.device.type == "cpu" else "gpu", WARM + STEPS)
    recipe = load(words.split())[0].recipe
    _quiet()
    ways: dict[str, Callable[[Bench, Recipe], float]] = {"bare loop": _bare, "Lightning, a line a step": _lightning}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(bench.rounds):
        for times in seconds.values():
            times.append(0.0)
        for turn in range(TURNS):
            for name in list(ways)[:: -1 if turn % 2 else 1]:
                seconds[name][-1] += ways[name](bench, recipe) / TURNS
    bare = seconds["bare loop"]
    table = [
        {"loop": name, "ms a step": 1000 * statistics.median(times)}
        | {"ms over the bare loop": spread([1000 * (a - b) for a, b in zip(times, bare, strict=True)])}
        for name, times in seconds.items()
    ]
    yield Result(
        f"{recipe.model.parameters().total:,} parameters, batch 4 x 32, {TURNS} x {STEPS} steps a round", table
    )


def _lightning(bench: Bench, recipe: Recipe) -> float:
    data, lit, watch = LMData(recipe.data, recipe.seed), LitLM(recipe), Watch(bench.clock)
    data.setup()
    with TemporaryDirectory() as folder, chdir(folder):  # where Lightning leaves its own checkpoint
        recorder = Recorder(Path(folder, "metrics.jsonl"), recipe, lambda step: {})
        guard = Guard(Path(folder, "nonfinite.json"), data, recipe.trainer.nonfinite)
        display = Display(Console(quiet=True), recorder)
        _trainer(recipe, False, [recorder, guard, display, watch]).fit(lit, data)
    return watch.seconds


def _bare(bench: Bench, recipe: Recipe) -> float:
    data, lit = LMData(recipe.data, recipe.seed), LitLM(recipe)
    data.setup()
    net = lit.net.to_empty(device=bench.device)
    initialise(net, recipe.seed)
    made = lit.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]
    began = 0.0
    for step, batch in zip(range(WARM + STEPS), data.train_dataloader(), strict=False):
        if step == WARM:
            began = bench.clock()
        inputs, targets = loss.shift(batch.to(bench.device))
        (loss.next_token(net(inputs).logits, targets) / targets.numel()).backward()
        clip_grad_norm_(net.parameters(), recipe.optim.clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return (bench.clock() - began) / STEPS
