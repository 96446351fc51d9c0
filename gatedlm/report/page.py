"""report.html: a run in one file that opens anywhere, without a network or a script."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from torch import Tensor

from gatedlm.report.drawing import (
    DRAWING,
    Line,
    attention_map,
    chart,
    colour_scale,
    floats,
    loss_curve,
    number,
    palette,
    ridges,
    sentence,
)
from gatedlm.report.names import FIGURES, MEANINGS

STYLE = Path(__file__).with_name("style.css")

PLACES = {
    "query": "the query (G4)",
    "key": "the key (G3)",
    "value": "the value (G2)",
    "sdpa": "the SDPA output (G1)",
    "output": "the output of the attention layer (G5)",
}
NOT_OF_ALL = ("val/bits_per_byte", "gate_score", "share_below")  # without text or gates they are None
SOURCES = {"input": "the hidden state after the pre-norm", "constant": "a learned table, whatever the input"}
PACKED = """<p>As packed, a row begins wherever the packing cut the text; with a fixed first token all rows begin
alike.</p>"""
BACKCOPY = """<p>Bigram-Backcopy: an active query stands on a trigger and has to look one token back; a dormant one has
nothing to copy and may rest on the first token.</p>"""
MAPS = """<p>Each line of a map is a query and sums to one. The first token's column is drawn wide and apart. The row
reads, from the first token on (a space is ·, a line end ↵):</p>"""
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


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

    name = escape(str(ledger["name"]))
    with matplotlib.rc_context(DRAWING):
        sections = (
            _headline(ledger),
            _section("Loss and optimizer", _loss(ledger, metrics), *_optimizer(metrics)),
            _section("Attention on the first token and massive activations", *_sink(ledger, metrics)),
            _section("Attention maps", *_maps(maps, tokens)),
            _section("Gate scores", *_gate_scores(ledger, metrics)),
            _section("Sample", _pre(sample) if sample else sentence("This run wrote no sample.")),
            _section("Recipe", _recipe(ledger["recipe"])),
            _section("Where it comes from", _provenance(ledger)),
        )
    path = folder / "report.html"
    page = PAGE.format(name=name, style=palette() + STYLE.read_text(), body="\n".join(sections))
    path.write_text(page, encoding="utf-8", errors="replace")
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
    gates = ", no gate"
    if model["gates"]:
        gates = ". ".join((f"; {number(params['gate'])} are gates", *map(_gate_in_words, model["gates"])))
    return (
        f"<p>A {model['layers']}-layer Transformer of width {number(model['width'])}, with {model['heads']} query "
        f"and {model['kv_heads']} key/value heads of {model['head_dim']} channels and {feedforward}: "
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
    final, skip = ledger["final"], "without the first four queries"
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
        (label, number(final[key]), "; ".join(filter(None, (MEANINGS.get(key), levels.get(key)))))
        for key, label in FIGURES.items()
        if key in final and not (key in NOT_OF_ALL and final[key] is None)
    ]
    return _table(("figure", "value", "to read it by"), rows)


def _loss(ledger: dict[str, Any], metrics: list[dict[str, Any]]) -> str:
    training, validation = _points(metrics, "train/loss"), _points(metrics, "val/loss")
    return loss_curve(training, validation, ledger["baselines"], ledger["spike_events"])


def _optimizer(metrics: list[dict[str, Any]]) -> list[str]:
    figures = [
        _over_steps("Learning rate", "learning rate", metrics, {"": "optim/lr"}),
        _over_steps("Gradient norm, before clipping", "gradient norm", metrics, {"": "optim/grad_norm"}, log=True),
        _over_steps("Speed", "tokens per second", metrics, {"": "tokens_per_second"}),
    ]
    if any("train/balance" in line for line in metrics):
        terms = {"load balance": "train/balance", "router z": "train/router_z"}
        label = "Further terms of the loss, with their coefficients"
        figures.append(_over_steps(label, "loss term (nats per token)", metrics, terms))
    return figures


def _sink(ledger: dict[str, Any], metrics: list[dict[str, Any]]) -> list[str]:
    f_attn, m_act, uniform = "share of attention on the first token", "largest |h| of a layer", _uniform(ledger)
    by_layer = ledger["by_layer"]
    alike = by_layer["f_attn"] == by_layer["f_attn_fixed_first"]
    rows = {"": "f_attn"} if alike else {"as packed": "f_attn", "fixed first token": "f_attn_fixed_first"}
    probed = {label: f"probe/{key}" for label, key in rows.items()}
    figures = [
        "" if alike else PACKED,
        _over_steps("F-Attn over training", f_attn, metrics, probed, uniform),
        _over_steps("M-Act over training", m_act, metrics, {"": "probe/m_act"}),
    ]
    if len(by_layer["m_act"]) > 1:
        figures += [
            _by_layer("F-Attn by layer", f_attn, ledger, rows, uniform),
            _by_layer("M-Act by layer", m_act, ledger, {"": "m_act"}),
        ]
    if "f_attn_dormant" in ledger["final"]:
        kinds = {"dormant queries": "probe/f_attn_dormant", "active queries": "probe/f_attn_active"}
        figures += [BACKCOPY, _over_steps("F-Attn of dormant and active queries", f_attn, metrics, kinds, uniform)]
    return figures


def _maps(maps: dict[int, Tensor], tokens: list[str]) -> list[str]:
    if not maps:
        return [sentence("No attention map was kept.")]
    row = "".join(f'<span title="position {i}">{escape(_visible(token))}</span>' for i, token in enumerate(tokens))
    parts = [f'{MAPS}<p class="tokens">{row}</p>', colour_scale()]
    layers = []
    for layer, heads in maps.items():
        figures = [attention_map(head, layer, i) for i, head in enumerate(heads.detach().double().cpu().numpy())]
        layers.append(f'<div><h3>Layer {int(layer)}</h3><div class="maps">{"".join(figures)}</div></div>')
    return [*parts, f'<div class="layers">{"".join(layers)}</div>']


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
    return f'<div class="blocks">{"".join(map(_pre, texts))}</div>'


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
    return _table(("what", "which"), [(escape(str(key)), escape(str(value))) for key, value in rows.items()])


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
    log: bool = False,
) -> str:
    lines = {name: _points(metrics, key) for name, key in keys.items()}
    return chart(label, "step", unit, lines, levels or {}, log)


def _by_layer(
    label: str,
    unit: str,
    ledger: dict[str, Any],
    keys: dict[str, str],
    levels: Mapping[str, float | None] | None = None,
) -> str:
    columns = {name: floats(ledger["by_layer"].get(key, ())) for name, key in keys.items()}
    lines = {name: (np.arange(len(values)), values) for name, values in columns.items()}
    return chart(label, "layer", unit, lines, levels or {})


def _points(metrics: list[dict[str, Any]], key: str) -> Line:
    """Steps and values of the lines that have the key; a null is nan."""
    lines = [line for line in metrics if key in line]
    return np.array([line["step"] for line in lines]), floats(line[key] for line in lines)


def _uniform(ledger: dict[str, Any]) -> dict[str, float]:
    """F-Attn of attention spread evenly: the mean over queries 1 <= i < T of 1 / (i + 1)."""
    context = ledger["recipe"]["data"]["context"]
    return {"uniform attention": float(np.mean(1 / np.arange(2, context + 1)))} if context > 1 else {}


def _visible(token: str) -> str:
    return token.replace("\n", "↵").replace("\t", "→").replace(" ", "·")


def _section(title: str, *parts: str) -> str:
    """A heading; figures that follow one another share a grid."""
    body = re.sub(r"((?:<figure>.*?</figure>)+)", r'<div class="figures">\1</div>', "".join(parts), flags=re.DOTALL)
    return f"<section><h2>{title}</h2>{body}</section>"


def _pre(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f"<table><thead><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr></thead><tbody>{lines}</tbody></table>"
    )
