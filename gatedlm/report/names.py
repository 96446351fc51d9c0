"""What the figures of a ledger are called, in tables and in the report, and what some of them are."""

FIGURES = {
    "val/loss": "validation loss, nats per token",
    "val/bits_per_byte": "validation loss, bits per byte",
    "train/loss": "training loss at the last step, nats per token",
    "f_attn": "F-Attn, rows as packed",
    "f_attn_fixed_first": "F-Attn, fixed first token",
    "f_attn_dormant": "F-Attn of dormant queries",
    "f_attn_active": "F-Attn of active queries",
    "sink_rate": "sink rate, rows as packed",
    "sink_rate_fixed_first": "sink rate, fixed first token",
    "m_act": "M-Act",
    "value_drain": "value drain, |v_0| / mean |v_t|",
    "gate_score": "mean gate score",
    "share_below": "share of gate scores below 0.1",
}
MEANINGS = {
    "f_attn": "share of attention on the first token, over layers, heads and all queries but the first",
    "sink_rate": "share of heads, row by row, that put more than 0.3 of their attention on the first token",
    "m_act": "largest |h| in a layer's output, averaged over layers",
    "value_drain": "a sink's value is drained, to well below 1; v_0 is the first token's, v_t those of the others",
}
