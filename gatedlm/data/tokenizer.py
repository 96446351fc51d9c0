"""Byte-level BPE with ``<|endoftext|>`` as id 0: trained on the corpus or loaded, never injected by text."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from gatedlm.data.corpora import brief

END = "<|endoftext|>"
BYTES = 256
ASCII = set(map(chr, range(33, 127)))  # bytes that every text has; rarer ones are missing from some known tokenizers
UNBROKEN = re.compile(r"(\S{1000}|\s{1000})")  # training takes the square of the time for a word twice as long


def train(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Byte-level BPE of at most ``vocab`` tokens: the end of text, the 256 bytes, then merges by frequency.

    ValueError where ``vocab`` is smaller than the byte alphabet and the end of text.
    """
    if vocab < BYTES + 1:
        raise ValueError(f"data.vocab={vocab}: smaller than the {BYTES} bytes and the end of text; take at least 257")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((part for text in texts for part in UNBROKEN.split(text)), trainer)
    return _ready(tokenizer)


def load(source: str) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json``, of a folder that has one, or of a Hub name, with the end of text as id 0.

    ValueError where there is none, where it is damaged, or where it is not a byte-level BPE.
    """
    path = Path(os.path.expanduser(source))
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file() and (path.suffix == ".json" or source.count("/") > 1):
        raise ValueError(f"data.tokenizer={source}: no file {path}; give a tokenizer.json, its folder or a Hub name")
    try:
        tokenizer = Tokenizer.from_file(str(path)) if path.is_file() else Tokenizer.from_pretrained(source)
    except Exception as error:  # the library raises bare Exception
        hint = "give a tokenizer.json, its folder or a Hub name"
        raise ValueError(f"data.tokenizer={source}: cannot be read ({brief(error)}); {hint}") from error
    state = tokenizer.to_str()
    if '"ByteLevel"' not in state or json.loads(state)["model"]["type"] != "BPE":
        raise ValueError(
            f"data.tokenizer={source}: not a byte-level BPE; take one such as gpt2's, or leave the key out"
        )
    if lacking := sorted(ASCII - tokenizer.get_vocab().keys()):
        raise ValueError(
            f"data.tokenizer={source}: no tokens for {' '.join(lacking)}, which would vanish; take one with all bytes"
        )
    return _ready(_end_first(tokenizer))


def _end_first(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer with the end of text as id 0: it and the token that stood there change places."""
    tokenizer.add_special_tokens([END])
    end, first = tokenizer.token_to_id(END), tokenizer.id_to_token(0)
    state = json.loads(tokenizer.to_str())
    state["model"]["vocab"] |= {first: end, END: 0}
    for token in state["added_tokens"]:
        token["id"] = {end: 0, 0: end}.get(token["id"], token["id"])
    state["added_tokens"].sort(key=lambda token: token["id"])
    return Tokenizer.from_str(json.dumps(state))


def _ready(tokenizer: Tokenizer) -> Tokenizer:
    # None of these three is certain from a file: the first is not saved, the others may come with a model's limits.
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def size(tokenizer: Tokenizer) -> int:
    """Rows an embedding needs: the highest id plus one."""
    return max(tokenizer.get_vocab().values()) + 1


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Ids of each text after the end of text that opens every document, int64."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # said aloud, the library does not warn when workers fork
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array([0, *encoding.ids]) for encoding in encodings]


def sample(texts: Iterable[str], reach: float, budget: int) -> list[str]:
    """Every k-th of the texts within the first ``reach`` characters, k the least power of two that fits ``budget``."""
    kept: list[str] = []
    stride, read, size = 1, 0, 0
    for index, text in enumerate(texts):
        if read >= reach:
            break
        read += len(text)
        if index % stride == 0:
            kept.append(text)
            size += len(text)
        while len(kept) > 1 and size > budget:
            kept, stride = kept[::2], 2 * stride
            size = sum(map(len, kept))
    return kept


def token_bytes(tokenizer: Tokenizer, vocab: int) -> Tensor:
    """Bytes of text each id stands for, (V,); 0 for special tokens and for ids the tokenizer does not use."""
    lengths = torch.zeros(vocab, dtype=torch.long)
    for token, index in tokenizer.get_vocab(with_added_tokens=False).items():
        lengths[index] = len(token)  # byte-level tokens are spelt with one character per byte
    for index, token in tokenizer.get_added_tokens_decoder().items():
        lengths[index] = 0 if token.special else len(token.content.encode())
    return lengths
