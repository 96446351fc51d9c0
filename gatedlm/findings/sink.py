"""The attention sink of Bigram-Backcopy: one head that has to rest somewhere, with and without a gate."""

import numpy as np

from gatedlm.findings.finding import Claim, Finding, Row, Scale, Table, minus
from gatedlm.report.drawing import chart, floats
from gatedlm.report.layout import uniform

ROWS = [
    Row("baseline", ("gate=none",)),
    Row("SDPA elementwise", ("gate=sdpa-elementwise",)),
    Row("SDPA headwise", ("gate=sdpa-headwise",)),
]
DORMANT = "probe/f_attn_dormant"
EVEN = uniform(64)["uniform attention"]


def rows(scale: Scale, rates: tuple[float, ...]) -> list[Row]:
    """The same at every scale."""
    return ROWS


def over_training(key: str, title: str, unit: str):
    """A drawing of a probe over training, a line a row, the mean over seeds."""

    def draw(table: Table) -> str:
        lines = {}
        for row in table.shown:
            curves = [dict(record["curves"][key]) for record in table.records[row.label].values()]
            steps = sorted(set.intersection(*map(set, curves))) if curves else []
            lines[row.label] = np.array(steps), np.array([np.mean(floats(c[step] for c in curves)) for step in steps])
        return chart(title, "step", unit, lines, {})

    return draw


def _less(key: str, arm: str, text: str, unit: str) -> Claim:
    return Claim(text, lambda t: minus(t.finals("baseline", key), t.finals(arm, key)), unit, "tiny")


def _passed(arm: str, text: str) -> Claim:
    """The effective sink divided by the mean score, since a gate at its start halves whatever passes."""

    def support(table: Table) -> dict[int, float]:
        passed, scores = table.finals(arm, "effective_sink"), table.finals(arm, "gate_score")
        as_if_open = {seed: passed[seed] / score for seed, score in scores.items() if score > 0}
        return minus(table.finals("baseline", "effective_sink"), as_if_open)

    return Claim(text, support, "effective sink, divided by the mean gate score, below the baseline's", "tiny")


FINDING = Finding(
    "sink",
    "Sink: Bigram-Backcopy, one head with nothing to do on most queries",
    "backcopy",
    rows,
    columns=("f_attn_dormant", "f_attn_active", "effective_sink", "value_drain", "gate_score"),
    paper=(),
    claims=(
        _less(
            "f_attn_dormant",
            "SDPA elementwise",
            "an elementwise gate takes dormant attention off the first token",
            "share",
        ),
        _less("f_attn_dormant", "SDPA headwise", "so does a headwise one", "share"),
        _passed(
            "SDPA elementwise",
            "with an elementwise gate the first token writes less, beyond what the gate takes of all",
        ),
        _passed("SDPA headwise", "with a headwise gate too"),
        Claim(
            "without a gate dormant queries rest on the first token, beyond an even spread",
            lambda t: {s: x - EVEN for s, x in t.finals("baseline", "f_attn_dormant").items()},
            "share above an even spread",
            "tiny",
        ),
        Claim(
            "the baseline's first value is drained",
            lambda t: {s: 1 - x for s, x in t.finals("baseline", "value_drain").items()},
            "|v_0| below the mean |v_t|, as a share of it",
            "tiny",
        ),
    ),
    figures=(
        over_training(DORMANT, "Dormant queries' attention on the first token", "share of attention"),
        over_training("probe/f_attn_active", "Active queries' attention on the first token", "share of attention"),
        over_training("probe/value_drain", "Value drain", "|v_0| over the mean |v_t|"),
    ),
    curves=(DORMANT, "probe/f_attn_active", "probe/value_drain", "probe/effective_sink"),
    notes="Dormant queries stand on no trigger and have nothing to copy; active ones look one token back. Attention "
    "spread evenly over what each query of a context of 64 sees would put 0.06 on the first token, averaged over "
    "causal queries. A gate scales whatever passes it, so its effective sink is divided by its mean score before it is "
    "compared. Early in training the order of the arms depends on the seed.",
)
