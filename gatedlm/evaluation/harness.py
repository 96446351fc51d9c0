"""Any task of lm-eval for a model of this project; lm-eval is the extra ``eval``, imported where it is used."""

from __future__ import annotations

import logging
import os
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

from gatedlm.data.corpora import brief
from gatedlm.evaluation.perplexity import windows
from gatedlm.evaluation.reader import Reader
from gatedlm.evaluation.score import Advance, Outcome, Score, ratio
from gatedlm.evaluation.words import Asked

BOOTSTRAPS = 1000  # for the errors of figures that are no means


def run(reader: Reader, task: str, manager: Any, asked: Asked, advance: Advance) -> Outcome:
    """The figures that lm-eval gives for a task, a group or a task's own file. ValueError, one line, where it fails."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    seeds = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), asked.seed)
    if asked.code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # what the evaluate library asks for besides
    try:
        found = import_module("lm_eval").simple_evaluate(
            model=adapter(reader, advance),
            tasks=[task],
            num_fewshot=asked.shots,
            limit=asked.limit,
            task_manager=manager,
            confirm_run_unsafe_code=asked.code,
            bootstrap_iters=BOOTSTRAPS,
            **seeds,
        )
    except Exception as error:  # tasks are code and data of others, and raise whatever they like
        raise ValueError(f"lm-eval:{task}: {brief(error)}") from error
    several = len(found["results"]) > 1
    return Outcome([score for name in found["results"] for score in _scores(found, name, name if several else "")], {})


def _scores(found: Any, name: str, part: str) -> list[Score]:
    """Figures of one task: of single items where the figure is their mean, or else as lm-eval tells them."""
    figures, samples = found["results"][name], found["samples"].get(name, [])
    scores = []
    for key, value in figures.items():
        metric, _, kept = key.partition(",")
        if not kept or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        items = [sample.get(metric) for sample in samples if sample["filter"] == kept]
        label = metric if kept == "none" else f"{metric}, {kept}"
        if items and all(isinstance(one, int | float) for one in items) and abs(sum(items) / len(items) - value) < 1e-9:
            scores.append(ratio(part, label, items))
        else:
            error = figures.get(f"{metric}_stderr,{kept}")
            error = float(error) if isinstance(error, int | float) else None
            scores.append(Score(part, label, float(value), error, figures.get("sample_len", len(items))))
    return scores


def manager_for(task: str, code: bool) -> Any:
    """Where lm-eval finds a task: among its own by name, or in its file's folder.

    ValueError, one line, where lm-eval is not installed, knows no such task, or would run what models write and
    ``code`` does not allow it.
    """
    try:
        managed = import_module("lm_eval.tasks").TaskManager
    except ImportError:
        raise ValueError(f"lm-eval:{task}: lm-eval is not installed, pip install 'gatedlm[eval]' adds it") from None
    file = Path(task)
    manager = managed(include_path=str(file.parent), include_defaults=False) if file.is_file() else managed()
    if not file.is_file() and task not in manager.all_tasks:
        raise ValueError(f"lm-eval:{task}: lm-eval has no task, group or tag of that name, and there is no such file")
    entry = manager.task_index.get(task)
    if not code and _executes(file if entry is None else entry.yaml_path):
        raise ValueError(f"lm-eval:{task}: runs what the model writes; to let it, add allow_code_execution=true")
    return manager


def _executes(file: Path | None) -> bool:
    """Whether a task's file, or one that it includes, says that it is unsafe: to be known before lm-eval loads it."""
    load = import_module("lm_eval.tasks._yaml_loader").load_yaml
    return file is not None and bool(load(file, resolve_func=False).get("unsafe_code"))


def adapter(reader: Reader, advance: Advance) -> Any:
    """The model as lm-eval wants it: token ids in, log p or greedy text out, by the project's own reader."""
    template: Any = import_module("lm_eval.api.model").TemplateLM

    class Adapter(template):
        @property
        def eot_token_id(self) -> int:
            return reader.first

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            return reader.encode(string)

        def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
            told = reader.nats([_row(reader, context, text) for _, context, text in requests], advance)
            return [(-one.total, bool(one.greedy.all())) for one in told]

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            rows = [[*windows(reader.encode(one.args[0]), reader.first, reader.context)] for one in requests]
            told = iter(reader.nats([row for document in rows for row in document], advance))
            return [-sum(next(told).total for _ in document) for document in rows]

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return _written(reader, [one.args for one in requests], advance)

    return Adapter()


def _row(reader: Reader, context: list[int], text: list[int]) -> Any:
    return reader.row(text, 0) if context == [reader.first] else reader.row(context + text, len(context))


def _written(reader: Reader, requests: list[Any], advance: Advance) -> list[str]:
    """Greedy completions of (prompt, {until, max_gen_toks, ...}); requests that stop alike are written together."""
    told: dict[int, str] = {}
    keys = [(tuple(_until(asked)), int(asked.get("max_gen_toks", 256))) for _, asked in requests]
    order = sorted(range(len(requests)), key=keys.__getitem__)
    for (until, tokens), several in groupby(order, key=keys.__getitem__):
        several = list(several)
        prompts = [reader.prompt(requests[index][0], tokens).ids for index in several]
        told |= zip(several, reader.write(prompts, tokens, advance, until), strict=True)
    return [told[index] for index in range(len(requests))]


def _until(asked: dict[str, Any]) -> list[str]:
    if asked.get("do_sample") or asked.get("temperature"):
        raise ValueError("the task draws its answers at random, only greedy ones are written here")
    until = asked.get("until") or []
    return [until] if isinstance(until, str) else until
