# %% [markdown]
# # 4. The sink, seen
#
# The shares of attention add up to one, always. A head that has nothing to look at must look somewhere, and language
# models learn to look at the first token: the *attention sink*. In the paper's baseline nearly half of all attention
# goes there. Here we grow one in a single head, in less than a minute, and then grow another head with a gate.
#
# **You will know** why a sink arises, how to measure it, what happens to the value of the token that serves as one, and
# that a head with a gate has no need of it.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch

from gatedlm.data.synthetic import BOS, Backcopy, active, dormant
from gatedlm.loss import next_token, shift
from gatedlm.model.gate import GateSpec
from gatedlm.model.lm import GatedLM, ModelSpec, initialise
from gatedlm.probes import attention_map, f_attn_where, first_token_attention, tracing, value_drain

SEED = 0
STEPS, BATCH, CONTEXT, VOCAB = 300, 32, 64, 64
RATE, WARMUP = 3e-3, 100
ARMS = {"no gate": [], "headwise gate": [GateSpec(granularity="headwise")]}
COLOURS = {"no gate": "#D55E00", "headwise gate": "#0072B2"}
torch.set_num_threads(1)

# %% [markdown]
# ## A task with little to do
#
# Bigram-Backcopy ([Guo et al. 2024](https://arxiv.org/abs/2410.13835)) is a text of 63 symbols behind a fixed first
# token. After most symbols the next one is drawn from a table that depends on the last symbol alone, for which a model
# needs no attention. But eight symbols are *triggers*: after one, the symbol *before* it comes again. So a query on a
# trigger is **active**, it has to look one token back; all others are **dormant**.

# %%
rows = Backcopy(VOCAB, CONTEXT, stream=[1])[np.arange(64)]  # stream 1 is held out, stream 0 trains
inputs, targets = shift(rows)
print("a row begins", rows[0, :16].tolist(), "with its triggers", inputs[0, :16][active(inputs[0, :16])].tolist())
print(f"{dormant(inputs).float().mean():.0%} of the queries are dormant")

# %% [markdown]
# ## Training
#
# One layer with one head, and a loop that anyone who has trained a network knows. `tracing` shows what passes in the
# model; `first_token_attention` gives each query's attention on the first token, which `f_attn_where` averages over the
# dormant or active ones.


# %%
@torch.no_grad()
def look(model):
    """Attention on the first token of dormant and of active queries, and the trace of the layer."""
    with tracing(model) as trace:
        model(inputs)
    first = first_token_attention(trace[0].q, trace[0].k)
    return {kind.__name__: f_attn_where(first, kind(inputs)).item() for kind in (dormant, active)}, trace[0]


def trained(gates):
    """A model after training and what ``look`` saw on the way, by step."""
    sizes = {"layers": 1, "width": 64, "heads": 1, "kv_heads": 1, "head_dim": 64, "ffn": 176, "qk_norm": False}
    model = GatedLM(ModelSpec(vocab=VOCAB, gates=gates, **sizes))
    initialise(model, SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / WARMUP))
    seen = {0: look(model)[0]}
    texts = Backcopy(VOCAB, CONTEXT, stream=[0, SEED])[np.arange(STEPS * BATCH)]
    for step, (batch, labels) in enumerate(map(shift, texts.split(BATCH)), 1):
        loss = next_token(model(batch).logits, labels) / labels.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        warmup.step()
        if step % 25 == 0:
            seen[step] = look(model)[0]
    return model, seen


models, curves = {}, {}
for arm, gates in ARMS.items():
    models[arm], curves[arm] = trained(gates)
    with torch.no_grad():
        loss = next_token(models[arm](inputs).logits, targets).item() / targets.numel()
    rest = ", ".join(f"{kind} {share:.3f}" for kind, share in curves[arm][STEPS].items())
    print(f"{arm:<14} loss {loss:.2f} nats, attention on the first token: {rest}")

# %% [markdown]
# ## The sink over training
#
# If a query looked evenly at all it can see, the first token would get 6 % on average: the dotted line.

# %%
even = np.mean([1 / (query + 1) for query in range(1, CONTEXT)])
figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
for arm, curve in curves.items():
    for kind, style in (("dormant", "-"), ("active", "--")):
        shares = [at[kind] for at in curve.values()]
        axes.plot([*curve], shares, style, color=COLOURS[arm], label=f"{arm}, {kind} queries")
axes.axhline(even, color="dimgrey", ls=":", label="an even spread")
axes.set(xlabel="step", ylabel="attention on the first token", title="A sink arises", ylim=(0, None))
axes.legend(frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# ## Where the head looks
#
# The attention maps of one row. Lines are queries, columns the tokens they look at; queries on triggers are marked by a
# triangle. On those, both heads look one token back, sharply. On the others the ungated head returns to the first
# column.

# %%
SHOWN = 32
traces = {arm: look(model)[1] for arm, model in models.items()}
triggers = active(inputs[0, :SHOWN]).nonzero().flatten()
figure, panels = plt.subplots(1, 2, figsize=(8, 4.2), layout="constrained", sharey=True)
for axes, (arm, layer) in zip(panels, traces.items(), strict=True):
    looks = attention_map(layer, torch.arange(SHOWN))[0, 0, :, :SHOWN]
    image = axes.imshow(looks, cmap="cividis", vmin=0, vmax=1)
    axes.plot([SHOWN] * len(triggers), triggers, "<", color=COLOURS[arm], clip_on=False)
    axes.set(title=arm, xlabel="token looked at", xlim=(-0.5, SHOWN - 0.5))
panels[0].set_ylabel("query (◂ on a trigger)")
figure.colorbar(image, ax=panels, label="share of attention", shrink=0.8)
plt.show()

# %% [markdown]
# ## What a sink is good for
#
# Attention that rests on the first token does nothing if that token's value is next to nothing. So a sink comes with a
# drained value: |v_0| well below the other tokens' |v_t|. And the gated head? It says "nothing" with its score instead,
# one number for each query.

# %%
drain = {arm: value_drain(layer).item() for arm, layer in traces.items()}
for arm, share in drain.items():
    print(f"{arm:<14} |v_0| is {share:.2f} of the mean |v_t|")
scores = traces["headwise gate"].scores["sdpa"][..., 0, 0]
opened = {kind.__name__: scores[kind(inputs)].mean().item() for kind in (dormant, active)}
print("mean score:", {kind: round(score, 2) for kind, score in opened.items()})

figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
bins = np.linspace(0, 1, 41)
for kind, colour in ((dormant, "#0072B2"), (active, "#E69F00")):
    chosen = scores[kind(inputs)]
    axes.hist(chosen, bins, weights=torch.ones_like(chosen) / len(chosen), alpha=0.7, color=colour, label=kind.__name__)
axes.set(xlabel="score", ylabel="share of the queries", title="A gate closes where there is nothing to do")
axes.legend(frameon=False, title="queries")
plt.show()

# %% [markdown]
# ## What was learnt
#
# How strong the sink is depends on the seed and on when one looks; that it is there without the gate, and not with it,
# does not.

# %%
dormant_share = {
    arm: np.mean([at["dormant"] for step, at in curve.items() if step > 200]) for arm, curve in curves.items()
}
assert (inputs[:, 0] == BOS).all()
assert dormant_share["no gate"] > 2 * even  # a sink ...
assert dormant_share["headwise gate"] < 0.75 * dormant_share["no gate"]  # ... for which a gate leaves little need
assert all(curve[STEPS]["active"] < 0.05 for curve in curves.values())  # active queries have no time for it
assert drain["no gate"] < 0.8 and drain["no gate"] < drain["headwise gate"]
assert opened["dormant"] < 0.6 * opened["active"]

# %% [markdown]
# ## Larger
#
# `python -m gatedlm.reproduce sink seeds=5` trains five times as long with five seeds and gives a verdict on each of
# these sentences. `python -m gatedlm.analyze model=QwQZh/gated_attention/1B_gate_elementwise` looks into the models
# that the authors released.
