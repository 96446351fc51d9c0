"""``python -m gatedlm.generate run=RUN|model=MODEL [prompt=TEXT ...] [key=value ...]``: text, as it comes."""

from __future__ import annotations

import difflib
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gatedlm.command import command

if TYPE_CHECKING:  # imported where it is used: usage and a wrong word answer before torch is loaded
    from tokenizers import Tokenizer

USAGE = """\
usage: python -m gatedlm.generate run=RUN|model=MODEL [prompt=TEXT ...] [prompts=FILE] [key=value ...]

writes on from each prompt, or without one begins a text; RUN is the folder of a run, MODEL a converted folder or a
name on the Hub; standard output holds the texts alone, the first as it comes, the others when their batch is done

  prompts=FILE     a prompt on each line
  tokens=200       how many to write at most; a text that ends by itself is shorter
  temperature=0.8  what logits are divided by; 0 takes the most probable token
  top_k=0          draw from so many tokens, the most probable ones; 0 is all
  top_p=1          draw from the fewest tokens that hold this share
  min_p=0          draw from tokens at least this many times as probable as the likeliest
  seed=0           text i draws with seed + i, whatever the others are
  window=W         see the last W tokens alone, and with keep_first=N the first N too
  chunk=512        tokens of a prompt that are read at once
  model.rope.scaling=yarn model.rope.factor=4   texts up to 4 times the trained context
  batch=16         texts that are written at once

for example: python -m gatedlm.generate run=runs/NAME prompt="def main(" temperature=0"""
DRAW = ("temperature", "top_k", "top_p", "min_p", "seed")
REAL = ("temperature", "top_p", "min_p")
LEAST = {"tokens": 1, "top_k": 0, "seed": 0, "window": 1, "keep_first": 0, "chunk": 1, "batch": 1}
ROPE = "model.rope."  # what begins the words that stretch a trained context
WORDS = ("run", "model", "prompt", "prompts", *REAL, *LEAST)
HALF = "\N{REPLACEMENT CHARACTER}"  # what bytes decode to that are no whole character yet


def main(words: list[str]) -> None:
    """Write the texts; exit status 2 with one line for words or a model that cannot be used, 130 after Ctrl-C."""
    command(words, USAGE, _generate)


def _generate(words: list[str]) -> None:
    rope = [word for word in words if word.startswith(ROPE)]
    where, prompts, numbers = _read([word for word in words if word not in rope])

    import torch

    from gatedlm.hub import open_model
    from gatedlm.model.sampling import Sampling, generate

    sampling = Sampling(**{key: numbers.pop(key) for key in DRAW if key in numbers})
    batch = numbers.pop("batch")
    opened = open_model(where, words=rope)
    net, tokenizer, name, first, stop = opened
    if tokenizer is None:
        raise ValueError(f"{name}: it has no tokenizer.json, so its tokens stand for no text")
    ids = [([] if first is None else [first]) + tokenizer.encode(p, add_special_tokens=False).ids for p in prompts]
    if not all(ids):
        raise ValueError(f"{name}: no token begins its texts, give prompt=TEXT")
    opened.check(max(map(max, ids)))
    net.to("cuda" if torch.cuda.is_available() else "cpu")
    started, written = time.perf_counter(), 0
    for i in range(0, len(prompts), batch):
        own = replace(sampling, seed=sampling.seed + i)
        steps = generate(net, ids[i : i + batch], sampling=own, stop=stop, **numbers)
        written += _write(tokenizer, prompts[i : i + batch], ids[i : i + batch], steps)
    print(f"{written} tokens in {time.perf_counter() - started:.1f} s", file=sys.stderr)


def _write(tokenizer: Tokenizer, prompts: list[str], read: list[list[int]], steps: Iterator[list[int | None]]) -> int:
    """Print a batch's texts in order, the first as it comes; how many tokens they took beside those ``read``."""
    ids: list[list[int]] = [[] for _ in prompts]

    def first() -> Iterator[int]:
        for step in steps:
            for own, token in zip(ids, step, strict=True):
                own += [] if token is None else [token]
            if step[0] is not None:
                yield step[0]

    print(prompts[0], end="", flush=True)
    for piece in _characters(tokenizer, read[0], first()):
        print(piece, end="", flush=True)
    print()
    for prompt, before, own in zip(prompts[1:], read[1:], ids[1:], strict=True):
        print(prompt, *_characters(tokenizer, before, own), sep="")
    return sum(map(len, ids))


def _characters(tokenizer: Tokenizer, before: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """The text of tokens as soon as they make whole characters: a byte-level token may be a part of one.

    They are read behind those ``before`` them, without which some tokenizers drop the space between.
    """
    part: list[int] = []
    for token in tokens:
        part.append(token)
        text = _behind(tokenizer, before, part)
        if text and not text.endswith(HALF):
            yield text
            before, part = part, []
    yield _behind(tokenizer, before, part)


def _behind(tokenizer: Tokenizer, before: list[int], part: list[int]) -> str:
    return tokenizer.decode(before + part)[len(tokenizer.decode(before)) :]


def _read(words: list[str]) -> tuple[str, list[str], dict[str, Any]]:
    """The model, the prompts and the numbers that words ask for."""
    models, prompts = [], []
    numbers: dict[str, Any] = {"tokens": 200, "batch": 16}
    for word in words:
        key, _, value = word.partition("=")
        if key in ("run", "model"):
            models.append(value)
        elif key in ("prompt", "prompts"):
            prompts += [_text(value)] if key == "prompt" else _lines(value)
        elif key in WORDS:
            numbers[key] = _number(key, value)
        else:
            near = difflib.get_close_matches(key, WORDS, 1)
            advice = f"did you mean {near[0]}=?" if near else f"write {', '.join(f'{name}=' for name in WORDS)}"
            raise ValueError(f"unknown word {key!r}: {advice}")
    if len(models) != 1 or not models[0]:
        raise ValueError("which model? write run=runs/NAME or model=FOLDER, one of them and once")
    if "keep_first" in numbers and "window" not in numbers:
        raise ValueError(f"keep_first={numbers['keep_first']}: all is kept unless window=W says how much")
    return models[0], prompts or [""], numbers


def _number(key: str, value: str) -> float:
    try:
        number = float(value) if key in REAL else int(value)
    except ValueError:
        raise ValueError(f"{key}={value}: write a {'' if key in REAL else 'whole '}number") from None
    if key in LEAST and not LEAST[key] <= number < 2**62:
        raise ValueError(f"{key}={value}: a whole number from {LEAST[key]} up")
    return number


def _text(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError:  # bytes of a command line that are no text
        raise ValueError(f"prompt={ascii(prompt)[1:-1]}: not UTF-8") from None
    return prompt


def _lines(file: str) -> list[str]:
    try:
        prompts = [line for line in Path(file).read_text(encoding="utf-8").splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts={file}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None
    if not prompts:
        raise ValueError(f"prompts={file}: no prompt in it, write one on each line")
    return prompts


if __name__ == "__main__":
    main(sys.argv[1:])
