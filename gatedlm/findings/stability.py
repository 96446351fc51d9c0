"""Learning-rate sensitivity: how loss and activations of each arm bear larger learning rates (Section 4.1)."""

from statistics import mean

import numpy as np

from gatedlm.findings.finding import Claim, Finding, Row, Scale, Table, by_seed, halvings, minus
from gatedlm.report.drawing import Line, chart

ARMS = {
    "baseline": ("gate=none",),
    "SDPA elementwise": ("gate=sdpa-elementwise",),
    "SDPA headwise": ("gate=sdpa-headwise",),
    "sandwich norm": ("model.sandwich_norm=true",),
}
OTHERS = [*ARMS][1:]


def label(arm: str, rate: float) -> str:
    """How a row is called: the arm and its learning rate."""
    return f"{arm} lr={rate:g}"


def row(arm: str, rate: float, paper: tuple[float, ...] = ()) -> Row:
    """An arm at one learning rate, its feed-forward narrowed to the baseline's parameters as in Table 2."""
    words = (*ARMS[arm], f"optim.lr={rate:g}")
    return Row(label(arm, rate), words, paper, matched=arm != "baseline", against=label("baseline", rate))


def rows(scale: Scale, rates: tuple[float, ...]) -> list[Row]:
    """Arm by arm; each is compared with the baseline at the same rate."""
    return [row(arm, rate) for arm in ARMS for rate in sorted(rates or scale.sweep)]


def rates_of(table: Table) -> list[float]:
    """The learning rates of a table's rows."""
    return sorted({float(row.label.split("lr=")[1]) for row in table.rows})


def sensitivity(table: Table, arm: str) -> dict[int, float]:
    """Mean over learning rates of min(loss, initial loss) - best loss, in nats (Wortsman et al. 2023, 2309.14322).

    None of a single rate.
    """
    losses = [table.capped(label(arm, rate)) for rate in rates_of(table)]
    return by_seed(losses, lambda of_seed: mean(of_seed) - min(of_seed)) if losses[1:] else {}


def _less_sensitive(arm: str) -> Claim:
    return Claim(
        f"{arm}: the loss depends less on the learning rate than the baseline's",
        lambda table: minus(sensitivity(table, "baseline"), sensitivity(table, arm)),
        "nats of sensitivity below the baseline",
        "tiny",
    )


def _better_at(arm: str, part: slice, words: str) -> Claim:
    def support(table: Table) -> dict[int, float]:
        rates = rates_of(table)
        leads = [table.below(label(arm, rate), label("baseline", rate)) for rate in rates[part]]
        return by_seed(leads) if rates[1:] else {}

    return Claim(f"{arm} has the lower loss {words}", support, "nats below the baseline", "tiny")


def _calmer(table: Table) -> dict[int, float]:
    """By which factor (as a logarithm to base 2) M-Act lies below the baseline's, over the rates."""
    arms = ("baseline", "SDPA elementwise")
    return by_seed([halvings(*(table.finals(label(arm, rate), "m_act") for arm in arms)) for rate in rates_of(table)])


def _fewer_spikes(table: Table) -> dict[int, float]:
    return minus(*(_spikes(table, arm) for arm in ("baseline", "SDPA elementwise")))


def _spikes(table: Table, arm: str) -> dict[int, float]:
    """Spike events per thousand steps by seed, the mean over rates."""
    return by_seed([table.finals(label(arm, rate), "spikes_per_thousand") for rate in rates_of(table)])


def loss_over_rate(table: Table) -> str:
    """Validation loss against learning rate, a line an arm, the mean over seeds."""
    return _over_rate(table, "Loss against learning rate", "validation loss (nats per token)", table.losses, "x")


def activations_over_rate(table: Table) -> str:
    """M-Act against learning rate, a line an arm, the mean over seeds."""
    title, unit = "Massive activations against learning rate", "M-Act, mean over layers of the largest |h|"
    return _over_rate(table, title, unit, lambda name: table.finals(name, "m_act"), "xy")


def _over_rate(table: Table, title: str, unit: str, figure, log: str) -> str:
    lines: dict[str, Line] = {}
    for arm in ARMS:
        found = {rate: figure(label(arm, rate)) for rate in rates_of(table)}
        points = {rate: mean(values.values()) for rate, values in found.items() if values}
        lines[arm] = np.array([*points]), np.array([*points.values()])
    return chart(title, "learning rate", unit, lines, {}, log)


FINDING = Finding(
    "stability",
    "Stability: what larger learning rates do to loss and activations",
    "dense",
    rows,
    columns=("m_act", "spikes"),
    claims=(
        *map(_less_sensitive, OTHERS),
        *(_better_at(arm, slice(1), "at the smallest rate") for arm in OTHERS),
        *(_better_at(arm, slice(None), "in the mean over the rates") for arm in OTHERS),
        *(_better_at(arm, slice(-1, None), "at the largest rate") for arm in OTHERS),
        Claim(
            "SDPA elementwise shrinks massive activations", _calmer, "log2 of the factor, mean over the rates", "tiny"
        ),
        Claim("the gate removes loss spikes", _fewer_spikes, "events per thousand steps fewer", "medium"),
    ),
    figures=(loss_over_rate, activations_over_rate),
    notes="Rows of one arm differ in the learning rate alone. What a gate or a norm adds is taken off the feed-forward "
    "in whole steps of its width as in Table 2, which leaves up to 2 % more than the baseline has. Sensitivity is the "
    "mean over the rates of min(loss, initial loss), less the best loss. In the paper the arms differ in loss spikes, "
    "too, in runs of 100,000 steps.",
)
