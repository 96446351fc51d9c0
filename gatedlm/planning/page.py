"""A plan as it is printed: the words that ask for it, its figures and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from rich import box
from rich.table import Table

from gatedlm.planning.device import DENSE, DEVICES, MEMORY, MIXTURE, NETWORK
from gatedlm.planning.memory import Setting, largest_micro, with_margin
from gatedlm.planning.pace import bounds, breaks, checkpoint_bytes, checkpoint_seconds, hours, step
from gatedlm.planning.routing import SPREADS, simulated
from gatedlm.planning.text import asked, held, order_bytes, prepared_bytes
from gatedlm.planning.work import flops
from gatedlm.recipe import Recipe, load

RANKS = (1, 8, 64, 256)
NODE = 8  # devices of a machine, as recipes have it
GIGA = 1e9


def settings(words: list[str]) -> list[Setting]:
    """What the words ask for, a setting for each swept one. ValueError, one line, for what does not exist or divide."""
    own = dict(word.split("=", 1) for word in words if word.startswith(("devices=", "device=")))
    others = [word for word in words if not word.startswith(("devices=", "device="))]
    name = own.get("device", "").lower()
    if "device" in own and name not in DEVICES:
        raise ValueError(f"device={name}: there are {', '.join(DEVICES)}")
    # Of all these devices the products in bf16 are the fastest, whatever this machine would choose.
    runs = load([*others, *(_machines(own["devices"]) if "devices" in own else [])], auto="bf16")
    return [_setting(run.recipe, name) for run in runs]


def _machines(devices: str) -> list[str]:
    """So many ranks in the words of a recipe, on whole machines of eight where they fill them."""
    if not devices.isdecimal() or not int(devices):
        raise ValueError(f"devices={devices}: a whole number of ranks above 0")
    ranks = int(devices)
    inside = NODE if ranks % NODE == 0 else ranks
    return [f"trainer.devices={inside}", f"trainer.nodes={ranks // inside}"]


def expected(setting: Setting) -> str:
    """What a ready recipe says of itself: hours and cost, and the micro-batch that it needs or would be faster with."""
    best = replace(setting, micro=max(1, largest_micro(setting)))
    own, fewer = hours(setting), hours(best)
    hint = f"; {_span(fewer)} with trainer.micro_batch={best.micro}" if fewer < 0.9 * own else ""
    hint = f"; needs trainer.micro_batch={best.micro}" if best.micro < setting.micro else hint
    dollars = own * setting.ranks * setting.device.dollars
    return f"by plan at least {_span(own)} on {setting.device.name.upper()}s, {_two(dollars)} dollars{hint}"


def lines(setting: Setting) -> Iterator[str | Table]:
    """The plan from top to bottom."""
    yield from _size(setting)
    yield _memory(setting)
    yield from _time(setting)
    yield _ranks(setting)
    yield from _simulated(setting)


def _span(hours: float) -> str:
    unit, size = next((u, s) for u, s in (("h", 1), ("min", 60), ("s", 3600)) if hours * s >= 1.5 or u == "s")
    return f"{_two(hours * size)} {unit}"


def _two(value: float) -> str:
    """Two digits are more than an estimate is worth."""
    return f"{float(f'{value:.2g}'):,g}"


def _setting(recipe: Recipe, name: str) -> Setting:
    spec, batch = recipe.trainer, recipe.data.batch
    ranks = spec.devices * spec.nodes
    device = DEVICES[name or ("h100" if spec.accelerator == "gpu" else "cpu")]
    return Setting(recipe, device, ranks, min(spec.micro_batch or batch, batch // ranks))


def _size(setting: Setting) -> Iterator[str]:
    recipe, work = setting.recipe, flops(setting.model, setting.recipe.data.context)
    total, active, gate = setting.model.parameters()
    step, ranks = recipe.data.batch * recipe.data.context, setting.ranks
    how = "sharded by FSDP" if setting.sharded else "one process"
    yield f"{recipe.name} on {ranks} {setting.device.name}, {how}, estimated"
    if setting.sharded and recipe.trainer.strategy == "ddp":
        yield "not planned: trainer.strategy=ddp, under which each rank holds all of the model"
    yield f"{total:,} parameters, {active:,} active, {gate:,} in gates"
    yield f"{work.total / GIGA:.3g} GFLOPs a token, {work.attention / work.total:.0%} of them in attention itself"
    yield (
        f"{recipe.trainer.steps:,} steps of {step:,} tokens, {recipe.trainer.steps * step / GIGA:,.4g} G tokens; "
        f"{setting.passes} x {setting.micro} sequences a step and rank"
    )


def _memory(setting: Setting) -> Table:
    """A rank's gigabytes at the fullest moment, with blocks as they are and recomputed."""
    columns = []
    for checkpointed in (False, True):
        trainer = replace(setting.recipe.trainer, checkpoint_blocks=checkpointed)
        columns.append(with_margin(replace(setting, recipe=replace(setting.recipe, trainer=trainer))))
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    rows.append(("all", *(sum(column.values()) for column in columns)))
    asked = ["", ""]
    asked[setting.checkpointed] = ", as asked"
    heading = (f"GB a rank, of {setting.device.memory / GIGA:g}", "blocks kept" + asked[0], "recomputed" + asked[1])
    return _table(heading, [(name, *(f"{part / GIGA:,.3g}" for part in parts)) for name, *parts in rows])


def _time(setting: Setting) -> Iterator[str]:
    found, seconds = bounds(setting), step(setting)
    share = MIXTURE if setting.model.experts.count else DENSE
    tokens = setting.recipe.data.batch * setting.recipe.data.context / setting.ranks
    mfu = flops(setting.model, setting.recipe.data.context).total * tokens / seconds / setting.rate
    took = ", ".join(f"{name} {time:.3g} s" for name, time in found.items())
    yield f"assumed: {share:.0%} of the peak FLOP/s, {MEMORY:.0%} of memory's and {NETWORK:.0%} of the network's rate"
    yield f"a step needs {took}: {seconds:.3g} s, {tokens / seconds:,.0f} tokens/s a device, MFU {mfu:.0%}"
    yield f"the run takes at least {_cost(hours(setting), setting)}"
    most = largest_micro(setting)
    every = ", all the sequences that a rank has" * (most == setting.recipe.data.batch // setting.ranks)
    yield f"largest micro-batch that fits and divides: {most or 'none'}{every}"
    yield f"what breaks first: {breaks(setting)}"


def _cost(hours: float, setting: Setting) -> str:
    spent, price = hours * setting.ranks, setting.device.dollars
    return f"{_span(hours)}, {_two(spent)} device hours, {_two(spent * price)} dollars at an assumed {price:g} an hour"


def _ranks(setting: Setting) -> Table:
    """The same run on other numbers of ranks, each with the largest micro-batch that fits."""
    rows = []
    for ranks in sorted({*RANKS, setting.ranks}):
        whole = setting.recipe.data.batch % ranks == 0
        one = replace(setting, ranks=ranks, micro=1)
        most = largest_micro(one) if whole else 0
        if not most:
            why = f"needs {sum(with_margin(one).values()) / GIGA:,.3g} GB" if whole else "does not divide"
            rows.append((f"{ranks}", why, *[""] * 5))
            continue
        at = replace(one, micro=most)
        found, used = bounds(at), sum(with_margin(at).values()) / GIGA
        time = (f"{step(at):.3g}", max(found, key=lambda name: found[name]), _two(hours(at)))
        rows.append((f"{ranks}", f"{most}", f"{used:,.3g}", *time, _two(hours(at) * ranks)))
    return _table(("devices", "micro-batch", "GB", "s a step", "bound by", "hours", "device hours"), rows)


def _simulated(setting: Setting) -> Iterator[str | Table]:
    experts = setting.model.experts
    if experts.count:
        loads = {name: simulated(experts, setting.tokens, spread) for name, spread in SPREADS.items()}
        rows = [(name, f"{x.fullest:.2f}", f"{x.empty:.0%}", f"{x.padded:.1%}") for name, x in loads.items()]
        yield _table(("routing", "fullest / mean expert", "unused experts", "padding"), rows)
    yield from _text(setting.recipe)
    size, most = checkpoint_bytes(setting) / GIGA, setting.recipe.trainer.keep + 2
    seconds = checkpoint_seconds(setting)
    yield f"a checkpoint has {size:,.3g} GB and takes {seconds:.3g} s; up to {most} lie on disk, {most * size:,.3g} GB"


def _text(recipe: Recipe) -> Iterator[str]:
    tokens, disk = held(recipe), prepared_bytes(recipe)
    if tokens < inf:
        there = f"{_two(tokens / GIGA)} G tokens of {recipe.data.corpus} to train on, {_two(disk / GIGA)} GB prepared"
        yield f"text: {there}, read {_two(asked(recipe) / tokens)} times"
    yield f"data order: {order_bytes(recipe) / 1e6:,.3g} MB a rank, whatever their number"


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for number, title in enumerate(heading):
        table.add_column(title, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table
