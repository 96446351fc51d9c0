"""One run from recipe to ledger: prepare, train or go on, measure, write down."""

from __future__ import annotations

import logging
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console

from gatedlm.data.module import LMData
from gatedlm.data.packing import END_OF_TEXT
from gatedlm.recipe import Recipe, Run, changed, from_yaml, to_yaml
from gatedlm.report import write_report
from gatedlm.training.callbacks import Display, Profile, Recorder, read_metrics
from gatedlm.training.checkpoint import Checkpoints, checkpoints
from gatedlm.training.ledger import ledger, read_ledger, write_ledger
from gatedlm.training.measure import MAP_TOKENS, attention_maps, probe, validate
from gatedlm.training.module import LitLM
from gatedlm.training.sampling import sample
from gatedlm.training.strategy import placement

SAMPLE_TOKENS = 96
ELSEWHERE = ("name", "out", "data.cache", "data.workers")


class Stopped(Exception):
    """Signal ``number`` ended the run at a step boundary; all is saved and the same command goes on."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped after step {step}, all is saved: the same command goes on from there")
        self.number = number


def train(run: Run, console: Console) -> dict[str, Any]:
    """Train ``run`` in ``out/name``, going on from its newest checkpoint, and return its ledger.

    A finished run is not trained again. Raises ValueError, one line, for what the recipe asks and the machine, the data
    or an earlier run under the same name cannot give; Stopped after a signal.
    """
    recipe, folder = run.recipe, Path(run.recipe.out) / run.recipe.name
    done, differences = read_ledger(folder), _differences(folder, recipe)
    if done and not differences:
        console.print(f"{folder} is finished; for another run change a word or give it a name=")
        return done
    saved = checkpoints(folder / "checkpoints")
    if saved:
        _announce(folder, differences, saved[-1], console)
    _prepare_process(recipe)
    data, lit = LMData(recipe.data, recipe.seed, say=console.print), LitLM(recipe)
    data.setup()
    _open(folder, recipe)
    keeper = Checkpoints(folder / "checkpoints", recipe.trainer.checkpoint_every, recipe.trainer.keep)
    recorder = Recorder(folder / "metrics.jsonl", recipe, lambda step: _measure(step, lit, data))
    closing = Closing(run, folder, data, recorder)
    watchers = [recorder, Display(console, recorder), *([Profile(console)] if recipe.trainer.profile else [])]
    trainer = _trainer(recipe, [*watchers, closing, keeper])
    trainer.fit(lit, data, ckpt_path=saved[-1] if saved else None, weights_only=True)
    if keeper.stopped_by:
        raise Stopped(keeper.stopped_by, trainer.global_step)
    return closing.content


def _differences(folder: Path, recipe: Recipe) -> dict[str, tuple[Any, Any]]:
    """What the recipe changes of the one that the folder was begun with; where a folder lies is no change."""
    file = folder / "recipe.yaml"
    found = changed(from_yaml(file.read_text()), recipe) if file.exists() else {}
    return {key: values for key, values in found.items() if key not in ELSEWHERE}


def _announce(folder: Path, differences: dict[str, tuple[Any, Any]], checkpoint: Path, console: Console) -> None:
    for key, (before, now) in differences.items():
        if key.startswith(("model.", "data.", "seed")):
            raise ValueError(f"{folder} was begun with {key}={before}, not {now}: give this run another name=")
        console.print(f"{key}: {before} until now, {now} from here on")
    console.print(f"going on from {checkpoint}")


def _open(folder: Path, recipe: Recipe) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ledger.json").unlink(missing_ok=True)
        (folder / "recipe.yaml").write_text(to_yaml(recipe))
    except OSError as error:
        raise ValueError(
            f"{folder}: cannot write there ({error.strerror}), choose another place by out=FOLDER"
        ) from None


def _prepare_process(recipe: Recipe) -> None:
    # Lightning's notes on hardware and its own defaults are no news to who gave a recipe.
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    if recipe.trainer.threads:
        torch.set_num_threads(recipe.trainer.threads)


def _trainer(recipe: Recipe, callbacks: list[Callback]) -> L.Trainer:
    return L.Trainer(
        **placement(recipe.trainer),
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


def _measure(step: int, lit: LitLM, data: LMData) -> dict[str, Any]:
    """The figures due after ``step``: a validation, a probe, both or neither."""
    spec, figures = lit.recipe.trainer, {}
    with lit.trainer.precision_plugin.forward_context():
        if spec.val_every and step % spec.val_every == 0:
            figures |= _validate(lit, data)
        if spec.probe_every and step % spec.probe_every == 0:
            figures |= {f"probe/{name}": value for name, value in probe(lit, data).figures.items()}
    return figures


def _validate(lit: LitLM, data: LMData) -> dict[str, float]:
    return validate(lit, islice(data.val_dataloader(), lit.recipe.trainer.val_batches or None))


class Closing(Callback):
    """Measures a run at its end and writes ledger.json, tokenizer.json and report.html; ``content`` is the ledger."""

    def __init__(self, run: Run, folder: Path, data: LMData, recorder: Recorder) -> None:
        self.run, self.folder, self.data, self.recorder = run, folder, data, recorder
        self.content: dict[str, Any] = {}

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, LitLM)
        if trainer.global_step < trainer.max_steps:
            return
        with trainer.precision_plugin.forward_context():
            validation, probed = _validate(pl_module, self.data), probe(pl_module, self.data)
            row = self.data.val_rows(1)[0, :MAP_TOKENS]
            maps, text = attention_maps(pl_module, row), self._sample(pl_module)
        self.content = ledger(self.run, self.data, self.recorder.latest, validation, probed)
        if trainer.is_global_zero:
            self._write(maps, row.tolist(), text)

    def _sample(self, lit: LitLM) -> str | None:
        if not self.data.tokenizer:
            return None
        start = torch.tensor([END_OF_TEXT], device=lit.device)
        tokens = sample(lit.net, start, SAMPLE_TOKENS, self.run.recipe.data.context, temperature=0.8, seed=0)
        return self.data.tokenizer.decode(tokens.tolist())

    def _write(self, maps: dict[int, torch.Tensor], row: list[int], text: str | None) -> None:
        names = [self._spell(token) for token in row]
        if self.data.tokenizer:
            self.data.tokenizer.save(str(self.folder / "tokenizer.json"))
        write_ledger(self.folder, self.content)
        write_report(self.folder, self.content, read_metrics(self.recorder.file), maps, names, text)

    def _spell(self, token: int) -> str:
        tokenizer = self.data.tokenizer
        return tokenizer.decode([token], skip_special_tokens=False) if tokenizer else str(token)
