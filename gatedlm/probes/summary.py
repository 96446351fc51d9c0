"""The probes' figures over many rows: accumulated batch by batch, added up over ranks, written to the ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gatedlm.model.lm import GatedLM, ModelSpec
from gatedlm.probes.activations import Outlier, larger, m_act
from gatedlm.probes.scores import Scores, count_scores
from gatedlm.probes.sink import (
    effective_sink,
    f_attn,
    first_token_attention,
    first_value,
    sink_rate,
    value_drain,
)
from gatedlm.probes.sparsity import small_outputs
from gatedlm.probes.trace import LayerTrace, watching
from gatedlm.shapes import Float, Int


class LayerFigures(NamedTuple):
    """One layer in one pass: figures that are means over rows, the largest activation, scores by gate position."""

    means: dict[str, Float[Tensor, ""]]
    outlier: Outlier
    scores: dict[str, Scores]


def layer_figures(model: ModelSpec) -> Callable[[LayerTrace], LayerFigures]:
    """What ``watching`` is to keep of each layer of such a model for a ``Summary``."""
    gates = {gate.position: gate for gate in model.gates if gate.source != "self"}
    factor = "sdpa" in gates and gates["sdpa"].combine == "multiply"

    def see(layer: LayerTrace) -> LayerFigures:
        first = first_token_attention(layer.q, layer.k, layer.mask, lse=layer.lse)
        means = {
            "f_attn": f_attn(first),
            "f_attn_skip4": f_attn(first, skip=4),
            "sink_rate": sink_rate(first),
            "first_value": first_value(layer),
            "value_drain": value_drain(layer),
            "effective_sink": effective_sink(layer, first, layer.scores["sdpa"] if factor else None),
        }
        scores = {position: count_scores(layer.scores[position]) for position in gates}
        return LayerFigures(means | small_outputs(layer), m_act(layer), scores)

    return see


@dataclass(frozen=True, eq=False)
class Summary:
    """Sums over rows, maxima and counts, by layer; those of other rows, from a batch or a rank, are merged by ``+``.

    rows      how many rows were seen; each weighs the same
    sums      f_attn, f_attn_skip4, sink_rate, first_value, value_drain, effective_sink, and the figures of
              ``small_outputs``, each summed over rows
    outliers  the largest |h|, and which row, token and channel hold it
    scores    by position, of the gates that have a score: all but source=self, where Y' = f(Y) takes none
    """

    rows: int
    sums: dict[str, Float[Tensor, " L"]]
    outliers: list[Outlier]
    scores: dict[str, Scores]

    @classmethod
    def of(cls, rows: int, layers: list[LayerFigures]) -> Summary:
        """The summary of one pass over ``rows`` rows."""
        counts = {position: [layer.scores[position] for layer in layers] for position in layers[0].scores}
        return cls(
            rows,
            {name: rows * _by_layer([layer.means[name] for layer in layers]).double() for name in layers[0].means},
            [layer.outlier for layer in layers],
            {
                position: Scores(_by_layer([c.total for c in of]).double(), _by_layer([c.histogram for c in of]))
                for position, of in counts.items()
            },
        )

    def __add__(self, other: Summary) -> Summary:
        moved = [outlier._replace(row=self.rows + outlier.row) for outlier in other.outliers]
        return Summary(
            self.rows + other.rows,
            {name: total + other.sums[name] for name, total in self.sums.items()},
            [larger(*pair) for pair in zip(self.outliers, moved, strict=True)],
            {position: scores + other.scores[position] for position, scores in self.scores.items()},
        )

    @property
    def by_layer(self) -> dict[str, list[float]]:
        """Each figure in each layer; gate_score and share_below, if any gate has a score, are means over gates."""
        figures = {name: (total / self.rows).tolist() for name, total in self.sums.items()}
        figures["m_act"] = [outlier.size for outlier in self.outliers]
        if self.scores:
            for name, figure in (("gate_score", "mean"), ("share_below", "share_below")):
                gates = torch.stack([getattr(scores, figure) for scores in self.scores.values()])
                figures[name] = gates.mean(0).tolist()
        return figures

    @property
    def totals(self) -> dict[str, float | None]:
        """Each figure's mean over the layers, so M-Act is a mean of maxima; None for the scores of a model without."""
        figures = {name: sum(layers) / len(layers) for name, layers in self.by_layer.items()}
        return {"gate_score": None, "share_below": None} | figures

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON: rows, totals, by_layer, outliers by layer, and scores by position and layer."""
        scores = {
            position: {
                "mean": scores.mean.tolist(),
                "share_below": scores.share_below.tolist(),
                "histogram": scores.histogram.tolist(),
            }
            for position, scores in self.scores.items()
        }
        outliers = [outlier._asdict() for outlier in self.outliers]
        return {
            "rows": self.rows,
            "totals": self.totals,
            "by_layer": self.by_layer,
            "outliers": outliers,
            "scores": scores,
        }


def opened_by(tokens: Int[Tensor, "N T"], first: int | None) -> Int[Tensor, "N T"]:
    """The rows with id ``first`` written over the first token of each; as they are for None."""
    return tokens if first is None else torch.cat((torch.full_like(tokens[:, :1], first), tokens[:, 1:]), dim=1)


@torch.no_grad()
def summarise(model: GatedLM, tokens: Int[Tensor, "N T"], batch: int, first: int | None = None) -> Summary:
    """All figures over N rows of T tokens, ``batch`` rows at a time, in eval mode; the model is left as it was.

    ``first`` is the id that each row is ``opened_by``, so that all begin alike; None leaves them as packed.
    """
    tokens = opened_by(tokens, first)
    training = model.training
    model.eval()
    try:
        return reduce(add, (_summary(model, rows) for rows in tokens.split(batch)))
    finally:
        model.train(training)


def _summary(model: GatedLM, tokens: Int[Tensor, "B T"]) -> Summary:
    with watching(model, layer_figures(model.spec)) as layers:
        model(tokens.to(model.embed.weight.device))
    return Summary.of(len(tokens), layers)


def _by_layer(figures: list[Tensor]) -> Tensor:
    return torch.stack(figures).cpu()
