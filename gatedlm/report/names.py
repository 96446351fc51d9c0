"""What the figures of a ledger are called, in tables and in the report."""

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
    "value_drain": "value drain, |v_0| / mean |v|",
    "gate_score": "mean gate score",
    "share_below": "share of gate scores below 0.1",
}
