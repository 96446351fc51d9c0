"""The language model: what it is made of, how large it is, how it begins, and where a reader may listen."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from gatedlm.model.attention import Attention, SoftmaxAttention
from gatedlm.model.cache import Cache, Past
from gatedlm.model.feedforward import ExpertsSpec, MixtureOfExperts, Routing, SwiGLU
from gatedlm.model.gate import Gate, GateSpec, Score
from gatedlm.model.norm import RMSNorm
from gatedlm.model.rope import RopeSpec, angles
from gatedlm.model.switch import SwitchSpec
from gatedlm.shapes import Bool, Float, Int


class Parameters(NamedTuple):
    """Parameter counts: all; those one token uses (embeddings counted, unused experts not); those of the gates."""

    total: int
    active: int
    gate: int


@dataclass(frozen=True)
class ModelSpec:
    """A decoder of ``layers`` blocks of width C = ``width`` with H ``heads``, G ``kv_heads`` and D ``head_dim``.

    vocab          tokens (V)
    ffn            width of the SwiGLU feed-forward, or of one expert in a mixture
    experts        a mixture of experts instead of the dense feed-forward
    gates          the gates, at most one at each position
    switch         several key/value projections a head, of which each token uses some
    qk_norm        RMSNorm on each head's query and key (Appendix A.2)
    sandwich_norm  RMSNorm on the outputs of attention and feed-forward too (Section 4.1)
    tied           one matrix embeds tokens and reads them out

    Raises ValueError, naming the fix, for sizes that do not fit together and gates that could not act.
    """

    vocab: int = 1024
    layers: int = 4
    width: int = 64
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 176
    experts: ExpertsSpec = field(default_factory=ExpertsSpec)
    gates: list[GateSpec] = field(default_factory=list)
    switch: SwitchSpec = field(default_factory=SwitchSpec)
    qk_norm: bool = True
    sandwich_norm: bool = False
    tied: bool = False
    rope: RopeSpec = field(default_factory=RopeSpec)

    def __post_init__(self) -> None:
        for name in ("vocab", "layers", "width", "heads", "kv_heads", "head_dim", "ffn"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)}: must be at least 1")
        for broken, why in (*_size_refusals(self), *_gate_refusals(self)):
            if broken:
                raise ValueError(why)

    def parameters(self) -> Parameters:
        """Counts by formula, nothing is built. Per layer 2 C (H + G) D + 3 C F, norms, gates; V C once or twice."""
        attention = 2 * self.width * (self.heads + self.kv_heads) * self.head_dim + 2 * self.head_dim * self.qk_norm
        norms = (4 if self.sandwich_norm else 2) * self.width
        gate = self.layers * sum(_gate_parameters(self, spec) for spec in self.gates)
        expert = 3 * self.width * self.ffn
        router = self.experts.count * self.width
        shared = self.layers * (attention + norms + router) + gate
        shared += self.width + self.vocab * self.width * (1 if self.tied else 2)
        count, used = (self.experts.count, self.experts.used) if self.experts.count else (1, 1)
        total, active = (_switch_parameters(self, n) for n in (self.switch.count, self.switch.used))
        return Parameters(
            shared + self.layers * (count * expert + total), shared + self.layers * (used * expert + active), gate
        )

    def matched_to(self, baseline: ModelSpec, multiple: int = 8) -> ModelSpec:
        """This model with ``ffn`` changed so that its total matches the baseline's, rounded up to ``multiple``.

        The paper narrows the feed-forward where a gate adds parameters (Table 2); its release rounds to 128.
        """
        surplus = self.parameters().total - baseline.parameters().total
        per_unit = 3 * self.width * self.layers * max(1, self.experts.count)
        return replace(self, ffn=math.ceil((self.ffn - surplus / per_unit) / multiple) * multiple)


def _size_refusals(spec: ModelSpec) -> list[tuple[bool, str]]:
    return [
        (
            spec.heads % spec.kv_heads != 0,
            f"model.heads={spec.heads} is not a multiple of model.kv_heads={spec.kv_heads}: "
            "each key/value head serves the same number of query heads",
        ),
        (spec.head_dim % 2 != 0, f"model.head_dim={spec.head_dim}: RoPE turns pairs of channels, use an even number"),
        (
            spec.experts.count > 0 and (spec.width % 8 != 0 or spec.ffn % 8 != 0),
            f"model.width={spec.width} model.ffn={spec.ffn}: grouped experts need multiples of 8",
        ),
    ]


def _gate_refusals(spec: ModelSpec) -> list[tuple[bool, str]]:
    positions = Counter(gate.position for gate in spec.gates)
    twice = [position for position, times in positions.items() if times > 1]
    rules = [(bool(twice), f"model.gates: two gates at {', '.join(twice)}: each position takes one")]
    for gate in spec.gates if spec.qk_norm else ():
        if gate.position in ("query", "key"):
            scales = gate.combine == "multiply" and gate.granularity == "headwise"
            advice = "use granularity=elementwise, another position, or model.qk_norm=false"
            rules.append((scales, f"gate {gate}: QK-norm cancels one factor per head: {advice}"))
            advice = "drop the gate or set model.qk_norm=false"
            rules.append((gate.activation == "rmsnorm", f"gate {gate}: QK-norm does the same right after it: {advice}"))
    for gate in spec.gates if spec.sandwich_norm else ():
        advice = "use sharing=specific, granularity=elementwise or model.sandwich_norm=false"
        rules.append((_one_factor(spec, gate), f"gate {gate}: sandwich norm cancels one factor per token: {advice}"))
        advice = "drop the gate or set model.sandwich_norm=false"
        again = gate.position == "output" and gate.activation == "rmsnorm"
        rules.append((again, f"gate {gate}: sandwich norm does the same right after it: {advice}"))
    return rules


def _one_factor(spec: ModelSpec, gate: GateSpec) -> bool:
    """Whether the gate scales all that attention writes for a token alike (on values: if the same for every token)."""
    heads = {"sdpa": spec.heads, "value": spec.kv_heads if gate.source == "constant" else 0}.get(gate.position, 0)
    single = heads == 1 or (heads > 0 and gate.sharing == "shared")
    return single and gate.combine == "multiply" and gate.granularity == "headwise"


def _switch_parameters(spec: ModelSpec, projections: int) -> int:
    """What switch heads add to a layer if ``projections`` of each head are counted, and all scores."""
    places = sum(spec.switch.at(place) for place in ("key", "value"))
    added = (projections - 1) * spec.head_dim + spec.switch.count
    return places * spec.kv_heads * spec.width * added


def _gate_parameters(spec: ModelSpec, gate: GateSpec) -> int:
    heads = {"key": spec.kv_heads, "value": spec.kv_heads, "output": 1}.get(gate.position, spec.heads)
    dim = spec.width if gate.position == "output" else spec.head_dim
    if gate.source == "self":
        return dim if gate.activation == "rmsnorm" else 0
    scores = heads * (dim if gate.granularity == "elementwise" else 1)
    return scores * (spec.width if gate.source == "input" else 1)


class Block(nn.Module):
    """h = x + attention(norm(x)); y = h + feedforward(norm(h)); with sandwich norm each branch is normed once more."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.width)
        self.attention = Attention(spec)
        self.feedforward_norm = RMSNorm(spec.width)
        self.feedforward = (
            MixtureOfExperts(spec.width, spec.ffn, spec.experts) if spec.experts.count else SwiGLU(spec.width, spec.ffn)
        )
        self.attention_post_norm, self.feedforward_post_norm = (
            RMSNorm(spec.width) if spec.sandwich_norm else nn.Identity() for _ in range(2)
        )

    def forward(
        self,
        x: Float[Tensor, "B T C"],
        rope: tuple[Float[Tensor, "1 T 1 D"], Float[Tensor, "1 T 1 D"]],
        mask: Bool[Tensor, "b 1 T S"] | None = None,
        past: Past | None = None,
    ) -> tuple[Float[Tensor, "B T C"], Routing | None]:
        h = x + self.attention_post_norm(self.attention(self.attention_norm(x), rope, mask, past))
        y, routing = self.feedforward(self.feedforward_norm(h))
        return h + self.feedforward_post_norm(y), routing


class Output(NamedTuple):
    """logits, and the routers' decisions layer by layer (empty for a dense model)."""

    logits: Float[Tensor, "B T V"]
    routing: list[Routing]


class Station(NamedTuple):
    """Where a reader may listen in one layer: the block, attention's core, and the gates' scores.

    ``gate`` stands between the core and the output projection, whether it is a gate (G1) or none.
    """

    block: Block
    core: SoftmaxAttention
    gate: nn.Module
    scores: dict[str, Score]


class GatedLM(nn.Module):
    """logits = head(norm(blocks(embed(tokens)))); tokens are (B, T), logits (B, T, V)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed = nn.Embedding(spec.vocab, spec.width)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.norm = RMSNorm(spec.width)
        self.head = None if spec.tied else nn.Linear(spec.width, spec.vocab, bias=False)

    def forward(
        self, tokens: Int[Tensor, "B T"], documents: Int[Tensor, "B T"] | None = None, cache: Cache | None = None
    ) -> Output:
        """``documents`` numbers each token's document: attention then stays within it.

        ``cache`` holds what earlier passes read, which these tokens follow, and keeps them for the next; it has one
        document a row, so ValueError with ``documents``.
        """
        x, routing = self.hidden(tokens, documents, cache)
        return Output(F.linear(x, self.readout), routing)

    @property
    def readout(self) -> Tensor:
        """The matrix (V, C) that logits are read with, which may be the one that embeds."""
        return self.embed.weight if self.head is None else self.head.weight

    def hidden(
        self, tokens: Int[Tensor, "B T"], documents: Int[Tensor, "B T"] | None = None, cache: Cache | None = None
    ) -> tuple[Float[Tensor, "B T C"], list[Routing]]:
        """norm(blocks(embed(tokens))), what ``forward`` reads the logits from, for callers that want them in parts."""
        if cache is not None and documents is not None:
            raise ValueError("documents= and cache= exclude each other: a cache holds one document a row, give one")
        positions, mask = _layout(tokens, documents) if cache is None else cache.advance(tokens)
        pasts = [None] * len(self.blocks) if cache is None else cache.layers
        rope = angles(self.spec.rope, positions, self.spec.head_dim)
        x, routing = self.embed(tokens), []
        for block, past in zip(self.blocks, pasts, strict=True):
            x, decision = block(x, rope, mask, past)
            routing += [decision] if decision is not None else []
        return self.norm(x), routing

    def stations(self) -> list[Station]:
        """One per layer, in order, for hooks; see ``gatedlm.probes``."""
        return [_station(block) for block in self.blocks if isinstance(block, Block)]


def _station(block: Block) -> Station:
    gates = block.attention.gates
    scores = {place: gate.score for place, gate in gates.items() if isinstance(gate, Gate)}
    return Station(block, block.attention.core, gates["sdpa"], scores)


def _layout(tokens: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Positions (1, T), and with documents the mask (B, 1, T, T), causal and within one document.

    Positions run on from document to document: RoPE sees distances only.
    """
    place = torch.arange(tokens.shape[1], device=tokens.device)
    if documents is None:
        return place[None], None
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return place[None], same & (place[:, None] >= place)


@torch.no_grad()
def initialise(model: GatedLM, seed: int) -> None:
    """Draw all parameters, each from (seed, its name), so that the same weights arise on any number of ranks.

    | parameter | draw | source |
    |---|---|---|
    | embedding, head, projections, router, experts, gates | N(0, 0.02^2) | release: 0.02 for every matrix, gates too |
    | o_proj, down_proj, which write into the residual stream | N(0, 0.02^2 / 2 layers) | our choice: Megatron-LM's |
    | norms | 1 | |
    | score tables of input-independent gates | 0, so the score begins at act(0) | Table 4, row 6 |
    """
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
        full = _draw(name, parameter.shape, model.spec.layers, generator).to(parameter.device)
        if isinstance(parameter, DTensor):
            full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(full)


def _draw(name: str, shape: torch.Size, layers: int, generator: torch.Generator) -> Tensor:
    if name.endswith("score.table"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    writes = name.removesuffix(".weight").endswith(("o_proj", "down_proj"))
    return torch.randn(shape, generator=generator) * (0.02 / math.sqrt(2 * layers) if writes else 0.02)
