"""Figure 3: how the gates' scores are spread between 0 and 1."""

from gatedlm.findings import table4
from gatedlm.findings.finding import Claim, Finding, Row, Scale, Table, minus
from gatedlm.report.drawing import ridges

SHOWN = ("baseline", "SDPA elementwise", "SDPA headwise", "value elementwise", "SDPA head-shared")
PAPER = {"SDPA elementwise": 0.116, "SDPA headwise": 0.172, "value elementwise": 0.221, "SDPA head-shared": 0.271}


def rows(scale: Scale, rates: tuple[float, ...]) -> list[Row]:
    """Rows of Table 4 that have scores, and the baseline."""
    shown = [row for row in table4.rows(scale, rates) if row.label in SHOWN]
    return [Row(row.label, row.words, (PAPER[row.label],) if row.label in PAPER else ()) for row in shown]


def histograms(table: Table) -> str:
    """The scores of each gated row's first seed, layer by layer."""
    drawn = []
    for row in table.shown:
        record = next(iter(table.records[row.label].values()), None)
        for scores in (record or {"scores": {}})["scores"].values():
            drawn.append(ridges(f"Scores, {row.label}", **scores))
    return "".join(drawn)


FINDING = Finding(
    "figure3",
    "Figure 3: gate scores",
    "moe",
    rows,
    columns=("gate_score", "share_below"),
    paper=("gate score",),
    claims=(
        Claim(
            "scores of the SDPA gate are sparser than those of the value gate",
            lambda t: minus(t.finals("value elementwise", "gate_score"), t.finals("SDPA elementwise", "gate_score")),
            "mean score below the value gate's",
            "small",
        ),
        Claim(
            "scores of each head's own are sparser than shared ones",
            lambda t: minus(t.finals("SDPA head-shared", "gate_score"), t.finals("SDPA elementwise", "gate_score")),
            "mean score below head-shared",
            "small",
        ),
        Claim(
            "the SDPA gate is more closed than open on average",
            lambda t: {seed: 0.5 - score for seed, score in t.finals("SDPA elementwise", "gate_score").items()},
            "mean score below 1/2",
            "tiny",
        ),
    ),
    figures=(histograms,),
)
