"""When a run is saved, what counts as saved, and which save a run goes on from.

A checkpoint is a folder ``step-N`` with ``state``, a file or the shards of several ranks, and ``manifest.json``,
written last: the step, its validation loss, and each file's size and checksum.
"""

from __future__ import annotations

import json
import shutil
import signal
import zlib
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint

from gatedlm.training.callbacks import Recorder
from gatedlm.training.ledger import write_whole

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
WHOLE, ENDS = 2**30, 2**20  # files up to 1 GiB are checked whole, of larger ones the first and last MiB


def manifests(folder: Path) -> dict[Path, dict[str, Any]]:
    """{checkpoint: manifest} of the complete checkpoints of a run, oldest first."""
    return {file.parent: _manifest(file) for file in sorted(folder.glob("step-*/manifest.json"))}


def _manifest(file: Path) -> dict[str, Any]:
    """What the file says, or where that is no manifest one that names the file itself as damaged."""
    try:
        found = json.loads(file.read_text())
        if isinstance(found["step"], int) and isinstance(found["files"], dict):
            return found
    except (ValueError, LookupError, TypeError, OSError):
        pass
    return {"step": 0, "files": {file.name: None}}


def damage(checkpoint: Path, manifest: dict[str, Any]) -> str | None:
    """The first file of a checkpoint that is not what its manifest says, or None if all are."""
    for name, mark in manifest["files"].items():
        if not (checkpoint / name).is_file() or _mark(checkpoint / name) != mark:
            return name
    return None


def _mark(file: Path) -> list[int]:
    """[size, CRC-32] of a file."""
    size = file.stat().st_size
    with file.open("rb") as content:
        if size <= WHOLE:
            return [size, zlib.crc32(content.read())]
        head = content.read(ENDS)
        content.seek(-ENDS, 2)
        return [size, zlib.crc32(content.read(), zlib.crc32(head))]


class Checkpoints(Checkpoint):
    """Saves every ``every`` steps, at the end, and when asked to stop; keeps the ``keep`` newest and the best one.

    The best is the one of least val/loss, of those that a validation at the same step rated.

    SIGINT, SIGTERM and SIGUSR1 raise a flag that all ranks agree on at the next step boundary: Lightning's own handler
    broadcasts inside the handler and hangs with several processes. A second signal kills at once. ``stopped_by`` is the
    signal that ended the run, or None. OSError where a save fails; the checkpoints before it stay.
    """

    def __init__(self, folder: Path, every: int, keep: int, recorder: Recorder) -> None:
        self.folder, self.every, self.keep, self.recorder = folder, every, keep, recorder
        self.stopped_by: int | None = None
        self._asked = 0
        self._before: dict[int, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        # Lightning would broadcast a flag of its own in every step.
        assert hasattr(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"), "Lightning changed: see Checkpoints"
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.should_stop:  # the guard's doing: a step that was not finite is none to go on from
            return
        asked = self._agreed(trainer)
        if asked:
            self.stopped_by = asked
            trainer.should_stop = True
        # The last step is saved on_train_end, behind the closing figures: a run killed amid those makes them again.
        due = self.every and trainer.global_step % self.every == 0 and trainer.global_step < trainer.max_steps
        if asked or due:
            self._save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == trainer.max_steps:
            self._save(trainer)
        self._restore_handlers()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._restore_handlers()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self._asked = number
        for again in SIGNALS:
            signal.signal(again, signal.SIG_DFL)

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
        path = self.folder / f"step-{trainer.global_step:08d}"
        if (path / "manifest.json").exists():
            return
        if trainer.is_global_zero:
            shutil.rmtree(path, ignore_errors=True)
        trainer.strategy.barrier()
        trainer.save_checkpoint(path / "state")
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            self._seal(path, trainer.global_step)
            if trainer.global_step < trainer.max_steps:
                self.prune()
        trainer.strategy.barrier()  # a rank that ended now would take the first one with it

    def _seal(self, path: Path, step: int) -> None:
        files = {str(file.relative_to(path)): _mark(file) for file in sorted(path.rglob("*")) if file.is_file()}
        latest = self.recorder.latest
        rated = latest.get("val/loss") if latest.get("step") == step else None
        manifest = {"step": step, "val/loss": rated, "files": files}
        write_whole(path / "manifest.json", json.dumps(manifest, indent=1))

    def prune(self) -> None:
        """Remove what is neither among the newest nor the best; after the last step, once its figures are written."""
        saved = manifests(self.folder)
        rated = [path for path in saved if saved[path].get("val/loss") is not None]
        best = min(rated, key=lambda path: saved[path]["val/loss"], default=None)
        for path in [*saved][: -self.keep]:
            if path != best:
                (path / "manifest.json").unlink()  # first, so that half a folder never looks complete
                shutil.rmtree(path)
