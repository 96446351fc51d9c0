"""A run in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gatedlm.recipe import Run
from gatedlm.training.ledger import read_ledger

ENDINGS = (signal.SIGTERM, signal.SIGUSR1)  # by which schedulers end a job


def apart(run: Run) -> dict[str, Any]:
    """Train a run of several ranks in a process of its own, because a process can be a rank only once.

    KeyboardInterrupt, with its number, where a signal ended the process before it could hear it.
    """
    words = [*run.overrides, f"name={run.recipe.name}"]
    status = _wait(subprocess.Popen([sys.executable, "-m", "gatedlm.fit", *words]))
    ledger = read_ledger(Path(run.recipe.out, run.recipe.name))
    if status > 2:
        raise SystemExit(status)
    if -status in (signal.SIGINT, *ENDINGS):
        raise KeyboardInterrupt(-status)
    if status or not ledger:
        raise ValueError(f"{run.label}: ended with exit status {status}")
    return ledger


@contextmanager
def when_told_to_end(act: Callable[[int], Any]) -> Iterator[None]:
    """``act`` with the signal's number on one of ``ENDINGS``."""
    before = {n: signal.signal(n, lambda number, _: act(number)) for n in ENDINGS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(process: subprocess.Popen) -> int:
    """Ctrl-C reaches the child too, other signals are handed on: it saves its run and says how to go on."""
    with when_told_to_end(process.send_signal):
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue
