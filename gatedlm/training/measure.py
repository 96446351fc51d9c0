"""What is measured of a run as it stands: validation loss, and the probes' figures on validation rows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gatedlm import loss
from gatedlm.data.module import LMData
from gatedlm.data.packing import END_OF_TEXT
from gatedlm.data.synthetic import active, dormant
from gatedlm.probes import Summary, attention_map, f_attn_where, first_token_attention, summarise, tracing
from gatedlm.training.module import LitLM

PROBE_ROWS = 16
PROBE_BATCH = 4
MAP_TOKENS = 64
MAPPED_LAYERS = 3


@torch.no_grad()
def validate(lit: LitLM, batches: Iterable[Tensor]) -> dict[str, float]:
    """val/loss in nats per token and, where tokens stand for bytes of text, val/bits_per_byte; over all ranks."""
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

    ``trained`` is the one that begins as the training rows do: M-Act, gate scores and value drain are read from it.
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
        own = {name: trained[name] for name in ("m_act", "gate_score", "share_below", "value_drain")}
        sinks = ("f_attn", "f_attn_skip4", "sink_rate")
        return (
            own | {name: packed[name] for name in sinks} | {f"{n}_fixed_first": fixed[n] for n in sinks} | self.queries
        )

    @property
    def by_layer(self) -> dict[str, list[float]]:
        """The same figures in each layer, lists from the first block to the last."""
        sinks = ("f_attn", "f_attn_skip4", "sink_rate")
        packed, fixed = self.packed.by_layer, self.fixed.by_layer
        own = {name: figures for name, figures in self.trained.by_layer.items() if name not in sinks}
        return own | {name: packed[name] for name in sinks} | {f"{name}_fixed_first": fixed[name] for name in sinks}


def probe(lit: LitLM, data: LMData) -> Probed:
    """Probe the first validation rows; all ranks see the same ones, so that sharded networks pass together."""
    inputs, _ = loss.shift(data.packed_rows(PROBE_ROWS))
    packed = summarise(lit.net, inputs, PROBE_BATCH)
    fixed = summarise(lit.net, inputs, PROBE_BATCH, first=END_OF_TEXT)
    trained = fixed if lit.recipe.data.fixed_first else packed
    return Probed(packed, fixed, trained, _queries(lit, inputs) if data.task else {})


@torch.no_grad()
def _queries(lit: LitLM, inputs: Tensor) -> dict[str, float]:
    with tracing(lit.net) as trace:
        lit.net(inputs.to(lit.device))
    first = torch.stack([first_token_attention(layer.q, layer.k) for layer in trace]).mean(0).cpu()
    kinds = {"dormant": dormant(inputs), "active": active(inputs)}
    return {f"f_attn_{kind}": float(f_attn_where(first, where)) for kind, where in kinds.items()}


@torch.no_grad()
def attention_maps(lit: LitLM, row: Tensor) -> dict[int, Tensor]:
    """Attention maps (H, T, T) of the first, middle and last layers on one row of at most 64 tokens."""
    with tracing(lit.net) as trace:
        lit.net(row[None].to(lit.device))
    layers = sorted({round(i) for i in torch.linspace(0, len(trace) - 1, MAPPED_LAYERS).tolist()})
    return {layer: attention_map(trace[layer], torch.arange(len(row)).to(lit.device))[0].cpu() for layer in layers}
