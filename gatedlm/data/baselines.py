"""What counting alone reaches: the losses that a trained model has to beat."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gatedlm.data.packing import END_OF_TEXT

PRIOR = 32.0  # observations that the unigram model is worth in a bigram's context


def count_losses(train: Tensor, validation: Tensor, vocab: int, within_documents: bool = False) -> dict[str, float]:
    """Mean -log p of the validation targets, in nats per token, under counts c of the training rows.

    unigram  p(y) = (c_y + 1/2) / (c + V/2), Krichevsky and Trofimov's estimate
    bigram   p(y|x) = (c_xy + 32 p(y)) / (c_x + 32), a Dirichlet prior around the unigram (MacKay and Peto 1995)
    """
    x, y = _pairs(train, within_documents)
    unigram = (np.bincount(y, minlength=vocab) + 0.5) / (len(y) + 0.5 * vocab)
    codes, counts = np.unique(x * vocab + y, return_counts=True)  # sparse: a table of V x V may not fit
    contexts = np.bincount(x, minlength=vocab)

    x, y = _pairs(validation, within_documents)
    place = np.searchsorted(codes, x * vocab + y).clip(max=len(codes) - 1)
    both = np.where(codes[place] == x * vocab + y, counts[place], 0)
    bigram = (both + PRIOR * unigram[y]) / (contexts[x] + PRIOR)
    return {"unigram": float(-np.log(unigram[y]).mean()), "bigram": float(-np.log(bigram).mean())}


def _pairs(rows: Tensor, within_documents: bool) -> tuple[np.ndarray, np.ndarray]:
    x, y = rows[:, :-1].numpy().ravel(), rows[:, 1:].numpy().ravel()
    kept = y != END_OF_TEXT if within_documents else slice(None)
    return x[kept], y[kept]
