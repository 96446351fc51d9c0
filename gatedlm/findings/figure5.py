"""Figure 5: how much of the SDPA output is next to nothing, before the gate and after it."""

from gatedlm.findings import table4
from gatedlm.findings.figure2 import by_layer
from gatedlm.findings.finding import Claim, Finding, Row, Scale, Table, halvings, minus

SHOWN = ("baseline", "SDPA elementwise", "SDPA headwise")


def rows(scale: Scale, rates: tuple[float, ...]) -> list[Row]:
    """Rows of Table 4."""
    return [Row(row.label, row.words) for row in table4.rows(scale, rates) if row.label in SHOWN]


def _gain(threshold: str) -> Claim:
    before, after = f"small_before_{threshold}", f"small_after_{threshold}"
    return Claim(
        f"the gate leaves more outputs below {threshold} than reach it",
        lambda t: minus(t.finals("SDPA elementwise", after), t.finals("SDPA elementwise", before)),
        "share after less share before",
        "tiny",
    )


def _shrinks(table: Table) -> dict[int, float]:
    return halvings(*(table.finals("SDPA elementwise", key) for key in ("sdpa_before", "sdpa_after")))


FINDING = Finding(
    "figure5",
    "Figure 5: sparsity of the SDPA output before and after its gate",
    "moe",
    rows,
    columns=(
        "small_before_0.01",
        "small_after_0.01",
        "small_before_0.001",
        "small_after_0.001",
        "sdpa_before",
        "sdpa_after",
    ),
    paper=(),
    claims=(
        _gain("0.01"),
        _gain("0.001"),
        Claim(
            "the gate shrinks the mean |output| (in the paper 0.71 to 0.05, a factor of 2 to the 3.8)",
            _shrinks,
            "log2 of the factor",
            "tiny",
        ),
    ),
    figures=(
        by_layer("small_before_0.01", "Outputs below 0.01 before the gate, by layer", "share of outputs"),
        by_layer("small_after_0.01", "Outputs below 0.01 after the gate, by layer", "share of outputs"),
    ),
)
