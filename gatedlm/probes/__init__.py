"""What to look at: sink, massive activations, sparsity and gate scores in a pass, spikes in a curve of losses."""

from gatedlm.probes.activations import Outlier, m_act
from gatedlm.probes.interventions import INTERVENTIONS, hide_first, hold_scores, multiplies
from gatedlm.probes.scores import Scores, count_scores
from gatedlm.probes.sink import (
    attention_map,
    attention_rows,
    effective_sink,
    f_attn,
    f_attn_where,
    first_token_attention,
    first_value,
    sink_rate,
    value_drain,
)
from gatedlm.probes.sparsity import small_outputs
from gatedlm.probes.spikes import Event, Spikes, SpikeSpec, SpikeWatch, find_spikes
from gatedlm.probes.streaming import streaming_loss
from gatedlm.probes.summary import LayerFigures, Summary, layer_figures, opened_by, summarise
from gatedlm.probes.trace import LayerTrace, Trace, tracing, watching

__all__ = [
    "INTERVENTIONS",
    "Event",
    "LayerFigures",
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
    "effective_sink",
    "f_attn",
    "f_attn_where",
    "find_spikes",
    "first_token_attention",
    "first_value",
    "hide_first",
    "hold_scores",
    "layer_figures",
    "m_act",
    "multiplies",
    "opened_by",
    "sink_rate",
    "small_outputs",
    "streaming_loss",
    "summarise",
    "tracing",
    "value_drain",
    "watching",
]
