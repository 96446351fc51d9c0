"""Figure 2: attention on the first token, layer by layer."""

import numpy as np

from gatedlm.findings import table4
from gatedlm.findings.finding import Claim, Finding, Row, Scale, Table, minus
from gatedlm.report import layout

SHOWN = ("baseline", "SDPA elementwise", "SDPA headwise", "value elementwise")


def rows(scale: Scale, rates: tuple[float, ...]) -> list[Row]:
    """Rows of Table 4."""
    return [Row(row.label, row.words, row.paper[2:3]) for row in table4.rows(scale, rates) if row.label in SHOWN]


def by_layer(key: str, title: str, unit: str):
    """A drawing of a figure layer by layer, a line a row, the mean over seeds."""

    def draw(table: Table) -> str:
        found = {row.label: table.layers(row.label, key) for row in table.shown}
        columns = {name: np.mean([*layers.values()], axis=0) for name, layers in found.items() if layers}
        return layout.by_layer(title, unit, columns, {})

    return draw


def _most(table: Table, label: str) -> dict[int, float]:
    """The largest F-Attn of any layer by seed."""
    return {seed: float(layers.max()) for seed, layers in table.layers(label, "f_attn_fixed_first").items()}


FINDING = Finding(
    "figure2",
    "Figure 2: attention on the first token by layer",
    "moe",
    rows,
    columns=("f_attn_fixed_first", "f_attn", "sink_rate_fixed_first"),
    paper=("F-Attn",),
    claims=(
        Claim(
            "the SDPA gate takes attention off the first token",
            lambda t: minus(
                t.finals("baseline", "f_attn_fixed_first"), t.finals("SDPA elementwise", "f_attn_fixed_first")
            ),
            "F-Attn below the baseline",
            "small",
        ),
        Claim(
            "and off that of the layer where it is largest (in the paper 0.83 to 0.04 in layer 21)",
            lambda t: minus(_most(t, "baseline"), _most(t, "SDPA elementwise")),
            "largest F-Attn of a layer below the baseline's",
            "small",
        ),
    ),
    figures=(by_layer("f_attn_fixed_first", "F-Attn by layer", "share of attention on the first token"),),
    notes="Attention spread evenly over what each query of a context of 128 sees would put 0.035 on the first token, "
    "averaged over causal queries: no head that rests there stands out at scale tiny, gated or not. The sink finding "
    "shows one that does.",
)
