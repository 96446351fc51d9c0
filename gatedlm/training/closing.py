"""How a run ends: measured once more and written down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback

from gatedlm.data.module import LMData
from gatedlm.data.packing import END_OF_TEXT
from gatedlm.probes.spikes import find_spikes
from gatedlm.recipe import Run
from gatedlm.report import write_report
from gatedlm.training.callbacks import Guard, Recorder, read_metrics
from gatedlm.training.ledger import ledger, write_ledger
from gatedlm.training.measure import MAP_TOKENS, Measurements, attention_maps
from gatedlm.training.module import LitLM
from gatedlm.training.sampling import sample

SAMPLE_TOKENS = 96


class Closing(Callback):
    """At the last step, or where ``guard`` ended the run, writes ledger.json, tokenizer.json and report.html.

    ``ledger`` is what stands in ledger.json, None while the run has not come to an end.
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
        self.ledger = ledger(self.run, self.data, lines[-1], self.measure, spikes, broken=self.guard.step is not None)
        if trainer.is_global_zero:
            self._write(lines, maps, row.tolist(), text)

    def _sample(self, lit: LitLM) -> str | None:
        if not self.data.tokenizer:
            return None
        start = torch.tensor([END_OF_TEXT], device=lit.device)
        tokens = sample(lit.net, start, SAMPLE_TOKENS, self.run.recipe.data.context, temperature=0.8, seed=0)
        return self.data.tokenizer.decode(tokens.tolist())

    def _write(
        self, lines: list[dict[str, Any]], maps: dict[int, torch.Tensor], row: list[int], text: str | None
    ) -> None:
        assert self.ledger
        if self.data.tokenizer:
            self.data.tokenizer.save(str(self.folder / "tokenizer.json"))
        write_report(self.folder, self.ledger, lines, maps, [self._spell(token) for token in row], text)
        write_ledger(self.folder, self.ledger)

    def _spell(self, token: int) -> str:
        tokenizer = self.data.tokenizer
        return tokenizer.decode([token], skip_special_tokens=False) if tokenizer else str(token)
