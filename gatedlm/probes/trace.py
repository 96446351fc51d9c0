"""What was seen in a forward pass: hooks on the model's stations for as long as a ``with`` block lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gatedlm.model.lm import GatedLM, Station
from gatedlm.shapes import Bool, Float


@dataclass(frozen=True)
class LayerTrace:
    """One layer in one pass, detached, in the types the model computed in.

    q, k, v  as softmax attention took them: after gates, QK-norm and RoPE
    mask     which keys each query saw, None if causal
    sdpa     softmax attention's output, before its gate (G1)
    hidden   the block's output in the residual stream
    scores   by gate position, in fp32; heads and channels are 1 where the score is shared over them. A gate with
             source=self has no score apart from its output Y', which then stands here
    """

    q: Float[Tensor, "B T H D"]
    k: Float[Tensor, "B T G D"]
    v: Float[Tensor, "B T G D"]
    mask: Bool[Tensor, "b 1 T T"] | None
    sdpa: Float[Tensor, "B T H D"]
    hidden: Float[Tensor, "B T C"]
    scores: dict[str, Float[Tensor, "B T _ _"]]


Trace = list[LayerTrace]


@contextmanager
def tracing(model: GatedLM) -> Iterator[Trace]:
    """``with tracing(model) as trace: model(tokens)`` fills ``trace``, layer by layer, when the block ends.

    Outputs, gradients and random state stay as they were; of several passes the last is kept. The hooks go even if the
    block raises. Raises ValueError if a station saw nothing, as happens in a compiled model.
    """
    stations, trace = model.stations(), []
    arrived: dict[nn.Module, Any] = {}
    left: dict[nn.Module, Any] = {}
    with ExitStack() as hooks:
        for block, core, scores in stations:
            hooks.enter_context(core.register_forward_pre_hook(lambda core, args: arrived.update({core: args})))
            for module in (block, core, *scores.values()):
                hooks.enter_context(module.register_forward_hook(lambda module, _, out: left.update({module: out})))
        yield trace
    if not stations or not all({block, core, *scores.values()} <= left.keys() for block, core, scores in stations):
        raise ValueError(
            "tracing saw nothing at some layers: run the model inside the `with` block, and trace the eager model, "
            "because hooks do not fire in a compiled one"
        )
    trace += [_layer(station, arrived, left) for station in stations]


def _layer(station: Station, arrived: dict[nn.Module, Any], left: dict[nn.Module, Any]) -> LayerTrace:
    q, k, v, mask = arrived[station.core]
    return LayerTrace(
        q.detach(),
        k.detach(),
        v.detach(),
        mask,
        sdpa=left[station.core].detach(),
        hidden=left[station.block][0].detach(),
        scores={position: left[score].detach() for position, score in station.scores.items()},
    )
