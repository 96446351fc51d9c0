# %% [markdown]
# # 2. Five places to stand
#
# The gate of lesson 1 stood on the output of attention. It could stand elsewhere. The paper tries five places, G1 to G5
# in its Figure 1, and the choice turns out to matter more than any other.
#
# **You will know** the five places and their names here, what a gate costs at each of them, and what each can and
# cannot change in a model that has not been trained yet.

# %%
import matplotlib.pyplot as plt
import torch

from gatedlm.model.gate import GateSpec
from gatedlm.model.lm import GatedLM, ModelSpec, initialise
from gatedlm.probes import tracing

SEED = 0
PLACES = {"sdpa": "G1", "value": "G2", "key": "G3", "query": "G4", "output": "G5"}  # our word, the paper's

# %% [markdown]
# Attention's forward pass fits in five lines, and each of them has a place for a gate. (`Attention.forward` in
# gatedlm/model/attention.py reads the same.)
#
# ```
# q = gate["query"](split(q_proj(x)), x)      # G4
# k = gate["key"](split(k_proj(x)), x)        # G3
# v = gate["value"](split(v_proj(x)), x)      # G2
# o = gate["sdpa"](softmax_attention(rope(norm(q)), rope(norm(k)), v), x)      # G1
# y = gate["output"](o_proj(merge(o)), x)     # G5
# ```
#
# As a drawing, from the bottom up, with the places as in the paper's Figure 1:

# %%
BOXES = {"x": (2, 0), "query": (0.5, 1.2), "key": (2, 1.2), "value": (3.5, 1.2), "attention": (2, 2.6), "W_O": (2, 3.9)}
ARROWS = [("x", "query"), ("x", "key"), ("x", "value")]
ARROWS += [("query", "attention"), ("key", "attention"), ("value", "attention"), ("attention", "W_O")]
GATES = {"query": (1.0, 1.85), "key": (2, 1.85), "value": (3.0, 1.85), "sdpa": (2, 3.25), "output": (2, 4.55)}

figure, axes = plt.subplots(figsize=(6, 4.5), layout="constrained")
for start, end in ARROWS:
    axes.annotate("", BOXES[end], BOXES[start], arrowprops={"arrowstyle": "->", "shrinkA": 14, "shrinkB": 14})
axes.annotate("", (2, 5), BOXES["W_O"], arrowprops={"arrowstyle": "->", "shrinkA": 14})
for name, (left, up) in BOXES.items():
    axes.text(left, up, name, ha="center", va="center", bbox={"boxstyle": "round", "fc": "#eeeeee"})
for place, (left, up) in GATES.items():
    label = f"{PLACES[place]} {place}"
    axes.text(left, up, label, color="white", ha="center", va="center", bbox={"boxstyle": "round", "fc": "#0072B2"})
axes.set(title="Where a gate may stand", xlim=(0, 4), ylim=(-0.3, 5.1))
axes.set_axis_off()
plt.show()

# %% [markdown]
# ## What each costs
#
# A gate computes its scores from x by a matrix of its own: one column of C numbers for each score. Query and SDPA gates
# have a score for each channel of each query head; key and value gates for the key/value heads, of which there are
# fewer, since several query heads share one (grouped-query attention); an output gate one for each channel of the
# model. `ModelSpec` counts without building anything, so we can ask for the paper's mixture of 15 billion parameters.

# %%
PAPER = {"layers": 24, "width": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128}


def millions(place, granularity="elementwise"):
    return ModelSpec(**PAPER, gates=[GateSpec(place, granularity)]).parameters().gate / 1e6


for place, name in PLACES.items():
    headwise = "" if place in ("output", "key", "query") else f", {millions(place, 'headwise'):.1f} M one score a head"
    print(f"{name} {place:<7}{millions(place):6.1f} M one score a channel{headwise}")

# %% [markdown]
# These are the numbers in the paper's Table 1: 201, 25, 25, 201 and 100 million, 1.6 and 0.2 for a score a head.
# Headwise gates cost next to nothing, and as the paper finds they do nearly as well.
#
# No number stands for a headwise gate on queries or keys. Keys and queries are normalised right after the gate, and the
# norm takes back whatever multiplies a whole head. gatedlm refuses to build a gate that could not act:

# %%
try:
    ModelSpec(gates=[GateSpec("key", "headwise")])
except ValueError as refusal:
    print(refusal)
    refused = str(refusal)

# %% [markdown]
# ## What each changes at the start
#
# Here are six small models that differ in the place of the gate alone. `initialise` draws each matrix from the seed and
# the matrix's own name, so the shared ones are equal. We read what the first attention layer writes into the residual
# stream, the running sum to which every layer adds its part, and compare it with the model without a gate.

# %%
SMALL = {"vocab": 256, "layers": 1, "width": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 176}
tokens = torch.randint(256, (8, 64), generator=torch.Generator().manual_seed(SEED))


@torch.no_grad()
def attention_output(gates):
    """What attention writes, (B, T, C), and the trace of its layer."""
    model, written = GatedLM(ModelSpec(**SMALL, gates=gates)), []
    initialise(model, SEED)
    model.blocks[0].attention.register_forward_hook(lambda module, args, output: written.append(output))
    with tracing(model) as trace:
        model(tokens)
    return written[0], trace[0]


ungated, _ = attention_output([])
change = {}
for place, name in PLACES.items():
    written, layer = attention_output([GateSpec(place)])
    change[place] = ((written - ungated).norm() / ungated.norm()).item()
    shape = str(tuple(layer.scores[place].shape))
    print(f"{name} {place:<7} scores {shape:<16} changes the output by {change[place]:.0%}")

# %% [markdown]
# The shapes tell what each gate depends on. A score on the *value* belongs to the token that is looked at: all who look
# there get the same share. A score on the *SDPA output* belongs to the token that looks: it can refuse what a head
# brought, whatever that was. This dependence on the query is what the paper credits its best gate with. The gate on the
# *output* has it too, but comes after W_O has mixed the heads with one another.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained", sharey=True)
labels = [f"{name} {place}" for place, name in PLACES.items()]
left.barh(labels, [millions(place) for place in PLACES], color="#0072B2")
left.set(title="Cost in the paper's mixture", xlabel="parameters added (millions)")
right.barh(labels, [100 * change[place] for place in PLACES], color="#E69F00")
right.set(title="Effect before training", xlabel="change of attention's output (%)")
left.invert_yaxis()
plt.show()

# %% [markdown]
# Three of the places halve what attention writes, since a new gate is half open (lesson 1) and nothing after it
# restores the size. The two before the norm only nudge where attention looks.
#
# ## What was learnt

# %%
table_1 = {"sdpa": 201.3, "value": 25.2, "key": 25.2, "query": 201.3, "output": 100.7}
assert all(abs(millions(place) - cost) < 0.1 for place, cost in table_1.items())
assert abs(millions("sdpa", "headwise") - 1.57) < 0.01 and abs(millions("value", "headwise") - 0.197) < 0.001
assert "QK-norm cancels one factor per head" in refused
assert all(0.4 < change[place] < 0.6 for place in ("sdpa", "value", "output"))
assert all(0 < change[place] < 0.1 for place in ("query", "key"))

# %% [markdown]
# ## Larger
#
# `python -m gatedlm.reproduce table1 scale=tiny seeds=3` trains all fifteen rows of the paper's Table 1 at a size for a
# laptop; `scale=small` takes a GPU.
