"""The peak of a training step beside the plan's estimate of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.optim import AdamW

from benchmarks.harness import Bench, Result
from benchmarks.models import rows
from gatedlm import loss
from gatedlm.model.lm import GatedLM, initialise
from gatedlm.planning.device import DEVICES
from gatedlm.planning.memory import Setting, peak
from gatedlm.recipe import Recipe, load
from gatedlm.training.strategy import distribute

WORDS = "recipe=quickstart gate=none model.width=512 model.heads=8 model.kv_heads=4 model.head_dim=64 model.ffn=1536"
WORDS += " model.layers=6 data.vocab=4096 data.context=256 data.batch=8 trainer.accelerator=cpu"
MIXTURE = "model.ffn=256 model.experts.count=16 model.experts.used=2"
SETTINGS = {
    "dense": "",
    "dense, checkpointed": "trainer.checkpoint_blocks=true",
    "elementwise gate": "gate=sdpa-elementwise",
    "mixture": MIXTURE,
    "mixture, checkpointed": f"{MIXTURE} trainer.checkpoint_blocks=true",
    "vocabulary 32,768": "data.vocab=32768",
    "batch 32": "data.batch=32",
}


def run(bench: Bench) -> Iterator[Result]:
    """Weights, optimizer state, gradients, activations, logits: all that a process holds beyond an idle one."""
    table = []
    for name, words in SETTINGS.items():
        recipe = load([*WORDS.split(), *words.split()])[0].recipe
        planned = sum(peak(Setting(recipe, DEVICES[_device(bench)], 1, recipe.data.batch)).values())
        measured = bench.peak(lambda recipe=recipe: _steps(recipe, bench))
        table.append(
            {"model": name, "measured MiB": measured / 2**20, "planned MiB": planned / 2**20}
            | {"planned / measured": planned / measured}
        )
    yield Result("peak of a training step, fp32, one process", table)


def _device(bench: Bench) -> str:
    name = torch.cuda.get_device_name().lower() if bench.device.type == "cuda" else "cpu"
    return next((known for known in DEVICES if known in name), "h100")


def _steps(recipe: Recipe, bench: Bench) -> None:
    net = GatedLM(recipe.model).to(bench.device)
    initialise(net, seed=0)
    distribute(net, SingleDeviceStrategy(bench.device), recipe.trainer)
    optimizer = AdamW(net.parameters(), fused=True)
    inputs, targets = loss.shift(rows(recipe.model, recipe.data.batch, recipe.data.context, bench))
    for _ in range(2):
        x, _ = net.hidden(inputs)
        nats = loss.read_out(x, net.readout, targets, torch.ones_like(targets, dtype=torch.bool))
        (nats / targets.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
