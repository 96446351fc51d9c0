"""config.json and ModelSpec: what a checkpoint says of itself, and whether a model has a class at all."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import torch

from gatedlm.hub.layout import (
    GATEDLM,
    LLAMA,
    OFFICIAL,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    QWEN3_NEXT,
    SHARED,
    Layout,
)
from gatedlm.model.feedforward import ExpertsSpec
from gatedlm.model.gate import GateSpec
from gatedlm.model.lm import ModelSpec
from gatedlm.model.rope import RopeSpec

Config = dict[str, Any]
TARGETS = ("gatedlm", "transformers", "official")
TYPES = {layout.model_type: layout for layout in (QWEN3, QWEN3_MOE, QWEN3_NEXT, LLAMA, QWEN2_MOE)}
FLAGS = {
    "elementwise_attn_output_gate": GateSpec(),
    "headwise_attn_output_gate": GateSpec(granularity="headwise"),
}
ORIGINAL = "original_max_position_embeddings"
# What config.json calls the fields of RopeSpec, by kind of scaling
SCALINGS = {
    "default": {},
    "linear": {"factor": "factor"},
    "yarn": {"factor": "factor", ORIGINAL: "original", "beta_fast": "beta_fast", "beta_slow": "beta_slow"},
}
HEADWISE = "gatedlm_gate"  # "headwise" where the gate's rows of a head are equal
EPS = 1e-6
LARGEST = 2**19  # of any size, so that no product of three overflows
LOST = {
    "gates": "it has a place only for a sigmoid of the input that multiplies the SDPA output head by head",
    "experts": "it has no experts",
    "switch": "it has no switch heads",
    "qk_norm": "it norms every query and key",
    "sandwich_norm": "it has no norms on the outputs of attention and feed-forward",
    "rope": "it takes a base, in transformers linear or yarn scaling too",
}


def spec_of(config: Config) -> tuple[Layout, ModelSpec]:
    """The layout and the model that a config.json describes. ValueError names the key that gatedlm has no match for."""
    layout = _layout(config)
    for broken, why in _refusals(config, layout):
        if broken:
            raise ValueError(why)
    heads, width = _whole(config, "num_attention_heads"), _whole(config, "hidden_size")
    experts = _experts(config, layout)
    model = ModelSpec(
        vocab=_whole(config, "vocab_size"),
        layers=_whole(config, "num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=_whole(config, "num_key_value_heads", heads),
        head_dim=_whole(config, "head_dim", width // heads),
        ffn=_whole(config, "moe_intermediate_size" if experts.count else "intermediate_size"),
        experts=experts,
        gates=_gates(config, layout),
        qk_norm=config.get("use_qk_norm", True) is True if layout == OFFICIAL else layout.qk_norm,
        tied=config.get("tie_word_embeddings") is True,
        rope=_rope(config, layout),
    )
    if experts.count and layout.shared:
        layout = replace(layout, shared=_whole(config, "shared_expert_intermediate_size"))
    return layout, model


def config_of(spec: ModelSpec, layout: Layout, context: int, dtype: torch.dtype) -> Config:
    """The config.json with which a transformers class, or the release's own, builds this model."""
    kind = spec.rope.scaling if spec.rope.scaling in SCALINGS else "default"
    rope = {"rope_type": kind, "rope_theta": spec.rope.base, "partial_rotary_factor": 1.0}
    rope |= {key: getattr(spec.rope, ours) for key, ours in SCALINGS[kind].items()}
    general = {
        "architectures": [layout.class_name],
        "model_type": layout.model_type,
        "vocab_size": spec.vocab,
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.width,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "tie_word_embeddings": spec.tied,
        "attention_bias": False,
        "max_position_embeddings": context,
        "rope_theta": spec.rope.base,
    }
    name = str(dtype).removeprefix("torch.")
    if layout == OFFICIAL:
        flags = {flag: spec.gates == [gate] for flag, gate in FLAGS.items()}
        return general | flags | {"qkv_bias": False, "use_qk_norm": spec.qk_norm, "torch_dtype": name}
    mixture = _mixture(spec, layout) if layout.mixture else {}
    own = {"mlp_bias": False} if layout == LLAMA else {"use_sliding_window": False}
    if layout == QWEN3_NEXT:
        own = {"layer_types": ["full_attention"] * spec.layers, "partial_rotary_factor": 1.0}
        own |= {HEADWISE: "headwise"} if spec.gates == [FLAGS["headwise_attn_output_gate"]] else {}
    return general | mixture | own | {"rope_parameters": rope, "dtype": name}


def layout_for(spec: ModelSpec, to: str) -> Layout:
    """The layout that holds this model for one of ``TARGETS``; ValueError with the reason where none does.

    A model fits a class if the class's config.json describes this very model.
    """
    layout = _chosen(spec, to)
    if layout == GATEDLM:
        return layout
    _, back = spec_of(config_of(spec, layout, 1, torch.float32))
    for key in (field.name for field in fields(spec)):
        if getattr(back, key) != getattr(spec, key):
            name = "the release" if layout == OFFICIAL else layout.class_name
            raise ValueError(f"to={to}: {name} cannot hold this model.{key}, {LOST.get(key, 'it has no such thing')}")
    if layout == LLAMA and spec.width % spec.heads:
        raise ValueError(f"to={to}: without QK-norm model.width={spec.width} must be a multiple of model.heads")
    return layout


def _chosen(spec: ModelSpec, to: str) -> Layout:
    if to != "transformers":
        return OFFICIAL if to == "official" else GATEDLM
    if spec.gates:
        return QWEN3_NEXT
    if spec.qk_norm:
        return QWEN3_MOE if spec.experts.count else QWEN3
    return QWEN2_MOE if spec.experts.count else LLAMA


def _mixture(spec: ModelSpec, layout: Layout) -> Config:
    if not spec.experts.count:
        return {"num_experts": 0, "mlp_only_layers": list(range(spec.layers))}
    keys = {
        "num_experts": spec.experts.count,
        "num_experts_per_tok": spec.experts.used,
        "norm_topk_prob": spec.experts.renormalise,
        "moe_intermediate_size": spec.ffn,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    keys |= {"shared_expert_intermediate_size": SHARED} if layout.shared else {}
    return keys | ({"qkv_bias": False} if layout == QWEN2_MOE else {})


def _layout(config: Config) -> Layout:
    if {*FLAGS, "use_qk_norm"} & config.keys():
        return OFFICIAL
    kind = config.get("model_type")
    if kind not in TYPES:
        raise ValueError(f"model_type={kind!r}: no layout known here, there are {', '.join(TYPES)} and the release's")
    return TYPES[kind]


def _refusals(config: Config, layout: Layout) -> list[tuple[bool, str]]:
    kinds = config.get("layer_types") or ["linear_attention" if layout == QWEN3_NEXT else "full_attention"]
    act, eps = config.get("hidden_act", "silu"), config.get("rms_norm_eps", EPS)
    sliding = config.get("use_sliding_window") or (layout == LLAMA and config.get("sliding_window"))
    return [
        (act != "silu", f"hidden_act={act!r}: the feed-forward here is SwiGLU, which is silu"),
        (eps != EPS, f"rms_norm_eps={eps!r}: the norms here add {EPS}"),
        (kinds != ["full_attention"] * len(kinds), "layer_types: every layer here has full attention, not all there"),
        (bool(sliding), "use_sliding_window: attention here sees all that came before"),
        ("quantization_config" in config, "quantization_config: weights here are floating-point numbers"),
        (all(config.get(flag) for flag in FLAGS), f"{' and '.join(FLAGS)}: one of them, not both"),
    ]


def _experts(config: Config, layout: Layout) -> ExpertsSpec:
    if not layout.mixture:
        return ExpertsSpec()
    key = "num_local_experts" if "num_local_experts" in config else "num_experts"
    dense = config.get("mlp_only_layers") or []
    if config.get(key) == 0 or dense == list(range(_whole(config, "num_hidden_layers"))):
        return ExpertsSpec()
    if dense or config.get("decoder_sparse_step", 1) != 1:
        raise ValueError("mlp_only_layers or decoder_sparse_step: here all layers have experts or none has")
    if not isinstance(config.get("norm_topk_prob"), bool):
        raise ValueError("norm_topk_prob: must be true or false")
    return ExpertsSpec(_whole(config, key), _whole(config, "num_experts_per_tok"), config["norm_topk_prob"])


def _gates(config: Config, layout: Layout) -> list[GateSpec]:
    if layout == OFFICIAL:
        return [gate for flag, gate in FLAGS.items() if config.get(flag)]
    if layout == QWEN3_NEXT:
        return [GateSpec(granularity="headwise" if config.get(HEADWISE) == "headwise" else "elementwise")]
    return []


def _rope(config: Config, layout: Layout) -> RopeSpec:
    partial = config.get("partial_rotary_factor", 0.25 if layout == QWEN3_NEXT else 1.0)
    rope = {"rope_theta": config.get("rope_theta", 10_000.0), "partial_rotary_factor": partial}
    for key in ("rope_scaling", "rope_parameters"):
        rope |= config.get(key) or {}
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    if rope.pop("partial_rotary_factor") != 1:
        raise ValueError("partial_rotary_factor: RoPE here turns all channels of a head")
    known = SCALINGS.get(kind, {})
    foreign = [key for key, value in rope.items() if key not in {"rope_theta", *known} and value is not None]
    if kind not in SCALINGS or foreign:
        raise ValueError(f"rope_parameters: RoPE here has no {' '.join((str(kind), *foreign))}")
    given = {key: rope[key] for key in known if rope.get(key) is not None} | {"rope_theta": rope["rope_theta"]}
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
            raise ValueError(f"{key}={value!r}: must be a number")
    if kind == "yarn":
        given[ORIGINAL] = _whole({ORIGINAL: config.get("max_position_embeddings")} | given, ORIGINAL)
    own = {known[key]: value for key, value in given.items() if key in known}
    return RopeSpec(float(given["rope_theta"]), "none" if kind == "default" else kind, **own)


def _whole(config: Config, key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or not 1 <= value <= LARGEST:
        raise ValueError(f"{key}={value!r}: must be a whole number from 1 to {LARGEST}")
    return value
