"""How a run ends: measured once more and written down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback

from gatedlm.data.module import LMData
from gatedlm.data.packing import END_OF_TEXT
from gatedlm.model.sampling import Sampling, generate
from gatedlm.probes.spikes import find_spikes
from gatedlm.recipe import Run
from gatedlm.report import write_report
from gatedlm.training.callbacks import Guard, Recorder, read_metrics
from gatedlm.training.ledger import ledger
from gatedlm.training.measure import MAP_TOKENS, Measurements, attention_maps
from gatedlm.training.module import LitLM
from gatedlm.training.strategy import eager

SAMPLE_TOKENS = 96


class Closing(Callback):
    """At the last step, or where ``guard`` ended the run, writes report.html and makes the ledger.

    ``ledger`` is to be written once all else is saved, for it says that the run is over; None while it is not.
    """

    def __init__(
        self, run: Run, folder: Path, data: LMData, recorder: Recorder, guard: Guard, measure: Measurements
    ) -> None:
        self.run, self.folder, self.data = run, folder, data
        self.recorder, self.guard, self.measure = recorder, guard, measure
        self.ledger: dict[str, Any] | None = None

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, LitLM)
        if trainer.global_step < trainer.max_steps and self.guard.step is None:
            return
        if self.guard.step is not None:
            self.measure.renew()
        row = self.data.val_rows(1)[0, :MAP_TOKENS]
        with trainer.precision_plugin.forward_context():
            maps, text = attention_maps(pl_module.net, row), self._sample(pl_module)
        lines = read_metrics(self.recorder.file)
        spikes = find_spikes([x["step"] for x in lines], [x["train/loss"] for x in lines], self.run.recipe.spikes)
        self.ledger = ledger(self.run, self.data, lines, self.measure, spikes, broken=self.guard.step is not None)
        if trainer.is_global_zero:
            self._write(lines, maps, row.tolist(), text)

    def _sample(self, lit: LitLM) -> str | None:
        if not self.data.tokenizer:
            return None
        length = min(SAMPLE_TOKENS, self.run.recipe.data.context)  # no longer than the rows it was trained on
        with eager(lit.net):
            tokens = [token for (token,) in generate(lit.net, [[END_OF_TEXT]], length, Sampling()) if token is not None]
        return self.data.tokenizer.decode(tokens)

    def _write(
        self, lines: list[dict[str, Any]], maps: dict[int, torch.Tensor], row: list[int], text: str | None
    ) -> None:
        assert self.ledger
        write_report(self.folder, self.ledger, lines, maps, [self._spell(token) for token in row], text)

    def _spell(self, token: int) -> str:
        tokenizer = self.data.tokenizer
        return tokenizer.decode([token], skip_special_tokens=False) if tokenizer else str(token)
