# %% [markdown]
# # 1. A gate in twelve lines
#
# A head of attention mixes the values of the tokens it looks at and hands the mixture on, whatever it is. A gate lets
# each token decide how much of that mixture passes: Y' = Y · σ(X W), a number between 0 and 1 for every channel,
# computed from the token itself. That is the whole idea of the paper
# [Gated Attention for Large Language Models](https://arxiv.org/abs/2505.06708).
#
# **You will know** how to build gated attention by hand, that `GateSpec()` is the same thing, and what a new gate does
# before it has learnt anything.

# %%
import math
from dataclasses import replace

import matplotlib.pyplot as plt
import torch
from torch.testing import assert_close

from gatedlm.model.attention import Attention
from gatedlm.model.gate import GateSpec
from gatedlm.model.lm import ModelSpec

SEED = 0
B, T, H, D, C = 2, 9, 4, 16, 64  # rows, tokens, heads, channels a head, width of the model

# %% [markdown]
# The ingredients: some tokens x, already normalised as a block of a Transformer does it, and five matrices. Four of
# them every attention layer has; the fifth, `gate`, is new.

# %%
generator = torch.Generator().manual_seed(SEED)
x = torch.randn(B, T, C, generator=generator)
query, key, value, gate, out = (torch.randn(H * D, C, generator=generator) / math.sqrt(C) for _ in range(5))

# %% [markdown]
# And now attention with a gate, in twelve lines. `heads` cuts a vector of H · D numbers into H pieces. Every token
# looks at itself and at earlier ones (`later` are the others), the softmax says how much at each, `y` is the mixture of
# values, and the gate stands between the mixture and the projection that leads out.


# %%
def heads(t):
    return t.unflatten(-1, (H, D)).transpose(1, 2)  # (B, T, H D) -> (B, H, T, D)


def gated_attention(x, gate):
    q, k, v = heads(x @ query.T), heads(x @ key.T), heads(x @ value.T)
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    logits = (q @ k.mT / math.sqrt(D)).masked_fill(later, -math.inf)
    y = logits.softmax(-1) @ v
    scores = torch.sigmoid(heads(x @ gate.T))
    gated = y * scores
    merged = gated.transpose(1, 2).flatten(2)
    output = merged @ out.T
    return output, scores


by_hand, scores = gated_attention(x, gate)
print("output", tuple(by_hand.shape), " scores", tuple(scores.shape), " mean score", round(scores.mean().item(), 2))

# %% [markdown]
# In gatedlm a gate is described by words. Without any, `GateSpec()` is the one above: on the output of scaled
# dot-product attention (`sdpa`), a score for each channel (`elementwise`) of each head (`specific`), which multiplies,
# through a sigmoid, computed from the layer's input.

# %%
print(GateSpec())
spec = ModelSpec(width=C, heads=H, kv_heads=H, head_dim=D, qk_norm=False, gates=[GateSpec()])
layer = Attention(spec)
print(*(f"{name:<24}{tuple(weight.shape)}" for name, weight in layer.named_parameters()), sep="\n")

# %% [markdown]
# The same five matrices go in. Two things that we left out above are switched off: the norm on queries and keys
# (`qk_norm`), and rotary positions (lesson 8), by turning every pair of channels by the angle 0, whose cosine is 1 and
# whose sine is 0. The outputs should be equal.

# %%
no_turn = torch.ones(1, T, 1, D), torch.zeros(1, T, 1, D)
weights = {"q_proj.weight": query, "k_proj.weight": key, "v_proj.weight": value, "o_proj.weight": out}
layer.load_state_dict(weights | {"gates.sdpa.score.weight": gate})
with torch.no_grad():
    by_spec = layer(x, no_turn)
print("largest difference", (by_spec - by_hand).abs().max().item())

# %% [markdown]
# Here are the scores of one row of tokens. Each token has its own pattern: dark channels are held back, bright ones
# pass. Nothing here has been trained; the pattern only shows that the gate listens to the token.

# %%
figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
image = axes.imshow(scores[0].transpose(0, 1).flatten(1), cmap="cividis", vmin=0, vmax=1, aspect="auto")
for head in range(1, H):
    axes.axvline(head * D - 0.5, color="white")
axes.set(title="Scores of an untrained gate", ylabel="token", xlabel="channel (white lines part the heads)")
figure.colorbar(image, label="score, the share that passes")
plt.show()

# %% [markdown]
# In a model all matrices begin small, so that X W is close to 0 and every score close to σ(0) = ½. A new gate is
# therefore half open everywhere: it halves what attention writes, and training moves it from there. With a matrix of
# zeros the halving is exact.

# %%
half, _ = gated_attention(x, torch.zeros_like(gate))
plain = Attention(replace(spec, gates=[]))
plain.load_state_dict(weights)
with torch.no_grad():
    ungated = plain(x, no_turn)
print("a gate of zeros passes", round((half.norm() / ungated.norm()).item(), 4), "of the output")

# %% [markdown]
# ## What was learnt

# %%
assert_close(by_spec, by_hand, rtol=1e-4, atol=1e-5)  # by hand and by GateSpec
assert_close(half, ungated / 2, rtol=1e-4, atol=1e-5)  # a gate that knows nothing is half open
assert scores.shape == (B, H, T, D) and scores.min() > 0 and scores.max() < 1
assert not torch.allclose(by_hand, ungated, atol=0.1)  # a gate is no small change

# %% [markdown]
# ## Larger
#
# `python -m gatedlm.fit recipe=quickstart gate=none,sdpa-elementwise` trains two small language models, one of them
# with this gate. `python -m gatedlm.reproduce table1` compares all its relatives.
