"""What to look at: attention sink, massive activations and gate scores in a ``Trace``, spikes in a curve of losses."""

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
from gatedlm.probes.spikes import Event, Spikes, SpikeSpec, SpikeWatch, find_spikes
from gatedlm.probes.summary import Summary, summarise
from gatedlm.probes.trace import LayerTrace, Trace, tracing

__all__ = [
    "Event",
    "LayerTrace",
    "Outlier",
    "Scores",
    "SpikeSpec",
    "SpikeWatch",
    "Spikes",
    "Summary",
    "Trace",
    "attention_map",
    "attention_rows",
    "count_scores",
    "f_attn",
    "f_attn_where",
    "find_spikes",
    "first_token_attention",
    "m_act",
    "sink_rate",
    "summarise",
    "tracing",
    "value_drain",
]
