"""What to look at in a model: attention sink, massive activations, gate scores; pure functions of a ``Trace``."""

from gatedlm.probes.activations import Outlier, m_act
from gatedlm.probes.scores import Scores, count_scores
from gatedlm.probes.sink import (
    attention_map,
    attention_rows,
    f_attn,
    f_attn_where,
    first_token_attention,
    sink_rate,
    value_drain,
)
from gatedlm.probes.summary import Summary, summarise
from gatedlm.probes.trace import LayerTrace, Trace, tracing

__all__ = [
    "LayerTrace",
    "Outlier",
    "Scores",
    "Summary",
    "Trace",
    "attention_map",
    "attention_rows",
    "count_scores",
    "f_attn",
    "f_attn_where",
    "first_token_attention",
    "m_act",
    "sink_rate",
    "summarise",
    "tracing",
    "value_drain",
]
