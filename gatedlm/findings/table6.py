"""Table 6: switch heads, whose gain comes from their gate."""

from gatedlm.findings import table1
from gatedlm.findings.finding import Claim, Finding, Row, Scale, minus


def _switch(on: str, count: int, used: int) -> tuple[str, ...]:
    return f"model.switch.on={on}", f"model.switch.count={count}", f"model.switch.used={used}"


ROWS = [
    Row("baseline", paper=(6.026, 58.79, 52.92, 73.07, 60.26), added=0),
    Row("switch kv 8top8", _switch("key_value", 8, 8), (5.847, 59.17, 52.54, 73.32, 61.01), 38),
    Row("switch kv 4top4", _switch("key_value", 4, 4), (5.935, 58.14, 53.27, 73.75, 59.67), 13),
    Row("switch v 4top4", _switch("value", 4, 4), (5.820, 59.02, 52.77, 73.34, 61.74), 13),
    Row("switch v 8top2", _switch("value", 8, 2), (5.870, 59.10, 53.53, 74.17, 62.34), 25),
    Row("switch v 1top1", ("gate=value-headwise",), (5.808, 59.32, 53.53, 74.38, 62.61), 3),
]


def rows(scale: Scale, rates: tuple[float, ...]) -> list[Row]:
    """The baseline and five switch heads."""
    return ROWS


FINDING = Finding(
    "table6",
    "Table 6: switch heads; with one projection a head they are the headwise value gate",
    "moe",
    rows,
    paper=("PPL", "MMLU", "GSM8k", "Hellaswag", "C-eval"),
    claims=(
        Claim(
            "one gated projection a head lowers the loss: the gate is what helps",
            lambda table: table.below("switch v 1top1", "baseline"),
            "nats below the baseline",
            "small",
        ),
        Claim(
            "no switch head with more projections beats it",
            lambda table: minus(table.best(row.label for row in ROWS[1:5]), table.losses("switch v 1top1")),
            "nats below the best of them",
            "small",
        ),
    ),
    notes=f"{table1.HIGH_RATE} EtopK: each key/value head mixes K of E projections, weighted by a sigmoid of the "
    "input (arXiv 2312.07987). The parameters that the paper says its rows add follow from no reading of its text that "
    "we found; ours are shown.",
)
