# %% [markdown]
# # 9. From laptop to cluster
#
# A model that outgrows one machine is trained by many processes, each of which holds a shard of it. The recipe stays; a
# few words say where it runs. Here are two processes on this very computer, and the plan for more.
#
# **You will know** that one process and two compute the same run, that a killed run goes on as if nothing had happened,
# and how to read what a run on 8 or 64 GPUs would need before anyone pays for it.

# %%
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt

OUT = Path("runs")
STEPS = 24
COMMON = [
    "recipe=quickstart",
    "scale=nano",
    "data.max_tokens=1_000_000",
    f"trainer.steps={STEPS}",
    "trainer.accelerator=cpu",
    "trainer.checkpoint_every=4",
    "optim.lr=3e-3",
    f"out={OUT}",
]
TWO = ["trainer.strategy=fsdp", "trainer.devices=2", "name=two"]


def command(module, *words):
    return [sys.executable, "-m", f"gatedlm.{module}", *words]


def losses(name):
    """Training loss by step, as far as the run has come."""
    file = OUT / name / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {line["step"]: line["train/loss"] for line in map(json.loads, lines)}


# %% [markdown]
# ## One process
#
# Commands are started as in a shell, so that each is a process of its own:
# `python -m gatedlm.fit recipe=quickstart scale=nano ...`

# %%
one_process = subprocess.run(command("fit", *COMMON, "name=one"), capture_output=True, text=True)
print(*one_process.stdout.splitlines()[:3], one_process.stderr, sep="\n")

# %% [markdown]
# ## Two processes, and a kill
#
# `trainer.strategy=fsdp trainer.devices=2` starts two, which share out the rows of each batch and the parameters, so
# that neither holds the whole model (fully sharded data parallelism). After about half of the steps we kill both
# without a warning, as a machine that fails would.

# %%
running = subprocess.Popen(command("fit", *COMMON, *TWO), start_new_session=True, stdout=subprocess.DEVNULL)
while len(losses("two")) < STEPS // 2 and running.poll() is None:
    time.sleep(0.2)
os.killpg(running.pid, signal.SIGKILL)
running.wait()
killed_after = len(losses("two"))
print("killed after step", killed_after, "; saved:", sorted(path.name for path in (OUT / "two/checkpoints").iterdir()))

# %% [markdown]
# The same command again goes on from the newest whole checkpoint: a kill may tear the one that is being written.

# %%
going_on = subprocess.run(command("fit", *COMMON, *TWO), capture_output=True, text=True)
print(*going_on.stdout.splitlines()[:4], going_on.stderr, sep="\n")

# %%
one, two = losses("one"), losses("two")
apart = {step: abs(one[step] - two[step]) for step in one}
print("largest difference of the loss, in nats:", max(apart.values()))

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.plot([*one], [*one.values()], color="#000000", lw=3, alpha=0.4, label="one process")
left.plot([*two], [*two.values()], color="#D55E00", lw=1, label="two processes, FSDP")
left.axvline(killed_after, color="#0072B2", ls=":", label="killed, went on")
left.set(xlabel="step", ylabel="training loss (nats per token)", title="One run, either way")
left.legend(frameon=False)
right.semilogy([*apart], [max(value, 1e-9) for value in apart.values()], "o", color="#0072B2", ms=4)
right.set(xlabel="step", ylabel="difference (nats), none as 1e-9", title="How far apart", ylim=(5e-10, 1e-3))
plt.show()

# %% [markdown]
# They differ by rounding: sums over two halves are added up in another order.
#
# ## On paper: 8 and 64 GPUs
#
# `plan` computes memory, time and cost of a run, by arithmetic alone. Here the paper's mixture of 15 billion
# parameters, with its gate. On 8 GPUs and on 64: does it fit, what is a step bound by, how long does it take? (A *rank*
# is one process, on one GPU.)

# %%
paper = ["recipe=moe-15a2b", "gate=sdpa-elementwise", "device=h100"]
plan = subprocess.run(command("plan", *paper, "devices=64"), capture_output=True, text=True)
print(plan.stdout, plan.stderr)
rows = re.findall(r"^ +(8|64) +(.+)$", plan.stdout, re.MULTILINE)
hours = {int(devices): float(row.split()[-2].replace(",", "")) for devices, row in rows}
print("hours by the number of GPUs:", hours)

# %% [markdown]
# ## What was learnt

# %%
assert one_process.returncode == going_on.returncode == plan.returncode == 0
assert STEPS // 2 <= killed_after < STEPS  # it was cut short ...
assert [*two] == [*one] == [*range(1, STEPS + 1)]  # ... and lacks no step, nor has one twice
assert max(apart.values()) < 1e-4
assert 4 < hours[8] / hours[64] < 16  # eight times the GPUs, about an eighth of the time

# %% [markdown]
# ## Larger
#
# On a node with eight GPUs the same words are `python -m gatedlm.fit recipe=dense-500m gate=sdpa-elementwise`; several
# nodes are started by torchrun or SLURM with `trainer.nodes=N`.
# `python -m gatedlm.reproduce table2 scale=medium dry=true` says what the paper's Table 2 would take there.
