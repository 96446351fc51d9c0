# %% [markdown]
# # 6. Larger learning rates
#
# A large learning rate learns fast, up to the point where training comes apart: the loss spikes, activations blow up,
# and the run ends worse than a slower one. The paper finds that gated models stand larger rates. We try it on real
# text.
#
# **You will know** how to draw a stability curve, what happens to a model's activations at its steep end, what a
# sandwich norm does about that and what a gate does, and how spikes are told from noise.

# %%
import json
from pathlib import Path

import matplotlib.pyplot as plt
from rich.console import Console

from gatedlm.probes import SpikeSpec, find_spikes
from gatedlm.recipe import load
from gatedlm.training.run import train

SEED = 0
RATES = "1e-2,3e-2,1e-1"

# %% [markdown]
# The text is the Python standard library's own, in tokens of a vocabulary of 1,024; the models have four layers and are
# as small as `scale=nano` makes them. Three arms: no gate; a headwise gate, which adds one parameter in two hundred;
# and no gate but *sandwich norms*, which normalise what attention and feed-forward write before it is added to the
# residual stream. Each is trained with the same rows in the same order.

# %%
TEXT = ["recipe=quickstart", "data.max_tokens=1_000_000", "data.context=64", "data.batch=8"]
SIZE = ["scale=nano", "model.layers=4"]
SHORT = ["trainer.steps=100", "optim.warmup=20", "trainer.val_every=0", "trainer.probe_every=0", f"seed={SEED}"]
ARMS = {
    "no gate": ["gate=none"],
    "headwise gate": ["gate=sdpa-headwise"],
    "sandwich norm": ["gate=none", "model.sandwich_norm=true"],
}
losses, activations, runs = {}, {}, {}
for arm, words in ARMS.items():
    for run in load([*TEXT, *SIZE, *SHORT, *words, f"optim.lr={RATES}"]):
        ledger, rate = train(run, Console(quiet=True)), run.recipe.optim.lr
        losses[arm, rate], activations[arm, rate] = ledger["final"]["val/loss"], ledger["final"]["m_act"]
        runs[arm, rate] = Path(run.recipe.out, run.recipe.name)
        print(f"{arm:<14} at {rate:<5} loss {losses[arm, rate]:.2f} nats, M-Act {activations[arm, rate]:,.1f}")

# %% [markdown]
# ## The stability curve
#
# Loss against learning rate. Where a curve is flat, it does not matter much that nobody knows the best rate beforehand;
# that is worth a lot where a run costs a million. To the right the largest activation in the residual stream (M-Act, a
# mean over layers), which tells why: it grows by orders of magnitude.

# %%
STYLES = {"no gate": ("#D55E00", "o-"), "headwise gate": ("#0072B2", "s-"), "sandwich norm": ("#009E73", "^--")}
rates = sorted({rate for _, rate in losses})
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for arm, (colour, style) in STYLES.items():
    left.semilogx(rates, [losses[arm, rate] for rate in rates], style, color=colour, label=arm)
    right.loglog(rates, [activations[arm, rate] for rate in rates], style, color=colour, label=arm)
left.set(xlabel="learning rate", ylabel="validation loss (nats per token)", title="Loss")
right.set(xlabel="learning rate", ylabel="M-Act, largest |h|", title="Activations")
left.legend(frameon=False)
plt.show()

# %% [markdown]
# At the two smaller rates the gated model is clearly ahead; at the largest both have come apart. The sandwich norm
# keeps activations small by force, so that the rate hardly matters, and pays for it at the smallest rate.
#
# ## Spikes
#
# The paper sees its largest effect in loss spikes: dozens in its baseline, hardly any with a gate. They are rare events
# of long runs; here there are none to compare. But we can see how they are found. gatedlm compares each step with the
# *median* of a window before it and asks for a rise that is large in nats and against the scatter around that median.
# Noise does not pass; a spike planted in the same curve does.

# %%
lines = [json.loads(line) for line in (runs["no gate", 0.01] / "metrics.jsonl").open()]
steps, curve = [line["step"] for line in lines], [line["train/loss"] for line in lines]
planted = list(curve)
for step, rise in ((90, 2.0), (91, 1.5), (92, 0.5)):
    planted[step - 1] += rise
rule = SpikeSpec(window=50, skip=40, merge=10, rise=0.3)
as_it_was, with_spike = find_spikes(steps, curve, rule), find_spikes(steps, planted, rule)
print("as it was:", as_it_was.events, "\nplanted:", with_spike.events)

figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
axes.plot(steps, planted, color="#D55E00", lw=1, label="with a planted spike")
axes.plot(steps, curve, color="#000000", lw=1, label="as it was")
for event in with_spike.events:
    axes.axvline(event.peak, color="#0072B2", ls=":", label=f"found at step {event.peak}")
axes.set(xlabel="step", ylabel="training loss (nats per token)", title="A spike and noise")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## What was learnt

# %%
slow, high, highest = rates
assert all(losses["headwise gate", rate] < losses["no gate", rate] - 0.1 for rate in (slow, high))
assert all(activations[arm, highest] > 10 * activations[arm, slow] for arm in ("no gate", "headwise gate"))
assert activations["sandwich norm", highest] < activations["no gate", highest] / 3
assert losses["sandwich norm", slow] > losses["no gate", slow]  # what the sandwich costs
assert [event.peak for event in with_spike.events] == [90] and not as_it_was.events

# %% [markdown]
# ## Larger
#
# `python -m gatedlm.reproduce stability scale=tiny seeds=3 workers=2` draws these curves with more rates, sizes and
# seeds, and judges each sentence. `python -m gatedlm.reproduce spikes` looks for spikes that tell the arms apart.
