"""From words to figures: every task with every model, what is finished taken over, all of it set side by side."""

from __future__ import annotations

import json
import logging
import re
import time
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from gatedlm.data.packing import digest
from gatedlm.evaluation.jobs import Job, jobs_of
from gatedlm.evaluation.reader import Reader
from gatedlm.evaluation.score import Outcome, Score
from gatedlm.evaluation.tables import comparison, notes, results
from gatedlm.evaluation.words import Asked
from gatedlm.hub import look, open_model
from gatedlm.hub.folder import Files, read_json
from gatedlm.hub.opening import Found
from gatedlm.recipe import stretched
from gatedlm.training.ledger import plain, write_whole
from gatedlm.training.strategy import lacks_memory

FORMAT = 3  # raise it when the same words should give other figures


def evaluate(asked: Asked) -> None:
    """Run what was asked for; figures go to ``out``/MODEL/TASK.json at once, at the end to ``out``/results.json.

    ValueError, one line, for models, texts and tasks that cannot be.
    """
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # a line for each retry; the last error is told
    found = [look(where) for where in asked.models]
    jobs = jobs_of(asked, found)
    asked.out.mkdir(parents=True, exist_ok=True)
    names = _apart([each.recipe.name for each in found], asked)
    labels = _apart([_label(each) for each in found], asked)
    measured = (_measure(*one, jobs, asked) for one in zip(names, asked.models, found, strict=True))
    told = dict(zip(labels, measured, strict=True))
    _write(asked.out / "results.json", results(told))
    console = Console(markup=False)
    console.print(comparison(told))
    for note in (*notes(told), f"results: {asked.out / 'results.json'}"):
        console.print(note, soft_wrap=True, highlight=False)


def _apart(names: list[str], asked: Asked) -> list[str]:
    """Names with what was said about RoPE; where several models share one, the place of each instead."""
    places = (where if names.count(name) > 1 else name for where, name in zip(asked.models, names, strict=True))
    return [" ".join([name, *asked.rope]) for name in places]


def _label(found: Found) -> str:
    """The name of a model; of a run that a hash tells apart, the recipe and the other words it was asked for by."""
    stem, _, code = found.recipe.name.rpartition("-")
    try:
        words = map(str, read_json(found.folder / "ledger.json")["overrides"])
    except (ValueError, LookupError, TypeError):  # no ledger, or one of another kind
        return found.recipe.name
    if not re.fullmatch("[0-9a-f]{8}", code):
        return found.recipe.name
    return " ".join([stem, *(word for word in words if not word.startswith(("recipe=", "name=", "out=")))])


def _measure(name: str, where: str, found: Found, jobs: list[Job], asked: Asked) -> dict[str, Outcome]:
    """Each task's outcome for one model, which is opened only if one of them is missing and leaves memory with this."""
    context = asked.context or found.recipe.data.context
    reader = cache(lambda: _reader(where, found, context, asked))
    told: dict[str, Outcome] = {}
    for job in jobs:
        file = asked.out / _file_name(name) / f"{_file_name(job.name)}.json"
        key = digest(FORMAT, _stamp(found), asked.rope, context, json.dumps(job.says))
        told[job.name] = _kept(file, key) or _run(job, reader(), name, file, key)
    return told


def _reader(where: str, found: Found, context: int, asked: Asked) -> Reader:
    gpu = torch.cuda.is_available()
    opened = open_model(where, None if gpu else torch.float32)
    opened.net.to("cuda" if gpu else "cpu").spec = stretched(found.recipe, asked.rope).model
    return Reader(opened, context, asked.batch)


def _run(job: Job, reader: Reader, name: str, file: Path, key: str) -> Outcome:
    started = time.perf_counter()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(escape(f"{name}: {job.name}"), total=None)
        try:
            outcome = job.run(reader, lambda done, total: progress.update(bar, completed=done, total=total))
        except (MemoryError, RuntimeError) as error:
            if not lacks_memory(error):
                raise
            raise ValueError(f"{job.name}: more memory than there is: lower batch=, context= or lengths=") from None
    about = outcome.about | {"seconds": time.perf_counter() - started}
    content = {"key": key, "model": name, "task": job.name, "scores": [*map(asdict, outcome.scores)], "about": about}
    _write(file, content)
    return outcome


def _kept(file: Path, key: str) -> Outcome | None:
    """What an earlier command found, if all that decides it is the same and no figure was beyond what JSON holds."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        scores = [Score(**each) for each in content["scores"]]
        same = content["key"] == key and all(one.value is not None for one in scores)
        return Outcome(scores, content["about"]) if same else None
    except (OSError, ValueError, TypeError, LookupError):
        return None


def _write(file: Path, content: Any) -> None:
    """The file as JSON, its folder made where it is missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(plain(content), indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.=-]+", "-", name).strip("-.")


def _stamp(found: Found) -> list[tuple[str, int, int]]:
    """Which weights these are: names, sizes and dates of their files."""
    source: Any = found.source
    files = set(source.place.values()) if isinstance(source, Files) else source.checkpoint.rglob("*")
    return sorted((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
