"""Probes against dense softmax written out here, against planted facts, and as silent witnesses of a pass."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gatedlm.model.gate import GateSpec
from gatedlm.model.lm import GatedLM, ModelSpec
from gatedlm.model.rope import RopeSpec, angles
from gatedlm.probes import (
    LayerTrace,
    Summary,
    attention_map,
    count_scores,
    effective_sink,
    f_attn,
    f_attn_where,
    first_token_attention,
    first_value,
    m_act,
    sink_rate,
    small_outputs,
    summarise,
    tracing,
    value_drain,
    watching,
)

L, B, T, H, G, D, C, V = 3, 2, 7, 8, 4, 6, 40, 23
HEADWISE = GateSpec(granularity="headwise")
SHARED = GateSpec("value", sharing="shared")


@pytest.fixture
def model(scramble: Callable[..., nn.Module]) -> GatedLM:
    return build(scramble, HEADWISE, SHARED)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(1, V, (B, T), generator=torch.Generator().manual_seed(5))


def build(scramble: Callable[..., nn.Module], *gates: GateSpec, **sizes: Any) -> GatedLM:
    spec: dict[str, Any] = {"vocab": V, "layers": L, "width": C, "heads": H, "kv_heads": G, "head_dim": D, "ffn": 16}
    model = scramble(GatedLM(ModelSpec(gates=list(gates), **spec | sizes)))
    assert isinstance(model, GatedLM)
    return model


def layer_of(q: Tensor, k: Tensor, mask: Tensor | None = None, **seen: Any) -> LayerTrace:
    rest = {"v": k, "sdpa": q, "gated": q, "hidden": torch.zeros(*q.shape[:2], C), "scores": {}}
    return LayerTrace(q=q, k=k, mask=mask, **rest | seen)


def queries_and_keys() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k = (2 * torch.randn(B, T, heads, D, generator=generator) for heads in (H, G))
    return q, k


def packed() -> Tensor:
    """The mask of rows that hold two documents, the second from token 4 in row 0 and from token 2 in row 1."""
    document = torch.arange(T) >= torch.tensor([[4], [2]])
    return ((document[:, :, None] == document[:, None, :]) & torch.ones(T, T).tril().bool())[:, None]


def dense(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """The whole map in double precision, (B, H, T, T), one head and one query at a time."""
    full = torch.zeros(q.shape[0], H, q.shape[1], q.shape[1], dtype=torch.double)
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in full.shape[:3])).tolist():
        seen = torch.arange(i + 1) if mask is None else mask[b, 0, i].nonzero().flatten()
        weight = (k[b, seen, h // (H // G)].double() @ q[b, i, h].double() / math.sqrt(D)).exp()
        full[b, h, i, seen] = weight / weight.sum()
    return full


@pytest.mark.parametrize("mask", [None, packed()], ids=["causal", "documents"])
@pytest.mark.parametrize("chunk", [1, 3, T, 256])
def test_first_token_attention_is_column_0_of_the_dense_map(mask: Tensor | None, chunk: int):
    q, k = queries_and_keys()
    first = first_token_attention(q, k, mask, chunk)
    torch.testing.assert_close(first, dense(q, k, mask)[..., 0].float())
    assert mask is None or torch.equal(first[0] > 0, (torch.arange(T) < 4).expand(H, T))


@pytest.mark.parametrize("mask", [None, packed()], ids=["causal", "documents"])
def test_attention_map_holds_the_chosen_rows(mask: Tensor | None):
    q, k = queries_and_keys()
    rows = attention_map(layer_of(q, k, mask), torch.tensor([5, 0, 3]))
    torch.testing.assert_close(rows, dense(q, k, mask)[:, :, [5, 0, 3]].float())


def test_the_map_is_the_models_own(model: GatedLM, tokens: Tensor):
    """A v, with the traced v, is the traced SDPA output: q and k were taken where attention uses them."""
    documents = torch.tensor([[0] * 4 + [1] * 3, [0] * 2 + [1] * 5])
    with tracing(model) as trace:
        model(tokens, documents)
    for layer in trace:
        rows = attention_map(layer, torch.arange(T))
        v = layer.v.repeat_interleave(H // G, dim=2)
        torch.testing.assert_close(torch.einsum("bhts,bshd->bthd", rows, v), layer.sdpa)
        torch.testing.assert_close(first_token_attention(layer.q, layer.k, layer.mask, chunk=2), rows[..., 0])


def test_planted_sink_and_planted_uniform():
    q, k = torch.ones(B, T, H, D), torch.zeros(B, T, G, D)
    uniform = first_token_attention(q, k)
    torch.testing.assert_close(uniform, (1 / torch.arange(1.0, T + 1)).expand(B, H, T))
    assert f_attn(uniform).item() == pytest.approx(sum(1 / (i + 1) for i in range(1, T)) / (T - 1))
    assert f_attn(uniform, skip=4).item() == pytest.approx((1 / 5 + 1 / 6 + 1 / 7) / 3)
    k[:, 0] = 100
    assert f_attn(first_token_attention(q, k)) == 1


def test_sink_rate_counts_heads_of_rows_above_the_threshold():
    first = torch.zeros(B, H, T)
    first[..., 0] = 1
    first[0, :3] = 0.4
    first[1, 2] = 0.3001
    assert sink_rate(first).item() == 4 / (B * H)
    assert sink_rate(first, threshold=0.35).item() == 3 / (B * H)
    assert sink_rate(first, threshold=0.1).item() == 1, "query 0 alone gives each head 1/T"


def test_f_attn_where_takes_only_the_named_queries():
    first = torch.rand(B, H, T, generator=torch.Generator().manual_seed(0))
    where = torch.zeros(B, T, dtype=torch.bool)
    where[0, 2] = where[1, 5] = where[1, 6] = True
    expected = torch.cat((first[0, :, 2], first[1, :, 5], first[1, :, 6])).mean()
    torch.testing.assert_close(f_attn_where(first, where), expected)


def test_value_drain_is_the_first_values_size_over_the_others():
    q, k = queries_and_keys()
    v = torch.ones(B, T, G, D) * torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None]
    v[0, 0] *= 0.1
    v[1, 0] *= 0.3
    layer = layer_of(q, k, v=v)
    assert value_drain(layer).item() == pytest.approx(0.2)
    assert first_value(layer).item() == pytest.approx(0.2 * 2.5 * math.sqrt(D))


@pytest.mark.parametrize("score", [None, (H, D), (H, 1), (1, D)], ids=["none", "elementwise", "headwise", "shared"])
def test_effective_sink_is_attention_times_score_times_drain(score: tuple[int, int] | None):
    """Written out head by head and query by query, each head with the values of its own group."""
    q, k = queries_and_keys()
    generator = torch.Generator().manual_seed(8)
    v, first = torch.randn(B, T, G, D, generator=generator), dense(q, k)[..., 0].float()
    scores = torch.ones(B, T, H, D) if score is None else torch.rand(B, T, *score, generator=generator)
    terms = []
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (B, H, T))).tolist():
        sizes = [float(v[b, t, h // (H // G)].square().sum().sqrt()) for t in range(T)]
        drain = sizes[0] / (sum(sizes[1:]) / (T - 1))
        terms += [float(first[b, h, i] * scores.expand(B, T, H, D)[b, i, h].mean()) * drain] if i else []
    found = effective_sink(layer_of(q, k, v=v), first, None if score is None else scores)
    assert len(terms) == B * H * (T - 1) and found.item() == pytest.approx(sum(terms) / len(terms))


def test_small_outputs_are_counted_on_both_sides_of_the_gate():
    before, after = torch.full((1, 5, 2, 10), -0.5), torch.zeros(1, 5, 2, 10)
    before[0, 0, 0, :3] = torch.tensor([0.0099, -0.0009, 0.01])
    after[0, 1:, :, 0] = 0.002
    found = small_outputs(layer_of(before, before, sdpa=before, gated=after))
    assert {name: value.item() for name, value in found.items()} == pytest.approx(
        {
            "sdpa_before": (97 * 0.5 + 0.0208) / 100,
            "small_before_0.01": 0.02,
            "small_before_0.001": 0.01,
            "sdpa_after": 8 * 0.002 / 100,
            "small_after_0.01": 1,
            "small_after_0.001": 0.92,
        }
    )


@pytest.mark.parametrize(
    "gates", [(), (SHARED,), (HEADWISE,), (GateSpec(combine="replace", activation="silu", source="self"),)], ids=str
)
def test_the_tensor_after_the_gate_is_what_the_output_projection_takes(
    scramble: Callable[..., nn.Module], tokens: Tensor, gates: tuple[GateSpec, ...]
):
    model, arrived = build(scramble, *gates), []
    for block in model.blocks:
        block.get_submodule("attention.o_proj").register_forward_pre_hook(lambda m, args: arrived.append(args[0]))
    with tracing(model) as trace:
        model(tokens)
    for layer, x in zip(trace, arrived, strict=True):
        assert torch.equal(layer.gated.flatten(-2), x)
        score = layer.scores.get("sdpa")
        expected = layer.sdpa if score is None else score if gates[0].source == "self" else layer.sdpa * score
        assert torch.equal(layer.gated, expected)


@torch.no_grad()
def test_watching_holds_one_layer_at_a_time(model: GatedLM, tokens: Tensor):
    kept: list[list[StorageWeakRef]] = []
    for station in model.stations():
        station.core.register_forward_hook(
            lambda m, args, out: kept.append([StorageWeakRef(t.untyped_storage()) for t in (*args[:3], out)])
        )

    def see(layer: LayerTrace) -> float:
        assert all(storage.expired() for earlier in kept[:-1] for storage in earlier)
        assert not any(storage.expired() for storage in kept[-1]), "a layer's own are there"
        return layer.hidden.abs().max().item()

    with watching(model, see) as seen:
        model(tokens)
    with tracing(model) as trace:
        model(tokens)
    assert seen == [m_act(layer).size for layer in trace]


def test_m_act_names_what_holds_the_outlier(model: GatedLM, tokens: Tensor):
    def plant(block: nn.Module, args: Any, output: Any) -> Any:
        output[0][1, 4, 31] = -5000.0
        return output

    model.blocks[1].register_forward_hook(plant)
    with tracing(model) as trace:
        model(tokens)
    found = [m_act(layer) for layer in trace]
    assert max(range(L), key=lambda layer: found[layer].size) in (1, 2), "layer 2 adds to what layer 1 left"
    assert found[1] == (5000, 1, 4, 31)
    assert found[0].size == pytest.approx(trace[0].hidden.abs().max().item()) and found[0].size < 500


def test_scores_equal_the_gate_evaluated_by_hand(model: GatedLM, tokens: Tensor):
    inputs: list[Any] = []
    for block in model.blocks:
        block.get_submodule("attention_norm").register_forward_hook(lambda m, i, out: inputs.append(out))
    with tracing(model) as trace:
        model(tokens)
    for block, x, layer in zip(model.blocks, inputs, trace, strict=True):
        gates = block.get_submodule("attention.gates")
        headwise, shared = (gates.get_parameter(f"{place}.score.weight") for place in ("sdpa", "value"))
        expected = {
            "sdpa": torch.sigmoid(x @ headwise.T).view(B, T, H, 1),
            "value": torch.sigmoid(x @ shared.T).view(B, T, G, D).mean(2, keepdim=True),
        }
        torch.testing.assert_close(layer.scores, expected, check_dtype=True)


def test_scores_are_counted_in_fifty_bins_with_the_outside_at_the_edges():
    score = torch.tensor([-3.0, 0.0, 0.0199, 0.02, 0.0999, 0.1, 0.5, 0.999, 1.0, 7.0, -0.2]).view(1, 11, 1, 1)
    counted = count_scores(score)
    filled = {place: count for place, count in enumerate(counted.histogram.tolist()) if count}
    assert filled == {0: 4, 1: 1, 4: 1, 5: 1, 25: 1, 49: 3}
    assert counted.share_below.item() == pytest.approx((score < 0.1).float().mean().item())
    assert counted.mean.item() == pytest.approx(score.mean().item())
    diverged = count_scores(torch.full((1, 2, 1, 1), torch.nan))
    assert diverged.histogram.sum() == 2 and diverged.mean.isnan()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_tracing_changes_nothing(model: GatedLM, tokens: Tensor, training: bool, autocast: bool):
    def step() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(tokens).logits
        grads = torch.autograd.grad(logits.float().logsumexp(-1).sum(), list(model.parameters()))
        return [logits.detach(), torch.get_rng_state(), *grads]

    model.train(training)
    without = step()
    with tracing(model) as trace:
        within = step()
    assert all(torch.equal(a, b) for a, b in zip(without, within, strict=True))
    assert not any(leaf.requires_grad for layer in trace for leaf in tree_leaves(vars(layer)) if leaf is not None)
    assert all(torch.equal(a, b) for a, b in zip(without, step(), strict=True))


def test_figures_are_fp32_under_autocast(model: GatedLM, tokens: Tensor):
    with torch.autocast("cpu", torch.bfloat16):
        with tracing(model) as trace:
            model(tokens)
        inside = [first_token_attention(layer.q, layer.k) for layer in trace]
    assert trace[0].q.dtype == torch.bfloat16 and trace[0].scores["sdpa"].dtype == torch.float32
    for layer, first in zip(trace, inside, strict=True):
        torch.testing.assert_close(first, dense(layer.q, layer.k)[..., 0].float())


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_hooks_go_even_after_an_error(model: GatedLM, tokens: Tensor):
    with pytest.raises(KeyError), tracing(model) as trace:
        model(tokens)
        assert hooks(model) == L * (1 + 1 + 1 + 2)
        raise KeyError
    assert hooks(model) == 0 and trace == []


def test_a_silent_station_is_an_error(model: GatedLM):
    with pytest.raises(ValueError, match="inside the `with` block, and trace the eager model"), tracing(model):
        model.blocks[0](torch.randn(B, T, C), angles(model.spec.rope, torch.arange(T)[None], D))
    assert hooks(model) == 0


def test_a_compiled_model_is_refused():
    """In a process of its own, because the compiler cannot read through the shape checks of the tests."""
    program = """
import torch
from gatedlm.model.lm import GatedLM, ModelSpec
from gatedlm.probes import tracing
compiled = torch.compile(GatedLM(ModelSpec(layers=1)), backend="eager")
tokens = torch.zeros(1, 3, dtype=torch.long)
compiled(tokens)
with tracing(compiled):
    compiled(tokens)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1 and "ValueError: tracing saw nothing" in done.stderr, done.stderr


def test_summary_equals_the_probes_one_by_one(model: GatedLM, tokens: Tensor):
    with tracing(model) as trace:
        model(tokens)
    summary = summarise(model, tokens, batch=B)
    maps = [dense(layer.q, layer.k)[..., 0] for layer in trace]
    by_hand = {
        "f_attn": [first[..., 1:].mean() for first in maps],
        "f_attn_skip4": [first[..., 4:].mean() for first in maps],
        "sink_rate": [(first.mean(-1) > 0.3).double().mean() for first in maps],
        "first_value": [first_value(layer) for layer in trace],
        "value_drain": [value_drain(layer) for layer in trace],
        "effective_sink": [
            effective_sink(layer, first.float(), layer.scores["sdpa"]) for layer, first in zip(trace, maps, strict=True)
        ],
        **{name: [small_outputs(layer)[name] for layer in trace] for name in small_outputs(trace[0])},
        "m_act": [layer.hidden.abs().max() for layer in trace],
        "gate_score": [(layer.scores["sdpa"].mean() + layer.scores["value"].mean()) / 2 for layer in trace],
        "share_below": [sum((s < 0.1).float().mean() for s in layer.scores.values()) / 2 for layer in trace],
    }
    assert summary.by_layer.keys() == by_hand.keys() == summary.totals.keys()
    for name, layers in by_hand.items():
        assert summary.by_layer[name] == pytest.approx([float(layer) for layer in layers], abs=1e-6), name
        assert summary.totals[name] == pytest.approx(float(sum(layers)) / L, abs=1e-6), name
    assert summary.outliers == [m_act(layer) for layer in trace]
    assert 0 < by_hand["sink_rate"][0] < 1 and by_hand["share_below"][0] > 0, "else these two test nothing"


def test_batches_and_ranks_merge_into_the_whole(model: GatedLM):
    tokens = torch.randint(1, V, (5, T), generator=torch.Generator().manual_seed(9))
    whole = summarise(model, tokens, batch=5)
    ranks = summarise(model, tokens[:3], batch=1) + summarise(model, tokens[3:], batch=2)
    for summary in (summarise(model, tokens, batch=2), ranks):
        assert summary.rows == 5
        assert flat(summary) == pytest.approx(flat(whole), rel=1e-5)
        assert [outlier[1:] for outlier in summary.outliers] == [outlier[1:] for outlier in whole.outliers]
        for position, scores in summary.scores.items():
            assert torch.equal(scores.histogram, whole.scores[position].histogram)
            assert (scores.histogram.sum(-1) == 5 * T * {"sdpa": H, "value": D}[position]).all()


def flat(summary: Summary) -> list[float]:
    return [figure for layers in summary.by_layer.values() for figure in layers]


@pytest.mark.parametrize("training", [True, False])
def test_summary_leaves_the_model_as_it_was(model: GatedLM, tokens: Tensor, training: bool):
    model.train(training)
    states: list[tuple[bool, bool]] = []
    watch = model.register_forward_pre_hook(lambda m, args: states.append((m.training, torch.is_grad_enabled())))
    before, row = torch.get_rng_state(), tokens.clone()
    told = summarise(model, tokens, batch=1, first=0).as_dict()
    watch.remove()
    assert states == [(False, False)] * B
    assert torch.equal(torch.get_rng_state(), before) and torch.equal(tokens, row)
    assert model.training is training and all(p.grad is None for p in model.parameters()) and hooks(model) == 0
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert len(told["scores"]["sdpa"]["histogram"]) == L and len(told["scores"]["sdpa"]["histogram"][0]) == 50


def test_only_gates_with_a_score_have_a_gate_score(scramble: Callable[..., nn.Module], tokens: Tensor):
    itself = GateSpec(combine="replace", activation="silu", source="self")
    assert summarise(build(scramble), tokens, batch=B).totals["gate_score"] is None
    assert summarise(build(scramble, itself), tokens, batch=B).totals["share_below"] is None
    both = summarise(build(scramble, itself, SHARED), tokens, batch=B)
    assert list(both.scores) == ["value"]
    assert both.totals["gate_score"] == pytest.approx(both.scores["value"].mean.mean().item())


@torch.no_grad()
def test_fixed_first_token_shows_the_sink_that_packing_hides(scramble: Callable[..., nn.Module], tokens: Tensor):
    """Only token 0 has a key: attention is all on it, and uniform where it is absent."""
    model = build(scramble, layers=1, qk_norm=False, rope=RopeSpec(1e12))
    model.embed.weight.zero_()
    model.embed.weight[0, 0] = 1
    model.embed.weight[1:, 1] = 1
    attention = model.blocks[0].get_submodule("attention")
    q, k = (attention.get_parameter(f"{name}_proj.weight").zero_() for name in "qk")
    q.view(H, D, C)[:, D - 1, 1] = 10
    k.view(G, D, C)[:, D - 1, 0] = 10
    assert summarise(model, tokens, batch=1, first=0).totals["f_attn"] == pytest.approx(1)
    uniform = sum(1 / (i + 1) for i in range(1, T)) / (T - 1)
    assert summarise(model, tokens, batch=1).totals["f_attn"] == pytest.approx(uniform)


class Largest(TorchDispatchMode):
    """The most memory, in bytes, that one operation's tensors hold together, views with all they keep alive."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, Tensor)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        self.size = max(self.size, sum(storages.values()))
        return out


def test_long_rows_never_build_the_map(scramble: Callable[..., nn.Module]):
    length, heads = 4096, 2
    model = build(scramble, HEADWISE, layers=1, width=8, heads=heads, kv_heads=1, head_dim=4)
    tokens = torch.zeros(1, length, dtype=torch.long)
    with Largest() as seen:
        summarise(model, tokens, batch=1)
    one_chunk = 4 * heads * 256 * length
    assert seen.size < one_chunk, "the log-sum-exp comes with the attention"
    with Largest() as seen:
        summarise(model.bfloat16(), tokens, batch=1)
    assert one_chunk <= seen.size <= 4 * one_chunk < 4 * heads * length**2
    model.float()
    with tracing(model) as trace:
        model(tokens[:, :1024])
    with Largest() as seen:
        attention_map(trace[0], torch.arange(1024))
    assert seen.size >= 4 * heads * 1024**2, "the meter sees a whole map"
