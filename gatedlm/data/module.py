"""The LightningDataModule: this rank's rows of every step, and what a run tells about its corpus."""

from __future__ import annotations

import signal
import sys
import warnings

import lightning.pytorch as L
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader

from gatedlm.data import order
from gatedlm.data.baselines import count_losses
from gatedlm.data.cards import card
from gatedlm.data.packing import Corpus, Rows, Say, prepare
from gatedlm.data.synthetic import Backcopy, Chain, chain
from gatedlm.data.tokenizer import token_bytes
from gatedlm.recipe import DataSpec

COUNTED = 2**24  # tokens that the count models see: seconds, and enough for any vocabulary
SAMPLED = 4096  # rows of the endless task that they see
VALIDATION = 512  # rows of the endless task that are held out


def to_stderr(line: str) -> None:
    """The default for ``say``: standard output may hold results."""
    print(line, file=sys.stderr, flush=True)


def _deaf(worker: int) -> None:
    """A signal to the whole job is the main process's to answer, and that needs its workers until it has saved."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


class LMData(L.LightningDataModule):
    """Rows (B, T+1) of int64 for training, without end from the trainer's step on, and for validation.

    After ``setup``: ``corpus`` for the ledger, ``tokenizer`` (None for the synthetic task), ``vocab``, ``token_bytes``
    (V,), zeros where tokens are no text, and ``task``, the synthetic task's chain or None. Works without a Trainer as
    rank 0 of 1 at step 0. ``say`` takes the lines that tell of a preparation.
    """

    corpus: Corpus
    tokenizer: Tokenizer | None
    token_bytes: Tensor
    task: Chain | None
    train: Rows | Backcopy
    validation: Rows | Backcopy

    def __init__(self, spec: DataSpec, seed: int, say: Say = to_stderr) -> None:
        super().__init__()
        self.spec, self.seed, self.say, self.vocab, self.opened = spec, seed, say, spec.vocab, False

    def prepare_data(self) -> None:
        self.setup()

    def setup(self, stage: str | None = None) -> None:
        if self.opened:
            return
        for key in ("context", "batch"):
            if getattr(self.spec, key) < 1:
                raise ValueError(f"data.{key}={getattr(self.spec, key)}: take at least 1")
        # Rows come from memory maps: a worker costs more than it saves, and Lightning would warn at every start.
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        if card(self.spec.corpus).kind == "backcopy":
            self._open_backcopy()
        else:
            self._open_rows()
        self.opened = True

    def _open_rows(self) -> None:
        prepared = prepare(self.spec, self.say)
        self.corpus, self.tokenizer, self.task = prepared.corpus, prepared.tokenizer, None
        self.train, self.validation = prepared.train, prepared.validation
        self.token_bytes = token_bytes(prepared.tokenizer, self.vocab)

    def _open_backcopy(self) -> None:
        self.task, self.tokenizer = chain(self.vocab), None
        self.corpus = Corpus(self.spec.corpus, self.task.fingerprint)
        self.train = Backcopy(self.vocab, self.spec.context, [0, self.seed])
        self.validation = Backcopy(self.vocab, self.spec.context, [1], VALIDATION)
        self.token_bytes = torch.zeros(self.vocab, dtype=torch.long)

    @property
    def _count(self) -> int | None:
        return None if self.task else len(self.train)

    def batch_rows(self, step: int) -> np.ndarray:
        """Which rows of the training split optimizer step ``step``, counted from 1, read over all ranks."""
        return order.batch_indices(self._count, self.spec.batch, self.seed, step - 1)

    def train_dataloader(self) -> DataLoader:
        sampler = order.StepSampler(self._count, self.spec.batch, self.seed, self._step, *self._place())
        return self._loader(self.train, sampler)

    def val_dataloader(self) -> DataLoader:
        return self._loader(
            self.validation, order.validation_batches(len(self.validation), self.spec.batch, *self._place())
        )

    def val_rows(self, n: int) -> Tensor:
        """The first n validation rows, of which the first batches are made, (n, T+1); all if there are fewer."""
        return self.validation[order.validation_order(len(self.validation))[:n]]

    def packed_rows(self, n: int) -> Tensor:
        """``val_rows`` without a fixed first token: each begins where the packing cut the text."""
        return self.validation.packed(order.validation_order(len(self.validation))[:n])

    def baselines(self) -> dict[str, float]:
        """Nats per token of ``unigram`` and ``bigram`` count models on at most 16.8 million tokens of either split.

        For the synthetic task the counts come from 4,096 rows of training.
        """
        most = COUNTED // self.spec.context
        rows = order.batch_indices(None, SAMPLED, 0, 0) if self.task else np.arange(min(len(self.train), most))
        return count_losses(self.train[rows], self.val_rows(most), self.vocab, self.spec.documents)

    def _loader(self, rows: Rows | Backcopy, batches: order.StepSampler | list[np.ndarray]) -> DataLoader:
        # A generator of its own: without it every new iteration would draw from the run's random state.
        return DataLoader(
            dataset=rows,
            sampler=batches,
            batch_size=None,
            num_workers=self.spec.workers,
            generator=torch.Generator(),
            worker_init_fn=_deaf,
        )

    def _place(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def _step(self) -> int:
        return self.trainer.global_step if self.trainer else 0
