"""Table 4: sparse scores, smaller activations and less attention on the first token go together."""

import math

from gatedlm.findings import table1
from gatedlm.findings.finding import Claim, Finding, Row, Scale, Table, by_seed, minus
from gatedlm.findings.judge import spearman
from gatedlm.findings.page import COLUMNS

MEASURED = ("gate_score", "m_act", "f_attn_fixed_first")
PAPER = {  # gate score, M-Act, F-Attn, PPL, Hellaswag, MMLU, GSM8k
    "baseline": (math.nan, 1053, 0.467, 6.026, 73.07, 58.79, 52.92),
    "SDPA elementwise": (0.116, 94, 0.048, 5.761, 74.64, 60.82, 55.27),
    "SDPA headwise": (0.172, 98, 0.073, 5.792, 74.50, 60.05, 54.44),
    "SDPA head-shared": (0.271, 286, 0.301, 5.801, 74.34, 60.06, 53.15),
    "value elementwise": (0.221, 125, 0.297, 5.820, 74.38, 59.17, 51.33),
    "SDPA input-independent": (0.335, 471, 0.364, 5.917, 73.64, 59.02, 52.40),
    "SDPA NS-sigmoid": (0.653, 892, 0.451, 5.900, 74.05, 60.05, 52.75),
}
WORDS = {row.label: row.words for row in (table1.BASELINE, *table1.GATES)} | {
    "SDPA input-independent": ("gate=sdpa-constant",),
    "SDPA NS-sigmoid": ("gate=sdpa-ns-sigmoid",),
}


def rows(scale: Scale, rates: tuple[float, ...]) -> list[Row]:
    """The baseline and six gates."""
    return [Row(label, WORDS[label], figures) for label, figures in PAPER.items()]


def rank_correlation(x: str, y: str) -> Claim:
    """Spearman's rho of two figures over the gated rows, seed by seed."""

    def support(table: Table) -> dict[int, float]:
        gated = [row.label for row in table.rows if row.label != "baseline"]
        figures = [table.finals(label, key) for key in (x, y) for label in gated]
        return by_seed(figures, lambda of_seed: spearman(of_seed[: len(gated)], of_seed[len(gated) :]))

    return Claim(
        f"over the gated rows {COLUMNS[x]} and {COLUMNS[y]} rise together (in the paper with rank correlation 1)",
        support,
        "Spearman's rho",
        "small",
    )


def _less(key: str, label: str, text: str, unit: str, expected: str) -> Claim:
    return Claim(text, lambda t: minus(t.finals("baseline", key), t.finals(label, key)), unit, expected)


FINDING = Finding(
    "table4",
    "Table 4: sparsity of the scores, massive activations and the attention sink",
    "moe",
    rows,
    columns=MEASURED,
    paper=("gate score", "M-Act", "F-Attn", "PPL", "Hellaswag", "MMLU", "GSM8k"),
    claims=(
        _less(
            "m_act", "SDPA elementwise", "the SDPA gate shrinks massive activations", "M-Act below the baseline", "tiny"
        ),
        _less(
            "f_attn_fixed_first",
            "SDPA elementwise",
            "the SDPA gate takes attention off the first token",
            "F-Attn below the baseline",
            "small",
        ),
        rank_correlation("gate_score", "f_attn_fixed_first"),
        rank_correlation("gate_score", "m_act"),
        rank_correlation("f_attn_fixed_first", "m_act"),
        Claim(
            "sparse scores beat non-sparse ones (NS-sigmoid)",
            lambda table: table.below("SDPA elementwise", "SDPA NS-sigmoid"),
            "nats below NS-sigmoid",
            "small",
        ),
        Claim(
            "scores that depend on the query beat input-independent ones",
            lambda table: table.below("SDPA elementwise", "SDPA input-independent"),
            "nats below input-independent",
            "small",
        ),
    ),
    notes=f"{table1.HIGH_RATE} On ordinary text a model of a few hundred thousand parameters has hardly a sink to "
    "lose: attention spread evenly over what each query sees would put 0.035 on the first token. A rank correlation "
    "lies between -1 and 1, its interval, which Student's t gives, may not.",
)
