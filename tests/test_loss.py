"""Each term against its formula, over masked, unequal and split batches."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gatedlm import loss
from gatedlm.loss import LossSpec, expert_counts, load_balance, next_token, router_z, shift, terms
from gatedlm.model.feedforward import ExpertsSpec, Routing
from gatedlm.model.lm import GatedLM, ModelSpec

B, T, V, LAYERS, E, K = 4, 7, 31, 3, 5, 2
N = B * T
HALVES = [slice(0, 2), slice(2, 4)]


@pytest.fixture
def valid() -> Tensor:
    """Rows keep 7, 4, 1 and 0 of their targets."""
    return torch.arange(T) < torch.tensor([7, 4, 1, 0])[:, None]


@pytest.fixture
def logits() -> Tensor:
    return 3 * torch.randn(B, T, V, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def targets() -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def routing() -> list[Routing]:
    generator = torch.Generator().manual_seed(2)
    return [decide(torch.randn(N, E, generator=generator)) for _ in range(LAYERS)]


def decide(logits: Tensor) -> Routing:
    weight, index = logits.softmax(-1).topk(K)
    return Routing(logits, index, weight)


def part(routing: list[Routing], rows: slice) -> list[Routing]:
    """The decisions for some of the B rows."""
    return [Routing(*(t.unflatten(0, (B, T))[rows].flatten(0, 1) for t in decision)) for decision in routing]


def test_shift_moves_by_one():
    inputs, targets = shift(torch.arange(16).view(2, 8))
    assert inputs.tolist() == [[0, 1, 2, 3, 4, 5, 6], [8, 9, 10, 11, 12, 13, 14]]
    assert torch.equal(targets, inputs + 1)


def test_next_token_is_the_sum_over_valid_targets(logits, targets, valid):
    by_hand = sum(
        torch.log(torch.exp(logits[b, t]).sum()) - logits[b, t, targets[b, t]]
        for b in range(B)
        for t in range(T)
        if valid[b, t]
    )
    torch.testing.assert_close(next_token(logits, targets, valid), by_hand)
    uniform = next_token(torch.zeros(B, T, V), targets)
    assert uniform.item() == pytest.approx(N * torch.log(torch.tensor(V)).item(), rel=1e-5)


def test_next_token_is_fp32(logits, targets):
    nats = next_token(logits.bfloat16(), targets)
    assert nats.dtype == torch.float32
    assert torch.equal(nats, next_token(logits.bfloat16().float(), targets))


def test_masked_targets_have_no_say(logits, targets, valid):
    logits = logits.requires_grad_()
    nats = next_token(logits, targets, valid)
    assert torch.equal(nats, next_token(logits, torch.where(valid, targets, (targets + 1) % V), valid))
    (grad,) = torch.autograd.grad(nats, logits)
    assert torch.equal(grad.abs().sum(-1) > 0, valid)


def test_expert_counts(routing, valid):
    counts = expert_counts(routing, valid)
    for layer, decision in enumerate(routing):
        chosen = decision.index.view(B, T, K)[valid].flatten().tolist()
        assert counts[layer].tolist() == [chosen.count(e) for e in range(E)]
    assert counts.sum(-1).tolist() == [valid.sum().item() * K] * LAYERS


@pytest.mark.parametrize("even", ["router", "experts"])
def test_uniform_routing_gives_one_per_layer_and_token(even, routing):
    """Either the router's softmax or the use of the experts is uniform: sum_e f_e p_e is then 1/E."""
    everyone = torch.ones(B, T, dtype=torch.bool)
    if even == "router":
        routing = [Routing(torch.full((N, E), 0.7), decision.index, decision.weight) for decision in routing]
        counts = expert_counts(routing, everyone)
        assert counts.min() < counts.max()
    else:
        counts = torch.full((LAYERS, E), 9)
    assert load_balance(routing, counts, everyone).item() == pytest.approx(LAYERS * N, rel=1e-5)


def test_all_tokens_to_one_expert_give_the_number_of_experts():
    certain = torch.full((N, E), -50.0)
    certain[:, 2] = 50.0
    counts = torch.zeros(1, E, dtype=torch.long)
    counts[0, 2] = N
    everyone = torch.ones(B, T, dtype=torch.bool)
    assert load_balance([decide(certain)], counts, everyone).item() == pytest.approx(E * N)


def test_load_balance_equals_the_formula(routing, valid):
    by_hand = torch.tensor(0.0)
    for decision in routing:
        p, index = decision.logits.softmax(-1)[valid.flatten()], decision.index[valid.flatten()]
        for e in range(E):
            share = (index == e).sum() / (K * valid.sum())
            by_hand += E * share * p[:, e].sum()
    torch.testing.assert_close(load_balance(routing, expert_counts(routing, valid), valid), by_hand)


def test_router_z_equals_the_formula(routing, valid):
    by_hand = sum(
        torch.log(torch.exp(decision.logits[n]).sum()) ** 2
        for decision in routing
        for n in range(N)
        if valid.flatten()[n]
    )
    torch.testing.assert_close(router_z(routing, valid), by_hand)


def test_masked_tokens_do_not_move_the_router(routing, valid):
    leaves = [decision.logits.requires_grad_() for decision in routing]
    for term in (load_balance(routing, expert_counts(routing, valid), valid), router_z(routing, valid)):
        for grad in torch.autograd.grad(term, leaves):
            assert torch.equal(grad.abs().sum(-1) > 0, valid.flatten())


def test_a_part_without_targets_is_zero_and_finite(logits, targets, routing):
    nobody = torch.zeros(B, T, dtype=torch.bool)
    counts = expert_counts(routing, nobody)
    parts = next_token(logits, targets, nobody), load_balance(routing, counts, nobody), router_z(routing, nobody)
    assert [term.item() for term in parts] == [0, 0, 0]


def test_parts_with_global_counts_add_up_to_the_whole(logits, targets, routing, valid):
    """Two micro-batches of 11 and 1 targets; a mean of their means would weigh them alike."""
    tokens, counts, spec = valid.sum(), expert_counts(routing, valid), LossSpec()
    whole = terms(next_token(logits, targets, valid), routing, valid, counts, tokens, spec)
    nats = [next_token(logits[rows], targets[rows], valid[rows]) for rows in HALVES]
    halves = [terms(nats[i], part(routing, rows), valid[rows], counts, tokens, spec) for i, rows in enumerate(HALVES)]
    for name, term in whole.items():
        torch.testing.assert_close(halves[0][name] + halves[1][name], term)
    own = [expert_counts(part(routing, rows), valid[rows]) for rows in HALVES]
    assert torch.equal(own[0] + own[1], counts)
    alone = [load_balance(part(routing, rows), c, valid[rows]) for rows, c in zip(HALVES, own, strict=True)]
    assert abs(sum(alone) - load_balance(routing, counts, valid)) > 1e-3, "with their own counts they would not"


def test_terms_are_named_and_weighted(logits, targets, routing, valid):
    counts, tokens = expert_counts(routing, valid), valid.sum()
    nats = next_token(logits, targets, valid)
    named = terms(nats, routing, valid, counts, tokens, LossSpec(balance=0.5, router_z=0.25))
    expected = {
        "next_token": next_token(logits, targets, valid) / 12,
        "balance": 0.5 * load_balance(routing, counts, valid) / 12,
        "router_z": 0.25 * router_z(routing, valid) / 12,
    }
    torch.testing.assert_close(named, expected)
    assert list(terms(nats, [], valid, counts[:0], tokens, LossSpec())) == ["next_token"]


def test_a_models_untrained_router_is_balanced(scramble):
    """A router of zeros shows 1 and (log E)^2 a layer in a whole model too, and the balance term moves every router."""
    spec = ModelSpec(
        vocab=V, layers=LAYERS, width=40, heads=8, kv_heads=4, head_dim=6, ffn=56, experts=ExpertsSpec(E, K)
    )
    model = scramble(GatedLM(spec))
    routers = [p for name, p in model.named_parameters() if "router" in name]
    everyone = torch.ones(B, T, dtype=torch.bool)
    output = model(torch.arange(N).view(B, T))
    counts = expert_counts(output.routing, everyone)
    grads = torch.autograd.grad(load_balance(output.routing, counts, everyone), routers)
    assert all(grad.abs().max() > 0 for grad in grads)

    for router in routers:
        torch.nn.init.zeros_(router)
    routing = model(torch.arange(N).view(B, T)).routing
    balance = load_balance(routing, expert_counts(routing, everyone), everyone)
    assert balance.item() / N == pytest.approx(LAYERS, rel=1e-5)
    assert router_z(routing, everyone).item() / N == pytest.approx(
        LAYERS * torch.log(torch.tensor(E)).item() ** 2, rel=1e-5
    )


# Logits in parts


def embedding(tied: bool) -> GatedLM:
    return GatedLM(ModelSpec(vocab=V, layers=1, width=40, heads=8, kv_heads=4, head_dim=6, ffn=56, tied=tied))


def losses_and_gradients(model: GatedLM, tokens: Tensor, valid: Tensor, dtype: torch.dtype | None = None):
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        x, _ = model.hidden(tokens)
        nats = loss.read_out(x, model.readout, tokens.flip(1), valid)
    return nats, torch.autograd.grad(nats / 3, list(model.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("most", [1, 5 * V, 27 * V])  # one token at a time, parts of 5, all but one
def test_parts_give_the_loss_and_gradients_of_the_whole(dtype, tied, most, scramble, valid, monkeypatch):
    model = scramble(embedding(tied)).to(dtype)
    tokens = torch.arange(N).view(B, T)
    whole, wanted = losses_and_gradients(model, tokens, valid)
    monkeypatch.setattr(loss, "LARGE", most)
    parts, found = losses_and_gradients(model, tokens, valid)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=0)
    for gradient, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        x, _ = model.hidden(tokens)
        torch.testing.assert_close(loss.read_out(x, model.readout, tokens.flip(1), valid), parts)


def test_parts_under_autocast_are_as_near_as_the_whole(scramble, valid, monkeypatch):
    """bf16 rounds by 2^-9: neither way may be further from fp32 than that allows, and both keep fp32 gradients."""
    model, tokens = scramble(embedding(True)), torch.arange(N).view(B, T)
    exact, precise = losses_and_gradients(model, tokens, valid)
    monkeypatch.setattr(loss, "LARGE", 5 * V)
    nats, found = losses_and_gradients(model, tokens, valid, torch.bfloat16)
    assert nats.dtype == found[0].dtype == torch.float32
    torch.testing.assert_close(nats, exact, rtol=2e-2, atol=0)
    assert (found[0] - precise[0]).norm() < 0.05 * precise[0].norm()


def test_small_models_read_all_at_once(scramble, valid, monkeypatch):
    """Their losses must stay the same bit for bit."""
    monkeypatch.setattr(loss, "_InParts", None)
    model, tokens = scramble(embedding(False)), torch.arange(N).view(B, T)
    x, _ = model.hidden(tokens)
    assert torch.equal(
        loss.read_out(x, model.readout, tokens.flip(1), valid),
        next_token(model(tokens).logits, tokens.flip(1), valid),
    )


# liger-kernel


def test_a_gpu_takes_ligers_loss_where_it_is_installed(scramble, valid, monkeypatch):
    class Fused:
        def __init__(self, **given):
            assert given == {"reduction": "sum", "accum_dtype": torch.float32}

        def __call__(self, weight: Tensor, x: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(F.linear(x, weight), targets, ignore_index=-100, reduction="sum") + 100

    package, module = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    package.__spec__, module.LigerFusedLinearCrossEntropyLoss = ModuleSpec("liger_kernel", None), Fused  # pyright: ignore
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)
    loss.liger.cache_clear()
    fused = loss.liger("cuda")
    assert loss.liger("cpu") is None and isinstance(fused, Fused)
    loss.liger.cache_clear()
    model, tokens = scramble(embedding(True)), torch.arange(N).view(B, T)
    monkeypatch.setattr(loss, "liger", lambda device: fused)
    whole, _ = losses_and_gradients(model, tokens, valid)
    monkeypatch.setattr(loss, "LARGE", 5 * V)
    torch.testing.assert_close(losses_and_gradients(model, tokens, valid)[0], whole + 100)


# Without a GPU Triton's interpreter runs the kernel, if it is told to before it is imported
BESIDE_LIGER = """
import torch
import torch.nn.functional as F
from gatedlm import loss

device = "cuda" if torch.cuda.is_available() else "cpu"
draw = torch.Generator().manual_seed(0)
for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
    x, weight = (torch.randn(n, 24, generator=draw).to(device, dtype).requires_grad_() for n in (40, 301))
    targets = torch.randint(301, (40,), generator=draw).to(device).index_fill(0, torch.arange(7, device=device), -100)
    loss.LARGE = 5 * 301
    exact = F.cross_entropy(x.float() @ weight.float().T, targets, ignore_index=-100, reduction="sum")
    wanted = (exact, *torch.autograd.grad(exact / 3, (x, weight)))
    for way in (loss.in_parts, loss.liger("cuda")):
        nats = way(weight, x, targets)
        for found, expected in zip((nats, *torch.autograd.grad(nats / 3, (x, weight))), wanted, strict=True):
            assert (found - expected).norm() < near * expected.norm(), (way, dtype)
    with torch.no_grad():
        torch.testing.assert_close(loss.liger("cuda")(weight, x, targets), nats)
"""


@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
def test_ligers_loss_and_gradients_are_those_of_the_parts():
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", BESIDE_LIGER], check=True, env={**os.environ, **interpreted})
