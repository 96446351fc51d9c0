"""When a run is saved, what counts as saved, and which save a run goes on from."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def complete(path: Path) -> bool:
    """A single file is written atomically; a sharded folder is whole once ``meta.pt``, its last file, is there."""
    return path.is_file() or (path / "meta.pt").is_file()


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob("step-*.ckpt") if complete(path))


class Checkpoints(Checkpoint):
    """Saves every ``every`` steps, at the end, and when asked to stop; keeps the ``keep`` newest.

    SIGINT, SIGTERM and SIGUSR1 raise a flag that all ranks agree on at the next step boundary: Lightning's own handler
    broadcasts inside the handler and hangs with several processes. A second signal acts at once. ``stopped_by`` is the
    signal that ended the run, or None.
    """

    def __init__(self, folder: Path, every: int, keep: int) -> None:
        self.folder, self.every, self.keep = folder, every, keep
        self.stopped_by: int | None = None
        self._asked = 0
        self._before: dict[int, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        # Lightning would broadcast a flag of its own in every step.
        assert hasattr(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"), "Lightning changed: see Checkpoints"
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        asked = self._agreed(trainer)
        if asked:
            self.stopped_by = asked
            trainer.should_stop = True
        # The last step is saved on_train_end, behind the closing figures: a run killed amid those makes them again.
        due = self.every and trainer.global_step % self.every == 0 and trainer.global_step < trainer.max_steps
        if asked or due:
            self._save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save(trainer)
        self._restore_handlers()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._restore_handlers()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = number
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        self._before = {}

    def _agreed(self, trainer: L.Trainer) -> int:
        asked = torch.tensor(self._asked, device=trainer.strategy.root_device)
        if trainer.world_size > 1:
            dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return int(asked)

    def _save(self, trainer: L.Trainer) -> None:
        path = self.folder / f"step-{trainer.global_step:08d}.ckpt"
        if complete(path):
            return
        trainer.save_checkpoint(path)
        if trainer.is_global_zero:
            for old in checkpoints(self.folder)[: -self.keep]:
                shutil.rmtree(old) if old.is_dir() else old.unlink()
