"""Weights in and out: against transformers' own classes, bit for bit there and back, and whatever may be wrong."""

from __future__ import annotations

import fnmatch
import json
import math
import random
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, pipeline

from gatedlm.data.tokenizer import train
from gatedlm.hub import convert, open_model, opening
from gatedlm.hub.config import layout_for
from gatedlm.model.feedforward import ExpertsSpec
from gatedlm.model.gate import GateSpec
from gatedlm.model.lm import GatedLM, ModelSpec
from gatedlm.model.rope import RopeSpec
from gatedlm.model.switch import SwitchSpec
from gatedlm.recipe import DataSpec, Recipe, to_yaml

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()
Scramble = Callable[..., nn.Module]
HEADWISE = GateSpec(granularity="headwise")
CLASSES = {
    "Qwen3": {},
    "Qwen3Moe": {"experts": True},
    "Qwen3Next": {"gates": [GateSpec()]},
    "Qwen3NextMoe": {"gates": [GateSpec()], "experts": True},
    "Qwen3NextHeadwise": {"gates": [HEADWISE]},
    "Llama": {"qk_norm": False},
    "Qwen2Moe": {"qk_norm": False, "experts": True},
}


def fuzzed(name: str, ratio: int = 2, tied: bool = False) -> ModelSpec:
    """A model of the class, of a shape drawn from the arguments."""
    draw = random.Random(f"{name} {ratio} {tied}")
    words = CLASSES[name]
    kv_heads = draw.choice((1, 2, 3))
    experts = (
        ExpertsSpec(draw.choice((3, 30)), 2, draw.choice((True, False))) if words.get("experts") else ExpertsSpec()
    )
    return ModelSpec(
        vocab=draw.randrange(50, 90),
        layers=draw.choice((1, 2)),
        width=8 * kv_heads * ratio * draw.choice((1, 2)),
        heads=kv_heads * ratio,
        kv_heads=kv_heads,
        head_dim=draw.choice((4, 6, 10)),
        ffn=8 * draw.randrange(2, 6),
        tied=tied,
        rope=RopeSpec(draw.choice((10_000.0, 1e6))),
        **words | {"experts": experts},
    )


GATED, BARE = fuzzed("Qwen3Next"), fuzzed("Qwen3")


def class_name(name: str) -> str:
    """The transformers class, which for a variant of Qwen3-Next is that of the plain one."""
    return ("Qwen3Next" if name.startswith("Qwen3Next") else name) + "ForCausalLM"


def theirs(name: str, spec: ModelSpec, scramble: Scramble) -> PreTrainedModel:
    """A model of transformers' own class, its config written here and its weights drawn."""
    words: dict[str, Any] = {
        "vocab_size": spec.vocab,
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.width,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn,
        "tie_word_embeddings": spec.tied,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 77,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope.base, "partial_rotary_factor": 1.0},
        "bos_token_id": None,
        "eos_token_id": 3,
    }
    if spec.experts.count:
        words |= {
            "num_experts": spec.experts.count,
            "num_experts_per_tok": spec.experts.used,
            "norm_topk_prob": spec.experts.renormalise,
            "moe_intermediate_size": spec.ffn,
            "shared_expert_intermediate_size": 24,
        }
    if name.startswith("Qwen3Next"):
        words |= {"layer_types": ["full_attention"] * spec.layers}
        words |= {} if spec.experts.count else {"mlp_only_layers": list(range(spec.layers))}
    if name == "Qwen2Moe":
        words |= {"qkv_bias": False}
    kind = getattr(transformers, class_name(name))
    return drawn(kind(kind.config_class(**words)), scramble, centred=name.startswith("Qwen3Next"))


@torch.no_grad()
def drawn(model: PreTrainedModel, scramble: Scramble, centred: bool) -> PreTrainedModel:
    """Weights away from any neutral value, but for the shared expert, which gatedlm has not."""
    scramble(model.eval())
    for name, parameter in model.named_parameters():
        if "shared_expert" in name:
            parameter.zero_()
        if centred and parameter.dim() == 1:
            parameter.sub_(1)
    return model


def ours(spec: ModelSpec, scramble: Scramble) -> GatedLM:
    net = GatedLM(spec)
    scramble(net)
    return net


def kept(net: GatedLM, folder: Path, **data: Any) -> Path:
    """The model as weights in a run's folder."""
    recipe = Recipe("kept", model=net.spec, data=DataSpec(vocab=min(net.spec.vocab, 1024), **data))
    folder.mkdir()
    (folder / "recipe.yaml").write_text(to_yaml(recipe))
    save_file(net.state_dict(), folder / "model.safetensors")
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Equal to the bit, in name, type and value."""
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name


@torch.no_grad()
def assert_agree(net: GatedLM, model: PreTrainedModel) -> None:
    tokens = torch.randint(net.spec.vocab, (2, 19), generator=torch.Generator().manual_seed(0))
    a, b = net(tokens).logits, model(tokens).logits
    assert a.std() > 0.1
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


# Against transformers ---------------------------------------------------------------------------------------------

OWN = ("Qwen3NextHeadwise",)  # a layout that only convert writes
SHAPES = [
    pytest.param(name, ratio, tied, marks=[] if ratio == 2 or (place + ratio) % 2 else pytest.mark.slow)
    for place, name in enumerate(CLASSES)
    for ratio, tied in ((1, True), (2, False), (8, True))
]


@pytest.mark.parametrize(("name", "ratio", "tied"), [shape for shape in SHAPES if shape.values[0] not in OWN])
def test_models_of_transformers_give_the_same_logits_here(
    name: str, ratio: int, tied: bool, tmp_path: Path, scramble: Scramble
) -> None:
    spec = fuzzed(name, ratio, tied)
    model = theirs(name, spec, scramble)
    model.save_pretrained(tmp_path / "theirs")
    opened = open_model(str(tmp_path / "theirs"))
    assert opened.net.spec == spec
    assert (opened.name, opened.tokenizer, opened.first, opened.stop) == ("theirs", None, None, {3})
    assert_agree(opened.net, model)


@pytest.mark.parametrize(("name", "ratio", "tied"), SHAPES)
def test_models_of_ours_give_the_same_logits_in_transformers_and_come_back(
    name: str, ratio: int, tied: bool, tmp_path: Path, scramble: Scramble
) -> None:
    net = ours(fuzzed(name, ratio, tied), scramble)
    said, files = convert(str(kept(net, tmp_path / "ours")), tmp_path / "out", "transformers")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    model, loading = loaded
    assert not any(loading.values())
    assert (said, type(model).__name__) == (class_name(name),) * 2
    assert [file.name for file in files] == ["model.safetensors"]
    assert_agree(net, model)
    convert(str(tmp_path / "out"), tmp_path / "back", "gatedlm")
    assert_same(tensors(tmp_path / "back"), net.state_dict())
    assert (tmp_path / "back" / "recipe.yaml").exists()


def test_stacked_experts_are_read_too(tmp_path: Path, scramble: Scramble) -> None:
    model = theirs("Qwen3Moe", fuzzed("Qwen3Moe"), scramble)
    model.config.save_pretrained(tmp_path)
    assert any(name.endswith("experts.gate_up_proj") for name in model.state_dict())
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert_agree(open_model(str(tmp_path)).net, model)


def released(spec: ModelSpec, scramble: Scramble, folder: Path) -> PreTrainedModel:
    """Weights in the release's layout, and the Qwen3-Next model that they are by the formula of section 3.

    perm = arange(2HD).view(G, 2, R, D).permute(0, 2, 1, 3), W_next = W_release[perm].
    """
    model = theirs("Qwen3Next", spec, scramble)
    heads, groups, dim = spec.heads, spec.kv_heads, spec.head_dim
    ratio = heads // groups
    wide = torch.arange(2 * heads * dim).view(groups, 2, ratio, dim).permute(0, 2, 1, 3).reshape(-1)
    narrow = [g * ratio * (dim + 1) + ratio * dim + r for g in range(groups) for r in range(ratio)]
    state = {}
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            if name.endswith("norm.weight"):
                parameter.copy_((parameter + 1) - 1)  # so that w and w - 1 are both fp32
                state[name] = parameter + 1
            elif name.endswith("q_proj.weight") and spec.gates == [HEADWISE]:
                rows = torch.randn(heads * (dim + 1), spec.width) / spec.width**0.5
                queries = [g * ratio * (dim + 1) + i for g in range(groups) for i in range(ratio * dim)]
                gate = rows[narrow][:, None].expand(-1, dim, -1)
                parameter.copy_(torch.stack((rows[queries].view(heads, dim, -1), gate), 1).flatten(0, 2))
                state[name] = rows
            elif name.endswith("q_proj.weight"):
                state[name] = torch.empty_like(parameter)
                state[name][wide] = parameter
            else:
                state[name] = parameter.clone()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(release_config(spec)))
    torch.save(state, folder / "pytorch_model.bin")
    return model


def release_config(spec: ModelSpec) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "vocab_size": spec.vocab,
        "hidden_size": spec.width,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn,
        "qkv_bias": False,
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": spec.rope.base,
        "rope_scaling": None,
        "sliding_window": None,
        "tie_word_embeddings": spec.tied,
        "use_qk_norm": True,
        "use_sliding_window": False,
        "elementwise_attn_output_gate": spec.gates == [GateSpec()],
        "headwise_attn_output_gate": spec.gates == [HEADWISE],
    }


@pytest.mark.parametrize(("ratio", "gate"), [(1, HEADWISE), (2, GateSpec()), (2, HEADWISE), (8, GateSpec())])
def test_the_releases_layout(ratio: int, gate: GateSpec, tmp_path: Path, scramble: Scramble) -> None:
    spec = replace(fuzzed("Qwen3Next", ratio, True), gates=[gate])
    model = released(spec, scramble, tmp_path / "release")
    assert_agree(open_model(str(tmp_path / "release")).net, model)
    convert(str(tmp_path / "release"), tmp_path / "next", "transformers")
    assert_same(tensors(tmp_path / "next"), {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"})
    convert(str(tmp_path / "next"), tmp_path / "again", "official")
    assert_same(tensors(tmp_path / "again"), load(tmp_path / "release"))


def load(folder: Path) -> dict[str, Tensor]:
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    return {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}


# There and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_near_zero_come_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path, scramble: Scramble) -> None:
    """Qwen3-Next keeps w - 1, which of a small w no type of its own size holds."""
    net = ours(GATED, scramble).to(dtype)
    with torch.no_grad():
        small = 2.0 ** -torch.arange(net.spec.width).clamp(max=27)
        net.norm.weight.mul_(small * torch.randn(net.spec.width).sign()).view(-1)[0] = 0
    convert(str(kept(net, tmp_path / "ours")), tmp_path / "out", "transformers")
    convert(str(tmp_path / "out"), tmp_path / "back", "gatedlm")
    assert_same(tensors(tmp_path / "back"), net.state_dict())


def test_norms_that_are_no_numbers_travel(tmp_path: Path, scramble: Scramble) -> None:
    net = ours(GATED, scramble)
    with torch.no_grad():
        net.norm.weight.fill_(torch.nan)
    convert(str(kept(net, tmp_path / "ours")), tmp_path / "out", "transformers")
    assert open_model(str(tmp_path / "out")).net.norm.weight.isnan().all()


@pytest.mark.parametrize("spec", [BARE, replace(BARE, qk_norm=False), GATED, fuzzed("Qwen3NextHeadwise")])
def test_the_releases_layout_comes_back_bit_for_bit(spec: ModelSpec, tmp_path: Path, scramble: Scramble) -> None:
    net = ours(spec, scramble).to(torch.bfloat16)
    convert(str(kept(net, tmp_path / "ours")), tmp_path / "out", "official")
    opened = open_model(str(tmp_path / "out")).net
    assert opened.spec == spec
    assert_same(opened.state_dict(), net.state_dict())


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in CLASSES if name not in OWN])
def test_theirs_come_back_bit_for_bit(name: str, dtype: torch.dtype, tmp_path: Path, scramble: Scramble) -> None:
    model: Any = theirs(name, fuzzed(name), scramble)
    model.to(dtype).save_pretrained(tmp_path / "theirs")
    convert(str(tmp_path / "theirs"), tmp_path / "ours", "gatedlm")
    convert(str(tmp_path / "ours"), tmp_path / "back", "transformers")
    before, after = tensors(tmp_path / "theirs"), tensors(tmp_path / "back")
    shared = [name for name in before if "shared_expert" in name]  # zeros, of a width of our own choice
    assert not any(side[name].any() for side in (before, after) for name in shared)
    assert_same(*({k: v for k, v in side.items() if k not in shared} for side in (before, after)))


def test_a_headwise_gate_is_said_to_be_one(tmp_path: Path, scramble: Scramble) -> None:
    here = kept(ours(fuzzed("Qwen3NextHeadwise"), scramble), tmp_path / "ours")
    convert(str(here), tmp_path / "out", "transformers")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["gatedlm_gate"] == "headwise"
    del config["gatedlm_gate"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    assert open_model(str(tmp_path / "out")).net.spec.gates == [GateSpec()]


def test_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scramble: Scramble) -> None:
    monkeypatch.setattr(opening, "SHARD", 40_000)
    net = ours(replace(BARE, layers=3), scramble)
    assert max(parameter.nbytes for parameter in net.parameters()) < opening.SHARD
    _, files = convert(str(kept(net, tmp_path / "ours")), tmp_path / "out", "transformers")
    assert len(files) > 3
    assert all(file.stat().st_size < 1.2 * opening.SHARD for file in files)
    assert_agree(net, AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    convert(str(tmp_path / "out"), tmp_path / "back", "gatedlm")
    assert_same(tensors(tmp_path / "back"), net.state_dict())


def test_the_package_does_without_transformers() -> None:
    files = Path(opening.__file__).parent.glob("*.py")
    assert not [file for file in files if re.search("^ *(import|from) transformers", file.read_text(), re.M)]


def test_a_type_of_ones_own(tmp_path: Path, scramble: Scramble) -> None:
    net = ours(fuzzed("Qwen3Next"), scramble)
    convert(str(kept(net, tmp_path / "ours")), tmp_path / "out", "transformers")
    opened = open_model(str(tmp_path / "out"), dtype=torch.bfloat16).net
    assert {parameter.dtype for parameter in opened.parameters()} == {torch.bfloat16}
    assert_same(opened.state_dict(), net.to(torch.bfloat16).state_dict())


# What has no class ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "spec", "why"),
    [
        ("transformers", replace(GATED, gates=[GateSpec("value")]), "model.gates"),
        ("transformers", replace(GATED, gates=[GateSpec("query")]), "model.gates"),
        ("transformers", replace(GATED, gates=[GateSpec("key")]), "model.gates"),
        ("transformers", replace(GATED, gates=[GateSpec("output")]), "model.gates"),
        ("transformers", replace(GATED, gates=[GateSpec(), GateSpec("value")]), "model.gates"),
        ("transformers", replace(GATED, gates=[GateSpec(sharing="shared")]), "model.gates"),
        ("transformers", replace(GATED, gates=[GateSpec(combine="add")]), "model.gates"),
        ("transformers", replace(GATED, gates=[GateSpec(activation="silu")]), "model.gates"),
        ("transformers", replace(GATED, gates=[GateSpec(source="constant")]), "model.gates"),
        ("transformers", replace(GATED, qk_norm=False), "norms every query and key"),
        ("transformers", replace(GATED, sandwich_norm=True), "model.sandwich_norm"),
        ("transformers", replace(BARE, sandwich_norm=True), "model.sandwich_norm"),
        ("transformers", replace(BARE, switch=SwitchSpec(2)), "model.switch"),
        ("transformers", replace(BARE, qk_norm=False, heads=3, kv_heads=1, width=32), "multiple of model.heads"),
        ("official", replace(GATED, gates=[GateSpec("value")]), "model.gates"),
        ("official", fuzzed("Qwen3NextMoe"), "no experts"),
        ("official", replace(BARE, switch=SwitchSpec(2)), "model.switch"),
    ],
)
def test_what_has_no_place_is_refused(to: str, spec: ModelSpec, why: str) -> None:
    with pytest.raises(ValueError, match=why) as error:
        layout_for(spec, to)
    assert len(str(error.value).splitlines()) == 1


def test_a_refusal_leaves_nothing(tmp_path: Path, scramble: Scramble) -> None:
    kept(ours(replace(GATED, gates=[GateSpec("value")]), scramble), tmp_path / "ours")
    with pytest.raises(ValueError, match=r"model\.gates"):
        convert(str(tmp_path / "ours"), tmp_path / "out", "transformers")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


# What may be wrong with a folder ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, scramble: Scramble) -> Path:
    folder = tmp_path_factory.mktemp("good")
    theirs("Qwen3", fuzzed("Qwen3"), scramble).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "model"))


def refused(folder: Path, *says: str) -> None:
    with pytest.raises(ValueError) as error:
        open_model(str(folder))
    assert len(str(error.value).splitlines()) == 1
    for word in (str(folder), *says):
        assert word in str(error.value)


def altered(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")
    return folder


K = "model.layers.0.self_attn.k_proj.weight"


def test_a_tensor_that_is_missing_unused_or_of_another_shape_is_named(folder: Path) -> None:
    refused(altered(folder, lambda state: state.pop(K)), K)
    refused(altered(folder, lambda state: state.update({K: torch.ones(3, 5)})), K, "(3, 5)")


def test_a_tensor_without_a_place_is_named(folder: Path) -> None:
    refused(altered(folder, lambda state: state.update({"model.extra": torch.ones(3)})), "model.extra")


def test_numbers_that_are_not_floating_point_are_refused(folder: Path) -> None:
    refused(altered(folder, lambda state: state.update({K: state[K].to(torch.int8)})), K, "model.safetensors")


@pytest.mark.parametrize("extra", [{0: torch.ones(3)}, {K: torch.ones(3, device="meta")}], ids=["number", "meta"])
def test_a_torch_file_of_more_than_named_numbers_is_refused(extra: dict[Any, Tensor], folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state | extra, folder / "pytorch_model.bin")
    refused(folder, "pytorch_model.bin", f"{next(iter(extra))} is no tensor")


def test_a_torch_file_of_parameters_is_one_of_tensors(tmp_path: Path, scramble: Scramble) -> None:
    model = theirs("Qwen3Moe", fuzzed("Qwen3Moe"), scramble)
    model.save_pretrained(folder := tmp_path / "theirs")
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({name: nn.Parameter(tensor) for name, tensor in state.items()}, folder / "pytorch_model.bin")
    assert_agree(open_model(str(folder)).net, model)


def test_biases_are_accepted_only_where_they_are_zero(folder: Path) -> None:
    bias = K.replace("weight", "bias")
    altered(folder, lambda state: state.update({bias: torch.zeros(len(state[K]))}))
    assert isinstance(open_model(str(folder)).net, GatedLM)
    refused(altered(folder, lambda state: state[bias][-1:].fill_(0.1)), bias)


def test_a_tied_head_may_stand_there_only_as_the_embedding(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "lm_head.weight")
    altered(folder, lambda state: state.update({"lm_head.weight": state["model.embed_tokens.weight"].clone()}))
    assert open_model(str(folder)).net.head is None


class Canary:
    """Unpickled it would write a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.write_text, (self.file, "sang")


def test_a_malicious_pickle_is_not_run(folder: Path, tmp_path: Path) -> None:
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state | {K: Canary(tmp_path / "canary")}, folder / "pytorch_model.bin")
    refused(folder, "pytorch_model.bin", "unpickle")
    assert not (tmp_path / "canary").exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "canary").exists(), "the canary cannot sing at all"


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_damaged_file_names_itself(name: str, folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / name) if name.endswith("bin") else save_file(state, folder / name)
    whole = (folder / name).read_bytes()
    for size in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        (folder / name).write_bytes(whole[:size])
        refused(folder, name)
    (folder / name).write_bytes(b"PK\3\4" + random.Random(0).randbytes(999))
    refused(folder, name)
    (folder / name).write_bytes(whole)
    assert open_model(str(folder)).net.spec.layers


def test_any_flipped_byte_of_a_header_is_an_error_of_one_line_or_none(folder: Path) -> None:
    """No flip may end in a traceback of another kind, whatever it makes of the header."""
    whole = (folder / "model.safetensors").read_bytes()
    draw = random.Random(0)
    for _ in range(60):
        place = draw.randrange(0, 600)
        (folder / "model.safetensors").write_bytes(whole[:place] + draw.randbytes(1) + whole[place + 1 :])
        try:
            open_model(str(folder))
        except ValueError as error:
            assert len(str(error).splitlines()) == 1


def test_an_index_names_files_of_its_folder(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = folder / "model.safetensors.index.json"
    for places, says in (
        ({K: "model-1.safetensors", "b": "model-2.safetensors"}, "model-2.safetensors"),
        ({K: "../model-1.safetensors"}, "weight_map"),
        ([], "weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": places}))
        refused(folder, says)
    index.write_text("{")
    refused(folder, index.name)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gpt2"),
        ("model_type", None),
        ("hidden_act", "gelu"),
        ("rms_norm_eps", 1e-5),
        ("hidden_size", "many"),
        ("hidden_size", 2**62),
        ("num_hidden_layers", 400_000),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 5),
        ("vocab_size", True),
        ("layer_types", ["sliding_attention"]),
        ("layer_types", 5),
        ("use_sliding_window", True),
        ("rope_parameters", {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 1.5}),
        ("rope_parameters", {"full_attention": {"rope_theta": 1e4}}),
        ("rope_parameters", {"rope_theta": "large"}),
        ("rope_parameters", {"rope_theta": math.inf}),
        ("rope_parameters", {"rope_theta": math.nan}),
        ("rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.25}),
        ("rope_parameters", 7),
        ("quantization_config", {"bits": 4}),
        ("max_position_embeddings", "long"),
        ("max_position_embeddings", math.inf),
    ],
)
def test_a_config_without_a_match_is_refused(key: str, value: Any, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {key: value}
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder)


def test_qwen3_next_with_linear_attention_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "qwen3_next"}
    del config["layer_types"]
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "layer_types")


def test_gate_rows_that_differ_are_not_headwise(tmp_path: Path, scramble: Scramble) -> None:
    convert(str(kept(ours(GATED, scramble), tmp_path / "ours")), tmp_path / "out", "transformers")
    config = json.loads((tmp_path / "out" / "config.json").read_text()) | {"gatedlm_gate": "headwise"}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    refused(tmp_path / "out", "q_proj", "headwise")


def test_a_shared_expert_is_refused(tmp_path: Path, scramble: Scramble) -> None:
    model = theirs("Qwen3NextMoe", fuzzed("Qwen3NextMoe"), scramble)
    scramble(model)
    model.save_pretrained(tmp_path / "theirs")
    refused(tmp_path / "theirs", "shared expert")


def test_a_draft_that_fails_leaves_nothing(tmp_path: Path, scramble: Scramble) -> None:
    convert(str(kept(ours(GATED, scramble), tmp_path / "ours")), tmp_path / "out", "transformers")
    config = json.loads((tmp_path / "out" / "config.json").read_text()) | {"gatedlm_gate": "headwise"}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="headwise"):
        convert(str(tmp_path / "out"), tmp_path / "new", "gatedlm")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "out"]
    with pytest.raises(ValueError, match="exists"):
        convert(str(tmp_path / "ours"), tmp_path / "out", "gatedlm")


@pytest.mark.parametrize("where", ["nowhere", "/no/where", "no where/at all", "../x/y"])
def test_what_is_no_folder_is_said(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no such folder"):
        open_model(where)


def test_an_empty_folder_and_a_file_are_said(tmp_path: Path) -> None:
    refused(tmp_path, "recipe.yaml")
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "folder")


# The Hub ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """org/name/sub/folder on a Hub that is a folder; what was asked for."""
    import huggingface_hub

    asked: list[list[str]] = []
    root = tmp_path / "hub"
    shutil.copytree(folder, root / "org" / "name" / "sub")

    def snapshot_download(repository: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        source, copy = root / repository, tmp_path / "cache"
        if not source.is_dir():
            raise ConnectionError("no network\nat all")
        for file in source.rglob("*"):
            name = str(file.relative_to(source))
            if file.is_file() and any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, copy / name)
        return str(copy)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    return asked


def test_a_name_on_the_hub(hub: list[list[str]], tmp_path: Path) -> None:
    assert open_model("org/name/sub").name == "sub"
    assert len(hub) == 1, "torch files are asked for only where there are no safetensors"
    safe = tmp_path / "hub" / "org" / "name" / "sub" / "model.safetensors"
    torch.save(load_file(safe), safe.with_name("pytorch_model.bin"))
    safe.unlink()
    shutil.rmtree(tmp_path / "cache")
    assert open_model("org/name/sub").net.spec == BARE
    assert len(hub) == 3


def test_no_network_and_no_library_are_said_in_one_line(hub: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^org/other: no such folder, and .*\(no network\).*$"):
        open_model("org/other")
    with pytest.raises(ValueError, match="no weights in other"):
        open_model("org/name/other")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match="huggingface_hub"):
        open_model("org/name")


# Words ------------------------------------------------------------------------------------------------------------

TEXT = ["def main(words): return words", "import sys, os; sys.exit(main(sys.argv))"] * 9


def spoken(folder: Path, scramble: Scramble, **data: Any) -> Path:
    """A run with a tokenizer."""
    net = ours(replace(GATED, vocab=300), scramble)
    kept(net, folder, **data)
    train(TEXT, 290).save(str(folder / "tokenizer.json"))
    return folder


def greedy(net: GatedLM, tokens: list[int], count: int) -> list[int]:
    for _ in range(count):
        tokens = [*tokens, int(net(torch.tensor([tokens])).logits[0, -1].argmax())]
    return tokens


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("to", ["transformers", "gatedlm"])
def test_the_words_travel(to: str, fixed: bool, tmp_path: Path, scramble: Scramble) -> None:
    before = open_model(str(spoken(tmp_path / "run", scramble, fixed_first=fixed, context=77)))
    assert (before.first, before.stop) == (0 if fixed else None, {0})
    convert(str(tmp_path / "run"), tmp_path / "out", to)
    after = open_model(str(tmp_path / "out"))
    assert (after.first, after.stop) == (before.first, before.stop)
    assert before.tokenizer and after.tokenizer
    text = "import words<|endoftext|>"
    ids = before.tokenizer.encode(text, add_special_tokens=False).ids
    assert 0 not in ids
    assert after.tokenizer.encode(text, add_special_tokens=False).ids == ids
    assert after.tokenizer.encode(text).ids == [0] * fixed + ids
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(text)["input_ids"] == [0] * fixed + ids
    assert theirs.model_max_length == 77
    assert theirs.decode(ids) == text


@pytest.mark.parametrize("spec", [GATED, BARE, replace(BARE, qk_norm=False)], ids=["Qwen3Next", "Qwen3", "Llama"])
def test_a_pipeline_writes_the_same_tokens(spec: ModelSpec, tmp_path: Path, scramble: Scramble) -> None:
    net = ours(replace(spec, vocab=300), scramble)
    kept(net, tmp_path / "run")
    train(TEXT, 300).save(str(tmp_path / "run" / "tokenizer.json"))
    convert(str(tmp_path / "run"), tmp_path / "out", "transformers")
    write = pipeline("text-generation", str(tmp_path / "out"))
    found = write("import ", do_sample=False, max_new_tokens=12, return_tensors=True)[0]["generated_token_ids"]
    start = open_model(str(tmp_path / "run")).tokenizer
    assert start
    expected = greedy(net, [0, *start.encode("import ").ids], 12)
    assert found == expected[: len(found)] and (len(found) == len(expected) or found[-1] == 0)


def test_a_first_token_without_a_tokenizer_travels(tmp_path: Path, scramble: Scramble) -> None:
    kept(ours(GATED, scramble), tmp_path / "run", corpus="backcopy", context=50)
    for to in ("gatedlm", "transformers"):
        convert(str(tmp_path / "run"), tmp_path / to, to)
        opened = open_model(str(tmp_path / to))
        assert (opened.tokenizer, opened.first, opened.stop) == (None, 0, set())


def test_the_files_of_a_tokenizer_of_theirs_are_copied(folder: Path, tmp_path: Path) -> None:
    train(TEXT, 290).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "own": 1}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7], "bos_token_id": 5}')
    convert(str(folder), tmp_path / "ours", "gatedlm")
    convert(str(tmp_path / "ours"), tmp_path / "back", "transformers")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
    opened = open_model(str(tmp_path / "ours"))
    assert (opened.first, opened.stop) == (None, {5, 7}), "no tokenizer here writes the 5 before a text"


def test_a_damaged_tokenizer_names_itself(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    refused(folder, "tokenizer.json")
