"""The core, RoPE and the shape hook; test_gate compares whole attention with a formula, test_lm with transformers."""

from __future__ import annotations

import jaxtyping
import pytest
import torch

from gatedlm.model.attention import Attention, SoftmaxAttention
from gatedlm.model.lm import ModelSpec
from gatedlm.model.norm import RMSNorm
from gatedlm.model.rope import RopeSpec, angles, rotate

B, T, H, G, D, C = 3, 7, 8, 4, 6, 40


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_shapes_are_checked_in_the_tests():
    q, k = random(B, T, H, D), random(B, T, G, D)
    with pytest.raises(jaxtyping.TypeCheckError, match="parameter 'v'"):
        SoftmaxAttention()(q, k, k[..., :5])


@pytest.mark.parametrize("groups", [8, 4, 2, 1])
def test_core_is_softmax_attention_with_shared_key_value_heads(groups):
    q, k, v = random(B, T, H, D), random(B, T, groups, D, seed=1), random(B, T, groups, D, seed=2)
    o = SoftmaxAttention()(q, k, v)
    for h in range(H):
        g = h * groups // H
        scores = (q[:, :, h] @ k[:, :, g].mT / D**0.5).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
        torch.testing.assert_close(o[:, :, h], scores.softmax(-1) @ v[:, :, g])


def test_core_under_a_mask():
    q, k, v = random(B, T, H, D), random(B, T, G, D, seed=1), random(B, T, G, D, seed=2)
    core, causal = SoftmaxAttention(), torch.ones(B, 1, T, T).tril().bool()
    torch.testing.assert_close(core(q, k, v, causal), core(q, k, v))
    alone = torch.eye(T).bool().expand(B, 1, T, T)
    torch.testing.assert_close(core(q, k, v, alone), v.repeat_interleave(H // G, 2))


@pytest.mark.parametrize("base", [10_000.0, 1_000_000.0])
def test_rope_turns_each_pair_by_its_angle(base):
    """Pair i of D/2 is one complex number, turned by position x base^(-2i/D)."""
    x, half = random(B, T, H, D), D // 2
    y = rotate(x, *angles(RopeSpec(base), torch.arange(T)[None], D))
    for t in range(T):
        for i in range(half):
            turn = torch.exp(torch.tensor(1j * t * base ** (-2 * i / D)))
            expected = torch.complex(x[:, t, :, i], x[:, t, :, i + half]) * turn
            torch.testing.assert_close(torch.complex(y[:, t, :, i], y[:, t, :, i + half]), expected)


def test_rope_shows_the_distance_only():
    q, k = random(1, 1, 1, D), random(1, 1, 1, D, seed=1)

    def product(at: int, other: int) -> float:
        place = [angles(RopeSpec(), torch.tensor([[t]]), D) for t in (at, other)]
        return (rotate(q, *place[0]) * rotate(k, *place[1])).sum().item()

    assert product(3, 1) == pytest.approx(product(103, 101), abs=1e-4)
    assert product(3, 1) != pytest.approx(product(3, 2), abs=1e-2)


def test_rope_is_fp32_inside_and_keeps_the_type():
    """In bf16 the positions 256 and 257 would be the same number."""
    cos, sin = angles(RopeSpec(), torch.tensor([[256, 257]]), D)
    assert cos.dtype == sin.dtype == torch.float32
    x = random(1, 2, 1, D).bfloat16()
    y = rotate(x, cos, sin)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, rotate(x.float(), cos, sin).bfloat16(), rtol=0, atol=0)


def test_rmsnorm(scramble):
    norm, x = scramble(RMSNorm(C)), random(B, T, C)
    torch.testing.assert_close(norm(x), norm.weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt())
    assert norm(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("qk_norm", [True, False])
def test_qk_norm_bounds_the_scores(qk_norm, scramble):
    """With the norm's weight at 1, |q . k| / sqrt(D) is at most sqrt(D), however large x and the projections are."""
    attention = scramble(Attention(ModelSpec(width=C, heads=H, kv_heads=G, head_dim=D, qk_norm=qk_norm)))
    for norm in (attention.q_norm, attention.k_norm):
        for weight in norm.parameters():
            torch.nn.init.ones_(weight)
    seen = []
    attention.core.register_forward_pre_hook(lambda core, args: seen.extend(args))
    attention(1e3 * random(B, T, C), angles(RopeSpec(), torch.arange(T)[None], D))
    q, k, v, mask = seen
    assert (q.shape, k.shape, v.shape, mask) == ((B, T, H, D), (B, T, G, D), (B, T, G, D), None)
    largest = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(H // G, 2)).abs().max() / D**0.5
    assert (largest <= D**0.5 * 1.001) == qk_norm


def test_no_projection_has_a_bias():
    attention = Attention(ModelSpec(width=C, heads=H, kv_heads=G, head_dim=D))
    assert not [name for name, _ in attention.named_parameters() if "bias" in name]
