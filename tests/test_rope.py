"""RoPE: scaled frequencies against transformers', relative shifts, what casting and a factor of 1 must not change."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gatedlm.hub import open_model
from gatedlm.hub.config import config_of, layout_for
from gatedlm.hub.layout import QWEN3
from gatedlm.model.lm import GatedLM, ModelSpec
from gatedlm.model.rope import RopeSpec, angles, frequencies, rotate
from gatedlm.recipe import load, stretched

T, H, D = 7, 4, 16
SIZES: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 3, "max_position_embeddings": 512}
SCALINGS = ("linear", "ntk", "yarn")
SETTINGS = [
    RopeSpec(1e4, "yarn", 4.0, 4096),
    RopeSpec(1e6, "yarn", 4.0, 32_768),
    RopeSpec(1e6, "yarn", 40.0, 4096, beta_fast=16.0, beta_slow=2.0),
    RopeSpec(1e4, "yarn", 2.0, 256),
    RopeSpec(1e4, "yarn", 8.0, 16),  # so short that no pair turns 32 times
    RopeSpec(5e5, "linear", 8.0),
]


def theirs(spec: RopeSpec, dim: int, **changed: float) -> tuple[torch.Tensor, float]:
    """Inverse frequencies and the factor on cos and sin as transformers computes them."""
    rope = {"rope_type": spec.scaling, "rope_theta": spec.base, "factor": spec.factor, **changed}
    if spec.scaling == "yarn":
        rope |= {"original_max_position_embeddings": spec.original}
        rope |= {"beta_fast": spec.beta_fast, "beta_slow": spec.beta_slow}
    config = PreTrainedConfig(**(SIZES | {"head_dim": dim, "rope_parameters": rope}))
    return ROPE_INIT_FUNCTIONS[str(rope["rope_type"])](config, torch.device("cpu"), seq_len=changed.get("length"))


@pytest.mark.parametrize("dim", [32, 128])
@pytest.mark.parametrize("spec", SETTINGS, ids=str)
def test_frequencies_are_those_of_transformers(spec: RopeSpec, dim: int) -> None:
    wanted, factor = theirs(spec, dim)
    torch.testing.assert_close(frequencies(spec, dim), wanted, rtol=1e-6, atol=0)
    assert spec.attention == pytest.approx(factor, rel=1e-12)


def test_ntk_is_the_dynamic_one_at_its_full_length() -> None:
    """transformers raises the base by (s - (f - 1))^(D/(D-2)) at s times the length, which for its f = 1 is ours."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0}
    config = PreTrainedConfig(**(SIZES | {"head_dim": D, "rope_parameters": rope}))
    wanted, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=3 * 512)
    found = frequencies(RopeSpec(1e4, "ntk", 3.0), D)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    plain = frequencies(RopeSpec(1e4), D)
    assert found[0] == plain[0] and found[-1].item() == pytest.approx(plain[-1].item() / 3)


def test_yarn_leaves_fast_pairs_and_divides_slow_ones() -> None:
    spec = RopeSpec(1e6, "yarn", 4.0, 32_768)
    share = frequencies(RopeSpec(1e6), 128) / frequencies(spec, 128)
    turns = 32_768 * frequencies(RopeSpec(1e6), 128) / (2 * math.pi)
    assert torch.equal(share[turns > 32 * 1.3], torch.ones_like(share[turns > 32 * 1.3]))
    torch.testing.assert_close(share[turns < 1 / 1.3], torch.full_like(share[turns < 1 / 1.3], 4))
    assert spec.attention == pytest.approx(1.1386294361)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_factor_of_1_changes_nothing(scaling) -> None:
    places = torch.arange(1000)[None]
    plain, scaled = (angles(spec, places, D) for spec in (RopeSpec(5e4), RopeSpec(5e4, scaling, 1.0, 64)))
    assert all(map(torch.equal, plain, scaled))


@pytest.mark.parametrize("scaling", ["none", *SCALINGS])
def test_scores_depend_on_distances_alone(scaling) -> None:
    """(R_{m+s} q) . (R_{n+s} k) = (R_m q) . (R_n k) for any shift s, and not for another distance."""
    spec = RopeSpec(1e4, scaling, 1.0 if scaling == "none" else 4.0, 64)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, T, H, D, generator=generator) for _ in range(2))

    def scores(shift: int, stretch: int = 1) -> torch.Tensor:
        tables = angles(spec, (shift + stretch * torch.arange(T))[None], D)
        return torch.einsum("bthd,bshd->bhts", rotate(q, *tables), rotate(k, *tables))

    torch.testing.assert_close(scores(300), scores(0), atol=2e-3, rtol=0)
    assert (scores(0, 2) - scores(0)).abs().max() > 0.1
    plain = torch.einsum("bthd,bshd->bhts", q, k)
    torch.testing.assert_close(
        scores(0).diagonal(dim1=-2, dim2=-1), spec.attention**2 * plain.diagonal(dim1=-2, dim2=-1)
    )


def test_a_model_in_bf16_tells_positions_beyond_256_apart(scramble) -> None:
    """bfloat16 has 8 bits: 256 and 257 are one number in it, so tables and positions must not be cast."""
    spec = ModelSpec(vocab=31, layers=1, width=40, heads=8, kv_heads=4, head_dim=6, ffn=56)
    net = scramble(GatedLM(spec)).bfloat16()
    seen = []
    net.blocks[0].register_forward_pre_hook(lambda block, inputs: seen.extend(inputs[1]))
    with torch.autocast("cpu", torch.bfloat16):
        net(torch.zeros(1, 600, dtype=torch.long))
    cos, sin = (table[0, :, 0, 0] for table in seen)
    assert cos.dtype == sin.dtype == torch.float32
    wanted = torch.arange(600, dtype=torch.float64)
    torch.testing.assert_close(
        torch.stack((cos, sin)).double(), torch.stack((wanted.cos(), wanted.sin())), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("spec", [SETTINGS[3], SETTINGS[5]], ids=str)
def test_a_scaled_model_of_transformers_is_read_as_it_is(spec: RopeSpec, tmp_path: Path) -> None:
    """Logits of its own class, far beyond the original context; and the config.json is written back alike."""
    model = ModelSpec(vocab=31, layers=2, width=40, heads=8, kv_heads=4, head_dim=6, ffn=56, rope=spec)
    config = Qwen3Config(**config_of(model, QWEN3, 256, torch.float32))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = Qwen3ForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    ours, tokens = open_model(str(tmp_path)).net, torch.arange(700)[None] % 31
    assert ours.spec == model
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, atol=2e-5, rtol=1e-4)
    plain = open_model(str(tmp_path), words=["model.rope.scaling=none", "model.rope.factor=1"]).net
    with torch.no_grad():
        assert (plain(tokens).logits - ours(tokens).logits).abs().max() > 1e-3


def test_a_class_without_the_scaling_is_refused() -> None:
    model = ModelSpec(vocab=31, layers=1, width=40, heads=8, kv_heads=4, head_dim=6, ffn=56)
    for rope, to in ((RopeSpec(1e4, "ntk", 4.0), "transformers"), (RopeSpec(1e4, "linear", 4.0), "official")):
        with pytest.raises(ValueError, match=r"cannot hold this model\.rope"):
            layout_for(replace(model, rope=rope), to)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"factor": 4.0}, "does nothing by itself"),
        ({"factor": 0.5, "scaling": "linear"}, "factor=0.5: how many times longer"),
        ({"factor": 4.0, "scaling": "yarn"}, "give model.rope.original=TOKENS"),
        ({"beta_fast": 1.0}, "beta_fast: must be above"),
    ],
)
def test_what_does_not_fit_is_said(words: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RopeSpec(**words)


def test_a_recipe_stretches_from_the_context_it_had() -> None:
    words = ["recipe=quickstart", "data.context=512", "model.rope.scaling=yarn", "model.rope.factor=4"]
    (run,) = load(words)
    assert run.recipe.model.rope == RopeSpec(1e4, "yarn", 4.0, 128)
    assert load([*words, "model.rope.original=64"])[0].recipe.model.rope.original == 64


def test_a_trained_model_stretches_from_the_context_it_was_trained_at() -> None:
    (run,) = load(["recipe=quickstart", "data.context=256"])
    found = stretched(run.recipe, ["model.rope.scaling=yarn", "model.rope.factor=4"])
    assert found.model.rope == RopeSpec(1e4, "yarn", 4.0, 256)
    assert stretched(run.recipe, []) == run.recipe
    with pytest.raises(ValueError, match="RoPE alone can be changed"):
        stretched(run.recipe, ["model.width=80"])


def test_names_of_runs_from_before_scaling_stay() -> None:
    plain = load(["recipe=quickstart"])[0].recipe.name
    for words in itertools.chain([[]], [["model.rope.factor=1"], ["model.rope.scaling=none", "optim.state=fresh"]]):
        assert load(["recipe=quickstart", *words])[0].recipe.name == plain
    changed = ["model.rope.scaling=linear", "model.rope.base=20000", "model.rope.beta_fast=16"]
    assert len({load(["recipe=quickstart", word])[0].recipe.name for word in changed} | {plain}) == 4
