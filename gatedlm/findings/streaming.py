"""Streaming: what a model loses when the first token leaves a sliding window (Xiao et al. 2023, arXiv 2309.17453)."""

from __future__ import annotations

from gatedlm.data.module import LMData
from gatedlm.findings import sink
from gatedlm.findings.finding import Claim, Finding, Table, minus
from gatedlm.findings.records import folder
from gatedlm.hub import open_model
from gatedlm.probes import streaming_loss
from gatedlm.recipe import Run

ROWS = 64


def evict(run: Run) -> dict[str, float]:
    """Mean loss beyond a window of half the context, with the first token kept and with it dropped; the difference."""
    data = LMData(run.recipe.data, run.recipe.seed)
    data.setup()
    net, window = open_model(str(folder(run))).net.eval(), run.recipe.data.context // 2
    rows = data.val_rows(ROWS)
    kept, dropped = (float(streaming_loss(net, rows, window, n)[:, window:].mean()) for n in (1, 0))
    return {"loss_first_kept": kept, "loss_first_dropped": dropped, "harm": dropped - kept}


def _harmed_less(arm: str) -> Claim:
    return Claim(
        f"{arm}: dropping the first token does less harm than to the baseline",
        lambda t: minus(t.finals("baseline", "harm"), t.finals(arm, "harm")),
        "nats of harm below the baseline's",
        "tiny",
    )


def _harmed(table: Table) -> dict[int, float]:
    return table.finals("baseline", "harm")


FINDING = Finding(
    "streaming",
    "Streaming: the first token leaves a sliding window",
    "backcopy",
    sink.rows,
    columns=("loss_first_kept", "loss_first_dropped", "harm", "f_attn_dormant"),
    paper=(),
    claims=(
        Claim("dropping the first token harms the baseline", _harmed, "nats", "tiny"),
        _harmed_less("SDPA elementwise"),
        _harmed_less("SDPA headwise"),
    ),
    after=evict,
    notes="The runs of the sink finding, read with a window of half their context: once it keeps the first token "
    "beside the last 32, once it does not. Losses are means over the queries beyond the window. Any other model loses "
    "its first token by `python -m gatedlm.analyze model=NAME mask_first=true`.",
)
