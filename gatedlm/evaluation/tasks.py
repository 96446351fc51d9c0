"""Few-shot tasks: a YAML file says where items lie and how they read; here they become prompts and answers."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from reprlib import repr as short
from typing import Any, get_args, get_origin, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from datasets import load_dataset
from jinja2 import StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gatedlm.catalogue import expanded
from gatedlm.data.corpora import brief, parsed
from gatedlm.evaluation.words import shipped
from gatedlm.studies.words import check, whole

KINDS = ("choice", "exact", "completion")
PLACE = ("path", "hub", "config", "split")
LEAST = {"shots": 0, "tokens": 1}
WRITTEN = {  # how a value of a type is written
    str: "a text in quotes",
    int: "a whole number",
    dict[str, str]: "texts by name, such as {path: FILE}",
    list[str]: "a list of texts",
    list[list[str]]: "a list of [pattern, replacement]",
}

Record = dict[str, Any]


@dataclass(frozen=True)
class TaskSpec:
    """The keys of a task's file. Texts are Jinja templates over an item's fields, those in italics expressions.

    kind      choice: the most probable of some answers. exact: a greedy answer that equals the item's. completion: a
              text that follows, by its probability and whether greedy writing gives it
    items     where they lie: {path: FILE} of json, jsonl or parquet beside this file, or {hub: NAME, config:, split:}
    pool      where the items of the shots lie; left out, among those of the task
    subjects  {config: its name}: a data set for each subject, whose name becomes the items' field ``subject``
    group     field that an item's shots share with it, and whose values are scored apart too
    shots     how many solved items, the first of the pool, stand before an item; an item is never its own shot
    lead      what stands before all that
    prompt    an item without its answer
    choices   *list* of answers, for choice
    answer    for choice the *index* of the right one, or else the text
    clean     [pattern, replacement] pairs, applied in order to prompts and answers
    before    what stands before an answer; between, what stands behind each shot
    stop      texts that end a greedy answer; tokens, how many it has at most
    pattern   what of an answer is compared: the first group of the first match, in the item's and in the model's
    ignore    patterns that are taken out of both before
    """

    kind: str
    items: dict[str, str]
    prompt: str
    answer: str
    choices: str = ""
    pool: dict[str, str] = field(default_factory=dict)
    subjects: dict[str, str] = field(default_factory=dict)
    group: str = ""
    shots: int = 0
    lead: str = ""
    clean: list[list[str]] = field(default_factory=list)
    before: str = " "
    between: str = "\n\n"
    stop: list[str] = field(default_factory=lambda: ["\n"])
    tokens: int = 64
    pattern: str = r"^\s*(.*?)\s*$"
    ignore: list[str] = field(default_factory=list)
    about: str = ""


@dataclass(frozen=True)
class Item:
    """A prompt with its shots, the answers to choose from or the one text, which of them is right, and its group."""

    prompt: str
    answers: list[str]
    right: int
    group: str


@dataclass(frozen=True)
class Task:
    """A task's items, ready to be read by any model."""

    name: str
    spec: TaskSpec
    items: list[Item]

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps([asdict(item) for item in self.items]).encode()).hexdigest()[:16]


def load_task(word: str, shots: int | None = None, limit: int | None = None) -> Task:
    """The task of a shipped name or a file, with other shots or with the first ``limit`` items of each group.

    ValueError, one sentence, for a file, a field, a template or a number of shots that cannot be.
    """
    path = shipped().get(word) or Path(expanded(word))
    spec = _spec(path)
    try:
        return Task(path.stem, spec, list(_items(spec, path, spec.shots if shots is None else shots, limit)))
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None


# The file ---------------------------------------------------------------------------------------------------------


def _spec(path: Path) -> TaskSpec:
    keys = _keys(path)
    if lacking := [key for key in ("kind", "items", "prompt", "answer") if not keys.get(key)]:
        raise ValueError(
            f"{path}: no key {lacking[0]}, a task has kind, items, prompt and answer, for choice choices too"
        )
    spec = TaskSpec(**keys)
    for key, least in LEAST.items():
        whole(f"{path}: {key}", str(getattr(spec, key)), least)
    if spec.kind not in KINDS or (spec.kind == "choice") != bool(spec.choices):
        raise ValueError(f"{path}: kind is one of {', '.join(KINDS)}, and choice alone has the key choices")
    if not all(spec.stop):
        raise ValueError(f"{path}: stop holds an empty text, which would end every answer at once: leave it out")
    if odd := [pair for pair in spec.clean if len(pair) != 2]:
        raise ValueError(f"{path}: clean holds {short(odd[0])}, write [pattern, replacement]")
    groups, *_ = [_groups(path, one) for one in (spec.pattern, *spec.ignore, *(pair[0] for pair in spec.clean))]
    if spec.kind == "exact" and groups != 1:
        raise ValueError(f"{path}: pattern={spec.pattern}: mark the answer by one group (...)")
    return spec


def _groups(path: Path, pattern: str) -> int:
    try:
        return re.compile(pattern).groups
    except Exception as error:  # re raises four unrelated types
        raise ValueError(f"{path}: no pattern, {pattern}: {brief(error)}") from None


def _keys(path: Path) -> dict[str, Any]:
    """A file's keys, each of its type, over those of its ``base``; local files lie beside the file that names them."""
    try:
        keys = yaml.safe_load(path.read_text(encoding="utf-8"))
    except Exception as error:  # PyYAML lets through whatever Python raises at a value that is not what its tag says
        raise ValueError(f"tasks={path}: {getattr(error, 'strerror', None) or 'not YAML'}") from None
    if not isinstance(keys, dict):
        raise ValueError(f"tasks={path}: not a task, it holds no keys such as prompt:")
    base = keys.pop("base", None)
    if base is not None and base not in [*shipped()]:
        raise ValueError(f"{path}: base={base}: one of {', '.join(shipped())}")
    types = get_type_hints(TaskSpec)
    for key, value in keys.items():
        check(f"key in {path}", str(key), types)
        if not _is(types[key], value):
            raise ValueError(f"{path}: {key} holds {short(value)}, write {WRITTEN[types[key]]}")
    for key in sorted(keys.keys() & {"items", "pool"}):
        for name in keys[key]:
            check(f"key in {path}: {key}", name, PLACE)
        if "path" in keys[key]:
            keys[key]["path"] = str(path.parent / expanded(keys[key]["path"]))
    return (_keys(shipped()[base]) if base else {}) | keys


def _is(kind: Any, value: Any) -> bool:
    """Whether a value of YAML is a ``kind`` such as dict[str, str], with all inside it; true is no number."""
    if not (inside := get_args(kind)):
        return type(value) is kind
    parts = chain(*value.items()) if isinstance(value, dict) else value
    return isinstance(value, get_origin(kind)) and all(_is(inside[0], part) for part in parts)


# Items ------------------------------------------------------------------------------------------------------------


def _items(spec: TaskSpec, path: Path, shots: int, limit: int | None) -> Iterator[Item]:
    own = _records(spec, spec.items)
    pools: dict[str, list[Record]] = defaultdict(list)
    for record in _records(spec, spec.pool) if shots and spec.pool else own if shots else ():
        pools[_group(spec, record)].append(record)
    told, taken = _Telling(spec), Counter[str]()
    for number, record in enumerate(own, start=1):
        group = _group(spec, record)
        taken[group] += 1
        if limit is None or taken[group] <= limit:
            solved = [*islice((shot for shot in pools[group] if shot is not record and shot != record), shots)]
            if len(solved) < shots:
                where = f" with {spec.group}={group}" if spec.group else ""
                raise ValueError(f"shots={shots}, but the pool holds only {len(solved)} other items{where}: take fewer")
            yield told.item(record, solved, group, f"item {number}")


def _group(spec: TaskSpec, record: Record) -> str:
    if spec.group and spec.group not in record:
        raise ValueError(f"no field {spec.group} in an item, but {', '.join(record)}")
    return str(record[spec.group]) if spec.group else ""


class _Telling:
    """Items in words. Templates are sandboxed: a task's file may come from anywhere."""

    def __init__(self, spec: TaskSpec) -> None:
        self.spec = spec
        world = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True, finalize=_there)
        choice = spec.kind == "choice"
        if braced := [key for key in ("choices", "answer") if choice and "{{" in getattr(spec, key)]:
            raise ValueError(f"{braced[0]}: for choice an expression, write it without braces: {braced[0]}: FIELD")
        try:
            self.lead, self.prompt = (world.from_string(text).render for text in (spec.lead, spec.prompt))
            self.choices = world.compile_expression(spec.choices, undefined_to_none=False) if choice else None
            answer = world.compile_expression(spec.answer, undefined_to_none=False) if choice else None
            self.answer: Callable[..., Any] = answer or world.from_string(spec.answer).render
        except Exception as error:  # TemplateError, and what Python makes of the code
            raise ValueError(f"a template is wrong: {brief(error)}") from None

    def item(self, record: Record, shots: list[Record], group: str, where: str) -> Item:
        try:
            answers, right = self._answers(record)
            solved = "".join(self._solved(shot) + self.spec.between for shot in shots)
            prompt = self.lead(record) + solved + self._clean(self.prompt(record))
            "".join((prompt, *answers)).encode()  # half a surrogate pair is no text
        except Exception as error:  # templates are code of others, and raise whatever they like
            raise ValueError(f"{where}: {brief(error)}; its fields are {', '.join(record)}") from None
        return Item(prompt, answers, right, group)

    def _solved(self, record: Record) -> str:
        answers, right = self._answers(record)
        return self._clean(self.prompt(record)) + self.spec.before + answers[right]

    def _answers(self, record: Record) -> tuple[list[str], int]:
        if self.choices is None:
            text = self._clean(self.answer(record))
            if not (extracted(text, self.spec) if self.spec.kind == "exact" else text):
                raise ValueError(f"answer {text!r} is empty or no match for the pattern")
            return [text], 0
        listed, right = self.choices(record), str(self.answer(record)).strip()
        if not isinstance(listed, list | tuple):
            raise ValueError(f"choices gives {str(listed)[:40]!r}, write what gives a list, such as ['yes', 'no']")
        answers = [self._clean(str(_there(one))) for one in listed]
        if not (right.isdecimal() and int(right) < len(answers) > 1 and all(answers)):
            raise ValueError(
                f"answer {right} of {len(answers)} choices: an index from 0 on, of two or more, none empty"
            )
        return answers, int(right)

    def _clean(self, text: str) -> str:
        for pattern, replacement in self.spec.clean:
            text = re.sub(pattern, replacement, text)
        return text


def _there(value: Any) -> Any:
    """ValueError for null, which would read as the word None."""
    if value is None:
        raise ValueError("null where a text should stand")
    return value


def extracted(answer: str, spec: TaskSpec) -> str | None:
    """What of an answer is compared: the pattern's group, without what the task ignores; None without a match."""
    if (found := re.search(spec.pattern, answer)) is None:
        return None
    text = found[1] or ""
    for pattern in spec.ignore:
        text = re.sub(pattern, "", text)
    return text.strip()


# Files and the Hub ------------------------------------------------------------------------------------------------


def _records(spec: TaskSpec, place: dict[str, str]) -> list[Record]:
    if [*place] == ["path"]:
        return records(Path(place["path"]))
    if "path" in place or "hub" not in place:
        raise ValueError("items and pool lie somewhere: {path: FILE} or {hub: NAME, split: SPLIT}")
    if not spec.subjects:
        return _hub(place, place.get("config"))
    return [record | {"subject": name} for config, name in spec.subjects.items() for record in _hub(place, config)]


def records(path: Path) -> list[Record]:
    """The items of a json list, a jsonl or a parquet file. ValueError, one sentence, for any other content."""
    try:
        found = pq.read_table(path).to_pylist() if path.suffix == ".parquet" else _json(path)
    except (OSError, ValueError, RecursionError, pa.ArrowException) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or brief(error)}") from None
    if not found or not all(isinstance(record, dict) for record in found):
        raise ValueError(f"{path}: no items, write a list of objects or one object a line")
    return found


def _json(path: Path) -> list[Any]:
    if path.suffix == ".json":
        found = json.loads(path.read_text(encoding="utf-8-sig"))
        return found if isinstance(found, list) else []
    return [parsed(line, f"row {row}") for row, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()]


def _hub(place: dict[str, str], config: str | None) -> list[Record]:
    try:
        return load_dataset(place["hub"], config, split=place.get("split", "test")).to_list()
    except Exception as error:  # the library raises a dozen unrelated types, bare ones among them
        raise ValueError(
            f"cannot read {place['hub']} from the Hub ({brief(error)}); check name and network, or write a task "
            "of your own with base: and items: {path: FILE}"
        ) from None
