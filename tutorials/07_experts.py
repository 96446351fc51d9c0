# %% [markdown]
# # 7. Experts
#
# The paper's largest models are mixtures of experts: instead of one feed-forward network a layer has many, and a router
# sends each token to the few that suit it. Left alone, a router falls for a few favourites, so a loss asks it for
# balance. What it asks for depends on whose tokens are counted.
#
# **You will know** what a router does, what the balance loss rewards, and why it should be counted over the global
# batch and not over the small part of it that one process sees at a time.

# %%
import matplotlib.pyplot as plt
import torch
from torch.testing import assert_close

from gatedlm.loss import expert_counts, load_balance
from gatedlm.model.feedforward import ExpertsSpec, MixtureOfExperts, Routing

SEED = 0
C, EXPERTS, USED, TOKENS = 32, 8, 2, 256  # width, experts, experts a token uses, tokens of a micro-batch
torch.set_num_threads(1)

# %% [markdown]
# ## The balance loss by hand
#
# For each token the router has a probability p_e for each expert and picks the largest. Let f_e be the share of the
# picks that expert e got. The loss is E · Σ f_e p_e, averaged over tokens: 1 if all is even, more where the popular
# experts are also the probable ones.
#
# Take two experts and two micro-batches, one of prose and one of code, with a perfect specialist for each. Counted
# within a micro-batch this looks terrible, for all tokens go to one expert. Counted over both it is perfectly even.

# %%
valid = torch.ones(1, 4, dtype=torch.bool)  # four tokens, all of which count


def sent_to(expert):
    """A router's decision that sends four tokens to one of two experts and is sure of it."""
    logits = torch.full((4, 2), -20.0)
    logits[:, expert] = 20.0
    return [Routing(logits, index=torch.full((4, 1), expert), weight=torch.ones(4, 1))]


prose, code = sent_to(0), sent_to(1)
counted_alone = load_balance(prose, expert_counts(prose, valid), valid).item() / 4
both = expert_counts(prose, valid) + expert_counts(code, valid)
counted_together = load_balance(prose, both, valid).item() / 4
print("balance loss of the prose:", counted_alone, "counted alone,", counted_together, "counted together with the code")

# %% [markdown]
# ## Two domains
#
# Now a layer that has to learn. Tokens come from two domains, which they show in their first channel, and each domain
# wants another function of them. As with long documents, a micro-batch holds one domain only. The layer is gatedlm's
# own, eight experts of which a token uses two.

# %%
functions = torch.randn(2, C, C, generator=torch.Generator().manual_seed(SEED)) / C**0.5


def micro_batch(domain, generator):
    x = torch.randn(1, TOKENS, C, generator=generator)
    x[..., 0] = 2 if domain else -2
    return x, torch.tanh(2 * x @ functions[domain])


def counts_by_domain(layer, generator):
    """How often each expert was picked by each domain, (2, E)."""
    valid = torch.ones(1, TOKENS, dtype=torch.bool)
    with torch.no_grad():
        return torch.cat([expert_counts([layer(micro_batch(d, generator)[0])[1]], valid) for d in (0, 1)])


# %% [markdown]
# Three trainings that differ in the balance loss alone: none, counted in each micro-batch, counted over the global
# batch (here: both micro-batches). One optimizer step sees one micro-batch of each domain. Afterwards we ask for the
# error; how full the fullest expert is, as a multiple of its even share; and how much goes to *specialists*: the picks
# that an expert gets from the domain it serves most, as a share of all picks.


# %%
def trained(balance, steps=300, coefficient=0.2):
    """A layer trained with balance over ``micro``, ``global`` or nothing, and its error at the end."""
    generator, valid = torch.Generator().manual_seed(SEED), torch.ones(1, TOKENS, dtype=torch.bool)
    layer = MixtureOfExperts(C, 16, ExpertsSpec(EXPERTS, USED))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=C**-0.5, generator=generator)
    optimizer, errors = torch.optim.Adam(layer.parameters(), lr=5e-3), []
    for _ in range(steps):
        batches = [micro_batch(domain, generator) for domain in (0, 1)]
        outputs = [layer(x) for x, _ in batches]
        counts = [expert_counts([routing], valid) for _, routing in outputs]
        error = sum((y - target).square().mean() for (y, _), (_, target) in zip(outputs, batches, strict=True)) / 2
        loss = error
        for (_, routing), own in zip(outputs, counts, strict=True):
            if balance != "nothing":
                over = own if balance == "micro" else sum(counts)
                loss = loss + coefficient * load_balance([routing], over, valid) / (2 * TOKENS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        errors.append(error.item())
    return layer, sum(errors[-50:]) / 50


results = {}
for balance in ("nothing", "micro", "global"):
    layer, error = trained(balance)
    counts = counts_by_domain(layer, torch.Generator().manual_seed(SEED + 1)).float()
    shares = counts / counts.sum()
    fullest = EXPERTS * shares.sum(0).max().item()
    pure = shares.max(0).values.sum().item()
    results[balance] = {"error": error, "fullest": fullest, "pure": pure, "shares": shares}
    print(f"{balance:<8} error {error:.3f}  fullest expert {fullest:.1f} times its share  with specialists {pure:.0%}")

# %%
figure, panels = plt.subplots(1, 3, figsize=(9, 2.8), layout="constrained", sharey=True)
for axes, (balance, result) in zip(panels, results.items(), strict=True):
    shares = 100 * result["shares"]
    axes.bar(range(EXPERTS), shares[0], color="#0072B2", label="domain 0")
    axes.bar(range(EXPERTS), shares[1], bottom=shares[0], color="#E69F00", label="domain 1")
    axes.axhline(100 / EXPERTS, color="black", ls=":", label="an even share")
    axes.set(title=f"balance over: {balance}", xlabel="expert", xticks=range(EXPERTS), ylim=(0, 27))
panels[0].set_ylabel("share of all picks (%)")
figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
plt.show()

# %% [markdown]
# Without balance, each domain crowds into its favourites and other experts have little to do, a waste of memory, and of
# time when the experts live on different machines. Balance in each micro-batch makes every expert serve both
# domains, since each domain alone must be spread over all eight; the error pays for it. Balance over the global batch
# is as even and lets the experts specialise.
#
# ## The same over many processes
#
# In training, the global batch lies on many processes and may come in several micro-batches each. gatedlm adds the
# counts up over all of them. That is enough, because for given counts the loss is a sum over tokens: its parts add up
# to the whole.

# %%
generator = torch.Generator().manual_seed(SEED + 2)
batches = [micro_batch(domain, generator)[0] for domain in (0, 1)]
one, two, whole = (layer(x)[1] for x in (*batches, torch.cat(batches, dim=1)))
valid, valid_whole = torch.ones(1, TOKENS, dtype=torch.bool), torch.ones(1, 2 * TOKENS, dtype=torch.bool)
counts = expert_counts([whole], valid_whole)
in_parts = load_balance([one], counts, valid) + load_balance([two], counts, valid)
at_once = load_balance([whole], counts, valid_whole)
print("in parts", in_parts.item(), " at once", at_once.item())

# %% [markdown]
# In a recipe `loss.balance_over` chooses: `micro`; `global`, over all processes; `buffer`, over all processes and the
# micro-batches so far, the default; or `exact`, the whole batch by a first pass.
#
# ## What was learnt

# %%
assert_close(torch.tensor([counted_alone, counted_together]), torch.tensor([2.0, 1.0]))
assert_close(in_parts, at_once)
assert results["nothing"]["fullest"] > max(results["micro"]["fullest"], results["global"]["fullest"]) + 0.2
assert results["global"]["pure"] > results["micro"]["pure"] + 0.1  # specialists need balance over the global batch
assert results["global"]["error"] < 0.9 * results["micro"]["error"]

# %% [markdown]
# ## Larger
#
# `python -m gatedlm.fit recipe=quickstart-moe loss.balance_over=micro,global trainer.micro_batch=4` trains language
# models both ways. `python -m gatedlm.reproduce table1 arch=moe` has the paper's table, whose models are all mixtures.
