"""One model read on one sample: losses and probes as packed, with a fixed first token, and under interventions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gatedlm.loss import next_token, shift
from gatedlm.model.lm import GatedLM
from gatedlm.probes import (
    INTERVENTIONS,
    LayerFigures,
    LayerTrace,
    Summary,
    layer_figures,
    multiplies,
    opened_by,
    watching,
)
from gatedlm.studies.sample import Sample
from gatedlm.training.measure import Probed, queries

AT_ONCE = 2048  # tokens in a pass, or one row where that is longer
CHUNK = 256  # positions whose logits are there together: a large vocabulary's would be most of the memory

Advance = Callable[[], None]


@dataclass(frozen=True)
class Reading:
    """Nats per token, and what the probes saw in the same passes."""

    loss: float
    summary: Summary


@torch.no_grad()
def read(net: GatedLM, rows: Tensor, first: int | None, advance: Advance) -> Reading:
    """Loss and probes on rows (N, T+1) opened by id ``first``; ``advance`` is called as each layer of a pass ends.

    Beside the weights it takes memory for one layer in fp32 and its activations, 256 rows of its attention map, and
    for the head in fp32.
    """
    inputs, targets = shift(rows.to(net.embed.weight.device))
    figures, nats, summaries = layer_figures(net.spec), 0.0, []
    head = (net.head or net.embed).weight.float()

    def see(layer: LayerTrace) -> LayerFigures:
        advance()
        return figures(layer)

    batch = max(1, AT_ONCE // inputs.shape[1])
    for x, y in zip(opened_by(inputs, first).split(batch), targets.split(batch), strict=True):
        with in_fp32(net), watching(net, see) as layers:
            hidden, _ = net.hidden(x)
        parts = zip(hidden.flatten(0, 1).split(CHUNK), y.flatten().split(CHUNK), strict=True)
        nats += sum(float(next_token(F.linear(part, head)[None], labels[None])) for part, labels in parts)
        summaries.append(Summary.of(len(x), layers))
    return Reading(nats / targets.numel(), reduce(add, summaries))


@contextmanager
def in_fp32(net: GatedLM) -> Iterator[None]:
    """Blocks compute in fp32, each with a copy of its weights for as long as it takes; what stays keeps its type.

    Figures are then the weights' own, and a CPU that cannot multiply in bf16 is several times faster.
    """
    kind = net.embed.weight.dtype

    def widen(block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        block.float()
        return args[0].float(), *args[1:]

    def narrow(block: nn.Module, args: Any, out: Any) -> None:
        block.to(kind)

    with ExitStack() as hooks:
        for block in net.blocks:
            hooks.enter_context(block.register_forward_pre_hook(widen))
            hooks.enter_context(block.register_forward_hook(narrow))
        yield


def passes(net: GatedLM, sample: Sample, interventions: list[str]) -> int:
    """How often ``study`` will call ``advance``."""
    count, tokens = len(sample.rows), sample.rows.shape[1] - 1
    batches = math.ceil(count / max(1, AT_ONCE // tokens))
    return net.spec.layers * batches * (2 + len(applicable(net, interventions)))


def applicable(net: GatedLM, interventions: list[str]) -> list[str]:
    """Those that change something: a model without a gate that multiplies has no score to hold."""
    return [name for name in interventions if multiplies(net) or not name.startswith("gate=")]


def study(
    net: GatedLM, sample: Sample, first: int, fixed_first: bool, interventions: list[str], advance: Advance
) -> dict[str, Any]:
    """What study.json holds of a model's figures.

    ``first`` is the id of the fixed first token; ``fixed_first`` whether the model is meant to be read with it, as
    ``loss``, the interventions and all but the sink's share then are.
    """
    net.eval()
    packed, fixed = (read(net, sample.rows, opening, advance) for opening in (None, first))
    plain = fixed if fixed_first else packed
    by_kind = queries(net, shift(sample.rows)[0]) if sample.backcopy else {}
    probed = Probed(packed.summary, fixed.summary, plain.summary, by_kind)
    told = plain.summary.as_dict()
    changed = {}
    for name in applicable(net, interventions):
        with INTERVENTIONS[name](net):
            reading = read(net, sample.rows, first if fixed_first else None, advance)
        changed[name] = {
            "loss": reading.loss,
            "difference": reading.loss - plain.loss,
            "figures": reading.summary.totals,
        }
    tokens = sample.rows[:, 1:].numel()
    return {
        "loss": plain.loss,
        "bits_per_byte": plain.loss * tokens / math.log(2) / sample.size if sample.size else None,
        "figures": probed.figures,
        "by_layer": probed.by_layer,
        "outliers": told["outliers"],
        "scores": told["scores"],
        "interventions": changed,
    }
