"""When to look and what to write. What to look at is in ``gatedlm.training.measure``."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from gatedlm.data.module import LMData
from gatedlm.probes.spikes import SpikeWatch
from gatedlm.recipe import Recipe
from gatedlm.training.ledger import write_whole

SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_FRAMES = 0.2


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, if there is one; a last one that a killed run left half written is dropped."""
    if not file.exists():
        return []
    text = file.read_text(errors="replace")
    return [_line(line, f"{file}, line {number}") for number, line in enumerate(text.split("\n")[:-1], 1)]


def _line(text: str, where: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        line = None
    if not isinstance(line, dict) or not {"step", "train/loss", "seconds"} <= line.keys():
        raise ValueError(f"{where}: not the figures of a step, delete that line")
    return line


def as_json(value: Any) -> Any:
    """A number, or None for one that JSON has no word for."""
    value = value if value is None or isinstance(value, int) else float(value)
    return value if value is None or math.isfinite(value) else None


def as_float(value: float | None) -> float:
    """The number that ``as_json`` wrote, not a number where it had no word."""
    return math.nan if value is None else value


class Recorder(Callback):
    """Appends a line to metrics.jsonl every ``log_every`` steps: losses, rate, speed, and what was measured.

    ``measure`` maps a step to further figures, of a validation or a probe; all ranks call it, rank 0 writes. A run that
    goes on from a step drops the lines beyond it first.
    """

    def __init__(self, file: Path, recipe: Recipe, measure: Callable[[int], dict[str, Any]]) -> None:
        self.file, self.measure, self.log_every = file, measure, recipe.trainer.log_every
        self.watch = SpikeWatch(recipe.spikes)
        self.tokens = recipe.data.batch * recipe.data.context
        self.latest: dict[str, Any] = {}
        self._earlier = self._began = self._resumed = self._busy = 0.0

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of training so far, those before an interruption included."""
        return self._earlier + time.perf_counter() - self._began

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        kept = [line for line in read_metrics(self.file) if line["step"] <= trainer.global_step]
        if trainer.is_global_zero:
            write_whole(self.file, "".join(json.dumps(line) + "\n" for line in kept))
        for line in kept:
            self.watch.see(line["step"], as_float(line["train/loss"]))
        self._earlier = kept[-1]["seconds"] if kept else 0.0
        self._began, self._written = time.perf_counter(), trainer.global_step
        self._resumed = self._began

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._busy += time.perf_counter() - self._resumed
        step = trainer.global_step
        figures, last = self.measure(step), step == trainer.max_steps
        if step % self.log_every == 0 or last or "train/skipped" in outputs:
            speed = (step - self._written) * self.tokens / self._busy
            figures = {**outputs, **figures, "tokens": step * self.tokens, "tokens_per_second": speed}
            self.latest = {key: as_json(value) for key, value in {"step": step, **figures}.items()}
            self.latest |= self._spike(step) | {"seconds": self.seconds}
            self._busy, self._written = 0.0, step
            self._write(trainer)
        self._resumed = time.perf_counter()

    def _spike(self, step: int) -> dict[str, float | None]:
        rise = self.watch.see(step, as_float(self.latest["train/loss"]))
        return {"train/spike": as_json(rise)} if rise else {}

    def _write(self, trainer: L.Trainer) -> None:
        if trainer.is_global_zero:
            with self.file.open("a") as out:
                out.write(json.dumps(self.latest) + "\n")


class Display(Callback):
    """Step, loss, rate, tokens/s and time left: live on a terminal, else one plain line every few seconds."""

    def __init__(self, console: Console, recorder: Recorder) -> None:
        self.console, self.recorder = console, recorder
        self._progress: Progress | None = None
        self._shown = self._first_step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._shown, self._began, self._first_step = time.perf_counter(), time.perf_counter(), trainer.global_step
        if trainer.is_global_zero and self.console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
            self._progress = Progress(*columns, console=self.console)
            self._task = self._progress.add_task("", total=trainer.max_steps, completed=trainer.global_step)
            self._progress.start()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        pause = SECONDS_BETWEEN_FRAMES if self._progress else SECONDS_BETWEEN_LINES
        now, last = time.perf_counter(), trainer.global_step == trainer.max_steps
        if trainer.is_global_zero and self._is_new_spike(trainer.global_step):
            rise = as_float(self.recorder.latest["train/spike"])
            size = f"{rise:.2f} nats above its trend" if math.isfinite(rise) else "not finite"
            self.console.print(f"spike at step {trainer.global_step}: the loss is {size}")
        quiet = now - self._shown < pause and not last
        if not trainer.is_global_zero or not self.recorder.latest or quiet:
            return
        self._shown, text = now, self._text(trainer)
        if self._progress:
            self._progress.update(self._task, completed=trainer.global_step, description=text)
        else:
            self.console.print(f"step {trainer.global_step}/{trainer.max_steps}  {text}", soft_wrap=True)

    def _is_new_spike(self, step: int) -> bool:
        line = self.recorder.latest
        return "train/spike" in line and line["step"] == step

    def _text(self, trainer: L.Trainer) -> str:
        line = self.recorder.latest
        done, left = trainer.global_step - self._first_step, trainer.max_steps - trainer.global_step
        seconds = (time.perf_counter() - self._began) / done * left
        loss = line.get("train/loss")
        return (
            f"loss {'not finite' if loss is None else f'{loss:.3f}'}  lr {line['optim/lr']:.1e}  "
            f"{line['tokens_per_second']:,.0f} tokens/s  {seconds:.0f} s left"
        )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._progress:
            self._progress.stop()


class Guard(Callback):
    """Where a loss or gradient was not finite, ends the run or, with nonfinite=skip, lets it go on without that step.

    The step is not applied in either case. Ending leaves nonfinite.json with the rows of the batch; ``step`` is where.
    """

    def __init__(self, file: Path, data: LMData, policy: str) -> None:
        self.file, self.data, self.policy = file, data, policy
        self.step: int | None = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if "train/skipped" in outputs and self.policy == "stop":
            self.step, trainer.should_stop = trainer.global_step, True
            if trainer.is_global_zero:
                found = {"step": self.step, "rows": self.data.batch_rows(self.step).tolist()}
                self.file.write_text(json.dumps(found) + "\n")


class Profile(Callback):
    """Prints, when training ends, the operations that took the most time of their own."""

    def __init__(self, console: Console) -> None:
        self.console, self.profiler = console, torch.profiler.profile()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.profiler.start()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.profiler.stop()
        device = "cuda" if trainer.strategy.root_device.type == "cuda" else "cpu"
        table = self.profiler.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=15)
        self.console.print(table, soft_wrap=True, highlight=False)
