"""The words of ``evaluate``: what they say, and a line for a wrong one; light, so that it is told at once."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gatedlm.data.needles import TASKS as NEEDLES
from gatedlm.studies.words import check, folder, option, whole

HARNESS = "lm-eval:"
ROPE = "model.rope."
LISTS = ("run", "model", "tasks")  # words that may come several times
LONGEST = 2**20  # tokens of a long context task, which is written out whole before a model reads it
LEAST = {"bytes": 1, "context": 2, "count": 1, "limit": 1, "shots": 0, "seed": 0, "batch": 1}
DATA = {"data": "corpus", "data.path": "path", "data.text_field": "text_field", "data.domain_field": "domain_field"}
WORDS = ("run", "model", "tasks", *DATA, *LEAST, "lengths", "passages", "out", "allow_code_execution")


@dataclass(frozen=True)
class Asked:
    """The words of ``evaluate``; None or empty where nothing was said."""

    models: list[str]
    tasks: list[str]
    data: dict[str, Any] = field(default_factory=dict)
    rope: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    passages: str | None = None
    out: Path = Path("evaluation")
    code: bool = False
    bytes: int = 500_000
    context: int | None = None
    count: int = 100
    limit: int | None = None
    shots: int | None = None
    seed: int = 0
    batch: int = 8192


def shipped() -> dict[str, Path]:
    """The few-shot tasks that are ready by name, and their files."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "tasks").glob("*.yaml"))}


def asked(words: list[str]) -> Asked:
    """What the words ask for. ValueError, one line, for one that is unknown, lacks its value or holds a wrong one."""
    pairs = [option(word) for word in words]
    for key, _ in pairs:
        if not key.startswith(ROPE):
            check("word", key, WORDS)
    options = dict(pairs)
    if twice := [key for key, _ in pairs if key not in LISTS and [one for one, _ in pairs].count(key) > 1]:
        raise ValueError(f"{twice[0]}= is there twice, give it once")
    code = options.get("allow_code_execution", "false")
    if code not in ("true", "false"):
        raise ValueError(f"allow_code_execution={code}: write true or leave it out")
    return Asked(
        _several("run", [value for key, value in pairs if key in ("run", "model")]),
        _tasks(_several("tasks", [value for key, value in pairs if key == "tasks"])),
        _data(options),
        [f"{key}={value}" for key, value in pairs if key.startswith(ROPE)],
        [_length(one) for one in options["lengths"].split(",")] if "lengths" in options else [],
        options.get("passages"),
        folder("out", options.get("out", "evaluation")),
        code == "true",
        **{key: whole(key, options[key], least) for key, least in LEAST.items() if key in options},
    )


def _length(value: str) -> int:
    if (found := whole("lengths", value, 16)) > LONGEST:
        raise ValueError(f"lengths={value}: at most {LONGEST:,} tokens")
    return found


def _several(key: str, values: list[str]) -> list[str]:
    each = ",".join(values).split(",")
    if "" in each or len(set(each)) < len(each):
        wanted = {"run": "which models? write run=RUN or model=MODEL", "tasks": "which tasks? write tasks=NAME"}[key]
        raise ValueError(f"{wanted}, several with a comma between two, each once")
    return each


def _tasks(names: list[str]) -> list[str]:
    known = ["perplexity", "positions", *NEEDLES, *shipped()]
    for name in names:
        if name not in known and not name.startswith(HARNESS) and not name.endswith((".yaml", ".yml")):
            near = difflib.get_close_matches(name, known, 1)
            advice = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"tasks={name}: {advice}there are {', '.join(known)}, {HARNESS}NAME and FILE.yaml")
    return names


def _data(options: dict[str, str]) -> dict[str, str]:
    data = {DATA[key]: value for key, value in options.items() if key in DATA}
    if data and "corpus" not in data and "path" not in data:
        raise ValueError("data.text_field= and data.domain_field= say how to read data.path=FILE, which is missing")
    if "path" in data and data.setdefault("corpus", "files") != "files":
        raise ValueError("data= and data.path= both say what to read, give one of them")
    return data
