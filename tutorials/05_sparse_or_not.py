# %% [markdown]
# # 5. Sparse or not
#
# The gated head of lesson 4 shut itself on most queries. Is it the shutting that matters, or would any gate do? The
# paper builds two gates that cannot shut when it counts, and so can we.
#
# **You will know** what makes scores sparse, what sparse scores do to the output of attention and to the sink, and how
# to train by recipes instead of a loop of your own.

# %%
import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console

from gatedlm.recipe import load
from gatedlm.training.run import train

SEED = 0
PROBE = "probe/f_attn_dormant"

# %% [markdown]
# ## Three gates
#
# | gate | score | what it lacks |
# |---|---|---|
# | `sdpa-elementwise` | σ(X W) | nothing |
# | `sdpa-ns-sigmoid` | ½ + ½ σ(X W) | it never falls below ½: not sparse (Eq. 9 of the paper) |
# | `sdpa-constant` | σ(θ), a number learnt for each channel | it does not ask the token: all get the same |
#
# A recipe says everything about a run; `recipe=sink` is what we did by hand in lesson 4. `load` turns the words of a
# command line into runs, here one for each gate, and `train` returns a run's *ledger*, with all that was measured at
# its end. (In a shell: `python -m gatedlm.fit recipe=sink gate=sdpa-elementwise,sdpa-ns-sigmoid,sdpa-constant`.)
#
# Beside the ledger there is metrics.jsonl, with a line for each step. On some of them stands what a *probe* saw, a look
# into the model on held-out rows, here every 25 steps. The sink comes and goes while it forms, so we take the mean of
# the probes of the last hundred steps.


# %%
def late_attention(metrics):
    """Attention of dormant queries on the first token, the mean over the probes from step 200 on."""
    lines = map(json.loads, metrics.open())
    return np.mean([line[PROBE] for line in lines if line["step"] >= 200 and PROBE in line])


words = ["recipe=sink", "gate=sdpa-elementwise,sdpa-ns-sigmoid,sdpa-constant", f"seed={SEED}"]
brief = ["trainer.steps=300", "trainer.probe_every=25", "trainer.val_every=0"]
measured, resting = {}, {}
for run in load([*words, *brief]):
    gate = run.label.removeprefix("gate=sdpa-")
    measured[gate] = train(run, Console(quiet=True))
    resting[gate] = late_attention(Path(run.recipe.out, run.recipe.name, "metrics.jsonl"))
    print(f"{gate:<12} loss {measured[gate]['final']['val/loss']:.2f} nats")

# %% [markdown]
# ## How open they stand
#
# The ledger has counted all scores on held-out rows into fifty bins between 0 and 1.

# %%
COLOURS = dict(zip(measured, ("#0072B2", "#D55E00", "#009E73"), strict=True))
figure, panels = plt.subplots(1, 3, figsize=(9, 2.8), layout="constrained", sharey=True)
for axes, (gate, ledger) in zip(panels, measured.items(), strict=True):
    counts = np.array(ledger["scores"]["sdpa"]["histogram"][0])
    axes.bar(np.arange(50) / 50, 100 * counts / counts.sum(), width=1 / 50, align="edge", color=COLOURS[gate])
    axes.axvline(ledger["final"]["gate_score"], color="black", ls="--", label="mean")
    axes.set(title=gate, xlabel="score", xlim=(0, 1))
panels[0].set_ylabel("share of the scores (%)")
panels[0].legend(frameon=False)
plt.show()

# %% [markdown]
# The free gate pushes most of its scores towards 0. The non-sparse one would like to, and piles up at its floor. The
# constant one settles at a compromise.
#
# ## What that does
#
# Next to nothing, that is below 0.01, is what the free gate makes of most channels of attention's output. And with it
# the dormant queries rest on the first token least; an even spread would put 0.06 there. The other two heads need more
# of a sink, though less than the ungated one of lesson 4.

# %%
FIGURES = {
    "gate_score": "mean score",
    "share_below": "scores below 0.1",
    "small_after_0.01": "outputs below 0.01 after the gate",
    PROBE: "dormant attention on the first token",
}
table = {gate: ledger["final"] | {PROBE: resting[gate]} for gate, ledger in measured.items()}
for key, meaning in FIGURES.items():
    print(f"{meaning:<38}", *(f"{gate} {table[gate][key]:.2f}  " for gate in table))

figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for number, (gate, colour) in enumerate(COLOURS.items()):
    heights = [table[gate][key] for key in FIGURES]
    axes.barh(np.arange(len(FIGURES)) + 0.27 * (number - 1), heights, height=0.25, color=colour, label=gate)
axes.set_yticks(range(len(FIGURES)), [*FIGURES.values()])
axes.set(xlabel="share, or mean score", title="Sparse scores, small outputs, no sink", xlim=(0, 1))
axes.invert_yaxis()
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## What was learnt

# %%
free, floor, constant = table.values()
assert floor["gate_score"] >= 0.5 and floor["share_below"] == 0  # by its formula
assert free["gate_score"] < constant["gate_score"] < floor["gate_score"]
assert free["share_below"] > 0.2 > constant["share_below"]  # only the free gate is sparse
assert free["small_after_0.01"] > 1.5 * max(floor["small_after_0.01"], constant["small_after_0.01"])
assert free[PROBE] < 0.85 * min(floor[PROBE], constant[PROBE])  # and has less need of a sink

# %% [markdown]
# ## Larger
#
# `python -m gatedlm.reproduce table4 scale=tiny seeds=3` has the paper's Table 4: six gates, their scores, the largest
# activations and the sink. `python -m gatedlm.reproduce figure5` counts small outputs layer by layer.
