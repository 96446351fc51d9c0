"""Table 1: fifteen variants on the mixture of experts."""

from gatedlm.findings.finding import Claim, Finding, Row, Scale, Table, minus

BASELINE = Row("baseline", paper=(6.026, 73.07, 58.79, 52.92, 60.26), added=0)
HIGH_RATE = (
    "At scale tiny the learning rate of 1e-2 is high for this mixture: rows lie apart by tenths of a nat, most of it "
    "for bearing the rate, where the paper's lie apart by hundredths (its best gate by 0.045 nats)."
)
LARGER = [
    Row("k=8", (), (5.979, 73.51, 59.78, 52.16, 62.26), 50, lambda m: (f"model.kv_heads={2 * m.kv_heads}",)),
    Row("q=48", (), (5.953, 73.59, 58.45, 53.30, 59.67), 201, lambda m: (f"model.heads={m.heads * 3 // 2}",)),
    Row(
        "+4 experts",
        (),
        (5.964, 73.19, 58.84, 52.54, 63.19),
        400,
        lambda m: (f"model.experts.count={m.experts.count + max(1, m.experts.count // 32)}",),
    ),
]
GATES = [
    Row("SDPA elementwise", ("gate=sdpa-elementwise",), (5.761, 74.64, 60.82, 55.27, 62.20), 201),
    Row("value elementwise", ("gate=value-elementwise",), (5.820, 74.38, 59.17, 53.97, 61.00), 25),
    Row("key elementwise", ("gate=key-elementwise",), (6.016, 72.88, 59.18, 50.49, 61.74), 25),
    Row("query elementwise", ("gate=query-elementwise",), (5.981, 73.01, 58.74, 53.97, 62.14), 201),
    Row("output elementwise", ("gate=output-elementwise",), (6.017, 73.32, 59.41, 50.87, 59.43), 100),
    Row("SDPA headwise", ("gate=sdpa-headwise",), (5.792, 74.50, 60.05, 54.44, 62.61), 1.6),
    Row("value headwise", ("gate=value-headwise",), (5.808, 74.38, 59.32, 53.53, 62.61), 0.2),
    Row("SDPA head-shared", ("gate=sdpa-shared",), (5.801, 74.34, 60.06, 53.15, 61.01), 201),
    Row("value head-shared", ("gate=value-shared",), (5.867, 74.10, 59.02, 53.03, 60.61), 25),
    Row("SDPA additive", ("gate=sdpa-additive",), (5.821, 74.81, 60.06, 53.30, 60.98), 201),
    Row("SDPA elementwise SiLU", ("gate=sdpa-silu",), (5.822, 74.22, 60.49, 54.59, 62.34), 201),
]


def rows(scale: Scale, rates: tuple[float, ...]) -> list[Row]:
    """The paper's order."""
    return [BASELINE, *LARGER, *GATES]


def lead_over_larger(table: Table) -> dict[int, float]:
    """By how many nats the SDPA gate lies below the best of the baselines that spend parameters elsewhere."""
    return minus(table.best(row.label for row in LARGER), table.losses("SDPA elementwise"))


def places_that_help(table: Table) -> dict[int, float]:
    """By how many nats the better of the SDPA and value gates lies below the best of the three others."""
    others = table.best(("key elementwise", "query elementwise", "output elementwise"))
    return minus(others, table.best(("SDPA elementwise", "value elementwise")))


FINDING = Finding(
    "table1",
    "Table 1: gates at five places, fine and coarse, beside larger baselines",
    "moe",
    rows,
    paper=("PPL", "Hellaswag", "MMLU", "GSM8k", "C-eval"),
    claims=(
        Claim(
            "an elementwise gate on the SDPA output lowers the loss",
            lambda table: table.below("SDPA elementwise", "baseline"),
            "nats below the baseline",
            "tiny",
        ),
        Claim(
            "so does a headwise one, which adds next to no parameters",
            lambda table: table.below("SDPA headwise", "baseline"),
            "nats below the baseline",
            "tiny",
        ),
        Claim(
            "an elementwise gate on the value lowers the loss",
            lambda table: table.below("value elementwise", "baseline"),
            "nats below the baseline",
            "tiny",
        ),
        Claim(
            "the gate is worth more than parameters spent on heads or experts",
            lead_over_larger,
            "nats below the best of rows 2-4",
            "small",
        ),
        Claim("SDPA and value are the places, not key, query or output", places_that_help, "nats", "small"),
        Claim(
            "scores of each head's own beat scores shared by the heads",
            lambda table: table.below("SDPA elementwise", "SDPA head-shared"),
            "nats below head-shared",
            "small",
        ),
        Claim(
            "multiplying beats adding",
            lambda table: table.below("SDPA elementwise", "SDPA additive"),
            "nats below additive",
            "small",
        ),
        Claim(
            "sigmoid beats SiLU",
            lambda table: table.below("SDPA elementwise", "SDPA elementwise SiLU"),
            "nats below SiLU",
            "small",
        ),
    ),
    notes=f"{HIGH_RATE} At full size four more experts add 453 M parameters by the sizes of Table 7, where the paper "
    "says 400 M.",
)
