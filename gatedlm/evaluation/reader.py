"""A model that reads and writes text: nats of tokens and greedy completions, in batches of rows of like length."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from reprlib import repr as short
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gatedlm.evaluation.score import Advance
from gatedlm.hub import Opened
from gatedlm.model.sampling import Sampling, generate

CHUNK = 256  # positions whose logits are there together: a large vocabulary's would be most of the memory


class Row(NamedTuple):
    """Token ids, of which those from ``start`` on, 1 or later, are asked about; ``cut`` if their left was too long."""

    ids: list[int]
    start: int
    cut: bool = False


class Told(NamedTuple):
    """-log p of each token asked about, (n,) in nats, and whether it is the most probable one."""

    nats: Tensor
    greedy: Tensor

    @property
    def total(self) -> float:
        """-log p of them all together."""
        return float(self.nats.double().sum())


class Reader:
    """A model with its tokenizer. ``context`` tokens are the most it is shown of a prompt, ``batch`` those of a pass.

    ``first`` is the fixed first token: the model's own, or else its end of text. ValueError for a model without words.
    """

    def __init__(self, opened: Opened, context: int, batch: int) -> None:
        if opened.tokenizer is None:
            raise ValueError(f"{opened.name}: it has no tokenizer.json, so it reads no text")
        self.opened, self.net, self.tokenizer = opened, opened.net.eval(), opened.tokenizer
        self.tokenizer.encode_special_tokens = True  # words of a text never act as control tokens
        self.tokenizer.no_truncation()
        self.context, self.batch = context, batch
        self.opening = [] if opened.first is None else [opened.first]
        self.first = min(opened.stop, default=0) if opened.first is None else opened.first

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without a first token."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def pair(self, prompt: str, continuation: str) -> Row:
        """A prompt whose continuation is asked about; white space at the prompt's end counts as the continuation's.

        The text is encoded whole: how the prompt alone is encoded only says where the continuation begins. ValueError
        for a continuation beyond the context, of which only the end would count.
        """
        kept = prompt.rstrip()
        whole = self.encode(prompt + continuation)
        start = len(self.encode(kept)) if kept else 0
        if (size := len(whole) - start) > self.context:
            raise ValueError(f"{short(continuation)}: {size} tokens are more than the context, give context={size}")
        return self.row(whole, start)

    def row(self, ids: list[int], start: int) -> Row:
        """``ids`` behind the model's first token, at most ``context`` before the last: more goes at the left.

        At least the last is asked about: the prompt's end and a continuation may be one token together.
        """
        start = max(0, min(start, len(ids) - 1))
        opening = self.opening if start else [self.first]
        cut = max(0, len(opening) + len(ids) - self.context - 1)
        return Row(opening + ids[cut:], max(1, len(opening) + start - cut), cut > 0)

    def prompt(self, text: str, tokens: int) -> Row:
        """A text to write ``tokens`` on from; it keeps half of a short context, and what is more goes at the left."""
        ids, room = self.encode(text), max(self.context - tokens, self.context // 2)
        opening = self.opening if ids else [self.first]
        cut = max(0, len(opening) + len(ids) - room)
        return Row(opening + ids[cut:], len(opening) + len(ids) - cut, cut > 0)

    @torch.no_grad()
    def nats(self, rows: Sequence[Row], advance: Advance) -> list[Told]:
        """What the model makes of each row, in their order. ValueError where its logits are not finite."""
        told: dict[int, Told] = {}
        for batch in batches([len(row.ids) for row in rows], self.batch):
            told |= zip(batch, self._pass([rows[index] for index in batch]), strict=True)
            advance(len(told), len(rows))
        return [told[index] for index in range(len(rows))]

    def _pass(self, rows: list[Row]) -> list[Told]:
        self.opened.check(max(max(row.ids) for row in rows))
        device = self.net.embed.weight.device
        # Padding stands at the right, where no token of the text sees it.
        inputs = pad_sequence([torch.tensor(row.ids[:-1]) for row in rows], batch_first=True).to(device)
        hidden, _ = self.net.hidden(inputs)
        asked = torch.cat([hidden[i, row.start - 1 : len(row.ids) - 1] for i, row in enumerate(rows)])
        targets = torch.tensor([token for row in rows for token in row.ids[row.start :]], device=device)
        head, nats, greedy = self.net.readout.float(), [], []
        for part, labels in zip(asked.split(CHUNK), targets.split(CHUNK), strict=True):
            logits = F.linear(part.float(), head)
            nats.append(F.cross_entropy(logits, labels, reduction="none"))
            greedy.append(logits.argmax(-1) == labels)
        if not (found := torch.cat(nats).cpu()).isfinite().all():
            raise ValueError(f"{self.opened.name}: its logits are not finite, its weights or its precision do not hold")
        counts = [len(row.ids) - row.start for row in rows]
        return [*map(Told, found.split(counts), torch.cat(greedy).cpu().split(counts))]

    def write(
        self, prompts: Sequence[list[int]], tokens: int, advance: Advance, until: Collection[str] = ()
    ) -> list[str]:
        """Greedy completions of at most ``tokens``, up to a token that ends a text or the first of ``until``."""
        told: dict[int, str] = {}
        for batch in batches([len(prompt) + tokens for prompt in prompts], self.batch):
            told |= zip(batch, self._written([prompts[index] for index in batch], tokens, until), strict=True)
            advance(len(told), len(prompts))
        return [told[index] for index in range(len(prompts))]

    def _written(self, prompts: list[list[int]], tokens: int, until: Collection[str]) -> Iterator[str]:
        self.opened.check(max(map(max, prompts)))
        ids: list[list[int]] = [[] for _ in prompts]
        for step in generate(self.net, prompts, tokens, Sampling(temperature=0.0), self.opened.stop):
            for own, token in zip(ids, step, strict=True):
                own += [] if token is None or token in self.opened.stop else [token]
            ended = (token is None or token in self.opened.stop for token in step)
            if until and all(
                over or any(mark in self._behind(prompt, own) for mark in until)
                for over, prompt, own in zip(ended, prompts, ids, strict=True)
            ):
                break
        for prompt, own in zip(prompts, ids, strict=True):
            text = self._behind(prompt, own)
            yield text[: min((place for mark in until if (place := text.find(mark)) >= 0), default=None)]

    def _behind(self, prompt: list[int], own: list[int]) -> str:
        """The text of tokens behind the last of a prompt, without which some tokenizers drop the space between."""
        last = prompt[-1:]
        return self.tokenizer.decode(last + own)[len(self.tokenizer.decode(last)) :]


def batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices, the longest first, in batches of one or of at most ``budget`` tokens once padded to the longest."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    while order:
        count = max(1, budget // lengths[order[0]])
        yield order[:count]
        order = order[count:]
