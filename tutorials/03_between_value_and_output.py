# %% [markdown]
# # 3. Something between value and output
#
# Two places of lesson 2, on the value (G2) and on the SDPA output (G1), help far more than the others. The paper's
# first reason is that they stand between two matrices which have nothing else between them.
#
# **You will know** why value and output projection are really one matrix of low rank, how to see that in numbers, and
# what a gate, an RMSNorm or a SiLU between them does about it.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.testing import assert_close

from gatedlm.model.gate import Gate, GateSpec, Ungated

SEED = 0
C, D, N = 64, 16, 2048  # width of the model, of one head, and how many tokens we try

# %% [markdown]
# Follow one head. It takes values W_V x of the tokens it looks at, mixes them with shares A that add up to one, and
# leads the mixture out by W_O. Mixing is linear, so the order does not matter: first out, then mix, gives the same.
# Whatever the head looks at, it applies the one matrix M = W_O W_V.

# %%
generator = torch.Generator().manual_seed(SEED)
w_v = torch.randn(D, C, generator=generator) / C**0.5
w_o = torch.randn(C, D, generator=generator) / D**0.5
x = torch.randn(N, C, generator=generator)
mixing = torch.randn(N, N, generator=generator).softmax(-1)

values_mixed = mixing @ (x @ w_v.T) @ w_o.T
one_matrix = w_o @ w_v
print("two matrices or one: largest difference", (values_mixed - mixing @ (x @ one_matrix.T)).abs().max().item())
rank = torch.linalg.matrix_rank(one_matrix).item()
print("M is", tuple(one_matrix.shape), "and has rank", rank)

# %% [markdown]
# M has 64 × 64 entries but only rank 16, the width of the head. All those parameters, two matrices deep, and the head
# is a single linear map through a narrow passage. Grouped-query attention makes it worse, since several heads share a
# W_V.
#
# Now put something between. In gatedlm's words a gate is Y' = Y · σ(X W); `combine="replace"` puts a function of Y in
# its place, for which the paper tries an RMSNorm (Y divided by its root mean square) and a SiLU, Y · σ(Y), in Table 3.
# Below is the smallest head there is: one token looks at one other. A value gate (G2) asks the token that is looked at
# for its score, an SDPA gate (G1) the one that looks; that is all the difference between them.

# %%
BETWEEN = {
    "nothing": None,
    "RMSNorm": GateSpec(combine="replace", activation="rmsnorm", source="self"),
    "SiLU": GateSpec(combine="replace", activation="silu", source="self"),
    "value gate": GateSpec("value"),
    "SDPA gate": GateSpec("sdpa"),
}


class Head(nn.Module):
    """W_O between(W_V seen), where ``seen`` (N, C) are the tokens looked at and ``looking`` (N, C) those that look."""

    def __init__(self, spec):
        super().__init__()
        self.value, self.out = nn.Linear(C, D, bias=False), nn.Linear(D, C, bias=False)
        self.between = Gate(spec, width=C, heads=1, dim=D) if spec else Ungated()
        self.asks_looking = spec == GateSpec("sdpa")
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=C**-0.5) if parameter.ndim > 1 else nn.init.ones_(parameter)

    def forward(self, seen, looking):
        asked = looking if self.asks_looking else seen
        y = self.value(seen)[None, :, None]  # as a gate wants it: (rows, tokens, heads, D)
        return self.out(self.between(y, asked[None])[0, :, 0])


torch.manual_seed(SEED)
heads = {name: Head(spec) for name, spec in BETWEEN.items()}
looking = torch.randn(N, C, generator=generator)

# %% [markdown]
# ## Is it still one matrix?
#
# Fit the best single matrix to each untrained head, by least squares from both tokens to the output, and see what is
# left over. And count the directions of its input that a head hears. A matrix of rank 16 is deaf to all others: move a
# token along one of them and nothing comes out. For a map that is not linear we take its derivative at many points, put
# them all on one pile, and count the directions to which at least one responds: the rank of the pile.


# %%
@torch.no_grad()
def left_over(head):
    """The share of the output's variance that no single matrix gives."""
    both, output = torch.cat((x, looking), dim=1), head(x, looking)
    return ((output - both @ torch.linalg.lstsq(both, output).solution).square().sum() / output.square().sum()).item()


def heard(head):
    """Singular values of the derivatives at 64 points, stacked; the largest is scaled to 1."""
    slopes = torch.func.vmap(torch.func.jacrev(lambda a, b: head(a[None], b[None])[0], argnums=(0, 1)))
    pile = torch.cat(slopes(x[:64], looking[:64]), dim=-1).detach().flatten(0, 1)
    values = torch.linalg.svdvals(pile)
    return values / values[0]


curved = {name: left_over(head) for name, head in heads.items()}
spectra = {name: heard(head) for name, head in heads.items()}
directions = {name: int((values > 1e-4).sum()) for name, values in spectra.items()}
for name in heads:
    print(f"{name:<11}{curved[name]:6.1%} beyond any matrix, hears {directions[name]} directions")

# %%
STYLES = {"nothing": "o-", "RMSNorm": "s--", "SiLU": "^:", "value gate": "v-.", "SDPA gate": "D-"}
COLOURS = dict(zip(heads, ("#000000", "#E69F00", "#009E73", "#56B4E9", "#0072B2"), strict=True))
figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
for name, values in spectra.items():
    axes.semilogy(range(1, 41), values[:40].clamp(min=1e-8), STYLES[name], color=COLOURS[name], ms=4, label=name)
axes.axvline(D + 0.5, color="dimgrey", lw=1)
axes.text(D + 1.5, 1e-4, "width of the head", color="dimgrey")
axes.set(xlabel="direction of the input", ylabel="response (largest = 1)", title="What a head hears")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# All four break up the single matrix. RMSNorm and SiLU bend what passes but still listen through the same 16
# directions; a gate has a matrix of its own to listen with, and hears 32.
#
# ## What can it learn?
#
# Give each head a task that is natural for attention: pass something on *if the looking token wants it*. The target is
# a map of rank 16, so the passage is wide enough, but only where the looking token points to one side of some
# direction; elsewhere it is zero. How much of the target's variance does each head explain after 400 steps of training?

# %%
wanted = torch.randn(C, generator=generator)


def target(seen, looking):
    return (seen @ one_matrix.T) * (looking @ wanted > 0)[:, None]


def explained(head):
    """The share of the target's variance that the head explains once it is trained."""
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(400):
        seen, looks = torch.randn(2, 256, C, generator=generator)
        loss = (head(seen, looks) - target(seen, looks)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        missed = head(x, looking) - target(x, looking)
    return 1 - (missed.square().sum() / target(x, looking).square().sum()).item()


share = {name: explained(head) for name, head in heads.items()}
print({name: round(value, 3) for name, value in share.items()})

figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
axes.barh(list(share), [100 * value for value in share.values()], color=list(COLOURS.values()))
axes.axvline(50, color="dimgrey", ls=":", label="always pass one half")
axes.legend(frameon=False, loc="upper right")
axes.set(xlabel="variance of the target explained (%)", title="Pass it on if the looking token wants it", xlim=(0, 100))
axes.invert_yaxis()
plt.show()

# %% [markdown]
# Whoever does not ask the looking token can do no better than always to pass one half, which explains 50 %. The SDPA
# gate asks, and gets most of the rest. So two things are to be had between value and output: a bend, which all four
# bring, and a say of the token that looks, which only the SDPA gate has.
#
# ## What was learnt

# %%
assert_close(values_mixed, mixing @ (x @ one_matrix.T), rtol=1e-3, atol=1e-4)  # value and output projection are one map
assert rank == D < C
assert curved["nothing"] < 1e-6 and all(share > 0.01 for name, share in curved.items() if name != "nothing")
assert directions == {"nothing": D, "RMSNorm": D, "SiLU": D, "value gate": 2 * D, "SDPA gate": 2 * D}
assert all(share[name] < 0.55 for name in share if name != "SDPA gate")
assert share["nothing"] > 0.4 and share["SDPA gate"] > 0.8

# %% [markdown]
# ## Larger
#
# `python -m gatedlm.reproduce table3 scale=tiny seeds=3` puts gates, RMSNorm and SiLU between value and output
# projection of language models and compares their losses.
