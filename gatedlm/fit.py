"""``python -m gatedlm.fit recipe=NAME [group=NAME ...] [key=value ...]``: train, watch, and read what the gate did."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from gatedlm.catalogue import usage
from gatedlm.command import command, say

if TYPE_CHECKING:  # imported where it is used: usage and a wrong word answer before torch is loaded
    from gatedlm.recipe import Run


def main(words: list[str]) -> None:
    """Train the runs that the words ask for; without words say which there are.

    Exit status 2 with one line for words, data or a machine that cannot do it; 128 + N after signal N.
    """
    # It says so before the first step; from there on the run saves itself.
    command(words, usage(), _fit, "stopped: the same command goes on")


def _fit(words: list[str]) -> None:
    from gatedlm.recipe import load

    runs = load(words)
    if len(runs) == 1:
        _alone(runs[0])
    else:
        _sweep(runs)


def _console() -> Console:
    from gatedlm.training.strategy import is_first_rank

    return Console(quiet=not is_first_rank(), markup=False)


def _alone(run: Run) -> None:
    from gatedlm.training.tables import run_table

    ledger = _one(run)
    _console().print(run_table(ledger))
    _point(run)


def _point(run: Run) -> None:
    _console().print(f"report: {Path(run.recipe.out, run.recipe.name, 'report.html')}", soft_wrap=True)


def _one(run: Run) -> dict[str, Any]:
    from gatedlm.training.run import Stopped, train
    from gatedlm.training.strategy import is_first_rank, lacks_memory

    console = _console()
    try:
        return train(run, console)
    except Stopped as stopped:
        console.print(f"{stopped}: python -m gatedlm.fit {shlex.join(sys.argv[1:])}", soft_wrap=True)
        # Another rank's status would make the launcher kill the first.
        raise SystemExit(128 + stopped.number if is_first_rank() else 0) from None
    except (MemoryError, RuntimeError) as error:
        if run.recipe.trainer.devices * run.recipe.trainer.nodes > 1 and _lost_a_rank(error):
            raise ValueError("another process of this run was killed or ended: the same command goes on") from None
        if not lacks_memory(error):
            raise
        size, data = run.recipe.model.parameters().total, run.recipe.data
        raise ValueError(
            f"{size:,} parameters, data.batch={data.batch} and data.context={data.context} need more memory than there "
            "is: lower the model's sizes, trainer.micro_batch or data.context"
        ) from None


def _lost_a_rank(error: Exception) -> bool:
    return any(sign in str(error) for sign in ("Connection closed by peer", "Connection reset by peer", "NCCL"))


def _sweep(runs: list[Run]) -> None:
    """One run after another and a table of them all; a run that cannot be trained is said and left out."""
    from gatedlm.findings.arms import arms_table
    from gatedlm.training.apart import apart
    from gatedlm.training.tables import comparison

    if "LOCAL_RANK" in os.environ:
        raise ValueError(f"{runs[0].label}, {runs[1].label}, ...: under torchrun give the words of a single run")
    console, ledgers = Console(markup=False), {}
    for number, run in enumerate(runs, 1):
        console.rule(f"{number} of {len(runs)}: {run.label}")
        try:
            if run.recipe.trainer.devices == 1:
                ledgers[run.label] = _one(run)
                _point(run)
            else:
                ledgers[run.label] = apart(run)
        except (ValueError, OSError) as error:
            say(error)
    console.print(comparison(ledgers))
    if arms := arms_table(ledgers):
        console.print(arms)
    for run in runs:
        if run.label in ledgers:
            console.print(f"{Path(run.recipe.out, run.recipe.name)}  {run.label}", soft_wrap=True, highlight=False)
    if len(ledgers) < len(runs):
        raise SystemExit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
