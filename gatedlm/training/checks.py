"""Whether a run can go through with what it begins: looked at before the first step, one line for each problem."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import socket
import sys
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from gatedlm.data.cards import card
from gatedlm.data.packing import cache_root, is_prepared
from gatedlm.recipe import Recipe, to_yaml
from gatedlm.training.ledger import LIBRARIES
from gatedlm.training.strategy import is_first_rank

STATE = 3 * 4  # bytes a parameter: weights and AdamW's averages, in fp32
PATIENCE = timedelta(minutes=2)


def first_here() -> bool:
    """Whether this is the rank that speaks for its machine."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


def refuse(problems: list[str], speaks: bool) -> None:
    """ValueError for the last of them where there are any, the others on stderr: each its own line.

    A rank that does not speak ends without a word and with status 0: another would have the speaker killed.
    """
    if problems and not speaks:
        raise SystemExit(0)
    for problem in problems[:-1]:
        print(problem, file=sys.stderr)
    if problems:
        raise ValueError(problems[-1])


def before_data(recipe: Recipe, folder: Path) -> list[str]:
    """What one process sees by itself: no room for the checkpoints, a corpus that all ranks would prepare at once."""
    return [*_room(recipe, folder), *_corpus(recipe)]


def _room(recipe: Recipe, folder: Path) -> list[str]:
    spec = recipe.trainer
    count = spec.keep + 2 if spec.checkpoint_every else 1  # the best one, and the one being written
    needed = count * STATE * recipe.model.parameters().total
    there = sum(file.stat().st_size for file in folder.glob("checkpoints/*/**/*") if file.is_file())
    place = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(place).free + there
    if free >= needed:
        return []
    return [
        f"out={recipe.out}: {free / 1e9:.3g} GB free, and {count} checkpoints take {needed / 1e9:.3g}: "
        "make room, give another out= or lower trainer.keep"
    ]


def _corpus(recipe: Recipe) -> list[str]:
    alone = recipe.trainer.devices * recipe.trainer.nodes == 1
    if alone or card(recipe.data.corpus).kind != "hub" or is_prepared(recipe.data):
        return []
    return [
        f"data.corpus={recipe.data.corpus} is not prepared in {cache_root(recipe.data)}: run python -m gatedlm.prepare "
        "with the same words first"
    ]


class Agreement(Callback):
    """Refuses, once the ranks are connected and before the model is built, a run whose ranks do not fit together."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self.folder = recipe, folder

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if trainer.world_size == 1:
            return
        refuse(unreachable(trainer.strategy.root_device), is_first_rank())
        everyone: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(everyone, facts(self.recipe, self.folder))
        refuse(disagreements(everyone), is_first_rank())


def unreachable(device: torch.device) -> list[str]:
    """A sum over all ranks, which within two minutes has to give their number."""
    ones = torch.ones((), device=device)
    try:
        work = dist.all_reduce(ones, async_op=True)
        assert work is not None
        work.wait(PATIENCE)
        if int(ones) == dist.get_world_size():
            return []
        why = f"a sum of ones gave {int(ones)} on {dist.get_world_size()} ranks"
    except RuntimeError as error:
        why = str(error).strip().split("\n")[0]
    return [
        f"{dist.get_backend()}: the ranks do not reach each other ({why}): check firewalls and that "
        "NCCL_SOCKET_IFNAME names the interface between the machines"
    ]


def facts(recipe: Recipe, folder: Path) -> dict[str, str]:
    """What has to be the same on all ranks, and the name of this one's machine."""
    versions = {name: version(name) for name in LIBRARIES}
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        **versions,
        "recipe": hashlib.sha256(to_yaml(recipe).encode()).hexdigest()[:8],
        "run's folder": f"{folder.absolute()} {'there' if os.path.isdir(folder) else 'missing'}",
    }


def disagreements(everyone: list[dict[str, str]]) -> list[str]:
    """A line for each fact that is not rank 0's everywhere: who differs, what it has, what rank 0 has."""
    problems = []
    for name, expected in everyone[0].items():
        others = {rank: own[name] for rank, own in enumerate(everyone) if own[name] != expected}
        if others and name != "host":
            rank, found = next(iter(others.items()))
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            problems.append(
                f"{name}: rank {rank} on {everyone[rank]['host']}{more} has {found}, rank 0 on {everyone[0]['host']} "
                f"has {expected}: make them the same"
            )
    return problems
