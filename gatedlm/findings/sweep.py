"""Many runs side by side in processes of their own; what is finished is not trained again."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import chain
from multiprocessing import connection
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from gatedlm.findings.records import folder
from gatedlm.recipe import Run
from gatedlm.training.apart import apart, when_told_to_end
from gatedlm.training.ledger import read_ledger
from gatedlm.training.run import Stopped, train
from gatedlm.training.strategy import share


def unfinished(runs: list[Run]) -> list[Run]:
    """The runs without a ledger; ValueError for a ledger that is none."""
    return [run for run in runs if not read_ledger(folder(run))]


def sweep(runs: list[Run], workers: int, console: Console) -> list[str]:
    """Train the runs, ``workers`` at a time, and return a line for each that could not be trained.

    Raises KeyboardInterrupt with the signal's number once all is saved when one asks to stop; the same runs go on from
    there.
    """
    todo = unfinished(runs)
    console.print(f"{len(runs) - len(todo)} of {len(runs)} runs are done")
    began, problems = time.monotonic(), []
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(todo))
        train_all = _one_by_one if workers == 1 else partial(_at_once, workers=workers)
        for number, (run, problem) in enumerate(chain.from_iterable(map(train_all, _generations(todo))), 1):
            problems += [problem] if problem else []
            left = len(todo) - number
            seconds = (time.monotonic() - began) / number * left
            busy = min(workers, left)
            state = f"{number}/{len(todo)} done, {busy} running, {left - busy} waiting, about {_clock(seconds)} left"
            progress.update(task, completed=number, description=state)
            console.print(f"{state}  {problem or run.label}", soft_wrap=True, highlight=False)
    return problems


def _generations(runs: list[Run]) -> Iterator[list[Run]]:
    """The runs that begin with the weights of none of the others, then those that begin with theirs, and so on."""
    while runs:
        folders = {str(folder(run)) for run in runs}
        yield [run for run in runs if run.recipe.origin not in folders]
        runs = [run for run in runs if run.recipe.origin in folders]


def _one_by_one(runs: list[Run]) -> Iterator[tuple[Run, str | None]]:
    for run in runs:
        problem = _train(run)
        if stopped:
            raise KeyboardInterrupt(stopped)
        yield run, problem


def _at_once(runs: list[Run], workers: int) -> Iterator[tuple[Run, str | None]]:
    """Each run as it ends, with a problem if it had one."""
    context = multiprocessing.get_context("spawn")
    numbers = context.SimpleQueue()
    for number in range(workers):
        numbers.put(number)
    with when_told_to_end(_interrupt), ProcessPoolExecutor(workers, context, _prepare, (workers, numbers)) as pool:
        running = {pool.submit(_train, run): run for run in runs}
        try:
            for future in as_completed(running):
                yield running[future], future.result()
        except BrokenProcessPool:
            raise ValueError("a worker was killed, for lack of memory perhaps: take fewer workers=") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()  # a worker saves its run on SIGTERM


def _clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _interrupt(number: int) -> None:
    raise KeyboardInterrupt(number)


def _prepare(workers: int, numbers: Any) -> None:
    """A worker's beginning: its share of the cores, a GPU of its own, and an end if its parent ends."""
    os.setpgid(0, 0)  # Ctrl-C is the parent's, which ends its workers by one signal: a second would kill them
    parent = multiprocessing.parent_process()
    assert parent
    threading.Thread(target=lambda: connection.wait([parent.sentinel]) and os._exit(1), daemon=True).start()
    torch.set_num_threads(share(workers))
    gpus = torch.cuda.device_count()
    if gpus > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(numbers.get() % gpus)


stopped = 0  # the signal that ended this process's run, which then begins none of those it was handed before


def _train(run: Run) -> str | None:
    """Train a run, its talk in console.txt of its folder; a line if that can't be done."""
    global stopped
    if stopped:
        return f"{run.label}: not begun"
    place = folder(run)
    place.mkdir(parents=True, exist_ok=True)
    with (place / "console.txt").open("a") as talk:
        try:
            if run.recipe.trainer.devices * run.recipe.trainer.nodes > 1:
                apart(run)
            else:
                train(run, Console(file=talk, width=100, markup=False))
        except Stopped as stop:
            stopped = stop.number
            return f"{run.label}: {stop}"
        except Exception as error:
            traceback.print_exc(file=talk)
            return f"{run.label}: {str(error).partition(chr(10))[0] or type(error).__name__}"
    return None
