"""What F-Attn adds to a forward pass in time and memory, by length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from benchmarks.harness import Bench, Result, Work, timed
from benchmarks.models import WIDE, ours, rows
from gatedlm.model.gate import GateSpec
from gatedlm.model.lm import GatedLM
from gatedlm.probes import LayerTrace, attention_map, f_attn, first_token_attention
from gatedlm.probes.trace import watching

LENGTHS = (1024, 4096)
MAPPED = 1024  # longest context at which the whole map is made for comparison


def run(bench: Bench) -> Iterator[Result]:
    """One row of tokens, width 512, 8 layers, elementwise gate, fp32; logits are left out."""
    net = ours(replace(WIDE, gates=[GateSpec()]), bench).net
    assert isinstance(net, GatedLM)
    tables = [compared(net, length, bench) for length in LENGTHS]
    yield from tables
    yield _growth(*tables)


def compared(net: GatedLM, length: int, bench: Bench) -> Result:
    """A forward pass as it is, with F-Attn, and in a short context with the whole map."""
    tokens = rows(net.spec, 1, length - 1, bench)
    looks = {"F-Attn by the log-sum-exp": _share, "F-Attn recomputed": _recomputed} | (
        {"the whole map": _whole} if length <= MAPPED else {}
    )
    works: dict[str, Work] = {"forward": partial(_forward, net, tokens)}
    works |= {name: partial(_watched, net, tokens, look) for name, look in looks.items()}
    peaks = {name: bench.peak(work) / 2**20 for name, work in works.items()}
    seconds = bench.alternate(works)
    table = [row | {"peak MiB": peaks[row["variant"]]} for row in timed(seconds, "forward")]
    return Result(f"forward of {length:,} tokens", table)


def _growth(short: Result, long: Result) -> Result:
    """What a look holds at most in either, and how often the one is in the other."""
    peaks = [{row["variant"]: row["peak MiB"] for row in table.rows} for table in (short, long)]
    table = [
        {"variant": name, "MiB": peaks[0][name], "MiB of the longer": peak, "growth": peak / peaks[0][name]}
        for name, peak in peaks[1].items()
    ]
    return Result(f"growth of the peak from {LENGTHS[0]:,} to {LENGTHS[1]:,} tokens", table)


@torch.no_grad()
def _forward(net: GatedLM, tokens: torch.Tensor) -> None:
    net.hidden(tokens)


@torch.no_grad()
def _watched(net: GatedLM, tokens: torch.Tensor, look: Callable[[LayerTrace], torch.Tensor]) -> None:
    with watching(net, look):
        net.hidden(tokens)


def _share(layer: LayerTrace) -> torch.Tensor:
    return f_attn(first_token_attention(layer.q, layer.k, lse=layer.lse))


def _recomputed(layer: LayerTrace) -> torch.Tensor:
    return f_attn(first_token_attention(layer.q, layer.k))


def _whole(layer: LayerTrace) -> torch.Tensor:
    return f_attn(attention_map(layer, torch.arange(layer.q.shape[1], device=layer.q.device))[..., 0])
