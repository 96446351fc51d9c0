"""Three ways to score few-shot items: a choice by probability, a greedy answer, a text that follows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gatedlm.evaluation.reader import Reader, Row
from gatedlm.evaluation.score import Advance, Outcome, Score, ratio
from gatedlm.evaluation.tasks import Task, extracted

Points = dict[str, list[tuple[float, float]]]


class Marks(NamedTuple):
    """By metric each item's points and what they count for, the rows that were read, and what the model said."""

    points: Points
    rows: list[Row]
    told: list[Any]


def score(reader: Reader, task: Task, advance: Advance) -> Outcome:
    """The task's figures over all items; where it has groups, those of each under ``groups``."""
    points, rows, told = SCORERS[task.spec.kind](reader, task, advance)
    about = {"fingerprint": task.fingerprint, "items": len(task.items), "cut": sum(row.cut for row in rows)}
    groups = sorted({item.group for item in task.items} - {""})
    about |= {"groups": {group: _of_group(points, task, group) for group in groups}} if groups else {}
    return Outcome(_scores(points), about | {"told": told})


def _scores(points: Points) -> list[Score]:
    return [ratio("", metric, [x for x, _ in pairs], [w for _, w in pairs]) for metric, pairs in points.items()]


def _of_group(points: Points, task: Task, group: str) -> dict[str, float]:
    own = [index for index, item in enumerate(task.items) if item.group == group]
    return {each.metric: each.value for each in _scores({k: [pairs[i] for i in own] for k, pairs in points.items()})}


def choice(reader: Reader, task: Task, advance: Advance) -> Marks:
    """acc: the right answer has the largest log p of all; acc_bytes: the largest log p per byte of UTF-8."""
    rows = [reader.pair(item.prompt, task.spec.before + answer) for item in task.items for answer in item.answers]
    told = iter(reader.nats(rows, advance))
    sums = [[-next(told).total for _ in item.answers] for item in task.items]
    points: Points = {"acc": [], "acc_bytes": []}
    for item, log_p in zip(task.items, sums, strict=True):
        per_byte = [one / len(answer.encode()) for one, answer in zip(log_p, item.answers, strict=True)]
        points["acc"].append((float(np.argmax(log_p) == item.right), 1))
        points["acc_bytes"].append((float(np.argmax(per_byte) == item.right), 1))
    return Marks(points, rows, sums)


def completion(reader: Reader, task: Task, advance: Advance) -> Marks:
    """acc: greedy writing gives the text; bits_per_byte: -log2 p of all texts over their bytes."""
    texts = [task.spec.before + item.answers[0] for item in task.items]
    rows = [reader.pair(item.prompt, text) for item, text in zip(task.items, texts, strict=True)]
    told = reader.nats(rows, advance)
    acc = [(float(one.greedy.all()), 1.0) for one in told]
    spaces = [item.prompt[len(item.prompt.rstrip()) :] for item in task.items]  # told with the text, see ``pair``
    asked = [space + text for space, text in zip(spaces, texts, strict=True)]
    bits = [(one.total / math.log(2), float(len(text.encode()))) for one, text in zip(told, asked, strict=True)]
    return Marks({"acc": acc, "bits_per_byte": bits}, rows, bits)


def exact(reader: Reader, task: Task, advance: Advance) -> Marks:
    """exact_match: the greedy answer, as ``extracted``, equals the item's own."""
    rows = [reader.prompt(item.prompt, task.spec.tokens) for item in task.items]
    written = reader.write([row.ids for row in rows], task.spec.tokens, advance, task.spec.stop)
    pairs = zip(task.items, written, strict=True)
    right = [extracted(item.answers[0], task.spec) == extracted(text, task.spec) for item, text in pairs]
    return Marks({"exact_match": [(float(one), 1) for one in right]}, rows, written)


SCORERS: dict[str, Callable[[Reader, Task, Advance], Marks]] = {
    "choice": choice,
    "exact": exact,
    "completion": completion,
}
