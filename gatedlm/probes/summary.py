"""The probes' figures over many rows: accumulated batch by batch, added up over ranks, written to the ledger."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from gatedlm.model.lm import GatedLM
from gatedlm.probes.activations import m_act
from gatedlm.probes.scores import Scores, count_scores
from gatedlm.probes.sink import f_attn, first_token_attention, sink_rate, value_drain
from gatedlm.probes.trace import LayerTrace, Trace, tracing
from gatedlm.shapes import Float, Int


@dataclass(frozen=True, eq=False)
class Summary:
    """Sums over rows, maxima and counts, by layer; those of other rows, from a batch or a rank, are merged by ``+``.

    rows    how many rows were seen; each weighs the same
    sums    f_attn, f_attn_skip4, sink_rate and value_drain, each summed over rows
    m_act   the largest |h|
    scores  by position, of the gates that have a score: all but source=self, where Y' = f(Y) takes none
    """

    rows: int
    sums: dict[str, Float[Tensor, " L"]]
    m_act: Float[Tensor, " L"]
    scores: dict[str, Scores]

    def __add__(self, other: Summary) -> Summary:
        return Summary(
            self.rows + other.rows,
            {name: total + other.sums[name] for name, total in self.sums.items()},
            torch.maximum(self.m_act, other.m_act),
            {position: scores + other.scores[position] for position, scores in self.scores.items()},
        )

    @property
    def by_layer(self) -> dict[str, list[float]]:
        """Each figure in each layer; gate_score and share_below, if any gate has a score, are means over gates."""
        figures = {name: total / self.rows for name, total in self.sums.items()} | {"m_act": self.m_act}
        if self.scores:
            figures["gate_score"] = torch.stack([scores.mean for scores in self.scores.values()]).mean(0)
            figures["share_below"] = torch.stack([scores.share_below for scores in self.scores.values()]).mean(0)
        return {name: figure.tolist() for name, figure in figures.items()}

    @property
    def totals(self) -> dict[str, float | None]:
        """Each figure's mean over the layers, so M-Act is a mean of maxima; None for the scores of a model without."""
        figures = {name: sum(layers) / len(layers) for name, layers in self.by_layer.items()}
        return {"gate_score": None, "share_below": None} | figures

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON: rows, totals, by_layer, and scores by position and layer."""
        scores = {
            position: {
                "mean": scores.mean.tolist(),
                "share_below": scores.share_below.tolist(),
                "histogram": scores.histogram.tolist(),
            }
            for position, scores in self.scores.items()
        }
        return {"rows": self.rows, "totals": self.totals, "by_layer": self.by_layer, "scores": scores}


@torch.no_grad()
def summarise(model: GatedLM, tokens: Int[Tensor, "N T"], batch: int, first: int | None = None) -> Summary:
    """All figures over N rows of T tokens, ``batch`` rows at a time, in eval mode; the model is left as it was.

    ``first`` is an id written over each row's first token, so that all rows begin alike; None leaves them as packed.
    """
    if first is not None:
        tokens = torch.cat((torch.full_like(tokens[:, :1], first), tokens[:, 1:]), dim=1)
    training = model.training
    model.eval()
    try:
        return reduce(add, (_summary(model, rows) for rows in tokens.split(batch)))
    finally:
        model.train(training)


def _summary(model: GatedLM, tokens: Int[Tensor, "B T"]) -> Summary:
    with tracing(model) as trace:
        model(tokens.to(model.embed.weight.device))
    figures = [_means(layer) for layer in trace]
    return Summary(
        rows=len(tokens),
        sums={name: len(tokens) * _by_layer([layer[name] for layer in figures]).double() for name in figures[0]},
        m_act=torch.tensor([m_act(layer).size for layer in trace], dtype=torch.float64),
        scores={gate.position: _scores(trace, gate.position) for gate in model.spec.gates if gate.source != "self"},
    )


def _means(layer: LayerTrace) -> dict[str, Tensor]:
    first = first_token_attention(layer.q, layer.k, layer.mask)
    return {
        "f_attn": f_attn(first),
        "f_attn_skip4": f_attn(first, skip=4),
        "sink_rate": sink_rate(first),
        "value_drain": value_drain(layer),
    }


def _scores(trace: Trace, position: str) -> Scores:
    counts = [count_scores(layer.scores[position]) for layer in trace]
    return Scores(_by_layer([c.total for c in counts]).double(), _by_layer([c.histogram for c in counts]))


def _by_layer(figures: list[Tensor]) -> Tensor:
    return torch.stack(figures).cpu()
