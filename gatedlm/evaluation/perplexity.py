"""Perplexity and bits per byte by domain, document by document, beside what counting alone reaches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from gatedlm.data.baselines import count_losses
from gatedlm.data.tokenizer import size
from gatedlm.evaluation.reader import Reader, Row
from gatedlm.evaluation.score import Advance, Outcome, Score, ratio
from gatedlm.evaluation.text import Text

ALL = "all"


class Counted(NamedTuple):
    """A document's loss in nats, its tokens and its bytes."""

    nats: float
    tokens: int
    size: int


def perplexity(reader: Reader, text: Text, advance: Advance) -> Outcome:
    """exp(nats / tokens) and nats / ln 2 / bytes, sums over the documents of each domain and of all.

    ``unigram`` and ``bigram`` are the perplexities of ``counting`` on the same tokens.
    """
    encoded = {domain: [reader.encode(one) for one in texts] for domain, texts in text.documents.items()}
    rows = {
        domain: [list(windows(ids, reader.first, reader.context)) for ids in documents]
        for domain, documents in encoded.items()
    }
    told = iter(reader.nats([row for of in rows.values() for document in of for row in document], advance))
    scores, everything = [], []
    for domain, documents in rows.items():
        nats = [sum(next(told).total for _ in document) for document in documents]
        sizes = (len(one.encode()) for one in text.documents[domain])
        counted = [*map(Counted, nats, map(len, encoded[domain]), sizes)]
        scores += [*_figures(domain, counted), *_counting(reader, domain, encoded[domain])]
        everything += counted
    scores += _figures(ALL, everything) if len(rows) > 1 else []
    return Outcome(scores, {"text": text.origin, "fingerprint": text.fingerprint, "context": reader.context})


def windows(ids: list[int], first: int, context: int) -> Iterator[Row]:
    """Rows that ask about every token of a document once, each opened by ``first``, at most ``context`` seen.

    A document that is longer is read in windows half a context apart: but for its beginning every token is told after
    at least half a context.
    """
    stride = max(1, context // 2)
    for place in range(0, max(1, len(ids) - context + stride), stride):
        yield Row([first, *ids[place : place + context]], 1 if place == 0 else context - stride + 1)


def _figures(domain: str, counted: Sequence[Counted]) -> list[Score]:
    nats, tokens, sizes = zip(*counted, strict=True)
    bits = [one / math.log(2) for one in nats]
    return [ratio(domain, "perplexity", nats, tokens, exponential=True), ratio(domain, "bits_per_byte", bits, sizes)]


def _counting(reader: Reader, domain: str, documents: list[list[int]]) -> list[Score]:
    losses = counting(documents, size(reader.tokenizer))
    tokens = sum(map(len, documents))
    return [Score(domain, name, math.exp(loss), None, tokens) for name, loss in losses.items()]


def counting(documents: list[list[int]], vocab: int) -> dict[str, float]:
    """Nats per token of unigram and bigram counts: those of one half of the text on the other, both ways.

    Nothing for a text of less than four tokens.
    """
    # Id 0 opens each document here, whatever a tokenizer uses it for; it is no target.
    stream = torch.tensor([token for ids in documents for token in (0, *(one + 1 for one in ids))])
    if len(stream) - len(documents) < 4:
        return {}
    halves = stream[None].tensor_split(2, dim=1)
    counts = [int((half[:, 1:] != 0).sum()) for half in halves]
    told = [count_losses(one, other, vocab + 1, True) for one, other in (halves[::-1], halves)]
    return {name: sum(n * of[name] for n, of in zip(counts, told, strict=True)) / sum(counts) for name in told[0]}
