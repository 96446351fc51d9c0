"""report.html: a run in one file that opens anywhere, without a network or a script."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from torch import Tensor

from gatedlm.report.drawing import DRAWING, Line, chart, floats, loss_curve, number, ridges, sentence
from gatedlm.report.layout import PLACES, attention_maps, by_layer, page, pre, section, table, uniform
from gatedlm.report.names import FIGURES, MEANINGS

NOT_OF_ALL = ("val/bits_per_byte", "gate_score", "share_below")  # without text or gates they are None
SOURCES = {"input": "the hidden state after the pre-norm", "constant": "a learned table, whatever the input"}
PACKED = """<p>As packed, a row begins wherever the packing cut the text; with a fixed first token all rows begin
alike.</p>"""
BACKCOPY = """<p>Bigram-Backcopy: an active query stands on a trigger and has to look one token back; a dormant one has
nothing to copy and may rest on the first token.</p>"""


def write_report(
    folder: Path,
    ledger: dict[str, Any],
    metrics: list[dict[str, Any]],
    maps: dict[int, Tensor],
    tokens: list[str],
    sample: str | None,
) -> Path:
    """Write ``folder/report.html`` and return its path; every figure that is missing or null becomes a sentence.

    ledger and metrics are what ledger.json and the lines of metrics.jsonl hold. maps are attention probabilities
    (H, T, T) by layer, on one row whose T tokens are ``tokens``. sample is text the model wrote.
    """
    import matplotlib

    with matplotlib.rc_context(DRAWING):
        sections = (
            _headline(ledger),
            section("Loss and optimizer", _loss(ledger, metrics), *_optimizer(metrics)),
            section("Attention on the first token and massive activations", *_sink(ledger, metrics)),
            section("Attention maps", *attention_maps(maps, tokens)),
            section("Gate scores", *_gate_scores(ledger, metrics)),
            section("Sample", pre(sample) if sample else sentence("This run wrote no sample.")),
            section("Recipe", _recipe(ledger["recipe"])),
            section("Where it comes from", _provenance(ledger)),
        )
    path = folder / "report.html"
    path.write_text(page(str(ledger["name"]), sections), encoding="utf-8", errors="replace")
    return path


def _headline(ledger: dict[str, Any]) -> str:
    status = str(ledger["status"])
    why = f"{escape(status)} at step {ledger['steps']}: a loss or gradient was not finite"
    ending = "" if status == "finished" else f"<p><strong>This run {why}.</strong></p>"
    return f"<h1>{escape(str(ledger['name']))}</h1>{_in_words(ledger)}{ending}{_final(ledger)}"


def _in_words(ledger: dict[str, Any]) -> str:
    """What the model is, which gate it has, and what it was trained on."""
    model, params = ledger["recipe"]["model"], ledger["params"]
    experts = model["experts"]["count"]
    feedforward, used = f"a SwiGLU feed-forward of width {number(model['ffn'])}", ""
    if experts:
        feedforward = f"{experts} experts of width {number(model['ffn'])}, {model['experts']['used']} used per token"
        used = f", of which one token uses {number(params['active'])}"
    switch, switched = model["switch"], ""
    if switch["count"]:
        kinds = switch["on"].replace("_", " and ")
        switched = f" (each key/value head mixes {switch['used']} of its {switch['count']} {kinds} projections)"
    gates = ", no gate"
    if model["gates"]:
        gates = ". ".join((f"; {number(params['gate'])} are gates", *map(_gate_in_words, model["gates"])))
    return (
        f"<p>A {model['layers']}-layer Transformer of width {number(model['width'])}, with {model['heads']} query "
        f"and {model['kv_heads']} key/value heads of {model['head_dim']} channels{switched} "
        f"and {feedforward}: "
        f"{number(params['total'])} parameters{used}{gates}. "
        f"It was trained on {number(ledger['tokens'])} tokens of "
        f"{escape(str(ledger['corpus']['name']))}, {number(ledger['tokens_per_second'])} a second.</p>"
    )


def _gate_in_words(gate: dict[str, str]) -> str:
    place, activation = PLACES[gate["position"]], gate["activation"].replace("_", "-")
    subject = place[0].upper() + place[1:]
    if gate["source"] == "self":
        return f"{subject} is replaced by its own {activation}"
    verb = "multiplied by" if gate["combine"] == "multiply" else "added to"
    unit = "channel" if gate["granularity"] == "elementwise" else "head"
    shared = ", averaged over the heads" if gate["sharing"] == "shared" else ""
    return f"{subject} is {verb} one {activation} score per {unit}{shared}, computed from {SOURCES[gate['source']]}"


def _final(ledger: dict[str, Any]) -> str:
    """The last figures of a run that apply to it, each beside what it is and what it is to be read against."""
    final, skip = ledger["final"], "this figure from query 4 on"
    beside: dict[str, dict[str, Any]] = {
        "val/loss": ledger["baselines"],
        "f_attn": _uniform(ledger) | {skip: final.get("f_attn_skip4")},
        "f_attn_fixed_first": _uniform(ledger) | {skip: final.get("f_attn_skip4_fixed_first")},
    }
    levels = {
        key: ", ".join(f"{escape(name)}: {number(value)}" for name, value in values.items())
        for key, values in beside.items()
    }
    rows = [
        (escape(label), number(final[key]), "; ".join(filter(None, (MEANINGS.get(key), levels.get(key)))))
        for key, label in FIGURES.items()
        if key in final and not (key in NOT_OF_ALL and final[key] is None)
    ]
    return table(("figure", "value", "to read it by"), rows)


def _loss(ledger: dict[str, Any], metrics: list[dict[str, Any]]) -> str:
    training, validation = _points(metrics, "train/loss"), _points(metrics, "val/loss")
    return loss_curve(training, validation, ledger["baselines"], ledger["spike_events"])


def _optimizer(metrics: list[dict[str, Any]]) -> list[str]:
    figures = [
        _over_steps("Learning rate", "learning rate", metrics, {"": "optim/lr"}),
        _over_steps("Gradient norm, before clipping", "gradient norm", metrics, {"": "optim/grad_norm"}, log="y"),
        _over_steps("Speed", "tokens per second", metrics, {"": "tokens_per_second"}),
    ]
    if any("train/balance" in line for line in metrics):
        terms = {"load balance": "train/balance", "router z": "train/router_z"}
        label = "Further terms of the loss, with their coefficients"
        figures.append(_over_steps(label, "loss term (nats per token)", metrics, terms))
    return figures


def _sink(ledger: dict[str, Any], metrics: list[dict[str, Any]]) -> list[str]:
    f_attn, m_act, level = "share of attention on the first token", "largest |h| of a layer", _uniform(ledger)
    layers = ledger["by_layer"]
    alike = layers["f_attn"] == layers["f_attn_fixed_first"]
    rows = {"": "f_attn"} if alike else {"as packed": "f_attn", "fixed first token": "f_attn_fixed_first"}
    probed = {label: f"probe/{key}" for label, key in rows.items()}
    figures = [
        "" if alike else PACKED,
        _over_steps("F-Attn over training", f_attn, metrics, probed, level),
        _over_steps("M-Act over training", m_act, metrics, {"": "probe/m_act"}),
    ]
    if len(layers["m_act"]) > 1:
        shares = {label: layers[key] for label, key in rows.items()}
        figures += [
            by_layer("F-Attn by layer", f_attn, shares, level),
            by_layer("M-Act by layer", m_act, {"": layers["m_act"]}, {}),
        ]
    if "f_attn_dormant" in ledger["final"]:
        kinds = {"dormant queries": "probe/f_attn_dormant", "active queries": "probe/f_attn_active"}
        figures += [BACKCOPY, _over_steps("F-Attn of dormant and active queries", f_attn, metrics, kinds, level)]
    return figures


def _gate_scores(ledger: dict[str, Any], metrics: list[dict[str, Any]]) -> list[str]:
    if not ledger["recipe"]["model"]["gates"]:
        return [sentence("This model has no gate, so there are no scores.")]
    if not ledger["scores"]:
        return [sentence("This gate replaces its input by a function of it and has no score.")]
    titles = {position: f"Scores at {PLACES.get(position, position)}" for position in ledger["scores"]}
    figures = [ridges(titles[position], **scores) for position, scores in ledger["scores"].items()]
    return [*figures, _over_steps("Mean gate score over training", "gate score", metrics, {"": "probe/gate_score"})]


def _recipe(recipe: dict[str, Any]) -> str:
    """As YAML, a block for each group of keys."""
    single = {key: value for key, value in recipe.items() if not isinstance(value, dict)}
    blocks = [single, *({key: value} for key, value in recipe.items() if key not in single)]
    texts = [yaml.safe_dump(block, sort_keys=False, allow_unicode=True) for block in blocks]
    return f'<div class="blocks">{"".join(map(pre, texts))}</div>'


def _provenance(ledger: dict[str, Any]) -> str:
    git, corpus = ledger["git"], ledger["corpus"]
    commit = f"{git['commit']}{', with changes' if git['dirty'] else ''}" if git else "not from a checkout"
    rows = {
        "asked for": " ".join(map(str, ledger["overrides"])),
        "seed": ledger["seed"],
        "seconds": number(ledger["seconds"]),
        "commit": commit,
        **{f"corpus {key}": _plain(value) for key, value in corpus.items() if value != {}},
        **ledger["versions"],
    }
    return table(("what", "which"), [(escape(str(key)), escape(str(value))) for key, value in rows.items()])


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(below)}" for key, below in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def _over_steps(
    label: str,
    unit: str,
    metrics: list[dict[str, Any]],
    keys: dict[str, str],
    levels: Mapping[str, float | None] | None = None,
    log: str = "",
) -> str:
    lines = {name: _points(metrics, key) for name, key in keys.items()}
    return chart(label, "step", unit, lines, levels or {}, log)


def _points(metrics: list[dict[str, Any]], key: str) -> Line:
    """Steps and values of the lines that have the key; a null is nan."""
    lines = [line for line in metrics if key in line]
    return np.array([line["step"] for line in lines]), floats(line[key] for line in lines)


def _uniform(ledger: dict[str, Any]) -> dict[str, float]:
    return uniform(ledger["recipe"]["data"]["context"])
