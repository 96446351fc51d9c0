"""The training loss as named terms that sum to it; labels are shifted, masked and normalised here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gatedlm.model.feedforward import Routing
from gatedlm.shapes import Bool, Float, Int


@dataclass(frozen=True)
class LossSpec:
    """Coefficients of a mixture's two extra terms; ST-MoE's values (arXiv 2202.08906), the paper names none.

    balance_over  whose tokens decide how full an expert is: micro (this forward pass), global (all ranks'), buffer (all
                  ranks', summed over the micro-batches so far) or exact (the whole global batch, by a first pass)
    """

    balance: float = 1e-2
    router_z: float = 1e-3
    balance_over: Literal["micro", "global", "buffer", "exact"] = "buffer"


def shift(rows: Int[Tensor, "B T1"]) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Rows of T + 1 tokens as inputs and targets: the target at t is the token at t + 1."""
    return rows[:, :-1], rows[:, 1:]


def next_token(
    logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"], valid: Bool[Tensor, "B T"] | None = None
) -> Float[Tensor, ""]:
    """sum over valid targets of -log softmax(logits)[target], in fp32 and nats; the caller divides by their number."""
    if valid is not None:
        targets = targets.masked_fill(~valid, -100)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="sum")


LARGE = 2**25  # logits that are held at once: 128 MiB in fp32, twice over


def read_out(
    x: Float[Tensor, "B T C"], weight: Float[Tensor, "V C"], targets: Int[Tensor, "B T"], valid: Bool[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """``next_token`` of the logits x W^T. Above ``LARGE`` of them they are never there all at once.

    The parts, or on a GPU liger-kernel's where it is installed, differ from the whole in rounding alone; small models
    take the whole, so that their losses stay the same bit for bit.
    """
    if targets.numel() * len(weight) <= LARGE:
        return next_token(F.linear(x, weight), targets, valid)
    kept = targets.masked_fill(~valid, -100).flatten()
    return (liger(x.device.type) or in_parts)(weight, x.flatten(0, 1), kept)


@cache
def liger(device: str) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """liger-kernel's ``in_parts``, gradients summed in fp32 as here; None without a GPU or the extra."""
    if device != "cuda" or find_spec("liger_kernel") is None:
        return None
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # pyright: ignore[reportMissingImports]

    return LigerFusedLinearCrossEntropyLoss(reduction="sum", accum_dtype=torch.float32)


def in_parts(weight: Float[Tensor, "V C"], x: Float[Tensor, "N C"], targets: Int[Tensor, " N"]) -> Float[Tensor, ""]:
    """``next_token`` of x W^T for N rows, those of target -100 left out, ``LARGE`` logits at a time."""
    return _InParts.apply(x, weight, targets, max(1, LARGE // len(weight)), torch.is_grad_enabled())


class _InParts(torch.autograd.Function):
    """Loss and both gradients of some tokens' logits after the other's, in the forward pass (Liger, arXiv 2410.10989).

    d loss / d logits = softmax - onehot is known as soon as the logits are, so that none has to wait for the backward
    pass. The weight's gradient is summed in fp32.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, size: int, learning: bool) -> Tensor:
        nats = torch.zeros((), device=x.device)
        to_x = torch.empty_like(x) if learning else None
        to_weight = torch.zeros(weight.shape, device=x.device) if learning else None
        for rows in (slice(start, start + size) for start in range(0, len(x), size)):
            logits = F.linear(x[rows], weight)
            kind, logp = logits.dtype, logits.float().log_softmax(-1)
            del logits
            nats += F.nll_loss(logp, targets[rows], ignore_index=-100, reduction="sum")
            if to_x is not None and to_weight is not None:
                kept = (targets[rows] >= 0)[:, None]
                slope = logp.exp_().scatter_add_(1, targets[rows, None].clamp(min=0), -kept.float()).mul_(kept).to(kind)
                to_x[rows] = slope @ weight.to(kind)
                _add_product(to_weight, slope.T, x[rows].to(kind))
        if to_x is not None and to_weight is not None:
            ctx.save_for_backward(to_x, to_weight.to(weight.dtype))
        return nats

    @staticmethod
    def backward(ctx, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        to_x, to_weight = ctx.saved_tensors
        return to_x * slopes[0], to_weight * slopes[0], None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, without room for the product where the types are the same."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def expert_counts(routing: list[Routing], valid: Bool[Tensor, "B T"]) -> Int[Tensor, "L E"]:
    """How often each expert of each layer was chosen by the valid tokens; no gradient."""
    kept = valid.flatten().long()[:, None]
    return torch.stack(
        [
            torch.zeros(r.logits.shape[-1], dtype=torch.long, device=kept.device).scatter_add(
                0, r.index.flatten(), kept.expand_as(r.index).flatten()
            )
            for r in routing
        ]
    )


def load_balance(routing: list[Routing], counts: Int[Tensor, "L E"], valid: Bool[Tensor, "B T"]) -> Float[Tensor, ""]:
    """E sum_e f_e sum_n p_ne, summed over layers and valid tokens n; divided by their number, 1 a layer if uniform.

    f is each expert's share of ``counts``, which may cover more tokens than these (the global batch), p the router's
    softmax. Global-batch balance: Qiu et al. 2025, arXiv 2501.11873.
    """
    share = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    kept = valid.flatten()[:, None]
    mass = torch.stack([(r.logits.softmax(-1) * kept).sum(0) for r in routing])
    return share.shape[-1] * (share * mass).sum()


def router_z(routing: list[Routing], valid: Bool[Tensor, "B T"]) -> Float[Tensor, ""]:
    """sum over layers and valid tokens of logsumexp(router logits)^2 (ST-MoE, arXiv 2202.08906, Eq. 5)."""
    return torch.stack([(r.logits.logsumexp(-1).square() * valid.flatten()).sum() for r in routing]).sum()


def terms(
    nats: Float[Tensor, ""],
    routing: list[Routing],
    valid: Bool[Tensor, "B T"],
    counts: Int[Tensor, "L E"],
    tokens: Int[Tensor, ""],
    spec: LossSpec,
) -> dict[str, Float[Tensor, ""]]:
    """The named terms whose sum is the loss: next_token, and for a mixture balance and router_z, coefficients included.

    ``nats`` is what ``next_token`` or ``read_out`` gives for these tokens.
    Each is a sum over these tokens divided by ``tokens``, the valid ones of the whole global batch: the terms of its
    parts add up to those of the whole.
    """
    named = {"next_token": nats}
    if routing:
        named["balance"] = spec.balance * load_balance(routing, counts, valid)
        named["router_z"] = spec.router_z * router_z(routing, valid)
    return {name: term / tokens for name, term in named.items()}
