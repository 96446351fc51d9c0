"""Bytes that one rank holds at the peak of an optimizer step.

The terms follow what autograd keeps: an operation's line below names the tensors that its backward pass needs. They are
those of eager passes; compiled blocks keep somewhat less.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from gatedlm.loss import LARGE
from gatedlm.model.gate import GateSpec
from gatedlm.model.kernels import GROUPED
from gatedlm.model.lm import ModelSpec
from gatedlm.planning.device import FRAGMENTED, Device
from gatedlm.recipe import Recipe

Bytes = dict[str, float]
FP32, INDEX = 4, 8
STATES = 2  # AdamW's averages


@dataclass(frozen=True)
class Setting:
    """A recipe on N ``ranks`` of a device, ``micro`` sequences a pass; sharded by FSDP, on one as the recipe says."""

    recipe: Recipe
    device: Device
    ranks: int
    micro: int

    @property
    def model(self) -> ModelSpec:
        return self.recipe.model

    @property
    def checkpointed(self) -> bool:
        return self.recipe.trainer.checkpoint_blocks

    @property
    def sharded(self) -> bool:
        return self.ranks > 1 or self.recipe.trainer.strategy == "fsdp"

    @property
    def tokens(self) -> int:
        """Of one pass."""
        return self.micro * self.recipe.data.context

    @property
    def passes(self) -> int:
        """Micro-batches of a rank in one optimizer step."""
        return -(-self.recipe.data.batch // (self.ranks * self.micro))

    @property
    def compute(self) -> int:
        """Bytes of a number in matrix products."""
        return FP32 if self.recipe.trainer.precision == "fp32" else 2

    @property
    def rate(self) -> float:
        """FLOP/s of the device's matrix products in that type, by its data sheet."""
        return self.device.fp32 if self.compute == FP32 else self.device.bf16

    @property
    def autocast(self) -> bool:
        """One process casts operation by operation, FSDP whole blocks: the former keeps more copies."""
        return self.compute < FP32 and not self.sharded

    @property
    def residual(self) -> int:
        """Bytes of a number in the residual stream."""
        return FP32 if self.autocast else self.compute


def peak(setting: Setting) -> Bytes:
    """The parts of the fullest moment: the loss, the backward pass of the last or the first block, or AdamW's step."""
    weights = setting.model.parameters().total * FP32 / setting.ranks
    moments = [_loss(setting), _backward(setting, first=False), _backward(setting, first=True), _update(setting)]
    fullest = max(moments, key=lambda parts: sum(parts.values()))
    return {"weights": weights, "optimizer": STATES * weights, **fullest}


def with_margin(setting: Setting) -> Bytes:
    """``peak`` and what the allocator, the driver and the libraries take besides."""
    parts = peak(setting)
    return parts | {"margin": FRAGMENTED * sum(parts.values()) + setting.device.taken}


def largest_micro(setting: Setting) -> int:
    """Sequences that fit in one pass, of those numbers that divide a rank's share of the batch; 0 if not even one."""
    share = setting.recipe.data.batch // setting.ranks
    if not _lacks(setting, share):  # a single pass has no gradients to keep, so that it may fit where two do not
        return share
    most = bisect_left(range(1, share), True, key=lambda n: _lacks(setting, n))
    return next((n for n in range(most, 0, -1) if share % n == 0), 0)


def _lacks(setting: Setting, micro: int) -> bool:
    return sum(with_margin(replace(setting, micro=micro)).values()) > setting.device.memory


# Moments of a step ------------------------------------------------------------------------------------------------


def _loss(setting: Setting) -> Bytes:
    """All that the blocks keep, and the logits' gradients being made."""
    return {
        "gradients": _gradients(setting) if setting.passes > 1 else 0.0,
        "activations": setting.model.layers * _kept(setting) + _top(setting),
        "logits": logits(setting),
        "communication": _root(setting),
    }


def _backward(setting: Setting, first: bool) -> Bytes:
    """In one block's backward pass: what is left of the others, its own tensors and those that are being made."""
    left = 1 if first else setting.model.layers
    done = setting.passes > 1 or first
    block, head = _block_parameters(setting.model), setting.model.vocab * setting.model.width
    others = _gradients(setting) - FP32 * block / setting.ranks
    recomputed = _block(setting) - _block_input(setting) if setting.checkpointed else 0.0
    return {
        "gradients": others if done else 0.0 if setting.sharded else FP32 * head,
        "activations": left * _kept(setting) + recomputed + _made(setting),
        "logits": 0.0,
        "communication": _root(setting) + _exchange(setting, block, head),
    }


def _update(setting: Setting) -> Bytes:
    return {"gradients": _gradients(setting), "activations": 0.0, "logits": 0.0, "communication": 0.0}


def _gradients(setting: Setting) -> float:
    return FP32 * setting.model.parameters().total / setting.ranks


def _root(setting: Setting) -> float:
    """What stays whole during a pass: under FSDP embedding and read-out, under autocast the cast copy of matrices."""
    model = setting.model
    if setting.sharded:
        return setting.compute * model.vocab * model.width * (1 if model.tied else 2)
    embedding = 0 if model.tied else model.vocab * model.width
    return setting.compute * (model.parameters().total - embedding) if setting.autocast else 0.0


def _exchange(setting: Setting, block: int, head: int) -> float:
    """A block's weights and the next one's, gathered; gradients being reduced; the read-out's own, not yet reduced."""
    return (2 * setting.compute + FP32) * block + setting.compute * head if setting.sharded else 0.0


def _block_parameters(model: ModelSpec) -> int:
    total = model.parameters().total - model.vocab * model.width * (1 if model.tied else 2) - model.width
    return total // model.layers


def activations(setting: Setting) -> float:
    """Of all blocks, were none computed anew."""
    return setting.model.layers * _block(setting)


# What is kept for the backward pass ---------------------------------------------------------------------------------


def _kept(setting: Setting) -> float:
    """Of one block from its forward to its backward pass."""
    if not setting.checkpointed:
        return _block(setting)
    return _block_input(setting) + setting.tokens * _routing(setting.model)


def _block_input(setting: Setting) -> float:
    return setting.tokens * setting.residual * setting.model.width


def _block(setting: Setting) -> float:
    model, norm = setting.model, _norm(setting)
    after = 2 * norm(model.width, setting.compute) if model.sandwich_norm else 0.0
    norms = 2 * norm(model.width, setting.residual) + after
    feedforward = _experts(setting) if model.experts.count else _dense(setting)
    return setting.tokens * (norms + _attention(setting) + sum(_gate(setting, g) for g in model.gates) + feedforward)


def _norm(setting: Setting) -> Callable[[int, int], float]:
    """RMSNorm of so many channels of a type: its input; from several kernels input and quotient in fp32."""
    return lambda channels, size: channels * (size if setting.device.fused else 2 * FP32)


def _attention(setting: Setting) -> float:
    """Normed input (once a projection under autocast), q k v before QK-norm and after RoPE, output, log-sum-exp or map.

    Where CPUs compute attention as two products they keep the whole map of every head.
    """
    model, size, norm = setting.model, setting.compute, _norm(setting)
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    readers = 3 + sum(gate.source == "input" for gate in model.gates) if setting.autocast else 1
    normed = norm(queries + keys, size) if model.qk_norm else 0.0
    switched = sum(model.switch.at(place) for place in ("key", "value")) * model.switch.count * keys
    kept = size * (readers * model.width + 2 * queries + 2 * keys + switched)
    context = setting.recipe.data.context
    grouped = setting.device.name == "cpu" and size < FP32 and context <= GROUPED
    return normed + kept + model.heads * (size * context if grouped else FP32)


def _gate(setting: Setting, gate: GateSpec) -> float:
    """Scores in fp32 and in the type they multiply, and the product."""
    model, size = setting.model, setting.compute
    heads = {"key": model.kv_heads, "value": model.kv_heads, "output": 1}.get(gate.position, model.heads)
    channels = heads * (model.width if gate.position == "output" else model.head_dim)
    scores = channels if gate.granularity == "elementwise" else heads
    return scores * (FP32 if size == FP32 else FP32 + size) + size * channels


def _dense(setting: Setting) -> float:
    """Normed input (twice under autocast); silu's input and output, up, their product."""
    return setting.compute * ((2 if setting.autocast else 1) * setting.model.width + 4 * setting.model.ffn)


def _experts(setting: Setting) -> float:
    """The router's input and decisions; a token's copies in the experts' order, their passes, their outputs."""
    model = setting.model
    copies = model.experts.used * setting.compute * (2 * model.width + 4 * model.ffn)
    return FP32 * model.width + _routing(model) + copies


def _routing(model: ModelSpec) -> float:
    """Logits, their softmax for the choice and for the balance; three orders, weights and what normalises them."""
    if not model.experts.count:
        return 0.0
    return 3 * FP32 * model.experts.count + (3 * INDEX + 3 * FP32) * model.experts.used


def _top(setting: Setting) -> float:
    """Input and output of the last norm, and the tokens."""
    channels = setting.model.width
    return setting.tokens * (_norm(setting)(channels, setting.residual) + setting.compute * channels + 2 * INDEX)


def _made(setting: Setting) -> float:
    """Gradients alive at once in the feed-forward: of the block's output, and of the hidden width twice."""
    model, size = setting.model, setting.compute
    used = model.experts.used if model.experts.count else 0
    inner = used * max(2 * model.width, model.width + 2 * model.ffn) if used else 2 * model.ffn
    return setting.tokens * (setting.residual * model.width + size * inner)


def logits(setting: Setting) -> float:
    """Log-probabilities and two gradients in fp32; above ``LARGE`` logits W's gradient twice, or once beside a part."""
    model, size = setting.model, setting.compute
    numbers = setting.tokens * model.vocab
    if numbers <= LARGE:
        return 3 * FP32 * numbers
    gradient = FP32 * model.vocab * model.width
    return gradient + max(gradient * size / FP32, 2 * FP32 * LARGE) + size * setting.tokens * model.width
