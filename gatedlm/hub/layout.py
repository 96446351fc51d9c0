"""Where our tensors stand in other layouts, and what is done to them on the way there and back.

H query heads share G key/value heads, R = H / G; D is the head width. A layout that gates the SDPA output keeps the
gate's rows inside q_proj: the release after the query rows of each group of R heads, Qwen3-Next after those of each
head. The two agree for R = 1 only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gatedlm.model.lm import GatedLM, ModelSpec


@dataclass(frozen=True)
class Layout:
    """A family of checkpoints: ``class_name`` and ``model_type`` as config.json spells them, and how it differs.

    gate     whose query rows the gate's rows follow inside q_proj: those of a group, of a head, or there are none
    qk_norm  whether queries and keys are normed
    centred  norms are kept as w - 1
    mixture  there are experts; ``stacked`` in one tensor, else in one for each
    shared   width of a shared expert, which is zero here; 0 where there is none
    """

    class_name: str
    model_type: str
    gate: Literal["", "group", "head"] = ""
    qk_norm: bool = True
    centred: bool = False
    mixture: bool = False
    stacked: bool = False
    shared: int = 0


SHARED = 16  # the least that divides among the ranks of a server
GATEDLM = Layout("GatedLM", "gatedlm", mixture=True, stacked=True)
OFFICIAL = Layout("Qwen3ForCausalLM", "qwen3", gate="group")
QWEN3 = Layout("Qwen3ForCausalLM", "qwen3")
QWEN3_MOE = Layout("Qwen3MoeForCausalLM", "qwen3_moe", mixture=True)
QWEN3_NEXT = Layout("Qwen3NextForCausalLM", "qwen3_next", gate="head", centred=True, mixture=True, shared=SHARED)
LLAMA = Layout("LlamaForCausalLM", "llama", qk_norm=False)
QWEN2_MOE = Layout("Qwen2MoeForCausalLM", "qwen2_moe", qk_norm=False, mixture=True, shared=SHARED)

QUERY, SCORE = "attention.q_proj.weight", "attention.gates.sdpa.score.weight"
ROUTER, UP, DOWN = "feedforward.router.weight", "feedforward.up_proj", "feedforward.down_proj"
NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "feedforward_norm.weight": "post_attention_layernorm.weight",
    QUERY: "self_attn.q_proj.weight",
    "attention.k_proj.weight": "self_attn.k_proj.weight",
    "attention.v_proj.weight": "self_attn.v_proj.weight",
    "attention.o_proj.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "feedforward.silu_proj.weight": "mlp.gate_proj.weight",
    "feedforward.up_proj.weight": "mlp.up_proj.weight",
    "feedforward.down_proj.weight": "mlp.down_proj.weight",
    ROUTER: "mlp.gate.weight",
    UP: "mlp.experts.gate_up_proj",
    DOWN: "mlp.experts.down_proj",
}
Change = Callable[[list[Tensor]], list[Tensor]]


class Link(NamedTuple):
    """theirs = pack(ours), ours = unpack(theirs): the same numbers in some tensors of ours and of another layout."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    pack: Change
    unpack: Change


def links(spec: ModelSpec, layout: Layout, dtype: torch.dtype = torch.float32) -> list[Link]:
    """All tensors of the model, a link each; the lists of any two layouts run in step.

    ``dtype`` is the checkpoint's type. Norms that are kept as w - 1 change in fp64 and take that type, fp32 or fp64,
    whichever is the first to hold the result unrounded. So they come back bit for bit if |w| is 0 or at least 2^-29.
    """
    return [_link(ours, spec, layout, dtype) for ours in _bundles(_shapes(spec))]


def expected(spec: ModelSpec, layout: Layout) -> dict[str, torch.Size]:
    """{their name: shape} of all tensors that the layout has for this model."""
    shapes = _shapes(spec)
    # A centred norm keeps its shape, but rounding cannot be judged without values.
    pairs = (
        (link.theirs, link.pack([shapes[name] for name in link.ours]))
        for link in links(spec, replace(layout, centred=False))
    )
    return {name: tensor.shape for names, tensors in pairs for name, tensor in zip(names, tensors, strict=True)}


def with_experts_of(layout: Layout, names: Collection[str]) -> Layout:
    """The layout with its experts stacked or not, as the names say."""
    return replace(layout, stacked=any(name.endswith(NAMES[UP]) for name in names))


def _shapes(spec: ModelSpec) -> dict[str, Tensor]:
    with torch.device("meta"):
        return GatedLM(spec).state_dict()


def _bundles(names: Collection[str]) -> list[tuple[str, ...]]:
    scores = {name.replace(SCORE, QUERY): name for name in names if name.endswith(SCORE)}
    return [(name, scores[name]) if name in scores else (name,) for name in names if name not in scores.values()]


def _link(ours: tuple[str, ...], spec: ModelSpec, layout: Layout, dtype: torch.dtype) -> Link:
    if layout == GATEDLM:
        return Link(ours, ours, _same, _same)
    tail = ours[0].split(".", 2)[-1] if ours[0].startswith("blocks.") else ours[0]
    theirs = ours[0].removesuffix(tail).replace("blocks", "model.layers") + NAMES[tail]
    if len(ours) == 2 and layout.gate:
        return Link(ours, (theirs,), *_packed(spec, layout))
    if tail.endswith("norm.weight") and layout.centred:
        return Link(ours, (theirs,), *_centred(dtype))
    if tail == ROUTER and layout.shared:
        return Link(ours, *_beside_shared(theirs, spec.width, layout.shared))
    if tail in (UP, DOWN):
        return Link(ours, *(_stacked(theirs) if layout.stacked else _one_by_one(theirs, spec.experts.count)))
    return Link(ours, (theirs,), _same, _same)


def _same(tensors: list[Tensor]) -> list[Tensor]:
    return tensors


def _packed(spec: ModelSpec, layout: Layout) -> tuple[Change, Change]:
    """(q, gate) as one matrix: cut into groups, the query rows of each before its gate rows."""
    groups = spec.heads if layout.gate == "head" else spec.kv_heads
    queries = spec.heads * spec.head_dim // groups
    repeats = spec.head_dim if layout.gate == "head" and spec.gates[0].granularity == "headwise" else 1

    def pack(tensors: list[Tensor]) -> list[Tensor]:
        q, gate = tensors[0], tensors[1].repeat_interleave(repeats, 0)
        return [torch.cat((q.unflatten(0, (groups, -1)), gate.unflatten(0, (groups, -1))), 1).flatten(0, 1)]

    def unpack(tensors: list[Tensor]) -> list[Tensor]:
        rows = tensors[0].unflatten(0, (groups, -1))
        gate = rows[:, queries:].reshape(-1, repeats, spec.width)
        if not torch.equal(gate, gate[:, :1].expand_as(gate)):
            raise ValueError("the gate rows of a head differ, though config.json says that its gate is headwise")
        return [rows[:, :queries].flatten(0, 1), gate[:, 0]]

    return pack, unpack


def _centred(dtype: torch.dtype) -> tuple[Change, Change]:
    """w as w - 1."""

    def moved(by: int) -> Change:
        return lambda tensors: [_narrow(tensors[0].double() + by, dtype)]

    return moved(-1), moved(1)


def _narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In the first type that holds every value of the fp64 tensor unrounded."""
    return next((x.to(kind) for kind in (dtype, torch.float32) if torch.equal(x.to(kind).double(), x)), x)


def _beside_shared(router: str, width: int, hidden: int) -> tuple[tuple[str, ...], Change, Change]:
    """The router, and beside it a shared expert that is zero and so adds nothing."""
    base = router.removesuffix("gate.weight")
    shapes = {
        "shared_expert.gate_proj.weight": (hidden, width),
        "shared_expert.up_proj.weight": (hidden, width),
        "shared_expert.down_proj.weight": (width, hidden),
        "shared_expert_gate.weight": (1, width),
    }

    def unpack(tensors: list[Tensor]) -> list[Tensor]:
        if any(tensor.any() for tensor in tensors[1:]):
            raise ValueError("a shared expert that is not zero, and gatedlm has none")
        return tensors[:1]

    names = (router, *(base + name for name in shapes))
    return names, lambda tensors: [tensors[0], *(tensors[0].new_zeros(shape) for shape in shapes.values())], unpack


def _stacked(name: str) -> tuple[tuple[str, ...], Change, Change]:
    """(E, in, out) as (E, out, in)."""

    def turn(tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].transpose(1, 2)]

    return (name,), turn, turn


def _one_by_one(name: str, count: int) -> tuple[tuple[str, ...], Change, Change]:
    """(E, in, out) as matrices (out, in), one or two side by side for each expert."""
    base, _, last = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)

    def pack(tensors: list[Tensor]) -> list[Tensor]:
        return [part for expert in tensors[0] for part in expert.T.chunk(len(parts))]

    def unpack(tensors: list[Tensor]) -> list[Tensor]:
        rows, width = tensors[0].shape
        whole = tensors[0].new_empty(count, width, rows * len(parts))
        for number, expert in enumerate(whole):
            expert.copy_(torch.cat(tensors[number * len(parts) : (number + 1) * len(parts)]).T)
        return [whole]

    return tuple(f"{base}.{expert}.{part}.weight" for expert in range(count) for part in parts), pack, unpack
