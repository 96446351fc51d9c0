"""What a run's folder holds already, and what that means for a recipe that is given again."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from gatedlm.recipe import Recipe, changed, from_yaml, to_yaml
from gatedlm.training.callbacks import read_metrics
from gatedlm.training.checkpoint import damage, manifests
from gatedlm.training.ledger import read_ledger

ELSEWHERE = ("name", "out", "data.cache", "data.workers")  # where things lie is no change of a run
FIXED = ("model.", "data.", "seed", "origin", "optim.state")


def finished(folder: Path, recipe: Recipe) -> dict[str, Any] | None:
    """The ledger of a run that has ended and that the recipe does not prolong.

    Raises ValueError where the folder was begun with another model, other data or another seed, or does not say.
    """
    ledger, changes = read_ledger(folder), _differences(folder, recipe)
    saved = manifests(folder / "checkpoints")
    begun = ledger or saved
    if begun and not (folder / "recipe.yaml").exists():
        raise ValueError(f"{folder} has lost its recipe.yaml, so that nobody knows what it holds: give another name=")
    for key, (before, now) in changes.items():
        if begun and key.startswith(FIXED):
            raise ValueError(f"{folder} was begun with {key}={before}, not {now}: give this run another name=")
    if ledger and (not changes or ledger["steps"] >= recipe.trainer.steps):
        return ledger
    furthest = max((manifest["step"] for manifest in saved.values()), default=0)
    if furthest > recipe.trainer.steps:
        raise ValueError(
            f"{folder} is at step {furthest} already, beyond trainer.steps={recipe.trainer.steps}: give more"
        )
    return None


def checkpoint(folder: Path, recipe: Recipe, console: Console) -> Path | None:
    """The newest undamaged checkpoint to go on from, or None; changes and damage are said."""
    saved = manifests(folder / "checkpoints")
    for path in reversed([path for path, manifest in saved.items() if manifest["step"] < recipe.trainer.steps]):
        broken = damage(path, saved[path])
        if broken:
            console.print(f"warning: {path / broken} is damaged, using the checkpoint before it", soft_wrap=True)
            continue
        for line in differences(folder, recipe):
            console.print(f"{line} from here on", soft_wrap=True)
        _lost(folder / "metrics.jsonl", saved[path]["step"], console)
        console.print(f"going on from {path}", soft_wrap=True)
        return path
    return None


def differences(folder: Path, recipe: Recipe) -> list[str]:
    """A line for each key whose value is another than the folder's."""
    return [f"{key}: {before} until now, {now}" for key, (before, now) in _differences(folder, recipe).items()]


def _lost(file: Path, step: int, console: Console) -> None:
    """Say if the curve does not reach the checkpoint, as far as its own spacing shows."""
    steps = [0, *(line["step"] for line in read_metrics(file) if line["step"] <= step)]
    if step - steps[-1] > max(b - a for a, b in pairwise([*steps, steps[-1] + 1])):
        console.print(f"warning: {file} ends at step {steps[-1]}, the curve stays without the steps up to {step}")


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
            raise ValueError(f"{folder}: another process trains this run, wait for it or give fit a name=") from None
        yield


def begin(folder: Path, recipe: Recipe, fingerprint: str, saved: Path | None) -> None:
    """Clear away what is half written or newer than ``saved``, and make recipe.yaml the recipe.

    ValueError where that can't be written, or where ``saved`` was trained on a corpus of another ``fingerprint``.
    """
    text = folder / "corpus.txt"
    if saved and text.exists() and text.read_text() != fingerprint:
        raise ValueError(
            f"{folder} was begun on other text than data.corpus={recipe.data.corpus} is now: give another name="
        )
    try:
        _discard(folder, saved)
        for name in ("ledger.json", "nonfinite.json"):
            (folder / name).unlink(missing_ok=True)
        text.write_text(fingerprint)
        draft = folder / f"recipe.yaml.{os.getpid()}"
        draft.write_text(to_yaml(recipe))
        draft.replace(folder / "recipe.yaml")
    except OSError as error:
        raise _unwritable(folder, error) from None


def _unwritable(folder: Path, error: OSError) -> ValueError:
    return ValueError(f"{folder}: cannot write there ({error.strerror}), give another place by out=FOLDER")


def _discard(folder: Path, saved: Path | None) -> None:
    """Remove half-written and damaged checkpoints and all that the run, going on from ``saved``, will write anew."""
    complete = manifests(folder / "checkpoints")
    for path in (folder / "checkpoints").glob("step-*"):
        if path not in complete or not saved or path.name > saved.name or damage(path, complete[path]):
            shutil.rmtree(path)


def _differences(folder: Path, recipe: Recipe) -> dict[str, tuple[Any, Any]]:
    file = folder / "recipe.yaml"
    try:
        found = changed(from_yaml(file.read_text()), recipe) if file.exists() else {}
    except (ValueError, OSError) as error:
        raise ValueError(f"{file}: {error}: give this run another name= or remove {folder}") from None
    moved = {key for key in ("origin",) if key in found and len({Path(where).name for where in found[key]}) == 1}
    return {key: values for key, values in found.items() if key not in {*ELSEWHERE, *moved}}
