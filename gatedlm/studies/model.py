"""The sink of models, one after the other on the same text: read, printed, set side by side and written down."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from gatedlm.hub import Opened, look, open_model
from gatedlm.probes import INTERVENTIONS, opened_by
from gatedlm.report.study import Picture, write_study
from gatedlm.studies.reading import passes, study
from gatedlm.studies.sample import LEAST, Sample, corpus_text, text_file, text_rows, validation_rows
from gatedlm.studies.tables import comparison, interventions_table, layers_table
from gatedlm.studies.words import check, folder, whole
from gatedlm.training.ledger import plain
from gatedlm.training.measure import MAP_TOKENS, PROBE_ROWS, attention_maps

WORDS = ("model", "text", "data", "tokens", "rows", "layers", "gate", "mask_first", "out")
TOKENS, ROWS = 512, 4


@dataclass(frozen=True)
class Asked:
    """The words of ``analyze model=...``; None where nothing was said."""

    models: list[str]
    text: str | None
    data: str | None
    tokens: int | None
    rows: int | None
    layers: list[int] | None
    interventions: list[str]
    out: Path | None
    rope: list[str]


def study_models(options: dict[str, str]) -> None:
    """Study the models that ``model=`` names; ValueError, one line, for words or models that cannot be."""
    asked, console = _asked(options), Console(markup=False)
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
    sample_for, studies, pictures = _sampler(asked), [], []
    for where in asked.models:
        told, picture = _study(where, sample_for, asked, [told["name"] for told in studies])
        studies.append(told)
        pictures.append(picture)
        console.print(layers_table(told))
    console.print(comparison(studies))
    if asked.interventions:
        console.print(interventions_table(studies))
    if asked.out:
        (asked.out / "study.json").write_text(json.dumps(studies, indent=1, allow_nan=False) + "\n")
        console.print(f"report: {write_study(asked.out, studies, pictures)}", soft_wrap=True)


def _asked(options: dict[str, str]) -> Asked:
    for key in options:
        if not key.startswith("model.rope."):
            check("word", key, WORDS)
    models = options["model"].split(",")
    if "" in models or len(set(models)) < len(models):
        raise ValueError(f"model={options['model']}: name each model once, with a comma between two")
    if "text" in options and "data" in options:
        raise ValueError("text= and data= both say what to read, give one of them")
    return Asked(
        models,
        options.get("text"),
        options.get("data"),
        whole("tokens", options["tokens"], LEAST) if "tokens" in options else None,
        whole("rows", options["rows"], 1) if "rows" in options else None,
        [whole("layers", layer, 0) for layer in options["layers"].split(",")] if "layers" in options else None,
        _interventions(options),
        folder("out", options["out"]) if "out" in options else None,
        [f"{key}={value}" for key, value in options.items() if key.startswith("model.rope.")],
    )


def _interventions(options: dict[str, str]) -> list[str]:
    asked = [f"gate={how}" for how in options["gate"].split(",")] if "gate" in options else []
    asked += [f"mask_first={options['mask_first']}"] if "mask_first" in options else []
    for name in asked:
        if name not in INTERVENTIONS:
            raise ValueError(f"{name}: write one of {', '.join(INTERVENTIONS)}")
    return asked


def _sampler(asked: Asked) -> Callable[[Opened], Sample]:
    """Rows for each model: runs of the same data read their validation rows, all others the same text."""
    found = [look(where) for where in asked.models]  # all, before the first of them takes its minutes
    recipes = [each.recipe for each in found]
    alike = all(recipe.data == recipes[0].data for recipe in recipes)
    if not (asked.text or asked.data) and all(trained_here(each.folder) for each in found) and alike:
        own = recipes[0]
        return lambda opened: validation_rows(own, opened.tokenizer, asked.rows or PROBE_ROWS, asked.tokens)
    tokens = asked.tokens or min([TOKENS, *(recipe.data.context for recipe in recipes)])
    rows = asked.rows or ROWS
    text = text_file(asked.text) if asked.text else corpus_text(asked.data, rows * tokens)
    origin = asked.text or asked.data or "prose of the standard library"

    def sample(opened: Opened) -> Sample:
        if opened.tokenizer is None:
            raise ValueError(
                f"{opened.name}: no tokenizer.json, so it reads no text; a run reads its own rows, alone or beside "
                "runs of the same data"
            )
        return text_rows(text, origin, opened.tokenizer, rows, tokens)

    return sample


def trained_here(folder: Path) -> bool:
    """Whether a folder is that of a run, and not of weights from elsewhere, which have no validation rows."""
    return (folder / "recipe.yaml").is_file() and any((folder / n).exists() for n in ("ledger.json", "checkpoints"))


def _study(
    where: str, sample_for: Callable[[Opened], Sample], asked: Asked, taken: list[str]
) -> tuple[dict[str, Any], Picture]:
    """What study.json holds of one model, which leaves memory with this call, and its pictures."""
    opened = open_model(where, words=asked.rope)
    name, sample = where if opened.name in taken else opened.name, sample_for(opened)
    net = opened.net.to("cuda" if torch.cuda.is_available() else "cpu")
    beyond = [layer for layer in asked.layers or () if layer >= net.spec.layers]
    if beyond:
        raise ValueError(f"layers={beyond[0]}: {name} has layers 0 to {net.spec.layers - 1}")
    fixed_first = opened.first is not None
    first = opened.first if opened.first is not None else min(opened.stop, default=0)
    opened.check(max(first, int(sample.rows.max())))
    with Progress(console=Console(stderr=True), transient=True) as progress:
        advance = partial(progress.advance, progress.add_task(name, total=passes(net, sample, asked.interventions)))
        told = study(net, sample, first, fixed_first, asked.interventions, advance)
    about = {
        "name": name,
        "parameters": net.spec.parameters().total,
        "gates": [str(gate) for gate in net.spec.gates],
        "precision": str(net.embed.weight.dtype).removeprefix("torch."),
        "text": sample.origin,
        "rows": len(sample.rows),
        "tokens": sample.rows.shape[1] - 1,
        "fixed_first": fixed_first,
    }
    row = opened_by(sample.rows[:1, :MAP_TOKENS], first if fixed_first else None)[0]
    maps = attention_maps(net, row, asked.layers) if asked.out else {}
    return plain(about | told), (maps, [_spell(opened, token) for token in row.tolist()])


def _spell(opened: Opened, token: int) -> str:
    return opened.tokenizer.decode([token], skip_special_tokens=False) if opened.tokenizer else str(token)
