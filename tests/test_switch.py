"""Switch heads: against a loop over tokens and heads, and as the value gate that one projection makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gatedlm.model.gate import GateSpec
from gatedlm.model.lm import GatedLM, ModelSpec, initialise
from gatedlm.model.switch import SwitchProjection, SwitchSpec

B, T, C, HEADS, D = 2, 5, 12, 3, 4
SPEC = ModelSpec(29, 2, 24, 6, 3, 8, 40)


@pytest.mark.parametrize(("count", "used"), [(1, 1), (4, 4), (5, 2)])
def test_each_head_mixes_its_best_projections(count: int, used: int) -> None:
    draw = torch.Generator().manual_seed(0)
    switch = SwitchProjection(C, HEADS, D, SwitchSpec(count, used))
    for parameter in switch.parameters():
        parameter.requires_grad_(False).normal_(generator=draw)
    x = torch.randn(B, T, C, generator=draw)
    experts, score = switch.experts.view(HEADS, count, D, C), switch.score.view(HEADS, count, C)
    expected = torch.zeros(B, T, HEADS, D)
    for b, t, h in torch.cartesian_prod(torch.arange(B), torch.arange(T), torch.arange(HEADS)).tolist():
        scores = [float(torch.sigmoid(score[h, e] @ x[b, t])) for e in range(count)]
        for e in sorted(range(count), key=lambda e: -scores[e])[:used]:
            expected[b, t, h] += scores[e] * (experts[h, e] @ x[b, t])
    torch.testing.assert_close(switch(x), expected.flatten(-2))


def test_one_projection_is_the_headwise_value_gate() -> None:
    gated = GatedLM(replace(SPEC, gates=[GateSpec("value", granularity="headwise")]))
    switched = GatedLM(replace(SPEC, switch=SwitchSpec(1, 1)))
    initialise(gated, 3)
    weights = gated.state_dict()
    names = {"attention.v_proj.weight": "attention.v_proj.experts", "gates.value.score.weight": "v_proj.score"}
    for old, new in names.items():
        weights = {name.replace(old, new): tensor for name, tensor in weights.items()}
    switched.load_state_dict(weights)
    tokens = torch.randint(29, (B, T), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(switched(tokens).logits, gated(tokens).logits)


@pytest.mark.parametrize("on", ["value", "key_value"])
@pytest.mark.parametrize(("count", "used"), [(1, 1), (4, 4), (5, 2)])
def test_parameters_are_counted(on, count: int, used: int) -> None:
    spec = replace(SPEC, switch=SwitchSpec(count, used, on))
    net = GatedLM(spec)
    assert spec.parameters().total == sum(p.numel() for p in net.parameters())
    unused = (count - used) * 3 * 8 * 24 * 2 * (2 if on == "key_value" else 1)
    assert spec.parameters().active == spec.parameters().total - unused
    assert isinstance(net.blocks[0].attention.k_proj, SwitchProjection) == (on == "key_value")  # type: ignore[union-attr]


def test_more_used_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model.switch: count=2 used=3"):
        SwitchSpec(2, 3)
