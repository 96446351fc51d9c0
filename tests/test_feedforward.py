"""SwiGLU and the mixture of experts: against a readable loop over the experts and transformers' Qwen3-MoE block."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gatedlm.model.feedforward import ExpertsSpec, MixtureOfExperts, Router, SwiGLU

B, T, C, FFN, E, K = 3, 7, 40, 56, 5, 2


def experts_by_loop(moe: MixtureOfExperts, x: Tensor, renormalise: bool) -> Tensor:
    """sum over the K most probable experts of p_e SwiGLU_e(x), one expert after another; x is (N, C)."""
    probability = (x.float() @ moe.router.weight.T).softmax(-1)
    kept = probability >= probability.sort(-1, descending=True).values[:, K - 1 : K]
    weight = probability * kept
    if renormalise:
        weight = weight / weight.sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    for e in range(E):
        silu, up = (x @ moe.up_proj[e]).split(FFN, -1)
        y = y + weight[:, e, None] * ((F.silu(silu) * up) @ moe.down_proj[e])
    return y


def mixture(scramble, renormalise: bool = True) -> MixtureOfExperts:
    return scramble(MixtureOfExperts(C, FFN, ExpertsSpec(E, K, renormalise)))


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(B, T, C, generator=torch.Generator().manual_seed(1))


def test_swiglu_equals_the_formula(x, scramble):
    swiglu = scramble(SwiGLU(C, FFN))
    silu, up = x @ swiglu.silu_proj.weight.T, x @ swiglu.up_proj.weight.T
    y, routing = swiglu(x)
    torch.testing.assert_close(y, (silu / (1 + torch.exp(-silu)) * up) @ swiglu.down_proj.weight.T)
    assert routing is None


@pytest.mark.parametrize("renormalise", [True, False])
def test_mixture_equals_the_loop_in_value_and_gradient(renormalise, x, scramble):
    moe = mixture(scramble, renormalise)
    x = x.clone().requires_grad_()
    y, _ = moe(x)
    by_loop = experts_by_loop(moe, x.flatten(0, 1), renormalise).view_as(x)
    torch.testing.assert_close(y, by_loop, rtol=1e-5, atol=1e-6)

    weight = torch.linspace(-1, 1, y.numel()).view_as(y)
    wanted = (x, *moe.parameters())
    grads = torch.autograd.grad((y * weight).sum(), wanted)
    expected = torch.autograd.grad((by_loop * weight).sum(), wanted)
    for grad, true in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, true, rtol=1e-4, atol=1e-5)
        assert grad.abs().max() > 0


@pytest.mark.parametrize("renormalise", [True, False])
def test_mixture_equals_transformers_qwen3_moe(renormalise, x, scramble):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=C,
        moe_intermediate_size=FFN,
        num_experts=E,
        num_experts_per_tok=K,
        norm_topk_prob=renormalise,
    )
    moe, oracle = mixture(scramble, renormalise), Qwen3MoeSparseMoeBlock(config)
    oracle.load_state_dict(
        {
            "gate.weight": moe.router.weight,
            "experts.gate_up_proj": moe.up_proj.mT,
            "experts.down_proj": moe.down_proj.mT,
        }
    )
    torch.testing.assert_close(moe(x)[0], oracle(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("renormalise", [True, False])
def test_router_decisions(renormalise, x, scramble):
    router, tokens = scramble(Router(C, ExpertsSpec(E, K, renormalise))), x.flatten(0, 1)
    logits, index, weight = router(tokens)
    p = logits.softmax(-1)
    torch.testing.assert_close(logits, tokens @ router.weight.T)
    torch.testing.assert_close(index, p.argsort(-1, descending=True)[:, :K])
    share = p.gather(-1, index)
    torch.testing.assert_close(weight, share / share.sum(-1, keepdim=True) if renormalise else share)


def test_no_token_is_dropped_when_all_want_the_same_experts(x, scramble):
    moe = mixture(scramble)
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[1], moe.router.weight[3] = 2.0, 1.0
    x = x.abs()
    y, routing = moe(x)
    assert (routing.index == torch.tensor([1, 3])).all()
    torch.testing.assert_close(y, experts_by_loop(moe, x.flatten(0, 1), True).view_as(x), rtol=1e-5, atol=1e-6)
    assert (y.abs().sum(-1) > 0).all()

    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    for parameter in (moe.up_proj, moe.down_proj):
        assert parameter.grad is not None
        idle = parameter.grad.flatten(1).abs().sum(1) == 0
        assert idle.tolist() == [True, False, True, False, True], "experts without tokens have zero gradients"


def test_each_token_is_routed_by_itself(x, scramble):
    moe = mixture(scramble)
    alone = torch.cat([moe(x[:, t : t + 1])[0] for t in range(T)], 1)
    torch.testing.assert_close(moe(x)[0], alone, rtol=1e-5, atol=1e-6)


def test_mixture_under_bf16_autocast(x, scramble):
    moe = mixture(scramble)
    exact, decided = moe(x)
    with torch.autocast("cpu", torch.bfloat16):
        y, routing = moe(x)
    assert y.dtype == torch.bfloat16
    assert routing.logits.dtype == routing.weight.dtype == torch.float32
    assert torch.equal(routing.logits, decided.logits), "the router stays in fp32"
    torch.testing.assert_close(y.float(), exact, rtol=5e-2, atol=5e-2)
    y.float().square().sum().backward()
    for parameter in moe.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32 and parameter.grad.abs().max() > 0


@pytest.mark.parametrize(("count", "used"), [(-1, 1), (4, 0), (4, 5)])
def test_impossible_experts_are_refused(count, used):
    with pytest.raises(ValueError, match=f"count={count} used={used}: a token uses between 1 and `count` experts"):
        ExpertsSpec(count, used)
