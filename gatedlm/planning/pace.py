"""How long a step takes at best, what bounds it, and what the whole run and its checkpoints cost."""

from __future__ import annotations

from gatedlm.planning.device import DENSE, MEMORY, MIXTURE, NETWORK
from gatedlm.planning.memory import FP32, STATES, Setting, activations, largest_micro, with_margin
from gatedlm.planning.text import FEW, asked, held
from gatedlm.planning.work import blocks_share, flops

NEAR = 0.5  # of a limit; below it nothing is worth a warning
DISK, STORAGE = 1e9, 20e9  # bytes/s that a rank writes, and that shared storage takes from all: our assumptions


def bounds(setting: Setting) -> dict[str, float]:
    """Seconds of an optimizer step that arithmetic, memory and network need by themselves; the slowest decides.

    compute  FLOPs, a third more in recomputed blocks, at the share of the peak that dense models or mixtures reach
    memory   weights read three times a pass, activations written and read twice, AdamW's 7 numbers a weight
    network  a pass gathers all weights twice and reduces all gradients in fp32; machines talk slower than their insides
    """
    return {"compute": _compute(setting), "memory": _memory(setting), "network": _network(setting)}


def step(setting: Setting) -> float:
    """Seconds of an optimizer step."""
    return max(bounds(setting).values())


def hours(setting: Setting) -> float:
    """Of the whole run, without validation, probes and checkpoints."""
    return setting.recipe.trainer.steps * step(setting) / 3600


def _compute(setting: Setting) -> float:
    model, context, batch = setting.model, setting.recipe.data.context, setting.recipe.data.batch
    again = blocks_share(model, context) / 3 if setting.checkpointed else 0.0
    work = flops(model, context).total * (1 + again) * batch * context / setting.ranks
    return work / (setting.rate * (MIXTURE if model.experts.count else DENSE))


def _memory(setting: Setting) -> float:
    total = setting.model.parameters().total
    traffic = setting.passes * (3 * setting.compute * total + 4 * activations(setting))
    return (traffic + 7 * FP32 * total / setting.ranks) / (setting.device.bandwidth * MEMORY)


def _network(setting: Setting) -> float:
    if setting.ranks == 1:
        return 0.0
    sent = (2 * setting.compute + FP32) * setting.model.parameters().total * (setting.ranks - 1) / setting.ranks
    device = setting.device
    return setting.passes * sent / ((device.inside if setting.ranks <= device.node else device.outside) * NETWORK)


def checkpoint_bytes(setting: Setting) -> float:
    """Weights and AdamW's averages in fp32, over all ranks."""
    return setting.model.parameters().total * FP32 * (1 + STATES)


def checkpoint_seconds(setting: Setting) -> float:
    """Of each rank writing its shard, or of one writing all."""
    return checkpoint_bytes(setting) / min(setting.ranks * DISK, STORAGE)


def limits(setting: Setting) -> dict[str, float]:
    """{what would break: the share of it that is used}; above 1 it breaks as planned, the largest breaks first.

    memory, of the device at this micro-batch; network, its seconds over those of arithmetic; batch, ranks over
    sequences; text, its readings over those that cost little.
    """
    found = bounds(setting)
    return {
        "memory": sum(with_margin(setting).values()) / setting.device.memory,
        "network": found["network"] / found["compute"],
        "batch": setting.ranks / setting.recipe.data.batch,
        "text": asked(setting.recipe) / held(setting.recipe) / FEW,
    }


def breaks(setting: Setting) -> str:
    """The first thing that would break, in a sentence."""
    used, parts, most = limits(setting), with_margin(setting), largest_micro(setting)
    first = max(used, key=lambda name: used[name])
    largest = max(parts, key=lambda name: parts[name])
    fit = (
        f"trainer.micro_batch={most} is the largest that fits and divides"
        if most
        else "take more devices" + " or a lower data.context" * (largest in ("activations", "logits"))
    )
    less = "a larger trainer.micro_batch sends" if setting.passes > 1 else "fewer devices or a larger data.batch send"
    needed = asked(setting.recipe) / 1e9
    words = {
        "memory": f"memory, {used['memory']:.0%} used and most of it by {largest}: {fit}",
        "network": f"the network, {used['network']:.0%} as long as arithmetic: {less} less",
        "text": f"the text, read {used['text'] * FEW:.2g} times: give a data.corpus of {needed:,.4g} G tokens",
        "batch": f"the batch, {setting.ranks} ranks on {setting.recipe.data.batch} sequences: raise data.batch first",
    }
    return "nothing is near its limit; first " * (used[first] < NEAR) + words[first]
