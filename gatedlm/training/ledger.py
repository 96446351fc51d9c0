"""What is kept of a run: one JSON with its recipe, its figures, and what it ran on."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gatedlm.data.module import LMData
from gatedlm.probes.spikes import Spikes
from gatedlm.recipe import Run
from gatedlm.training.measure import Measurements

SCHEMA = 1
LIBRARIES = ("gatedlm", "torch", "lightning", "datasets", "tokenizers", "omegaconf")
FIGURE = int | float | None
SHAPE: dict[Any, Any] = {  # of what is read again
    "name": str,
    "status": str,
    "recipe": dict,
    "seed": int,
    "seconds": int | float,
    "params": {"total": int, "active": int, "gate": int},
    "steps": int,
    "tokens": int,
    "tokens_per_second": int | float,
    "baselines": {"bigram": FIGURE},
    "initial_loss": FIGURE,
    "final": {str: FIGURE},
    "by_layer": {str: [FIGURE]},
    "scores": {str: {"mean": [FIGURE], "share_below": [FIGURE], "histogram": [[int]]}},
    "spikes": [int],
    "spike_events": [{"start": int, "peak": int}],
}


def ledger(
    run: Run, data: LMData, lines: list[dict[str, Any]], measured: Measurements, spikes: Spikes, broken: bool
) -> dict[str, Any]:
    """The ledger of a run with these metrics lines: diverged if a guard broke it off or no loss is left."""
    recipe, line = run.recipe, lines[-1]
    validation, probed = measured.validation, measured.probed
    diverged = broken or not math.isfinite(validation["val/loss"])
    final = {"train/loss": line["train/loss"], "val/bits_per_byte": None} | validation | probed.figures
    content = {
        "schema": SCHEMA,
        "name": recipe.name,
        "status": "diverged" if diverged else "finished",
        "recipe": asdict(recipe),
        "overrides": list(run.overrides),
        "seed": recipe.seed,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in LIBRARIES},
        "git": _git(),
        "seconds": line["seconds"],
        "params": recipe.model.parameters()._asdict(),
        "steps": line["step"],
        "tokens": line["tokens"],
        "tokens_per_second": line["tokens"] / line["seconds"],
        "corpus": asdict(data.corpus),
        "baselines": data.baselines(),
        "initial_loss": lines[0]["train/loss"],
        "final": final,
        "by_layer": probed.by_layer,
        "scores": probed.trained.as_dict()["scores"],
        "spikes": spikes.points,
        "spike_events": [event._asdict() for event in spikes.events],
    }
    return plain(content)


def read_ledger(folder: Path) -> dict[str, Any] | None:
    """The ledger of a run's folder, or None if the run has not come to an end."""
    file = folder / "ledger.json"
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_text())
    except (ValueError, RecursionError):
        content = None
    if (
        not isinstance(content, dict)
        or content.get("schema") != SCHEMA
        or not fits(content, SHAPE)
        or not content["steps"]
    ):
        raise ValueError(f"{file}: not a ledger, remove the file to train the run again")
    return content


def fits(value: Any, shape: Any) -> bool:
    """Whether a value from JSON has a shape: a type, [the shape of each entry], {str: the shape of each value}, or
    {key: the shape of its value} with keys that have to be there.
    """
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(entry, shape[0]) for entry in value)
    if not isinstance(shape, dict):
        return isinstance(value, shape)
    if not isinstance(value, dict):
        return False
    wanted = dict.fromkeys(value, shape[str]) if str in shape else shape
    return all(key in value and fits(value[key], below) for key, below in wanted.items())


def write_ledger(folder: Path, content: dict[str, Any]) -> None:
    """Write ledger.json whole or not at all."""
    write_whole(folder / "ledger.json", json.dumps(content, indent=1, allow_nan=False) + "\n")


def write_whole(file: Path, text: str) -> None:
    """Write ``text`` whole or not at all: under another name first."""
    draft = file.with_name(f"{file.name}.{os.getpid()}.part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(file)


def plain(value: Any) -> Any:
    """JSON has no word for a figure that is not finite: it becomes null."""
    if isinstance(value, dict):
        return {key: plain(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [plain(below) for below in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _git() -> dict[str, Any] | None:
    """The commit of the checkout that runs, and whether it was changed; None for an installed package."""
    here = Path(__file__).parent
    try:
        commit = _ask_git(here, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_ask_git(here, "status", "--porcelain", "--", "."))}
    except (OSError, subprocess.CalledProcessError):
        return None


def _ask_git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()
