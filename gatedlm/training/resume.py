"""What a run's folder holds already, and what that means for a recipe that is given again."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from gatedlm.recipe import Recipe, changed, from_yaml, to_yaml
from gatedlm.training.checkpoint import damage, manifests
from gatedlm.training.ledger import read_ledger

ELSEWHERE = ("name", "out", "data.cache", "data.workers")  # where things lie is no change of a run
FIXED = ("model.", "data.", "seed")


def finished(folder: Path, recipe: Recipe) -> dict[str, Any] | None:
    """The ledger of a run that has ended and that the recipe does not prolong.

    Raises ValueError where the folder was begun with another model, other data or another seed, or does not say.
    """
    ledger, differences = read_ledger(folder), _differences(folder, recipe)
    begun = ledger or manifests(folder / "checkpoints")
    if begun and not (folder / "recipe.yaml").exists():
        raise ValueError(f"{folder} has lost its recipe.yaml, so that nobody knows what it holds: give another name=")
    for key, (before, now) in differences.items():
        if begun and key.startswith(FIXED):
            raise ValueError(f"{folder} was begun with {key}={before}, not {now}: give this run another name=")
    over = ledger and (not differences or ledger["steps"] >= recipe.trainer.steps)
    return ledger if over else None


def checkpoint(folder: Path, recipe: Recipe, console: Console) -> Path | None:
    """The newest undamaged checkpoint to go on from, or None; changes and damage are said."""
    saved = manifests(folder / "checkpoints")
    for path in reversed([path for path, manifest in saved.items() if manifest["step"] < recipe.trainer.steps]):
        broken = damage(path, saved[path])
        if broken:
            console.print(f"warning: {path / broken} is damaged, using the checkpoint before it", soft_wrap=True)
            continue
        for key, (before, now) in _differences(folder, recipe).items():
            console.print(f"{key}: {before} until now, {now} from here on", soft_wrap=True)
        console.print(f"going on from {path}", soft_wrap=True)
        return path
    return None


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder for as long as the ``with`` block lasts; ValueError where another process holds it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise _unwritable(folder, error) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder}: another process trains this run, wait for it or give another name=") from None
        yield


def begin(folder: Path, recipe: Recipe) -> None:
    """Clear away what is half written, make recipe.yaml the recipe; ValueError where that can't be written."""
    try:
        _discard(folder)
        (folder / "ledger.json").unlink(missing_ok=True)
        draft = folder / f"recipe.yaml.{os.getpid()}"
        draft.write_text(to_yaml(recipe))
        draft.replace(folder / "recipe.yaml")
    except OSError as error:
        raise _unwritable(folder, error) from None


def _unwritable(folder: Path, error: OSError) -> ValueError:
    return ValueError(f"{folder}: cannot write there ({error.strerror}), give another place by out=FOLDER")


def _discard(folder: Path) -> None:
    """Remove damaged and half-written checkpoints, so that no newer name stands in the way of a run that goes on."""
    saved = manifests(folder / "checkpoints")
    for path in (folder / "checkpoints").glob("step-*"):
        if path not in saved or damage(path, saved[path]):
            shutil.rmtree(path)


def _differences(folder: Path, recipe: Recipe) -> dict[str, tuple[Any, Any]]:
    file = folder / "recipe.yaml"
    try:
        found = changed(from_yaml(file.read_text()), recipe) if file.exists() else {}
    except (ValueError, OSError) as error:
        raise ValueError(f"{file}: {error}: give this run another name= or remove {folder}") from None
    return {key: values for key, values in found.items() if key not in ELSEWHERE}
