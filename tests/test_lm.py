"""The whole model: transformers' Qwen3 and Qwen3-Next, causality, documents, counts of parameters, beginnings."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gatedlm.model.feedforward import ExpertsSpec
from gatedlm.model.gate import Gate, GateSpec
from gatedlm.model.lm import Block, GatedLM, ModelSpec, Parameters, initialise
from gatedlm.model.rope import RopeSpec, angles

B, T, V, LAYERS, H, G, D, C, FFN = 3, 7, 31, 2, 8, 4, 6, 40, 56
SPEC = ModelSpec(V, LAYERS, C, H, G, D, FFN, rope=RopeSpec(500.0))
MIXTURE = ExpertsSpec(5, 2)
EVERYWHERE = [GateSpec(position=place) for place in ("query", "key", "value", "sdpa", "output")]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))


# --- transformers as a second implementation

NAMES = {
    r"^blocks": "model.layers",
    r"^embed": "model.embed_tokens",
    r"^norm": "model.norm",
    r"^head": "lm_head",
    r"feedforward_norm": "post_attention_layernorm",
    r"\battention_norm": "input_layernorm",
    r"attention\.": "self_attn.",
    r"feedforward\.silu_proj": "mlp.gate_proj",
    r"feedforward\.": "mlp.",
}


def renamed(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = re.sub(ours, theirs, name)
    return name


def oracle_sizes(spec: ModelSpec) -> dict[str, Any]:
    return {
        "vocab_size": spec.vocab,
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.width,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn,
        "tie_word_embeddings": spec.tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope.base, "partial_rotary_factor": 1.0},
    }


@pytest.fixture
def drawn(scramble):
    """A model whose logits are small (about 0.2), so that 1e-6 leaves room for the rounding of fp32."""

    def draw(**changes: Any) -> GatedLM:
        model = scramble(GatedLM(replace(SPEC, **changes)))
        with torch.no_grad():
            model.norm.weight.mul_(0.2)
        return model

    return draw


def assert_same_logits(model: GatedLM, oracle: nn.Module, weights: dict[str, Tensor], tokens: Tensor) -> None:
    if model.spec.tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    oracle.load_state_dict(weights)
    with torch.no_grad():
        ours, theirs = model(tokens).logits, oracle(tokens).logits
    assert ours.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [8, 4, 2])
def test_ungated_model_equals_qwen3(kv_heads, tied, tokens, drawn):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = drawn(kv_heads=kv_heads, tied=tied)
    oracle = Qwen3ForCausalLM(Qwen3Config(**oracle_sizes(model.spec)))
    weights = {renamed(name): value for name, value in model.state_dict().items()}
    assert_same_logits(model, oracle, weights, tokens)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [8, 4, 2])
def test_elementwise_sdpa_gate_equals_qwen3_next(kv_heads, tied, tokens, drawn):
    """There q_proj holds [q D | gate D] per head, and norms store their weight less one."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    model = drawn(kv_heads=kv_heads, tied=tied, gates=[GateSpec()])
    everything = list(range(LAYERS))
    config = Qwen3NextConfig(
        **oracle_sizes(model.spec), layer_types=["full_attention"] * LAYERS, mlp_only_layers=everything
    )
    weights = {renamed(name): value - float("norm" in name) for name, value in model.state_dict().items()}
    for layer in everything:
        gate = weights.pop(f"model.layers.{layer}.self_attn.gates.sdpa.score.weight").view(H, D, C)
        q = f"model.layers.{layer}.self_attn.q_proj.weight"
        weights[q] = torch.cat((weights[q].view(H, D, C), gate), dim=1).view(2 * H * D, C)
    assert_same_logits(model, Qwen3NextForCausalLM(config), weights, tokens)


@pytest.mark.parametrize("sandwich_norm", [True, False])
def test_block_is_two_normed_branches(sandwich_norm, scramble):
    """x + n(attention(n(x))), then the same of the feed-forward; the outer norms only in the sandwich."""
    block = scramble(Block(replace(SPEC, sandwich_norm=sandwich_norm)))
    x = torch.randn(B, T, C, generator=torch.Generator().manual_seed(2))
    rope = angles(SPEC.rope, torch.arange(T)[None], D)
    weights = dict(block.named_parameters())

    def norm(name: str, y: Tensor) -> Tensor:
        return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[f"{name}_norm.weight"]

    def outer(name: str, y: Tensor) -> Tensor:
        return norm(f"{name}_post", y) if sandwich_norm else y

    h = x + outer("attention", block.attention(norm("attention", x), rope))
    y = h + outer("feedforward", block.feedforward(norm("feedforward", h))[0])
    torch.testing.assert_close(block(x, rope)[0], y, rtol=1e-5, atol=1e-5)


# --- what a token may see


@pytest.mark.parametrize("experts", [ExpertsSpec(), MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("gates", [[], EVERYWHERE], ids=["ungated", "gated"])
def test_causality(gates, experts, tokens, scramble):
    model = scramble(GatedLM(replace(SPEC, gates=gates, experts=experts, sandwich_norm=True)))
    before = model(tokens).logits
    for t in range(T):
        changed = tokens.clone()
        changed[:, t] = (changed[:, t] + 1) % V
        difference = (model(changed).logits - before).abs().amax((0, 2))
        assert (difference[:t] < 1e-6).all()
        assert (difference[t:] > 1e-4).all()


@pytest.mark.parametrize("experts", [ExpertsSpec(), MIXTURE], ids=["dense", "mixture"])
def test_packed_documents_do_not_see_each_other(experts, tokens, scramble):
    """Rows packed from documents of different lengths give the logits of the documents alone, positions and all."""
    model = scramble(GatedLM(replace(SPEC, gates=EVERYWHERE, experts=experts)))
    lengths = [[3, 4], [7], [1, 5, 1]]
    documents = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    packed = model(tokens, documents).logits
    for b, row in enumerate(lengths):
        alone = [model(document[None]).logits[0] for document in tokens[b].split(row)]
        torch.testing.assert_close(packed[b], torch.cat(alone), rtol=1e-5, atol=1e-5)
    assert (packed - model(tokens).logits).abs()[0, 3:].max() > 1e-2, "without the mask they would"


def test_no_leak_between_documents(tokens, scramble):
    model = scramble(GatedLM(replace(SPEC, gates=EVERYWHERE)))
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1]).expand(B, T)
    changed = tokens.clone()
    changed[:, 1] = (changed[:, 1] + 1) % V
    difference = (model(changed, documents).logits - model(tokens, documents).logits).abs().amax((0, 2))
    assert (difference > 1e-4).tolist() == [False, True, True, False, False, False, False]
    assert (difference[3:] < 1e-6).all()


def test_output_under_bf16_autocast(tokens, scramble):
    model = scramble(GatedLM(replace(SPEC, gates=EVERYWHERE, experts=MIXTURE)))
    seen: list[Tensor] = []
    for station in model.stations():
        for score in station.scores.values():
            score.register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.autocast("cpu", torch.bfloat16):
        output = model(tokens)
    assert output.logits.dtype == torch.bfloat16
    assert len(seen) == 5 * LAYERS and {score.dtype for score in seen} == {torch.float32}
    torch.testing.assert_close(output.logits.float(), model(tokens).logits, rtol=0.1, atol=0.3)


def test_routing_is_returned_layer_by_layer(tokens, scramble):
    assert scramble(GatedLM(SPEC))(tokens).routing == []
    routing = scramble(GatedLM(replace(SPEC, experts=MIXTURE)))(tokens).routing
    assert [decision.logits.shape for decision in routing] == [(B * T, 5)] * LAYERS
    assert not torch.equal(routing[0].logits, routing[1].logits)


def test_stations_are_where_the_docstring_says(tokens, scramble):
    model = scramble(GatedLM(replace(SPEC, gates=[GateSpec(), GateSpec("value", "headwise")])))
    seen: dict[str, Tensor] = {}
    first, second = model.stations()
    assert set(first.scores) == {"sdpa", "value"}
    first.block.register_forward_hook(lambda block, args, out: seen.update(block=out[0]))
    second.block.register_forward_pre_hook(lambda block, args: seen.update(next=args[0]))
    first.core.register_forward_hook(lambda core, args, out: seen.update(q=args[0], k=args[1], v=args[2], o=out))
    for place, score in first.scores.items():
        keep = {"y": f"{place} y", "score": place}
        score.register_forward_hook(lambda s, args, out, at=keep: seen.update({at["y"]: args[0], at["score"]: out}))
    model(tokens)
    assert torch.equal(seen["block"], seen["next"])
    assert torch.equal(seen["o"], seen["sdpa y"])
    torch.testing.assert_close(seen["v"], seen["value y"] * seen["value"])
    shapes = {"q": (B, T, H, D), "k": (B, T, G, D), "v": (B, T, G, D), "sdpa": (B, T, H, D), "value": (B, T, G, 1)}
    assert {name: tuple(seen[name].shape) for name in shapes} == shapes


# --- refusals


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kv_heads": 3}, "model.heads=8 is not a multiple of model.kv_heads=3"),
        ({"head_dim": 5}, "model.head_dim=5: RoPE turns pairs of channels, use an even number"),
        ({"experts": MIXTURE, "ffn": 60}, "grouped experts need multiples of 8"),
        ({"experts": MIXTURE, "width": 44}, "grouped experts need multiples of 8"),
        ({"layers": 0}, "model.layers=0: must be at least 1"),
        ({"gates": [GateSpec(), GateSpec(activation="silu")]}, "two gates at sdpa: each position takes one"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        replace(SPEC, **change)


def test_rope_base_must_be_above_one():
    with pytest.raises(ValueError, match=r"model.rope.base=1.0: must be above 1"):
        RopeSpec(1.0)


@pytest.mark.parametrize(
    ("gate", "sizes"),
    [
        (GateSpec("sdpa", "headwise", "shared"), {}),
        (GateSpec("sdpa", "headwise"), {"heads": 1, "kv_heads": 1}),
        (GateSpec("value", "headwise", "shared", source="constant"), {}),
        (GateSpec("value", "headwise", source="constant"), {"kv_heads": 1}),
    ],
    ids=str,
)
def test_sandwich_norm_cancels_a_factor_per_token(gate, sizes, tokens, scramble):
    """Such a gate acts without the norm, does nothing with it, and is refused there."""
    spec = replace(SPEC, **sizes)
    with pytest.raises(ValueError, match=r"cancels one factor per token: use .*model.sandwich_norm=false"):
        replace(spec, gates=[gate], sandwich_norm=True)
    for sandwich_norm in (True, False):
        model = scramble(GatedLM(replace(spec, sandwich_norm=sandwich_norm)))
        before = model(tokens).logits
        for block in model.blocks:
            heads = spec.heads if gate.position == "sdpa" else spec.kv_heads
            block.attention.gates[gate.position] = scramble(Gate(gate, C, heads, D))  # type: ignore[union-attr, index]
        change = (model(tokens).logits - before).abs().max()
        assert change < 1e-3 if sandwich_norm else change > 1e-1


def test_sandwich_norm_keeps_the_gates_it_does_not_cancel():
    kept = [GateSpec("sdpa", "headwise"), GateSpec("value", "headwise", "shared"), GateSpec("output")]
    replace(SPEC, gates=kept, sandwich_norm=True)
    twice = GateSpec("output", combine="replace", activation="rmsnorm", source="self")
    with pytest.raises(ValueError, match=r"does the same right after it: drop the gate or set model.sandwich_norm"):
        replace(SPEC, gates=[twice], sandwich_norm=True)


# --- counts of parameters


def built(spec: ModelSpec) -> GatedLM:
    with torch.device("meta"):
        return GatedLM(spec)


def counted(spec: ModelSpec) -> Parameters:
    """The same figures from the tensors of a built model."""
    sizes = {name: p.numel() for name, p in built(spec).named_parameters()}
    experts = sum(n for name, n in sizes.items() if re.search(r"feedforward\.(up|down)_proj$", name))
    idle = experts // max(1, spec.experts.count) * (spec.experts.count - spec.experts.used) if experts else 0
    total = sum(sizes.values())
    return Parameters(total, total - idle, sum(n for name, n in sizes.items() if ".score." in name))


def accepted_gates() -> list[GateSpec]:
    from test_gate import ACCEPTED

    return ACCEPTED


@pytest.mark.parametrize("experts", [ExpertsSpec(), MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("sandwich_norm", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_formula_equals_the_built_model_for_every_gate(qk_norm, sandwich_norm, tied, experts):
    spec = replace(SPEC, qk_norm=qk_norm, sandwich_norm=sandwich_norm, tied=tied, experts=experts)
    assert spec.parameters() == counted(spec)
    seen = set()
    for gate in accepted_gates():
        shape = (gate.position, gate.granularity, gate.source, gate.activation == "rmsnorm")
        if shape in seen:
            continue  # sharing, combine and activation change no tensor
        try:
            gated = replace(spec, gates=[gate])
        except ValueError:
            continue
        seen.add(shape)
        assert gated.parameters() == counted(gated), gate
    assert len(seen) == 28 - 2 * qk_norm - sandwich_norm


def test_formula_for_five_gates():
    spec = replace(SPEC, gates=EVERYWHERE)
    assert spec.parameters() == counted(spec)
    assert spec.parameters().gate == LAYERS * C * (2 * H * D + 2 * G * D + C)


LAYERS_28 = ModelSpec(151_936, 28, 2048, 16, 8, 128, 6144, tied=True)
LAYERS_48 = replace(LAYERS_28, layers=48, width=1536, ffn=4608)
TABLE_1 = ModelSpec(151_936, 24, 2048, 32, 4, 128, 768, experts=ExpertsSpec(128, 8))
RELEASED = 152_064


def millions(spec: ModelSpec) -> float:
    total = spec.parameters().total
    assert total == counted(spec).total
    return round(total / 1e6, 1)


def test_dense_counts_of_the_paper():
    """Appendix A.2, and the sizes of the released checkpoints."""
    released = replace(LAYERS_28, vocab=RELEASED)
    headwise, elementwise = (replace(released, gates=[GateSpec(granularity=g)]) for g in ("headwise", "elementwise"))
    assert millions(LAYERS_28) == 1720.6
    assert millions(released) == 1720.8
    assert millions(headwise) == 1721.8
    assert millions(LAYERS_48) == 1705.7
    assert headwise.matched_to(released, 128) == headwise
    matched = elementwise.matched_to(released, 128)
    assert (matched.ffn, millions(matched)) == (5504, 1728.2)
    matched = replace(LAYERS_48, gates=[GateSpec()]).matched_to(LAYERS_48, 128)
    assert (matched.ffn, millions(matched)) == (3968, 1715.2)


def test_mixture_counts_of_the_paper():
    """15.58B of which 1.99B work on a token; the paper says 2.54B, which its own table does not give."""
    parameters = TABLE_1.parameters()
    assert parameters == counted(TABLE_1)
    assert (round(parameters.total / 1e9, 2), round(parameters.active / 1e9, 2)) == (15.58, 1.99)


ADDED: list[tuple[int, dict[str, Any], str]] = [
    (1, {}, "0"),
    (2, {"kv_heads": 8}, "50.3"),
    (3, {"heads": 48}, "201.3"),
    (4, {"experts": ExpertsSpec(132, 8)}, "453"),
    (5, {"gates": [GateSpec()]}, "201.3"),
    (6, {"gates": [GateSpec("value")]}, "25.2"),
    (7, {"gates": [GateSpec("key")]}, "25.2"),
    (8, {"gates": [GateSpec("query")]}, "201.3"),
    (9, {"gates": [GateSpec("output")]}, "100.7"),
    (10, {"gates": [GateSpec("sdpa", "headwise")]}, "1.57"),
    (11, {"gates": [GateSpec("value", "headwise")]}, "0.197"),
    (12, {"gates": [GateSpec("sdpa", sharing="shared")]}, "201.3"),
    (13, {"gates": [GateSpec("value", sharing="shared")]}, "25.2"),
    (14, {"gates": [GateSpec(combine="add", activation="silu")]}, "201.3"),
    (15, {"gates": [GateSpec(activation="silu")]}, "201.3"),
]


@pytest.mark.parametrize(("row", "change", "added"), ADDED, ids=[f"row-{row}" for row, _, _ in ADDED])
def test_added_parameters_of_table_1(row, change, added):
    """In millions, to the last printed digit; row 4 as its widths give it, the paper prints 400."""
    spec = replace(TABLE_1, **change)
    more = (spec.parameters().total - TABLE_1.parameters().total) / 1e6
    digits = len(added.partition(".")[2])
    assert f"{more:.{digits}f}" == added
    assert spec.parameters().gate / 1e6 == (more if row >= 5 else 0)
    assert spec.parameters().total == counted(spec).total


@pytest.mark.parametrize(
    ("gate", "added"),
    [
        (GateSpec(combine="replace", activation="rmsnorm", source="self"), 24 * 128),  # Table 3, row 5
        (GateSpec(combine="replace", activation="silu", source="self"), 0),  # row 6
        (GateSpec(combine="add", activation="identity"), 24 * 2048 * 4096),  # row 7
        (GateSpec(source="constant"), 24 * 4096),  # Table 4, row 6
        (GateSpec(activation="ns_sigmoid"), 24 * 2048 * 4096),  # row 7
    ],
    ids=str,
)
def test_gate_parameters_of_tables_3_and_4(gate, added):
    assert replace(TABLE_1, gates=[gate]).parameters().gate == added


@pytest.mark.parametrize("multiple", [8, 128])
@pytest.mark.parametrize("experts", [ExpertsSpec(), MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("gates", [EVERYWHERE[3:4], EVERYWHERE], ids=["one", "five"])
def test_matched_to_rounds_up_by_less_than_one_step(gates, experts, multiple):
    base = replace(SPEC, width=256, ffn=1024, experts=experts)
    gated = replace(base, gates=gates)
    matched = gated.matched_to(base, multiple)
    step = 3 * base.width * LAYERS * multiple * (experts.count or 1)
    assert matched.ffn % multiple == 0 and replace(matched, ffn=gated.ffn) == gated
    assert 0 <= matched.parameters().total - base.parameters().total < step
    assert base.matched_to(base, multiple) == base


# --- beginnings


def begun(spec: ModelSpec, seed: int = 7) -> dict[str, Tensor]:
    model = GatedLM(spec)
    initialise(model, seed)
    return dict(model.state_dict())


def test_initial_weights_are_those_of_the_table():
    """The table in ``initialise``: 0.02, less on the two ways back into the residual stream, ones and zeros."""
    gates = [GateSpec(), GateSpec("value", source="constant"), GateSpec("output")]
    gates.append(GateSpec("query", combine="replace", activation="silu", source="self"))
    gates.append(GateSpec("key", source="constant", granularity="headwise", combine="add"))
    norm = GateSpec(combine="replace", activation="rmsnorm", source="self")
    spec = replace(SPEC, vocab=300, layers=4, width=96, sandwich_norm=True)
    kinds: dict[str, set[str]] = {"0.02": set(), "scaled": set(), "ones": set(), "zeros": set()}
    for variant in (replace(spec, gates=gates), replace(spec, gates=[norm], experts=MIXTURE)):
        for name, weight in begun(variant).items():
            kind = kind_of(weight, scaled=0.02 / (2 * 4) ** 0.5)
            kinds[kind].add(re.sub(r"blocks\.\d\.", "", name).removesuffix(".weight"))
    assert kinds == {
        "0.02": {"embed", "head", "feedforward.router", "feedforward.silu_proj", "feedforward.up_proj"}
        | {f"attention.{x}" for x in ("q_proj", "k_proj", "v_proj", "gates.sdpa.score", "gates.output.score")},
        "scaled": {"attention.o_proj", "feedforward.down_proj"},
        "ones": {"norm", "attention.q_norm", "attention.k_norm", "attention.gates.sdpa.score.act"}
        | {f"{place}{post}_norm" for place in ("attention", "feedforward") for post in ("", "_post")},
        "zeros": {f"attention.gates.{place}.score.table" for place in ("value", "key")},
    }


def kind_of(weight: Tensor, scaled: float) -> str:
    if weight.unique().numel() == 1:
        return {0.0: "zeros", 1.0: "ones"}[weight.flatten()[0].item()]
    spread = 5 / (2 * weight.numel()) ** 0.5  # five standard errors of a standard deviation
    assert abs(weight.mean()) < 5 * weight.std() / weight.numel() ** 0.5
    (kind,) = [word for word, std in (("0.02", 0.02), ("scaled", scaled)) if abs(weight.std() / std - 1) < spread]
    return kind


def test_initial_weights_depend_on_seed_and_name_only():
    base, again, other = begun(SPEC), begun(SPEC), begun(SPEC, seed=8)
    gated = begun(replace(SPEC, gates=EVERYWHERE, sandwich_norm=True))
    deeper = begun(replace(SPEC, layers=LAYERS + 1))
    for name, weight in base.items():
        assert torch.equal(weight, again[name]) and torch.equal(weight, gated[name])
        assert (weight.dim() == 1) == torch.equal(weight, other[name])
        if not name.endswith(("o_proj.weight", "down_proj.weight")):
            assert torch.equal(weight, deeper[name])
    drawn = [weight.flatten()[:200] for weight in gated.values() if weight.dim() > 1]
    for one, two in itertools.combinations(drawn, 2):
        assert not torch.equal(one[: len(two)], two[: len(one)]), "two tensors share their numbers"


def test_initial_weights_ignore_and_leave_the_global_random_state():
    torch.manual_seed(0)
    first, state = begun(SPEC), torch.get_rng_state()
    model = GatedLM(SPEC)
    torch.set_rng_state(state)
    initialise(model, 7)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], weight) for name, weight in model.state_dict().items())


def test_every_parameter_is_drawn():
    model = GatedLM(replace(SPEC, gates=EVERYWHERE, experts=MIXTURE, sandwich_norm=True))
    for parameter in model.parameters():
        nn.init.constant_(parameter, torch.nan)
    initialise(model, 7)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_tied_model_reads_out_with_its_embedding(tokens):
    tied, untied = GatedLM(replace(SPEC, tied=True)), GatedLM(SPEC)
    initialise(tied, 7)
    assert tied.state_dict().keys() == untied.state_dict().keys() - {"head.weight"}
    untied.load_state_dict(tied.state_dict() | {"head.weight": tied.embed.weight})
    assert torch.equal(tied(tokens).logits, untied(tokens).logits)


def test_fresh_model_guesses_about_uniformly(tokens):
    """At the start the loss is near log V, whatever the gates."""
    for gates in ([], EVERYWHERE):
        model = GatedLM(replace(SPEC, gates=gates, experts=MIXTURE))
        initialise(model, 7)
        loss = nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), tokens.flatten())
        assert loss.item() == pytest.approx(torch.log(torch.tensor(V)).item(), abs=0.1)
