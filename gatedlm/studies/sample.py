"""The text that models are studied on: rows of token ids and where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from gatedlm.catalogue import expanded
from gatedlm.data.cards import card
from gatedlm.data.corpora import documents
from gatedlm.data.module import LMData
from gatedlm.recipe import DataSpec, Recipe

LEAST = 8  # tokens in a row: some figures leave out the first four queries
LETTERS = 16  # characters of text taken for each token asked for, more than any tokenizer packs into one


@dataclass(frozen=True)
class Sample:
    """Rows (N, T+1), what they are in words, and how many bytes of text the targets stand for, 0 if for none.

    ``backcopy`` rows have dormant and active queries.
    """

    rows: Tensor
    origin: str
    size: int
    backcopy: bool = False


def validation_rows(recipe: Recipe, tokenizer: Tokenizer | None, count: int, tokens: int | None) -> Sample:
    """The first validation rows of a run, as packed, or the first ``tokens`` of each.

    ValueError for more than its context, and where its corpus has become another since, as the standard library does
    with each Python.
    """
    context = recipe.data.context
    if tokens is not None and tokens > context:
        raise ValueError(
            f"tokens={tokens}: rows of this run have data.context={context}, for longer ones give text=FILE"
        )
    data = LMData(recipe.data, recipe.seed)
    data.setup()
    if tokenizer and data.tokenizer and tokenizer.get_vocab() != data.tokenizer.get_vocab():
        raise ValueError(f"data.corpus={recipe.data.corpus}: not the text this run was trained on, give text=FILE")
    rows = data.packed_rows(count)[:, : (tokens or context) + 1]
    size = int(data.token_bytes[rows[:, 1:]].sum())
    return Sample(rows, f"validation rows of {recipe.data.corpus}", size, backcopy=data.task is not None)


def text_rows(text: str, origin: str, tokenizer: Tokenizer, count: int, tokens: int) -> Sample:
    """Rows that follow each other in ``text``, at most ``count``, shorter than ``tokens`` only if the text is.

    ValueError for a text that does not fill one short row.
    """
    tokenizer.encode_special_tokens = True  # words of a text never act as control tokens
    tokenizer.no_truncation()
    encoding = tokenizer.encode(text[: LETTERS * count * tokens], add_special_tokens=False)
    there = len(encoding.ids) - 1
    if there < LEAST:
        raise ValueError(f"{origin}: {there + 1} tokens are too few, give a text of a page or more")
    tokens = min(tokens, there)
    count = min(count, there // tokens)
    rows = torch.tensor(encoding.ids[: count * tokens + 1]).unfold(0, tokens + 1, tokens)
    start, end = encoding.offsets[1][0], encoding.offsets[count * tokens][1]
    return Sample(rows, origin, len(text[start:end].encode()))


def text_file(path: str) -> str:
    """A file's text; ValueError if it is none."""
    try:
        return Path(expanded(path)).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"text={path}: not UTF-8 at byte {error.start}, convert it with iconv -t utf-8") from None
    except OSError as error:
        raise ValueError(f"text={path}: {error.strerror}") from None


def corpus_text(corpus: str | None, tokens: int) -> str:
    """The beginning of a corpus, enough for so many tokens; without one the prose of the standard library."""
    kind = card(corpus or "stdlib").kind
    if kind not in ("stdlib", "hub"):
        raise ValueError(f"data={corpus}: holds no text of its own, give text=FILE or another corpus")
    missing, texts = LETTERS * tokens, []
    for text, domain in documents(DataSpec(corpus=corpus or "stdlib")):
        if missing <= 0:
            break
        if corpus or domain == "prose":
            texts.append(text)
            missing -= len(text)
    return "\n\n".join(texts)
