"""What the figures of a ledger or a study are called, in full and over narrow columns, and what some of them are."""

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
    "first_value": "size of the first value, |v_0|",
    "value_drain": "value drain, |v_0| / mean |v_t|",
    "effective_sink": "effective sink",
    "gate_score": "mean gate score",
    "share_below": "share of gate scores below 0.1",
    "sdpa_before": "mean |y| before the gate",
    "sdpa_after": "mean |y| after the gate",
    "small_before_0.01": "share of |y| < 0.01 before the gate",
    "small_after_0.01": "share of |y| < 0.01 after the gate",
    "small_before_0.001": "share of |y| < 0.001 before the gate",
    "small_after_0.001": "share of |y| < 0.001 after the gate",
}
MEANINGS = {
    "f_attn": "share of attention on the first token, over layers, heads and all queries but the first",
    "sink_rate": "share of heads, row by row, that put more than 0.3 of their attention on the first token",
    "m_act": "largest |h| in a layer's output, averaged over layers",
    "value_drain": "a sink's value is drained, to well below 1; v_0 is the first token's, v_t those of the others",
    "effective_sink": "attention on the first token x score of the SDPA gate x value drain: what a head passes on",
    "sdpa_before": "y is attention's output before the output projection; without a gate on it, after is before",
}
BY_LAYER = {
    "f_attn": "F-Attn",
    "f_attn_skip4": "from\nquery 4",
    "f_attn_fixed_first": "fixed\nfirst",
    "f_attn_skip4_fixed_first": "fixed,\nfrom 4",
    "sink_rate": "sink\nrate",
    "effective_sink": "eff.\nsink",
    "first_value": "|v_0|",
    "gate_score": "gate\nscore",
    "m_act": "M-Act",
}
