"""Table 3: which part of the gain is the non-linearity between the value and output projections."""

from gatedlm.findings import table1
from gatedlm.findings.finding import Claim, Finding, Row, Scale

BASELINE, GATES = table1.BASELINE, {row.label: row for row in table1.GATES}
NORM = Row("SDPA RMSNorm", ("gate=sdpa-rmsnorm",), (5.847, 74.10, 60.15, 53.75, 61.14), 0)
SILU = Row("SDPA SiLU alone", ("gate=sdpa-silu-only",), (5.975, 73.34, 59.55, 53.19, 60.90), 0)
IDENTITY = Row(
    "SDPA additive identity", ("gate=sdpa-additive-identity",), (5.882, 74.17, 59.20, 52.77, 59.86), added=201
)


def rows(scale: Scale, rates: tuple[float, ...]) -> list[Row]:
    """Rows 1, 5, 6 and 14 of Table 1, and three of its own."""
    return [
        BASELINE,
        GATES["SDPA elementwise"],
        GATES["value elementwise"],
        GATES["SDPA additive"],
        NORM,
        SILU,
        IDENTITY,
    ]


def _lowers(label: str, text: str, expected: str) -> Claim:
    return Claim(text, lambda table: table.below(label, "baseline"), "nats below the baseline", expected)


FINDING = Finding(
    "table3",
    "Table 3: non-linearity between value and output projection",
    "moe",
    rows,
    paper=("PPL", "Hellaswag", "MMLU", "GSM8k", "C-eval"),
    claims=(
        _lowers(
            "SDPA RMSNorm", "a norm on each head's output, which adds next to no parameters, lowers the loss", "small"
        ),
        _lowers("SDPA SiLU alone", "so does SiLU on the SDPA output, a little", "small"),
        _lowers("SDPA additive", "an additive gate lowers the loss", "small"),
        _lowers(
            "SDPA additive identity", "even without an activation, where only the map is no longer low-rank", "small"
        ),
        Claim(
            "the additive gate is better with SiLU than without",
            lambda table: table.below("SDPA additive", "SDPA additive identity"),
            "nats below identity",
            "small",
        ),
    ),
    notes=table1.HIGH_RATE,
)
