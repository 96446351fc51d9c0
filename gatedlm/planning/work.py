"""What there is to compute: floating-point operations of a token, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from gatedlm.model.lm import ModelSpec


class Flops(NamedTuple):
    """FLOPs of one token, forward and backward together: of the matrices it meets, and of attention itself.

    weights    6 for each of ``matrices``: 2 forward, 4 backward
    attention  6 layers H D T: the causal half of Q K^T and P V, 2 H D T forward, twice that backward
    """

    weights: float
    attention: float

    @property
    def total(self) -> float:
        """What MFU is reckoned with: recomputed passes do not count."""
        return self.weights + self.attention


def matrices(model: ModelSpec) -> int:
    """Weights that multiply a token: the read-out counts, the embedding it looks up does not; of experts those it uses.

    Gates and the router count. Switch heads compute all of their projections.
    """
    whole = replace(model, switch=replace(model.switch, used=max(1, model.switch.count)))
    tables = replace(model, gates=[gate for gate in model.gates if gate.source != "input"]).parameters().gate
    norms = model.layers * ((4 if model.sandwich_norm else 2) * model.width + 2 * model.head_dim * model.qk_norm)
    embedding = 0 if model.tied else model.vocab * model.width
    return whole.parameters().active - embedding - norms - model.width - tables


def flops(model: ModelSpec, context: int) -> Flops:
    """The FLOPs of one token in a row of ``context`` of them."""
    return Flops(6 * matrices(model), 6 * model.layers * model.heads * model.head_dim * context)


def blocks_share(model: ModelSpec, context: int) -> float:
    """The share of ``flops`` that lies in the blocks, which checkpointing computes once more by a third."""
    return 1 - 6 * model.vocab * model.width / flops(model, context).total
