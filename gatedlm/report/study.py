"""study.html: models side by side, layer by layer, with their maps, scores and what interventions change."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from torch import Tensor

from gatedlm.report.drawing import DRAWING, number, ridges, sentence
from gatedlm.report.layout import PLACES, attention_maps, by_layer, page, section, table, uniform
from gatedlm.report.names import BY_LAYER, FIGURES, MEANINGS

Study = dict[str, Any]
Picture = tuple[dict[int, Tensor], list[str]]

OVER_LAYERS = {
    "f_attn": ("F-Attn, rows as packed", "share of attention on the first token"),
    "f_attn_fixed_first": ("F-Attn, fixed first token", "share of attention on the first token"),
    "effective_sink": ("Effective sink", "share of the first token passed on"),
    "m_act": ("M-Act", "largest |h|"),
    "first_value": ("Size of the first value", "|v_0|"),
    "gate_score": ("Gate score", "mean score"),
    "small_before_0.01": ("Small outputs before the gate", "share of |y| < 0.01"),
    "small_after_0.01": ("Small outputs after the gate", "share of |y| < 0.01"),
}


def write_study(folder: Path, studies: list[Study], pictures: list[Picture]) -> Path:
    """Write ``folder/study.html`` and return its path; ``studies`` are what study.json holds, figures by model.

    A picture is each model's maps (H, T, T) by layer on one row, and what its T tokens read.
    """
    import matplotlib

    names = ", ".join(str(study["name"]) for study in studies)
    with matplotlib.rc_context(DRAWING):
        sections = (
            f"<h1>{escape(names)}</h1>{_about(studies)}{_figures(studies)}",
            section("Interventions", _interventions(studies)),
            section("Over layers", *_over_layers(studies)),
            section("Layer by layer", *(_layers(study) for study in studies)),
            section("Attention maps", *_maps(studies, pictures)),
            section("Gate scores", *_scores(studies)),
        )
    path = folder / "study.html"
    path.write_text(page(names, sections), encoding="utf-8", errors="replace")
    return path


def _about(studies: list[Study]) -> str:
    return table(
        ("model", "parameters", "type", "gates", "read on", "first token"),
        (
            (
                escape(study["name"]),
                number(study["parameters"]),
                study["precision"],
                escape(", ".join(study["gates"])) or "none",
                f"{study['rows']} x {study['tokens']} tokens: {escape(study['text'])}",
                "fixed" if study["fixed_first"] else "as packed",
            )
            for study in studies
        ),
    )


def side_by_side(studies: list[Study]) -> Iterable[tuple[str, str, list[float | None]]]:
    """Key, label and each model's figure, None where it has none; those that no model has are left out."""
    named = {"loss": "loss, nats per token", "bits_per_byte": "loss, bits per byte"} | FIGURES
    told = [study["figures"] | {key: study[key] for key in ("loss", "bits_per_byte")} for study in studies]
    for key, label in named.items():
        if any(of.get(key) is not None for of in told):
            yield key, label, [of.get(key) for of in told]


def _figures(studies: list[Study]) -> str:
    head = ("figure", *(escape(study["name"]) for study in studies), "to read it by")
    return table(
        head,
        ((escape(label), *map(_cell, cells), MEANINGS.get(key, "")) for key, label, cells in side_by_side(studies)),
    )


def _interventions(studies: list[Study]) -> str:
    rows = [
        (
            escape(study["name"]),
            name,
            *map(_cell, (study["loss"], changed["loss"], changed["difference"])),
            *(_cell(changed["figures"][key]) for key in ("f_attn", "m_act")),
        )
        for study in studies
        for name, changed in study["interventions"].items()
    ]
    if not rows:
        return sentence("None was asked for: gate=ones, gate=mean and mask_first=true are there.")
    return table(("model", "what", "loss", "loss with it", "difference", "F-Attn with it", "M-Act with it"), rows)


def _over_layers(studies: list[Study]) -> list[str]:
    level = uniform(studies[0]["tokens"])
    charts = []
    for key, (label, unit) in OVER_LAYERS.items():
        columns = {study["name"]: study["by_layer"].get(key, []) for study in studies}
        if any(columns.values()):
            charts.append(by_layer(label, unit, columns, level if key.startswith("f_attn") else {}))
    return charts


def _layers(study: Study) -> str:
    shown = [key for key in BY_LAYER if key in study["by_layer"]]
    head = ("layer", *(BY_LAYER[key] for key in shown), "at token", "at channel")
    rows = (
        (
            str(layer),
            *(_cell(study["by_layer"][key][layer]) for key in shown),
            str(outlier["token"]),
            str(outlier["channel"]),
        )
        for layer, outlier in enumerate(study["outliers"])
    )
    return f"<h3>{escape(study['name'])}</h3>{table(head, rows)}"


def _maps(studies: list[Study], pictures: list[Picture]) -> Iterable[str]:
    for study, (maps, tokens) in zip(studies, pictures, strict=True):
        yield f"<h3>{escape(study['name'])}</h3>"
        yield from attention_maps(maps, tokens, of=f"{study['name']}: ")


def _scores(studies: list[Study]) -> list[str]:
    drawn = [
        ridges(f"{study['name']}: scores at {PLACES[position]}", **scores)
        for study in studies
        for position, scores in study["scores"].items()
    ]
    return drawn or [sentence("None of these models has a gate with scores.")]


def _cell(value: float | None) -> str:
    return "-" if value is None else number(value)
