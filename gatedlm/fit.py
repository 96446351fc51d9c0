"""``python -m gatedlm.fit recipe=NAME [group=NAME ...] [key=value ...]``: train, watch, and read what the gate did."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from gatedlm.catalogue import usage

if TYPE_CHECKING:  # imported where it is used: usage and a wrong word answer before torch is loaded
    from gatedlm.recipe import Run


def main(words: list[str]) -> None:
    """Train the runs that the words ask for; without words say which there are.

    Exit status 2 with one line for words, data or a machine that cannot do it; 128 + N after signal N.
    """
    if not words or {"-h", "--help"} & set(words):
        print(usage())
        return
    try:
        _fit(words)
    except ValueError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def _fit(words: list[str]) -> None:
    from gatedlm.recipe import load

    runs = load(words)
    if len(runs) == 1:
        _one(runs[0])
    else:
        _sweep(runs)


def _one(run: Run) -> None:
    from lightning.pytorch.utilities import rank_zero_only

    from gatedlm.training.run import Stopped, train
    from gatedlm.training.tables import run_table

    console = Console(quiet=getattr(rank_zero_only, "rank", 0) != 0)
    try:
        content = train(run, console)
    except Stopped as stopped:
        console.print(f"{stopped}\n{_command(run)}", soft_wrap=True)
        raise SystemExit(128 + stopped.number) from None
    console.print(run_table(content))
    console.print(f"report: {Path(run.recipe.out, run.recipe.name, 'report.html')}", soft_wrap=True)


def _sweep(runs: list[Run]) -> None:
    """Each run in a process of its own, so that each begins alike and may have ranks of its own; then the table."""
    from gatedlm.training.ledger import read_ledger
    from gatedlm.training.tables import comparison

    console, ledgers = Console(), {}
    for number, run in enumerate(runs, 1):
        console.rule(f"{number} of {len(runs)}: {run.label}")
        command = [sys.executable, "-m", "gatedlm.fit", *run.overrides, f"name={run.recipe.name}"]
        status = _wait(subprocess.Popen(command))
        if status > 2:
            raise SystemExit(status)
        ledger = read_ledger(Path(run.recipe.out, run.recipe.name))
        if ledger:
            ledgers[run.label] = ledger
    console.print(comparison(ledgers))


def _wait(process: subprocess.Popen) -> int:
    """Ctrl-C reaches the child too, which saves its run and says how to go on."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def _command(run: Run) -> str:
    return "python -m gatedlm.fit " + " ".join(run.overrides)


if __name__ == "__main__":
    main(sys.argv[1:])
