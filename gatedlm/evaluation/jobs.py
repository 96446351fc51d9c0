"""What the names of tasks stand for: each with all that it reads, ready for any model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gatedlm.catalogue import expanded
from gatedlm.data.needles import TASKS as NEEDLES
from gatedlm.data.needles import Passage
from gatedlm.evaluation import harness
from gatedlm.evaluation.longcontext import needles, positions
from gatedlm.evaluation.perplexity import perplexity
from gatedlm.evaluation.reader import Reader
from gatedlm.evaluation.score import Advance, Outcome
from gatedlm.evaluation.scorers import score
from gatedlm.evaluation.tasks import load_task, records
from gatedlm.evaluation.text import Text, choose, read_text
from gatedlm.evaluation.words import HARNESS, Asked
from gatedlm.hub.opening import Found
from gatedlm.recipe import DataSpec
from gatedlm.studies.model import trained_here


@dataclass(frozen=True)
class Job:
    """A task that is ready to be run, and ``says``, all that decides its figures but the model."""

    name: str
    says: Any
    run: Callable[[Reader, Advance], Outcome]


def jobs_of(asked: Asked, found: list[Found]) -> list[Job]:
    """The tasks in their order; what a model has to say of them are the texts it was trained on, and its context.

    ValueError, one line, for a text, a file or a task that cannot be read: before any model is opened.
    """
    shortest = min(each.recipe.data.context for each in found)
    lengths = sorted({*asked.lengths} or {shortest, 2 * shortest, 4 * shortest})
    text = cache(lambda: _text(asked, found))
    jobs = {job.name: job for job in (_job(name, asked, lengths, text) for name in asked.tasks)}
    if len(jobs) < len(asked.tasks):
        raise ValueError(f"tasks={','.join(asked.tasks)}: two go by one name, rename the file of one")
    return [*jobs.values()]


def _job(name: str, asked: Asked, lengths: list[int], text: Callable[[], Text]) -> Job:
    if name == "perplexity":
        read = text()
        return Job(name, read.fingerprint, lambda reader, advance: perplexity(reader, read, advance))
    if name == "positions":
        read, length, count = text(), lengths[-1], asked.count
        says = [read.fingerprint, length, count]
        return Job(name, says, lambda reader, advance: positions(reader, read, length, count, advance))
    if name in NEEDLES:
        passages, count, seed = _passages(name, asked.passages), asked.count, asked.seed
        says = [lengths, count, seed, [*map(asdict, passages)]]
        return Job(name, says, lambda reader, advance: needles(reader, name, lengths, count, seed, passages, advance))
    if name.startswith(HARNESS):
        return _harness(name, asked)
    task = load_task(name, asked.shots, asked.limit)
    return Job(task.name, [asdict(task.spec), task.fingerprint], lambda reader, advance: score(reader, task, advance))


def _harness(name: str, asked: Asked) -> Job:
    task = expanded(name.removeprefix(HARNESS))
    manager = harness.manager_for(task, asked.code)
    file = Path(task).read_text(encoding="utf-8") if Path(task).is_file() else ""
    # What a file reads besides is not known here, so that it is measured each time.
    says = [asked.shots, asked.limit, asked.seed, file and time.time_ns()]
    return Job(name, says, lambda reader, advance: harness.run(reader, task, manager, asked, advance))


def _text(asked: Asked, found: list[Found]) -> Text:
    trained = [each.recipe.data for each in found if trained_here(each.folder)]
    return read_text(*choose(DataSpec(**asked.data) if asked.data else None, trained), asked.bytes)


def _passages(task: str, file: str | None) -> list[Passage]:
    """The texts with questions that qa asks about; none for any other task."""
    if task != "qa":
        return []
    if file is None:
        raise ValueError("tasks=qa: give passages=FILE, json, jsonl or parquet with text, question and answer")
    return [_passage(row, f"passages={file}, item {n}") for n, row in enumerate(records(Path(expanded(file))), 1)]


def _passage(row: dict[str, Any], where: str) -> Passage:
    texts: list[Any] = [row.get(key) for key in ("text", "question", "answer")]
    try:
        if all(text.encode().strip() for text in texts):
            return Passage(*texts)
    except (AttributeError, UnicodeEncodeError):  # something else than text, half a surrogate pair
        pass
    raise ValueError(f"{where}: text, question and answer are texts, none of them missing or empty")
