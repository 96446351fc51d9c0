# %% [markdown]
# # 8. Longer context
#
# A model trained on 64 tokens can be given 1,024. Nothing breaks outright; it only works worse, for it meets distances
# that it has never seen. This lesson looks at what it sees of a distance, and at three ways to stretch that.
#
# **You will know** how rotary positions encode distance by fast and slow turns, which of them a longer text pushes out
# of the trained range, what a larger base and YaRN do about it, and how one tests whether a model still finds what it
# needs.

# %%
import math
import textwrap
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console

from gatedlm.data import needles
from gatedlm.data.synthetic import Backcopy, active
from gatedlm.hub import open_model
from gatedlm.loss import shift
from gatedlm.model.lm import GatedLM
from gatedlm.model.rope import RopeSpec, frequencies
from gatedlm.recipe import load
from gatedlm.training.run import train

SEED = 0
TRAINED, LONG, D = 64, 1024, 64  # tokens in training, tokens afterwards, channels of the head
FACTOR = LONG / TRAINED

# %% [markdown]
# ## Slow and fast turns
#
# Rotary positions turn each pair of a query's channels by an angle that grows with the token's place, and each key's
# the same way; their product then depends on the distance alone. The first pair turns by one radian a token, the last
# one hardly at all. A pair that turns at least once within the trained text has met every angle. A slower one has met
# only part of a turn, and a longer text brings it to angles it does not know: those below the line.

# %%
PLANS = {
    "as trained": RopeSpec(),
    "linear": RopeSpec(scaling="linear", factor=FACTOR),
    "base 1,000,000": RopeSpec(base=1_000_000),
    "YaRN": RopeSpec(scaling="yarn", factor=FACTOR, original=TRAINED),
}
STYLES = dict(zip(PLANS, (("#D55E00", "o-"), ("#000000", "v:"), ("#009E73", "^-."), ("#0072B2", "s--")), strict=True))
turns = {name: frequencies(plan, D).double() * TRAINED / (2 * math.pi) for name, plan in PLANS.items()}
slow = int((turns["as trained"] < 1).sum())
print(slow, "of", D // 2, "pairs turn less than once within", TRAINED, "tokens")

figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
for name, (colour, style) in STYLES.items():
    axes.semilogy(range(1, D // 2 + 1), turns[name], style, color=colour, ms=3, label=name)
axes.axhline(1, color="dimgrey", lw=1)
axes.text(D // 2, 1.2, "one turn in the trained text", color="dimgrey", ha="right")
axes.set(xlabel="pair of channels", ylabel=f"turns in {TRAINED} tokens", title="How fast each pair turns")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# **Linear** interpolation divides all turns by the factor of the stretch: the longer text looks like the trained one,
# with the tokens packed more densely. A larger **base** slows the pairs more the slower they were; the paper goes from
# 10,000 to 1,000,000 and trains on. **YaRN** ([Peng et al. 2023](https://arxiv.org/abs/2309.00071)) divides the slow
# pairs by the factor, the fast ones little or not at all, since nearby tokens are told apart by those, and sharpens
# attention a little, by a factor on its logits (what the softmax takes), since more tokens compete.

# %%
yarn = turns["YaRN"] / turns["as trained"]
print("what YaRN leaves of the turns, pair by pair:", *(f"{share:.2f}" for share in yarn[:12]), "...")
print(f"and multiplies attention's logits by {PLANS['YaRN'].attention ** 2:.2f}")

# %% [markdown]
# ## A head at sixteen times its length
#
# We train the head of lesson 4 on 64 tokens: on a trigger it must find one particular key, the one just before, and
# copy that symbol. Then we let it read 1,024 tokens, in which that key is one of more and more. The loss on triggers
# tells how well it still finds it; 0 is perfect. The weights stay as they are; only the angles change.

# %%
words = ["recipe=sink", "gate=none", f"data.context={TRAINED}", f"model.head_dim={D}", f"seed={SEED}"]
(run,) = load([*words, "trainer.steps=300", "trainer.probe_every=0", "trainer.val_every=0"])
train(run, Console(quiet=True))
model = open_model(str(Path(run.recipe.out, run.recipe.name))).net
inputs, targets = shift(Backcopy(model.spec.vocab, LONG, stream=[1])[np.arange(8)])


@torch.no_grad()
def loss_on_triggers(plan):
    """Mean loss in nats of the queries on triggers, in each stretch of ``TRAINED`` tokens."""
    stretched = GatedLM(replace(model.spec, rope=plan))
    stretched.load_state_dict(model.state_dict())
    losses = F.cross_entropy(stretched(inputs).logits.mT, targets, reduction="none")
    parts = zip(losses.split(TRAINED, dim=1), active(inputs).split(TRAINED, dim=1), strict=True)
    return [loss[where].mean().item() for loss, where in parts]


found = {name: loss_on_triggers(plan) for name, plan in PLANS.items()}
for name, losses in found.items():
    print(f"{name:<15} first {TRAINED} tokens {losses[0]:.2f}, next {losses[1]:.2f}, last {losses[-1]:.2f} nats")

figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
for name, (colour, style) in STYLES.items():
    places = [TRAINED * (part + 0.5) for part in range(len(found[name]))]
    axes.plot(places, found[name], style, color=colour, ms=4, label=name)
axes.axvline(TRAINED, color="dimgrey", lw=1, label="trained length")
axes.set(xlabel="place in the text (tokens)", ylabel="loss on triggers (nats)", title="Finding the key before")
axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# As trained, the head is perfect on the length it knows and lost soon after: far keys stand at angles it never met, and
# some of them look like the one it wants. Linear interpolation ruins it everywhere, since neighbours now look alike.
# The larger base and YaRN keep the neighbours apart and the far keys away, and go a good part of the way without a step
# of training. The paper does both: it raises the base and trains on with 32 thousand tokens, then YaRN takes the model
# to 128 thousand.
#
# ## Needles
#
# In a language model the same question is asked with a *needle*: a fact strewn among sentences that do not matter, and
# a prompt that asks for it. gatedlm makes such texts, after [RULER](https://arxiv.org/abs/2404.06654), as long as one
# likes; a completion is right if it holds the answer.

# %%
print(textwrap.fill(needles.lesson("needle", characters=300, seed=SEED), 100, replace_whitespace=False))
puzzle = needles.Example(prompt=[], answers=("1234",))
right, wrong = needles.solved(puzzle, " 1234."), needles.solved(puzzle, " 1243.")
print("1234 is right:", right, " 1243 is right:", wrong)

# %% [markdown]
# ## What was learnt

# %%
assert slow == 23 and torch.equal(turns["base 1,000,000"][:1], turns["as trained"][:1])
assert torch.allclose(turns["linear"] * FACTOR, turns["as trained"])
assert torch.allclose(yarn[-slow + 1 :], torch.tensor(1 / FACTOR).double()) and yarn[0] == 1
assert abs(RopeSpec(scaling="yarn", factor=4, original=32_768).attention - 1.139) < 0.001  # the paper's
assert found["as trained"][0] < 0.1 and found["as trained"][-1] > 1  # good where trained, lost beyond
for name in ("base 1,000,000", "YaRN"):
    assert found[name][0] < 0.5 and found[name][1] < 0.6 * found["as trained"][1]
assert found["linear"][0] > 1
assert right and not wrong

# %% [markdown]
# ## Larger
#
# `python -m gatedlm.fit recipe=extend from=runs/NAME data.context=512 model.rope.base=1000000` goes on with a trained
# run at a longer context, `python -m gatedlm.evaluate run=runs/NAME tasks=needle lengths=128,512
# model.rope.scaling=yarn model.rope.factor=4` looks for needles, and `python -m gatedlm.reproduce table5` does both,
# with and without a gate.
