"""What is measured of a run as it stands: validation loss, and the probes' figures on validation rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from operator import add
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gatedlm import loss
from gatedlm.data.module import LMData
from gatedlm.data.packing import END_OF_TEXT
from gatedlm.data.synthetic import active, dormant
from gatedlm.model.lm import GatedLM
from gatedlm.probes import Summary, attention_map, f_attn_where, first_token_attention, summarise, tracing
from gatedlm.training.module import LitLM
from gatedlm.training.strategy import eager

PROBE_ROWS = 16
PROBE_BATCH = 4
MAP_TOKENS = 64
MAPPED_LAYERS = 3
SINKS = ("f_attn", "f_attn_skip4", "sink_rate")


@torch.no_grad()
def validate(lit: LitLM, data: LMData) -> dict[str, float]:
    """val/loss in nats per token and, where tokens stand for bytes of text, val/bits_per_byte; over all ranks."""
    batches = islice(data.val_dataloader(), lit.recipe.trainer.val_batches or None)
    sums = torch.zeros(3, dtype=torch.float64, device=lit.device)
    lit.eval()
    for number, rows in enumerate(batches):
        sums += lit.validation_step(rows.to(lit.device), number)
    lit.train()
    nats, tokens, size = lit.over_ranks(sums).tolist()
    figures = {"val/loss": nats / tokens}
    return figures | ({"val/bits_per_byte": nats / math.log(2) / size} if size else {})


@dataclass(frozen=True)
class Probed:
    """Two summaries of the same rows, as packed and with end-of-text written over the first token of each.

    ``trained`` is the one that begins as the training rows do: all but the sink's share is read from it.
    ``queries`` is the attention on the first token of the queries that the corpus tells apart (Bigram-Backcopy).
    """

    packed: Summary
    fixed: Summary
    trained: Summary
    queries: dict[str, float]

    @property
    def figures(self) -> dict[str, float | None]:
        """One number each, over layers."""
        packed, fixed, trained = self.packed.totals, self.fixed.totals, self.trained.totals
        own = {name: figure for name, figure in trained.items() if name not in SINKS}
        return (
            own | {name: packed[name] for name in SINKS} | {f"{n}_fixed_first": fixed[n] for n in SINKS} | self.queries
        )

    @property
    def by_layer(self) -> dict[str, list[float]]:
        """The same figures in each layer, lists from the first block to the last."""
        packed, fixed = self.packed.by_layer, self.fixed.by_layer
        own = {name: figures for name, figures in self.trained.by_layer.items() if name not in SINKS}
        return own | {name: packed[name] for name in SINKS} | {f"{name}_fixed_first": fixed[name] for name in SINKS}


def probe(net: GatedLM, data: LMData, rank: int = 0, world: int = 1) -> Probed:
    """Probe the first validation rows, spread over the ranks and merged: sums by rows, M-Act by maximum."""
    inputs, _ = loss.shift(data.packed_rows(PROBE_ROWS))
    with eager(net):
        packed, fixed = (_over_ranks(net, inputs, first, rank, world) for first in (None, END_OF_TEXT))
        by_kind = queries(net, inputs) if data.task else {}
    return Probed(packed, fixed, fixed if data.spec.fixed_first else packed, by_kind)


def _over_ranks(net: GatedLM, inputs: Tensor, first: int | None, rank: int, world: int) -> Summary:
    """A summary of all rows. Where they do not divide among the ranks, each sees all: sharded ranks must pass alike."""
    if world == 1 or len(inputs) % world:
        return summarise(net, inputs, PROBE_BATCH, first)
    parts: list[Any] = [None] * world
    dist.all_gather_object(parts, summarise(net, inputs.chunk(world)[rank], PROBE_BATCH, first))
    return reduce(add, parts)


@torch.no_grad()
def queries(net: GatedLM, inputs: Tensor) -> dict[str, float]:
    """F-Attn of Bigram-Backcopy's dormant and active queries, over layers and heads."""
    with tracing(net) as trace:
        net(inputs.to(net.embed.weight.device))
    first = torch.stack([first_token_attention(layer.q, layer.k) for layer in trace]).mean(0).cpu()
    kinds = {"dormant": dormant(inputs), "active": active(inputs)}
    return {f"f_attn_{kind}": float(f_attn_where(first, where)) for kind, where in kinds.items()}


@torch.no_grad()
def attention_maps(net: GatedLM, row: Tensor, layers: list[int] | None = None) -> dict[int, Tensor]:
    """Attention maps (H, T, T) on one row of at most 64 tokens, of chosen layers or the first, middle and last."""
    row = row.to(net.embed.weight.device)
    with eager(net), tracing(net) as trace:
        net(row[None])
    layers = layers or sorted({round(i) for i in torch.linspace(0, len(trace) - 1, MAPPED_LAYERS).tolist()})
    return {layer: attention_map(trace[layer], torch.arange(len(row), device=row.device))[0].cpu() for layer in layers}


class Measurements:
    """Validates and probes a run where due and at its last step; ``validation`` and ``probed`` are the latest."""

    validation: dict[str, float]
    probed: Probed

    def __init__(self, lit: LitLM, data: LMData) -> None:
        self.lit, self.data = lit, data

    def __call__(self, step: int) -> dict[str, Any]:
        """Figures for the line of ``step``."""
        spec, figures = self.lit.recipe.trainer, {}
        if step == spec.steps or (spec.val_every and step % spec.val_every == 0):
            figures |= self._validate()
        if step == spec.steps or (spec.probe_every and step % spec.probe_every == 0):
            figures |= {f"probe/{name}": value for name, value in self._probe().figures.items()}
        return figures

    def renew(self) -> None:
        """Measure the network as it stands, whatever was due."""
        self._validate()
        self._probe()

    def _validate(self) -> dict[str, float]:
        with self.lit.trainer.precision_plugin.forward_context():
            self.validation = validate(self.lit, self.data)
        return self.validation

    def _probe(self) -> Probed:
        trainer = self.lit.trainer
        with trainer.precision_plugin.forward_context():
            self.probed = probe(self.lit.net, self.data, trainer.global_rank, trainer.world_size)
        return self.probed
