"""One run from recipe to ledger: prepare, train or go on, measure, write down."""

from __future__ import annotations

import ctypes
import logging
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from torch.distributed.checkpoint.api import CheckpointException

from gatedlm.data.module import LMData
from gatedlm.recipe import Recipe, Run
from gatedlm.training.callbacks import Display, Guard, Profile, Recorder
from gatedlm.training.checkpoint import Checkpoints
from gatedlm.training.checks import Agreement, before_data, first_here, refuse
from gatedlm.training.closing import Closing
from gatedlm.training.ledger import write_ledger
from gatedlm.training.measure import Measurements
from gatedlm.training.module import LitLM, parameter_groups
from gatedlm.training.origin import origin, same_words
from gatedlm.training.resume import alone, begin, checkpoint, differences, finished
from gatedlm.training.strategy import in_words, is_first_rank, placement, threads

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h


class Stopped(Exception):
    """Signal ``number`` ended the run at a step boundary; all is saved and the same command goes on."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped after step {step}, all is saved, the same command goes on from there")
        self.number = number


def train(run: Run, console: Console) -> dict[str, Any]:
    """Train ``run`` in ``out/name``, going on from its newest checkpoint, and return its ledger.

    A finished run is not trained again. Raises ValueError, one line, for what the recipe asks and the machine, the data
    or an earlier run under the same name cannot give; Stopped after a signal.
    """
    folder = Path(run.recipe.out) / run.recipe.name
    # The first rank holds the folder for all of them.
    with alone(folder) if is_first_rank() else nullcontext():
        return _train(run, folder, console)


def _train(run: Run, folder: Path, console: Console) -> dict[str, Any]:
    recipe = run.recipe
    ledger = finished(folder, recipe)
    if ledger:
        others = differences(folder, recipe)
        for line in others:
            console.print(f"{line}, not applied", soft_wrap=True)
        advice = "give it another name=" if others else "change a word or give it a name="
        console.print(f"{folder} is {ledger['status']}; for another run {advice}", soft_wrap=True)
        return ledger
    saved = checkpoint(folder, recipe, console)
    begun = saved or origin(recipe)
    _quiet()
    _keep_freed_memory()
    if recipe.trainer.threads:
        torch.set_num_threads(threads(recipe.trainer))
    refuse(before_data(recipe, folder), first_here())
    data, lit = LMData(recipe.data, recipe.seed, say=console.print), LitLM(recipe)
    data.setup()
    if begun != saved:
        lit.anew = True
        same_words(recipe, data.tokenizer)
        console.print(f"beginning with the weights of {begun}", soft_wrap=True)
    if is_first_rank():
        begin(folder, recipe, data.corpus.fingerprint, saved)
        if data.tokenizer:
            data.tokenizer.save(str(folder / "tokenizer.json"))
    return _fit(run, folder, data, lit, begun, console)


def _fit(run: Run, folder: Path, data: LMData, lit: LitLM, saved: Path | None, console: Console) -> dict[str, Any]:
    spec, sharded = run.recipe.trainer, saved is not None and (saved / "state").is_dir()
    measure = Measurements(lit, data)
    recorder = Recorder(folder / "metrics.jsonl", run.recipe, measure)
    guard = Guard(folder / "nonfinite.json", data, spec.nonfinite)
    closing = Closing(run, folder, data, recorder, guard, measure)
    keeper = Checkpoints(folder / "checkpoints", spec.checkpoint_every, spec.keep, recorder)
    profile = [Profile(console)] if spec.profile else []
    agreement = Agreement(run.recipe, folder)
    shown = [Display(console, recorder), *profile]
    trainer = _trainer(run.recipe, sharded, [agreement, recorder, guard, *shown, closing, keeper])
    for line in (run.recipe.name, in_words(spec, sharded), *_groups(lit)):
        console.print(line, soft_wrap=True, highlight=False)
    try:
        trainer.fit(lit, data, ckpt_path=saved / "state" if saved else None, weights_only=True)
    except RuntimeError as error:
        if "loading state_dict" not in str(error):
            raise
        raise ValueError(f"{saved}: a checkpoint of another model, give this run another name=") from None
    except SystemExit:
        if trainer.interrupted:  # by Ctrl-C before the first step
            raise KeyboardInterrupt from None
        raise
    except (OSError, CheckpointException) as error:
        step = trainer.global_step
        raise ValueError(
            f"{folder}: step {step} could not be saved ({error}), the checkpoints before it stay"
        ) from None
    if keeper.stopped_by:
        raise Stopped(keeper.stopped_by, trainer.global_step)
    assert closing.ledger
    if is_first_rank():
        write_ledger(folder, closing.ledger)
        keeper.prune()
    return closing.ledger


def _quiet() -> None:
    """Lightning's notes on hardware and its own defaults are no news to who gave a recipe."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.")


def _keep_freed_memory() -> None:
    """On CPUs with glibc, reuse each step's large buffers: given back, every page of them would fault in again."""
    if sys.platform != "linux" or torch.accelerator.is_available():
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def _groups(lit: LitLM) -> list[str]:
    total, active, gate = lit.recipe.model.parameters()
    optim = lit.recipe.optim
    matrices, others = (len(group["params"]) for group in parameter_groups(lit.net, optim.weight_decay))
    return [
        f"{total:,} parameters, {active:,} active, {gate:,} in gates",
        f"AdamW: {matrices} matrices decay by {optim.weight_decay}, {others} norms and tables do not",
    ]


def _trainer(recipe: Recipe, sharded: bool, callbacks: list[Callback]) -> L.Trainer:
    return L.Trainer(
        **placement(recipe.trainer, sharded),
        max_steps=recipe.trainer.steps,
        max_epochs=-1,
        callbacks=callbacks,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
