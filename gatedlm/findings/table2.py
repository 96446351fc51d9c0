"""Table 2: dense models, the gate and larger learning rates, at equal parameters."""

from gatedlm.findings.finding import Claim, Finding, Row, Scale, Table, minus
from gatedlm.findings.stability import ARMS, label, rates_of, row

# PPL, HumanEval, MMLU, GSM8k, Hellaswag, C-eval, CMMLU of the 48-layer models on 400 G tokens, at 4e-3 and 8e-3
PAPER = {
    "baseline": ((7.421, 28.05, 52.04, 32.98, 65.96, 51.11, 51.86), (9.195, 21.34, 44.28, 15.24, 57.00, 43.11, 42.63)),
    "SDPA elementwise": (
        (7.288, 31.71, 52.44, 32.37, 66.28, 52.06, 52.29),
        (7.325, 31.10, 54.47, 36.62, 66.40, 53.91, 53.80),
    ),
    "SDPA headwise": ((7.370, 31.10, 53.83, 34.12, 65.59, 55.07, 52.38), ()),
    "sandwich norm": ((), (7.407, 30.49, 52.07, 32.90, 66.00, 52.04, 51.72)),
}


def rows(scale: Scale, rates: tuple[float, ...]) -> list[Row]:
    """The paper's two rates are the scale's low and high one; of other ``rates`` the paper says nothing."""
    if rates:
        return [row(arm, rate) for arm in ARMS for rate in sorted(rates)]
    return [row(arm, rate, figures) for arm in ARMS for rate, figures in zip(scale.rates, PAPER[arm], strict=True)]


def lead(table: Table, arm: str, place: int, other: str, place_of_other: int) -> dict[int, float]:
    """By how many nats an arm lies below another, each at the low (0) or high (-1) rate; none of a single rate."""
    rates = rates_of(table)
    return table.below(label(arm, rates[place]), label(other, rates[place_of_other])) if rates[1:] else {}


def _below(place: int, arm: str, other: str, text: str, expected: str) -> Claim:
    return Claim(text, lambda table: lead(table, arm, place, other, place), f"nats below {other}", expected)


def _more_at_the_high_rate(table: Table) -> dict[int, float]:
    """By how much more the gate lowers the loss at the high rate than at the low one."""
    return minus(*(lead(table, "SDPA elementwise", place, "baseline", place) for place in (-1, 0)))


def _high_against_low(table: Table) -> dict[int, float]:
    return lead(table, "SDPA elementwise", -1, "baseline", 0)


FINDING = Finding(
    "table2",
    "Table 2: dense models at equal parameters and two learning rates",
    "dense",
    rows,
    paper=("PPL", "HumanEval", "MMLU", "GSM8k", "Hellaswag", "C-eval", "CMMLU"),
    claims=(
        _below(0, "SDPA elementwise", "baseline", "the gate lowers the loss at the low rate", "tiny"),
        _below(-1, "SDPA elementwise", "baseline", "and at the high rate", "tiny"),
        Claim("more so there, where the baseline suffers", _more_at_the_high_rate, "nats gained more", "tiny"),
        _below(0, "SDPA headwise", "baseline", "a headwise gate lowers the loss", "tiny"),
        _below(-1, "sandwich norm", "baseline", "sandwich norm rescues the baseline at the high rate", "tiny"),
        _below(-1, "SDPA elementwise", "sandwich norm", "the gate does so better than sandwich norm", "tiny"),
        Claim(
            "the gated model at the high rate beats the baseline at the low one",
            _high_against_low,
            "nats below baseline at the low rate",
            "full",
        ),
    ),
    notes="What a gate or a norm adds is taken off the feed-forward in whole steps of its width: at scale tiny the "
    "elementwise gate's, while headwise gate and norms add less than a step. So rows have the baseline's parameters or "
    "up to 2 % more. The paper's figures stand at its own rates, 4e-3 and 8e-3.",
)
