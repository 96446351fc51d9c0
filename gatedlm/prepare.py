"""``python -m gatedlm.prepare recipe=NAME [shards=N shard=I] [key=value ...]``: a corpus, before it is trained on."""

from __future__ import annotations

import sys

from gatedlm.command import command

USAGE = """\
usage: python -m gatedlm.prepare recipe=NAME [shards=N shard=I] [group=NAME ...] [key=value ...]

makes the tokenizer and the rows of the recipe's corpus, so that training opens them at once

  shards=N shard=I  only the I-th of N parts, I from 0: one process each, the last to end joins them; a part that is
                    there is not made again, so the same command goes on where some of them were stopped

for example: python -m gatedlm.prepare recipe=dense-50m shards=4 shard=0"""


def main(words: list[str]) -> None:
    """Prepare and say what there is; exit status 2 with one line for what cannot be read or written."""
    command(words, USAGE, _prepare)


def _prepare(words: list[str]) -> None:
    own = dict(word.split("=", 1) for word in words if word.startswith(("shards=", "shard=")))
    share = _share(own)

    from gatedlm.data.cards import card
    from gatedlm.data.packing import prepare, prepare_part
    from gatedlm.recipe import load

    for run in load([word for word in words if word.split("=")[0] not in own]):
        spec = run.recipe.data
        if card(spec.corpus).kind == "backcopy":
            raise ValueError(f"data.corpus={spec.corpus} is drawn as it is trained, there is nothing to prepare")
        if share[1] > 1 and not prepare_part(spec, share, print):
            print(f"part {share[0]} of {share[1]} is there, others are not yet")
            continue
        corpus = prepare(spec, print).corpus
        print(f"{corpus.name}: {corpus.tokens:,} tokens of {corpus.documents:,} documents are ready")


def _share(own: dict[str, str]) -> tuple[int, int]:
    """(shard, shards), the whole as the only part of one."""
    part, parts = own.get("shard", "0"), own.get("shards", "1")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise ValueError(f"shards={parts} shard={part}: whole numbers, the second from 0 to one less than the first")
    return int(part), int(parts)


if __name__ == "__main__":
    main(sys.argv[1:])
