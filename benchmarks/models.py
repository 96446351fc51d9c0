"""The models that are compared, with the same weights wherever they come from, and one training step for all."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from benchmarks.harness import Bench, Work
from gatedlm import loss
from gatedlm.model.feedforward import ExpertsSpec
from gatedlm.model.kernels import multiplies_bf16
from gatedlm.model.lm import GatedLM, ModelSpec, initialise

NARROW = ModelSpec(vocab=4096, layers=6, width=256, heads=4, kv_heads=2, head_dim=64, ffn=768, tied=True)
WIDE = ModelSpec(vocab=16384, layers=8, width=512, heads=8, kv_heads=4, head_dim=64, ffn=1536, tied=True)
CLOSE = 1e-4  # of logits of about 1, in fp32


class Model(NamedTuple):
    """A module and how it gives logits (B, T, V) of tokens (B, T)."""

    net: nn.Module
    logits: Callable[[Tensor], Tensor]


def ours(spec: ModelSpec, bench: Bench, compiled: bool = False) -> Model:
    """A ``GatedLM`` with its initial weights, its blocks compiled as ``trainer.compile`` does it or not."""
    net = GatedLM(spec).to(bench.device)
    initialise(net, seed=0)
    for block in net.blocks if compiled else ():
        block.compile()
    return Model(net, lambda tokens: net(tokens).logits)


def rows(spec: ModelSpec, batch: int, context: int, bench: Bench) -> Tensor:
    """Random rows of tokens (B, T + 1)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(spec.vocab, (batch, context + 1), generator=generator).to(bench.device)


def training(model: Model, rows: Tensor, bf16: bool = False) -> Work:
    """One step: forward, loss in fp32, backward, gradients clipped at norm 1, fused AdamW, gradients dropped."""
    optimizer = AdamW(model.net.parameters(), lr=1e-3, fused=True)
    inputs, targets = loss.shift(rows)

    def step() -> None:
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=bf16):
            value = loss.next_token(model.logits(inputs), targets) / targets.numel()
        value.backward()
        clip_grad_norm_(model.net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def precisions(bench: Bench) -> list[str]:
    """fp32, and bf16 where the device multiplies it in hardware."""
    return ["fp32", "bf16"] if multiplies_bf16(bench.device.type) else ["fp32"]


NO_BF16 = "bf16 is left out: this device emulates its matrix products, see python -m benchmarks kernels"


def peers(model: Model, context: int, bench: Bench) -> tuple[dict[str, Model], list[str]]:
    """The same function from other libraries with the same weights, and a line for each: how close, or not installed.

    ValueError where a peer's logits differ, for then it is another function.
    """
    assert isinstance(model.net, GatedLM)
    spec = model.net.spec
    makers = {"transformers": _transformers, "LitGPT": _litgpt}
    if spec.experts.count:
        makers = {"transformers eager": _transformers, "transformers grouped": _grouped, "LitGPT": _litgpt}
    found, notes, tokens = {}, [], rows(spec, 2, min(context, 64) - 1, bench)
    for name, make in makers.items():
        try:
            peer = make(model.net, context, bench)
        except ImportError as error:
            notes.append(f"{name}: left out, {error}")
            continue
        with torch.no_grad():
            apart = (peer.logits(tokens) - model.logits(tokens)).abs().max().item()
        if not apart < CLOSE:
            raise ValueError(f"{name}: other logits from the same weights, by {apart:.1e}")
        found[name] = peer
        notes.append(f"{name}: logits from the same weights differ by {apart:.1e} at most")
    return found, notes


def _transformers(net: GatedLM, context: int, bench: Bench, experts: str = "eager") -> Model:
    from transformers import AutoConfig, AutoModelForCausalLM

    from gatedlm.hub.config import config_of
    from gatedlm.hub.layout import QWEN3, QWEN3_MOE

    layout = replace(QWEN3_MOE, stacked=True) if net.spec.experts.count else QWEN3
    config = AutoConfig.for_model(**config_of(net.spec, layout, context, torch.float32))
    kind = {"experts_implementation": experts} if net.spec.experts.count else {}
    peer = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", **kind).to(bench.device)
    peer.load_state_dict(_state(net, layout), strict=not net.spec.tied)
    return Model(peer, lambda tokens: peer(input_ids=tokens, use_cache=False).logits)


def _grouped(net: GatedLM, context: int, bench: Bench) -> Model:
    return _transformers(net, context, bench, experts="grouped_mm")


def _litgpt(net: GatedLM, context: int, bench: Bench) -> Model:
    from litgpt.config import Config  # pyright: ignore[reportMissingImports]
    from litgpt.model import GPT  # pyright: ignore[reportMissingImports]

    from gatedlm.hub.layout import QWEN3, QWEN3_MOE

    spec, experts = net.spec, net.spec.experts
    sizes: dict[str, Any] = {"n_layer": spec.layers, "n_embd": spec.width, "n_head": spec.heads}
    sizes |= {"n_query_groups": spec.kv_heads, "head_size": spec.head_dim, "rope_base": int(spec.rope.base)}
    sizes |= {"vocab_size": spec.vocab, "padded_vocab_size": spec.vocab, "block_size": context}
    kind = {"norm_class_name": "RMSNorm", "norm_eps": 1e-6, "norm_qk": True, "bias": False, "rotary_percentage": 1.0}
    kind |= {"parallel_residual": False, "mlp_class_name": "LLaMAMLP", "intermediate_size": spec.ffn}
    if experts.count:
        kind |= {"mlp_class_name": "LLaMAMoE", "moe_intermediate_size": spec.ffn}
        kind |= {"n_expert": experts.count, "n_expert_per_token": experts.used}
    peer = GPT(Config(**sizes, **kind)).to(bench.device)
    peer.load_state_dict(_litgpt_names(_state(net, QWEN3_MOE if experts.count else QWEN3)))
    if spec.tied:
        peer.lm_head.weight = peer.transformer.wte.weight  # pyright: ignore
    return Model(peer, peer)


def _state(net: GatedLM, layout: Any) -> dict[str, Tensor]:
    from gatedlm.hub.layout import links

    own = net.state_dict()
    pairs = ((link.theirs, link.pack([own[name] for name in link.ours])) for link in links(net.spec, layout))
    return {name: tensor for names, tensors in pairs for name, tensor in zip(names, tensors, strict=True)}


LITGPT = {
    r"model\.embed_tokens": "transformer.wte",
    r"model\.norm": "transformer.ln_f",
    r"model\.layers": "transformer.h",
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    r"self_attn\.([qk])_norm": r"attn.norm_\1",
    r"self_attn\.o_proj": "attn.proj",
    "gate_proj": "fc_1",
    "up_proj": "fc_2",
    "down_proj": "proj",
}


def _litgpt_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a Qwen3 by LitGPT's names, queries, keys and values in one."""
    renamed = {"lm_head.weight": state["model.embed_tokens.weight"]}
    for name, tensor in state.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            continue
        if name.endswith("q_proj.weight"):
            tensor = torch.cat([state[name.replace("q_proj", f"{kind}_proj")] for kind in "qkv"])
            name = name.replace("self_attn.q_proj", "attn.qkv")
        for old, new in LITGPT.items():
            name = re.sub(old, new, name)
        renamed[name] = tensor
    return renamed


def mixture(count: int, used: int) -> ModelSpec:
    """Two layers of width 256 with experts of width 128; count 0 is a dense layer of ``used`` experts' width."""
    spec = ModelSpec(vocab=4096, layers=2, width=256, heads=4, kv_heads=2, head_dim=64, ffn=128, tied=True)
    return replace(spec, experts=ExpertsSpec(count, used)) if count else replace(spec, ffn=128 * used)
