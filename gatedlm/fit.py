"""``python -m gatedlm.fit recipe=NAME [group=NAME ...] [key=value ...]``: train, watch, and read what the gate did."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    except (ValueError, OSError) as error:
        _say(error)
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # before the first step; from there on the run saves itself
        _say("stopped: the same command goes on")
        raise SystemExit(130) from None


def _say(what: Exception | str) -> None:
    """One line, whatever stands in the name of a file."""
    print(*str(what).splitlines(), file=sys.stderr)


def _fit(words: list[str]) -> None:
    from gatedlm.recipe import load

    runs = load(words)
    if len(runs) == 1:
        _alone(runs[0])
    else:
        _sweep(runs)


def _console() -> Console:
    from gatedlm.training.strategy import is_first_rank

    return Console(quiet=not is_first_rank())


def _alone(run: Run) -> None:
    from gatedlm.training.tables import run_table

    ledger = _one(run)
    _console().print(run_table(ledger))
    _point(run)


def _point(run: Run) -> None:
    _console().print(f"report: {Path(run.recipe.out, run.recipe.name, 'report.html')}", soft_wrap=True)


def _one(run: Run) -> dict[str, Any]:
    from gatedlm.training.run import Stopped, train

    console = _console()
    try:
        return train(run, console)
    except Stopped as stopped:
        console.print(f"{stopped}: python -m gatedlm.fit {shlex.join(sys.argv[1:])}", soft_wrap=True)
        raise SystemExit(128 + stopped.number) from None
    except (MemoryError, RuntimeError) as error:
        if not _lacks_memory(error):
            raise
        size, data = run.recipe.model.parameters().total, run.recipe.data
        raise ValueError(
            f"{size:,} parameters, data.batch={data.batch} and data.context={data.context} need more memory than there "
            "is: lower the model's sizes, trainer.micro_batch or data.context"
        ) from None


def _lacks_memory(error: Exception) -> bool:
    """Whether memory ran out, whichever library noticed; torch says it of a CPU in a bare RuntimeError."""
    from torch import OutOfMemoryError

    said = "can't allocate memory" in str(error) or "Storage size calculation overflowed" in str(error)
    return said or isinstance(error, MemoryError | OutOfMemoryError)


def _sweep(runs: list[Run]) -> None:
    """One run after another and a table of them all; a run that cannot be trained is said and left out."""
    from gatedlm.training.tables import comparison

    console, ledgers = Console(), {}
    for number, run in enumerate(runs, 1):
        console.rule(f"{number} of {len(runs)}: {run.label}")
        try:
            if run.recipe.trainer.devices == 1:
                ledgers[run.label] = _one(run)
                _point(run)
            else:
                ledgers[run.label] = _apart(run)
        except (ValueError, OSError) as error:
            _say(error)
    console.print(comparison(ledgers))
    if len(ledgers) < len(runs):
        raise SystemExit(2)


def _apart(run: Run) -> dict[str, Any]:
    """Train a run of several ranks in a process of its own, because a process can be a rank only once."""
    from gatedlm.training.ledger import read_ledger

    words = [*run.overrides, f"name={run.recipe.name}"]
    status = _wait(subprocess.Popen([sys.executable, "-m", "gatedlm.fit", *words]))
    ledger = read_ledger(Path(run.recipe.out, run.recipe.name))
    if status > 2:
        raise SystemExit(status)
    if status or not ledger:
        raise ValueError(f"{run.label}: ended with exit status {status}")
    return ledger


def _wait(process: subprocess.Popen) -> int:
    """Ctrl-C reaches the child too, which saves its run and says how to go on."""
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


if __name__ == "__main__":
    main(sys.argv[1:])
