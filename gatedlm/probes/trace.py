"""What was seen in a forward pass: hooks on the model's stations for as long as a ``with`` block lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from gatedlm.model.attention import SoftmaxAttention
from gatedlm.model.kernels import attention_and_lse
from gatedlm.model.lm import GatedLM, Station
from gatedlm.shapes import Bool, Float

Seen = TypeVar("Seen")


@dataclass(frozen=True)
class LayerTrace:
    """One layer in one pass, detached, in the types the model computed in.

    q, k, v  as softmax attention took them: after gates, QK-norm and RoPE
    mask     which keys each query saw, None if causal
    sdpa     softmax attention's output, before its gate (G1)
    gated    the same after its gate, as the output projection takes it; without a gate, the same
    hidden   the block's output in the residual stream
    scores   by gate position, in fp32; heads and channels are 1 where the score is shared over them. A gate with
             source=self has no score apart from its output Y', which then stands here
    lse      log sum over the keys seen of exp(q . k / sqrt(D)), in fp32, where the kernel gave it
    """

    q: Float[Tensor, "B T H D"]
    k: Float[Tensor, "B T G D"]
    v: Float[Tensor, "B T G D"]
    mask: Bool[Tensor, "b 1 T T"] | None
    sdpa: Float[Tensor, "B T H D"]
    gated: Float[Tensor, "B T H D"]
    hidden: Float[Tensor, "B T C"]
    scores: dict[str, Float[Tensor, "B T _ _"]]
    lse: Float[Tensor, "B H T"] | None = None


Trace = list[LayerTrace]
UNSEEN = (
    "tracing saw nothing at some layers: run the model inside the `with` block, and trace the eager model, "
    "because hooks do not fire in a compiled one"
)


@contextmanager
def watching(model: GatedLM, see: Callable[[LayerTrace], Seen]) -> Iterator[list[Seen]]:
    """``with watching(model, see) as seen: model(tokens)`` fills ``seen`` with see(layer), in order, when it ends.

    ``see`` is called as a layer ends, and what it does not return is let go: one layer's trace is in memory at a time.
    Outputs, gradients and random state stay as they were; of several passes the last is kept. The hooks go even if the
    block raises. Raises ValueError if a station saw nothing, as happens in a compiled model.
    """
    if not isinstance(model, GatedLM) or any(module._compiled_call_impl for module in model.modules()):
        raise ValueError(UNSEEN)
    stations, seen, found = model.stations(), [], {}
    with ExitStack() as hooks:
        for number, station in enumerate(stations):
            for hook in _listen(station, lambda layer, number=number: found.update({number: see(layer)})):
                hooks.enter_context(hook)
        yield seen
    if not stations or len(found) < len(stations):
        raise ValueError(UNSEEN)
    seen += [found[number] for number in range(len(stations))]


@contextmanager
def tracing(model: GatedLM) -> Iterator[Trace]:
    """``with tracing(model) as trace: model(tokens)``: ``watching`` that keeps all there is to see of every layer."""
    with watching(model, lambda layer: layer) as trace:
        yield trace


def _listen(station: Station, end: Callable[[LayerTrace], None]) -> list[AbstractContextManager]:
    """Hooks that keep what passes inside the block and hand it to ``end`` when the block ends."""
    inside = (station.core, station.gate, *station.scores.values())
    passed: dict[nn.Module | str, Any] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        o, passed["lse"] = attention_and_lse(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return o.transpose(1, 2)

    def keep(module: nn.Module, args: Any, out: Any) -> None:
        passed[module] = (args, out)

    def leave(block: nn.Module, args: Any, out: Any) -> None:
        if set(inside) <= passed.keys():
            layer = _layer(station, passed, out[0])
            passed.clear()
            end(layer)

    hooks = [module.register_forward_hook(keep) for module in inside]
    return [_computing(station.core, attend), *hooks, station.block.register_forward_hook(leave)]


@contextmanager
def _computing(core: SoftmaxAttention, attend: Callable[..., Tensor]) -> Iterator[None]:
    """The core computes by ``attend``, which hears more than a hook does, for as long as the ``with`` block lasts."""
    before = vars(core).get("forward")
    core.forward = attend
    try:
        yield
    finally:
        if before is None:
            del core.forward
        else:
            core.forward = before


def _layer(station: Station, passed: dict[nn.Module | str, Any], hidden: Tensor) -> LayerTrace:
    (q, k, v, mask), sdpa = passed[station.core]
    return LayerTrace(
        q.detach(),
        k.detach(),
        v.detach(),
        mask,
        sdpa=sdpa.detach(),
        gated=passed[station.gate][1].detach(),
        hidden=hidden.detach(),
        scores={position: passed[score][1].detach() for position, score in station.scores.items()},
        lse=None if passed.get("lse") is None else passed["lse"].detach(),
    )
