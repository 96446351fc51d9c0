"""report.html from made-up ledgers: whole, self-contained, equal to the ledger, and safe whatever the data say."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch

from gatedlm.model.feedforward import ExpertsSpec
from gatedlm.model.gate import GateSpec
from gatedlm.model.lm import GatedLM, ModelSpec, initialise
from gatedlm.probes import summarise
from gatedlm.recipe import DataSpec, Recipe, TrainerSpec
from gatedlm.report import drawing, write_report
from gatedlm.report.drawing import smoothed
from gatedlm.report.page import _gate_in_words, _uniform

LAYERS, HEADS, CONTEXT, STEPS = 4, 3, 128, 400
VOID = {"meta", "br", "img", "link", "hr", "input"}
HOSTILE = '<script>alert("x")</script> & $\\frac{1}$ {name} \ud800'
SPIKE = {"start": 120, "peak": 122, "rise": 0.8123}
SINKS = (
    "f_attn",
    "f_attn_fixed_first",
    "f_attn_skip4",
    "f_attn_skip4_fixed_first",
    "sink_rate",
    "sink_rate_fixed_first",
)


class Page(HTMLParser):
    """The elements, attributes and text of a page; a wrongly closed element is an AssertionError."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def figures(self) -> list[str]:
        return [unescape(attrs["aria-label"] or "") for tag, attrs in self.elements if tag == "svg"]


def metrics_of(steps: int, probed: dict[str, float], seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss = 2.2 + 4.8 * math.exp(-step / 60) + 0.15 * rng.standard_normal()
        rate = 0.01 * min(step / 40, 0.55 + 0.45 * math.cos(math.pi * step / steps))
        lines.append({"step": step, "train/loss": loss, "optim/lr": rate, "optim/grad_norm": rng.lognormal(-1, 0.5)})
        lines[-1] |= {"tokens_per_second": 30000 + 2000 * rng.standard_normal()}
        if step % 100 == 0:
            lines[-1] |= {"val/loss": loss + 0.1}
        if step % 50 == 0:
            lines[-1] |= {f"probe/{key}": value * step / steps for key, value in probed.items()}
    return lines


def made_up(
    gates: list[GateSpec] | None = None,
    steps: int = STEPS,
    layers: int = LAYERS,
    experts: int = 0,
    backcopy: bool = False,
) -> dict[str, Any]:
    """Arguments of ``write_report`` beside the folder; every figure has its own value."""
    gates = [GateSpec()] if gates is None else gates
    model = ModelSpec(layers=layers, heads=HEADS, kv_heads=HEADS, experts=ExpertsSpec(count=experts), gates=gates)
    recipe = Recipe(
        name="made-up", model=model, data=DataSpec(context=CONTEXT), trainer=TrainerSpec(steps=max(steps, 1))
    )
    rng = np.random.default_rng(1)
    by_layer = {key: rng.uniform(0.1, 0.9, layers).tolist() for key in (*SINKS, "value_drain")}
    by_layer["m_act"] = (20 * rng.uniform(1, 9, layers)).tolist()
    final: dict[str, Any] = {key: float(np.mean(values)) for key, values in by_layer.items()}
    final |= {
        "train/loss": 2.2143,
        "val/loss": 2.3198,
        "val/bits_per_byte": 1.7731,
        "gate_score": None,
        "share_below": None,
    }
    final |= {"f_attn_dormant": 0.8712, "f_attn_active": 0.0413} if backcopy else {}
    scores = {}
    for gate in gates:
        counts = [np.histogram(rng.beta(0.7 + layer, 3, 4000), 50, (0, 1))[0] for layer in range(layers)]
        means = [float((c * (np.arange(50) + 0.5)).sum() / 50 / c.sum()) for c in counts]
        shares = [float(c[:5].sum() / c.sum()) for c in counts]
        scores[gate.position] = {"mean": means, "share_below": shares, "histogram": [c.tolist() for c in counts]}
        final |= {"gate_score": float(np.mean(means)), "share_below": float(np.mean(shares))}
    watched = {"f_attn", "f_attn_fixed_first", "m_act", "gate_score", "f_attn_dormant", "f_attn_active"}
    metrics = metrics_of(steps, {key: final[key] for key in watched if final.get(key)})
    for line in metrics if experts else ():
        line |= {"train/balance": 0.041, "train/router_z": 0.013}
    ledger = {
        "schema": 1,
        "name": recipe.name,
        "status": "finished",
        "recipe": asdict(recipe),
        "overrides": ["recipe=quickstart", "gate=sdpa-elementwise"],
        "seed": 7,
        "versions": {"python": "3.11.2", "torch": "2.13.0"},
        "git": {"commit": "0123abc", "dirty": True},
        "seconds": 98.7654,
        "params": model.parameters()._asdict(),
        "tokens": steps * 2048,
        "tokens_per_second": 30123.4,
        "corpus": {
            "name": "stdlib",
            "fingerprint": "f00d",
            "tokens": 5123456,
            "skipped": 3,
            "domains": {"code": 4000000},
        },
        "baselines": {"unigram": 5.4321, "bigram": 3.5432},
        "final": final,
        "by_layer": by_layer,
        "scores": scores,
        "steps": steps,
        "spikes": [120, 122, 260] if steps > 300 else [],
        "spike_events": [SPIKE, SPIKE | {"start": 260, "peak": 260, "rise": 0.3}] if steps > 300 else [],
    }
    tokens = ["<|endoftext|>", *(["def", " f", "(x):", "\n", "    return", " x"] * 20)][:64]
    return {
        "ledger": ledger,
        "metrics": metrics,
        "maps": maps_of(64),
        "tokens": tokens,
        "sample": "def f(x):\n    return x",
    }


def maps_of(time: int) -> dict[int, torch.Tensor]:
    """Causal maps of which the later layer rests on the first token."""
    logits = torch.randn(2, HEADS, time, time, generator=torch.Generator().manual_seed(0))
    logits[1, :, :, 0] += 5
    hidden = torch.ones(time, time, dtype=torch.bool).triu(1)
    first, last = logits.masked_fill(hidden, -math.inf).softmax(-1)
    return {0: first, LAYERS - 1: last}


@pytest.fixture
def page(tmp_path: Path) -> Callable[[dict[str, Any]], Page]:
    return lambda arguments: Page(write_report(tmp_path, **arguments))


def cells(page: Page) -> list[str]:
    """Contents of the table cells, which hold text alone or with a <sub>."""
    return [unescape(part.split("</td>")[0]) for part in page.source.split("<td>")[1:]]


KINDS = {
    "gated": {},
    "headwise and value": {"gates": [GateSpec("sdpa", "headwise"), GateSpec("value")]},
    "ungated": {"gates": []},
    "mixture": {"experts": 8},
    "backcopy": {"backcopy": True, "layers": 1},
    "one step": {"steps": 1},
    "no step": {"steps": 0},
    "deep": {"layers": 48},
}


@pytest.mark.parametrize("kind", KINDS)
def test_page_is_balanced_and_self_contained(kind: str, page: Callable[[dict[str, Any]], Page]) -> None:
    made = page(made_up(**KINDS[kind]))
    ids = [attrs["id"] for _, attrs in made.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    for tag, attrs in made.elements:
        assert tag not in ("script", "link", "iframe")
        for name in ("src", "href", "xlink:href"):
            assert (attrs.get(name) or "#").startswith(("#", "data:image/png;base64,"))
            assert not (attrs.get(name) or "").startswith("#") or (attrs[name] or "")[1:] in ids
    assert "http" not in made.source and "@import" not in made.source
    assert "Nan" not in made.source and ">nan" not in made.source
    assert len(made.source) < 1_500_000


def test_figures_of_a_gated_run(page: Callable[[dict[str, Any]], Page]) -> None:
    made = page(made_up())
    maps = [f"Layer {layer}, head {head}" for layer in (0, LAYERS - 1) for head in range(HEADS)]
    assert made.figures == [
        "Loss over steps",
        "Learning rate",
        "Gradient norm, before clipping",
        "Speed",
        "F-Attn over training",
        "M-Act over training",
        "F-Attn by layer",
        "M-Act by layer",
        "Colour scale of the attention maps",
        *maps,
        "Scores at the SDPA output (G1)",
        "Mean gate score over training",
    ]
    for words in (
        "step",
        "layer",
        "loss (nats per token)",
        "query position",
        "spike",
        "bigram 3.543",
        "uniform attention",
    ):
        assert f">{words}" in made.source


@pytest.mark.parametrize("kind", ["gated", "ungated", "backcopy"])
def test_numbers_are_the_ledgers(kind: str, page: Callable[[dict[str, Any]], Page]) -> None:
    arguments = made_up(**KINDS[kind])
    final, shown = arguments["ledger"]["final"], cells(page(arguments))
    values = dict(zip(shown[0::3], shown[1::3], strict=False))
    assert values["validation loss, nats per token"] == "2.32"
    assert values["validation loss, bits per byte"] == "1.773"
    assert values["F-Attn, rows as packed"] == f"{final['f_attn']:.4g}"
    assert values["F-Attn, fixed first token"] == f"{final['f_attn_fixed_first']:.4g}"
    assert values["M-Act"] == f"{final['m_act']:.4g}"
    gated = kind != "ungated"
    assert values.get("mean gate score") == (f"{final['gate_score']:.4g}" if gated else None)
    assert values.get("share of gate scores below 0.1") == (f"{final['share_below']:.4g}" if gated else None)
    assert values.get("F-Attn of dormant queries") == ("0.8712" if kind == "backcopy" else None)
    assert {"5,123,456", "code 4,000,000", "0123abc, with changes", "98.77"} <= set(shown)
    assert shown[2] == "unigram: 5.432, bigram: 3.543"


def test_each_layers_scores_are_stated(page: Callable[[dict[str, Any]], Page]) -> None:
    arguments = made_up(gates=[GateSpec("value")])
    scores, text = arguments["ledger"]["scores"]["value"], page(arguments).text
    for mean, share in zip(scores["mean"], scores["share_below"], strict=True):
        assert f"mean {mean:.2f}, <0.1: {100 * share:.1f} %" in text
    assert f"mean {np.mean(scores['mean']):.2f}, {100 * np.mean(scores['share_below']):.1f} % below 0.1" in text


def test_map_captions_give_the_first_tokens_share(page: Callable[[dict[str, Any]], Page]) -> None:
    arguments = made_up()
    text = page(arguments).text
    for heads in arguments["maps"].values():
        for head in heads:
            assert f"first token {head[1:, 0].double().mean():.4g}" in text


def test_missing_figures_are_sentences(page: Callable[[dict[str, Any]], Page]) -> None:
    arguments = made_up(gates=[], steps=0)
    text = page(arguments | {"maps": {}, "tokens": [], "sample": None}).text
    assert "No finite training loss was recorded." in text
    assert "Learning rate: nothing was recorded." in text
    assert "No attention map was kept." in text
    assert "This model has no gate, so there are no scores." in text
    assert "This run wrote no sample." in text


def test_a_gate_without_a_score_says_so(page: Callable[[dict[str, Any]], Page]) -> None:
    gate = GateSpec(combine="replace", activation="rmsnorm", source="self")
    arguments = made_up(gates=[gate])
    arguments["ledger"]["scores"] = {}
    assert "has no score" in page(arguments).text


def test_a_diverged_run(page: Callable[[dict[str, Any]], Page]) -> None:
    """All figures null from some step on, nan and infinity where they were not yet written as null."""
    arguments = made_up()
    ledger = arguments["ledger"]
    for line in arguments["metrics"][100:]:
        line.update({key: None for key in line if key != "step"})
    ledger["status"], ledger["git"] = "diverged", None
    ledger["final"] = dict.fromkeys(ledger["final"]) | {"m_act": math.inf, "val/loss": math.nan}
    ledger["by_layer"] = {key: [None, math.nan, math.inf, 1.0] for key in ledger["by_layer"]}
    ledger["baselines"] = {"unigram": None, "bigram": None}
    ledger["scores"]["sdpa"] |= {"mean": [math.nan] * LAYERS, "share_below": [None] * LAYERS}
    made = page(arguments | {"maps": {0: torch.full((HEADS, 64, 64), math.nan)}})
    assert f"This run diverged at step {STEPS}: a loss or gradient was not finite." in made.text
    assert "Loss over steps" in made.figures
    shown = cells(made)
    assert dict(zip(shown[0::3], shown[1::3], strict=False))["training loss at the last step, nats per token"] == (
        "not finite"
    )


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([], ""),
        ([SPIKE], "1 spike, 0.81 nats at step 122."),
        ([SPIKE, SPIKE | {"peak": 50, "rise": 1.5}], "2 spikes, the largest 1.50 nats at step 50."),
        ([SPIKE, SPIKE | {"peak": 300, "rise": None}], "2 spikes, the largest not finite at step 300."),
    ],
)
def test_spikes_are_counted(events: list[dict[str, Any]], said: str, page: Callable[[dict[str, Any]], Page]) -> None:
    arguments = made_up()
    arguments["ledger"]["spike_events"] = events
    made = page(arguments)
    assert said in made.text
    assert (" at step " in made.text) == (">spike<" in made.source) == bool(events)


def test_the_loss_axis_ends_at_twice_the_first_loss_where_it_is_cut(page: Callable[[dict[str, Any]], Page]) -> None:
    arguments = made_up()
    assert "The axis ends" not in page(arguments).text
    arguments["metrics"][200]["train/loss"] = 1000.0
    assert "The axis ends at twice the first loss." in page(arguments).text


def test_markers_and_levels_lie_within_the_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero is on both axes of a chart, and above the highest mark there is room for it, whatever lies below."""
    drawn = []
    monkeypatch.setattr(drawing, "_figure", lambda axes, *_: drawn.append((axes.get_xlim(), axes.get_ylim())))
    for values, level in (([12.5, 12.7, 12.6], None), ([0.36], 0.9), ([-0.2, 0.1, 0.05], 0.02)):
        at = 50 * (1 + np.arange(len(values)))
        drawing.chart("some", "step", "unit", {"": (at, np.array(values))}, {"level": level})
        (left, right), (bottom, top) = drawn.pop()
        highest = max(*values, level or 0)
        assert -0.1 * right < left <= 0 and right > at[-1]
        assert top - highest >= 0.04 * (highest - min(*values, 0))
        assert bottom == 0 if min(values) >= 0 else bottom < min(values)


def test_a_line_of_nothing_leaves_the_others_their_colours() -> None:
    at, values = np.arange(3), np.array([0.1, 0.2, 0.3])
    with matplotlib.rc_context(drawing.DRAWING):
        made = drawing.chart("some", "layer", "unit", {"a": (at[:0], values[:0]), "b": (at, values)}, {})
    assert "--vermillion" in made and "--blue" not in made
    assert ">b<" in made and ">a<" not in made and "Nothing was recorded of: a." in made


def test_rows_that_begin_alike_are_one_line(page: Callable[[dict[str, Any]], Page]) -> None:
    arguments = made_up(backcopy=True)
    assert ">as packed<" in page(arguments).source
    by_layer = arguments["ledger"]["by_layer"]
    by_layer["f_attn_fixed_first"] = by_layer["f_attn"]
    assert "s packed<" not in page(arguments).source.split("F-Attn over training")[1]


def test_a_single_layer_has_no_chart_by_layer(page: Callable[[dict[str, Any]], Page]) -> None:
    assert not [name for name in page(made_up(layers=1)).figures if "by layer" in name]


def test_what_does_not_apply_is_left_out(page: Callable[[dict[str, Any]], Page]) -> None:
    arguments = made_up(gates=[])
    arguments["ledger"]["final"]["val/bits_per_byte"] = None
    made = page(arguments)
    assert not {"validation loss, bits per byte", "mean gate score", "share of gate scores below 0.1"} & set(
        cells(made)
    )
    assert "parameters, no gate. It was trained" in made.text


def test_everything_from_the_data_is_escaped(page: Callable[[dict[str, Any]], Page]) -> None:
    arguments = made_up()
    ledger = arguments["ledger"]
    ledger |= {"name": HOSTILE, "overrides": [HOSTILE], "seed": HOSTILE, "versions": {HOSTILE: HOSTILE}}
    ledger |= {
        "corpus": {"name": HOSTILE, HOSTILE: HOSTILE},
        "git": {"commit": HOSTILE, "dirty": False},
        "status": HOSTILE,
    }
    ledger |= {"baselines": {"unigram": 5.0, "<b>$": 3.0}, "scores": {HOSTILE: ledger["scores"]["sdpa"]}}
    ledger["recipe"]["name"] = ledger["recipe"]["data"]["path"] = HOSTILE
    made = page(arguments | {"tokens": [HOSTILE] * 64, "sample": HOSTILE})
    assert "<script" not in made.source and "<b>$" not in made.source
    assert made.text.count('<script>alert("x")</script> & $\\frac{1}$ {name} ?') >= 9


def test_every_gate_has_words() -> None:
    sentences = {
        _gate_in_words(asdict(GateSpec(position, granularity, sharing)))
        for position in ("query", "key", "value", "sdpa")
        for granularity in ("elementwise", "headwise")
        for sharing in ("specific", "shared")
    }
    assert len(sentences) == 16
    assert _gate_in_words(asdict(GateSpec())) == (
        "The SDPA output (G1) is multiplied by one sigmoid score per channel, "
        "computed from the hidden state after the pre-norm"
    )
    own = GateSpec(combine="replace", activation="silu", source="self")
    assert _gate_in_words(asdict(own)) == "The SDPA output (G1) is replaced by its own silu"


def test_smoothing_and_uniform_attention_are_their_formulas() -> None:
    assert smoothed(np.array([2.0, 4.0, np.nan, 1.0])) == pytest.approx(
        [2, (0.9 * 2 + 4) / 1.9, np.nan, (0.81 * 2 + 0.9 * 4 + 1) / 2.71], nan_ok=True
    )
    attention = torch.ones(5, 5).tril() / torch.arange(1, 6)[:, None]
    ledger = {"recipe": {"data": {"context": 5}}}
    assert _uniform(ledger)["uniform attention"] == pytest.approx(float(attention[1:, 0].mean()))
    assert _uniform({"recipe": {"data": {"context": 1}}}) == {}


def test_scores_are_shown_as_the_probes_write_them(page: Callable[[dict[str, Any]], Page]) -> None:
    gates = [GateSpec("sdpa", "headwise"), GateSpec("value")]
    model = GatedLM(ModelSpec(vocab=31, layers=LAYERS, gates=gates))
    initialise(model, seed=0)
    summary = summarise(model, torch.randint(31, (2, 9)), 2)
    arguments = made_up(gates=gates)
    arguments["ledger"]["scores"] = summary.as_dict()["scores"]
    assert f"mean {float(summary.scores['sdpa'].mean.mean()):.2f}," in page(arguments).text
