"""Kills one run at random moments, its saves included, and compares its losses with those of an unbroken one.

    python benchmarks/soak.py [kills=20] [seed=0] [key=value ...]

Further words go to the run. Ends with exit status 1 if a loss differs in a bit or a step is missing or there twice.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gatedlm.training.callbacks import read_metrics

WORDS = [
    "recipe=sink",
    "scale=nano",
    "gate=sdpa-elementwise",
    "name=soak",
    "trainer.steps=3000",
    "trainer.val_every=25",
]
WORDS += ["trainer.checkpoint_every=3", "trainer.probe_every=50", "optim.warmup=20"]


def main(words: list[str]) -> None:
    """Print a line a kill and the verdict."""
    given = dict(word.split("=", 1) for word in words)
    kills, draw = int(given.pop("kills", 20)), random.Random(int(given.pop("seed", 0)))
    command = [sys.executable, "-m", "gatedlm.fit", *WORDS, *(f"{key}={value}" for key, value in given.items())]
    with tempfile.TemporaryDirectory() as folder:
        whole, broken = Path(folder, "whole"), Path(folder, "broken")
        subprocess.run([*command, f"out={whole}"], check=True, stdout=subprocess.DEVNULL)
        amid = sum(_kill([*command, f"out={broken}"], broken / "soak", draw, number) for number in range(kills))
        subprocess.run([*command, f"out={broken}"], check=True, stdout=subprocess.DEVNULL)
        same = _losses(whole / "soak") == _losses(broken / "soak")
    print(f"{kills} kills, {amid} of them amid a save: {'the same losses' if same else 'other losses'}")
    sys.exit(not same)


def _kill(command: list[str], run: Path, draw: random.Random, number: int) -> bool:
    """Start the run, kill it some steps later and say whether that left half a checkpoint."""
    before = len(_losses(run))
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    target = before + draw.randrange(20, 120)
    while len(_losses(run)) < target and process.poll() is None:
        time.sleep(0.02)
    time.sleep(draw.random() * 0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    folders = list((run / "checkpoints").glob("step-*"))
    half = any(not (folder / "manifest.json").exists() for folder in folders)
    print(f"kill {number + 1} after step {len(_losses(run))}{', amid a save' if half else ''}", flush=True)
    return half


def _losses(run: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["train/loss"]) for line in read_metrics(run / "metrics.jsonl")]


if __name__ == "__main__":
    main(sys.argv[1:])
