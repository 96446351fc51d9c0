"""Every gate the words can say: refused with a sentence, or acting, learning and equal to a formula written here."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from gatedlm.model.attention import Attention
from gatedlm.model.gate import ACTIVATIONS, COMBINATIONS, Gate, GateSpec, Score
from gatedlm.model.lm import ModelSpec
from gatedlm.model.rope import RopeSpec, angles

B, T, H, G, D, C = 3, 7, 8, 4, 6, 40
SPEC = ModelSpec(width=C, heads=H, kv_heads=G, head_dim=D, rope=RopeSpec(500.0))
HEADS = {"query": H, "key": G, "value": G, "sdpa": H, "output": 1}
WORDS: dict[str, tuple[Any, ...]] = {
    name: get_args(hint) or tuple(ACTIVATIONS) for name, hint in get_type_hints(GateSpec).items()
}
PRODUCT = [dict(zip(WORDS, words, strict=True)) for words in itertools.product(*WORDS.values())]


def makes_sense(words: dict[str, str]) -> bool:
    """The paper's gates: a learned score that multiplies or adds, or a function of Y itself in its place."""
    whole = words["granularity"] == "elementwise" and words["sharing"] == "specific"
    if words["source"] == "self":
        return words["combine"] == "replace" and whole and words["activation"] != "identity"
    learned = words["combine"] != "replace" and words["activation"] != "rmsnorm"
    return learned and (whole or words["position"] != "output")


def survives_qk_norm(gate: GateSpec) -> bool:
    """A factor that is the same on all channels of a head is divided out by the norm, and so is a second norm."""
    cancelled = (gate.combine == "multiply" and gate.granularity == "headwise") or gate.activation == "rmsnorm"
    return not (cancelled and gate.position in ("query", "key"))


ACCEPTED = [GateSpec(**words) for words in PRODUCT if makes_sense(words)]
PLACED = [(gate, qk_norm) for gate in ACCEPTED for qk_norm in (True, False) if not qk_norm or survives_qk_norm(gate)]

ACT: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": lambda z: 1 / (1 + torch.exp(-z)),
    "ns_sigmoid": lambda z: (1 + 1 / (1 + torch.exp(-z))) / 2,
    "silu": lambda z: z / (1 + torch.exp(-z)),
    "identity": lambda z: z,
    "rmsnorm": lambda z: z / (z.square().mean(-1, keepdim=True) + 1e-6).sqrt(),
}
COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "multiply": lambda y, s: y * s,
    "add": lambda y, s: y + s,
    "replace": lambda y, s: s,
}


def gated_by_hand(gate: GateSpec, score: Score, y: Tensor, x: Tensor) -> Tensor:
    """Y' from the words alone; y is (B, T, h, d), x is (B, T, C)."""
    heads, dim = y.shape[2:]
    z = {
        "input": lambda: torch.einsum("btc,hdc->bthd", x, score.weight.reshape(heads, -1, C)),
        "constant": lambda: score.table,
        "self": lambda: y,
    }[gate.source]()
    if z.shape[-1] != (dim if gate.granularity == "elementwise" else 1):
        raise AssertionError(f"{gate}: {tuple(z.shape)} scores")
    s = ACT[gate.activation](z)
    if gate.activation == "rmsnorm":
        s = s * score.get_parameter("act.weight")
    if gate.sharing == "shared":
        s = torch.einsum("...hd->...d", s)[..., None, :] / heads
    return COMBINE[gate.combine](y, s)


def attention_by_hand(attention: Attention, gates: list[GateSpec], x: Tensor) -> Tensor:
    """The paper's Section 2 with full maps, RoPE as a complex factor and repeated key/value heads."""
    by_place = {gate.position: gate for gate in gates}

    def gated(place: str, y: Tensor) -> Tensor:
        if place not in by_place:
            return y
        return gated_by_hand(by_place[place], attention.gates[place].score, y, x)  # type: ignore[arg-type]

    def turned(y: Tensor, norm: torch.nn.Module) -> Tensor:
        for weight in norm.parameters():
            y = ACT["rmsnorm"](y) * weight
        wave = 500.0 ** -(torch.arange(D // 2) / (D // 2))
        factor = torch.exp(1j * torch.arange(T)[:, None, None] * wave)
        turned = torch.complex(y[..., : D // 2], y[..., D // 2 :]) * factor
        return torch.cat((turned.real, turned.imag), -1)

    def project(linear: torch.nn.Module) -> Tensor:
        assert isinstance(linear, torch.nn.Linear)
        return torch.einsum("btc,hdc->bthd", x, linear.weight.reshape(-1, D, C))

    q = turned(gated("query", project(attention.q_proj)), attention.q_norm)
    k = turned(gated("key", project(attention.k_proj)), attention.k_norm).repeat_interleave(H // G, 2)
    v = gated("value", project(attention.v_proj)).repeat_interleave(H // G, 2)
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    map = (torch.einsum("bthd,bshd->bhts", q, k) / D**0.5).masked_fill(future, -torch.inf).softmax(-1)
    o = gated("sdpa", torch.einsum("bhts,bshd->bthd", map, v))
    y = torch.einsum("bthd,chd->btc", o, attention.o_proj.weight.reshape(C, H, D))
    return gated("output", y[:, :, None])[:, :, 0]


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(B, T, C, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def rope() -> tuple[Tensor, Tensor]:
    return angles(SPEC.rope, torch.arange(T)[None], D)


def test_words_are_all_implemented():
    assert set(WORDS["activation"]) == set(ACT)
    assert set(WORDS["combine"]) == set(COMBINATIONS) == set(COMBINE)
    assert len(PRODUCT) == 900 and len(ACCEPTED) == 292


@pytest.mark.parametrize("position", WORDS["position"])
def test_other_combinations_are_refused_with_a_sentence(position: str):
    refused = [words for words in PRODUCT if words["position"] == position and not makes_sense(words)]
    for words in refused:
        with pytest.raises(ValueError, match=rf"^gate {position} .*: .*\b(use|set)\b.*$"):
            GateSpec(**words)


def test_the_default_is_the_papers_best_row():
    assert str(GateSpec()) == "sdpa elementwise specific multiply sigmoid input"


@pytest.mark.parametrize(("gate", "qk_norm"), PLACED, ids=lambda value: str(value).replace(" ", "-"))
def test_gate_acts_learns_and_equals_the_formula(gate: GateSpec, qk_norm: bool, x, rope, scramble):
    attention = scramble(Attention(replace(SPEC, gates=[gate], qk_norm=qk_norm)))
    y = attention(x, rope)
    by_hand = attention_by_hand(attention, [gate], x)
    torch.testing.assert_close(y, by_hand, rtol=1e-4, atol=1e-5)
    assert (y - attention_by_hand(attention, [], x)).abs().max() > 1e-2, "the gate does not act"

    weight = torch.linspace(-1, 1, y.numel()).view_as(y)
    names, parameters = zip(*attention.named_parameters(), strict=True)
    grads = torch.autograd.grad((y * weight).sum(), parameters)
    expected = torch.autograd.grad((by_hand * weight).sum(), parameters)
    for name, grad, true in zip(names, grads, expected, strict=True):
        torch.testing.assert_close(grad, true, rtol=1e-3, atol=1e-4, msg=name)
        assert "score" not in name or (grad != 0).all(), f"{name} does not learn"


def test_five_gates_at_once_equal_the_formula(x, rope, scramble):
    words = [("query", "add"), ("key", "add"), ("value", "multiply"), ("sdpa", "multiply"), ("output", "add")]
    gates = [GateSpec(position=place, combine=combine, activation="silu") for place, combine in words]  # type: ignore[arg-type]
    attention = scramble(Attention(replace(SPEC, gates=gates)))
    torch.testing.assert_close(attention(x, rope), attention_by_hand(attention, gates, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("position", ["query", "key"])
def test_qk_norm_cancels_a_factor_per_head(position, x, rope, scramble):
    gate = GateSpec(position=position, granularity="headwise")
    with pytest.raises(ValueError, match=r"cancels one factor per head: use granularity=elementwise.*qk_norm=false"):
        replace(SPEC, gates=[gate])
    attention = scramble(Attention(SPEC))
    before = attention(x, rope)
    attention.gates[position] = scramble(Gate(gate, C, HEADS[position], D))
    torch.testing.assert_close(attention(x, rope), before, rtol=0, atol=1e-4)


@pytest.mark.parametrize("position", ["query", "key"])
def test_a_norm_right_before_qk_norm_is_refused(position):
    gate = GateSpec(position, combine="replace", activation="rmsnorm", source="self")
    with pytest.raises(ValueError, match=r"does the same right after it: drop the gate or set model.qk_norm=false"):
        replace(SPEC, gates=[gate])


def test_scores_are_fp32_under_bf16(x, scramble):
    for gate in ACCEPTED:
        heads, dim = HEADS[gate.position], C if gate.position == "output" else D
        module = scramble(Gate(gate, C, heads, dim))
        seen = []
        module.score.register_forward_hook(lambda score, args, out, seen=seen: seen.append(out))
        y = torch.randn(B, T, heads, dim, dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            out = module(y, x)
            z = module.score.source(y, x).float()
        assert seen[0].dtype == torch.float32 and out.dtype == torch.bfloat16, gate
        assert out.shape == y.shape
        if gate.activation != "rmsnorm" and gate.sharing == "specific":  # not merely cast: no rounding in between
            torch.testing.assert_close(seen[0], ACT[gate.activation](z).expand_as(seen[0]))


@pytest.mark.parametrize("granularity", WORDS["granularity"])
@pytest.mark.parametrize("sharing", WORDS["sharing"])
def test_score_is_the_shape_the_paper_prints(granularity, sharing, x):
    """Table 1: n q d_k, n q, n d_k, and a single score where both are reduced."""
    score = Score(GateSpec(granularity=granularity, sharing=sharing), C, H, D)
    expected = (B, T, H if sharing == "specific" else 1, D if granularity == "elementwise" else 1)
    assert score(torch.zeros(B, T, H, D), x).shape == expected
    assert score.weight.shape == (H * expected[-1], C), "a shared score averages the full-size projection"


@pytest.mark.parametrize(("activation", "score"), [("sigmoid", 0.5), ("ns_sigmoid", 0.75), ("silu", 0.0)])
def test_score_at_zero(activation, score):
    assert ACTIVATIONS[activation](D)(torch.zeros(D)).tolist() == [score] * D


def test_an_activation_can_be_added_from_outside(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r"no activation cube: there are sigmoid, .*or add it to ACTIVATIONS first"):
        GateSpec(activation="cube")
    monkeypatch.setitem(ACTIVATIONS, "cube", lambda dim: lambda z: z**3)
    gate = Gate(GateSpec(activation="cube"), C, H, D)
    y, x = torch.randn(B, T, H, D), torch.randn(B, T, C)
    torch.nn.init.normal_(gate.score.weight)
    z = (x @ gate.score.weight.T).view(B, T, H, D)
    torch.testing.assert_close(gate(y, x), y * z**3)
