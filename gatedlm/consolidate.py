"""``python -m gatedlm.consolidate run=RUN [out=FOLDER] [shard=GIGABYTES]``: a checkpoint's weights as safetensors."""

from __future__ import annotations

import sys
from pathlib import Path

from gatedlm.catalogue import expanded
from gatedlm.command import command

USAGE = """\
usage: python -m gatedlm.consolidate run=RUN [out=FOLDER] [shard=GIGABYTES]

writes the weights of the newest checkpoint of runs/NAME, of however many ranks, as safetensors with the recipe in
their metadata: into RUN or FOLDER, in files of about 4 gigabytes or as many as shard= says

for example: python -m gatedlm.consolidate run=runs/NAME"""
WORDS = ("run", "out", "shard")


def main(words: list[str]) -> None:
    """Write the weights and say where; exit status 2 with one line for what cannot be read or written."""
    command(words, USAGE, _consolidate)


def _consolidate(words: list[str]) -> None:
    given = {key: value for key, _, value in (word.partition("=") for word in words)}
    for word, value in given.items():
        if word not in WORDS or not value:
            raise ValueError(f"{word}={value}: write run=RUN, out=FOLDER or shard=GIGABYTES")
    if "run" not in given:
        raise ValueError("which run? write run=runs/NAME")
    run = Path(expanded(given["run"]))
    size = _bytes(given.get("shard", "4"))
    if not (run / "recipe.yaml").exists():
        raise ValueError(f"run={run}: not the folder of a run, it has no recipe.yaml")

    from gatedlm.training.weights import consolidate

    for file in consolidate(run, Path(expanded(given.get("out", given["run"]))), size):
        print(file)


def _bytes(gigabytes: str) -> int:
    try:
        size = int(float(gigabytes) * 1e9)
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise ValueError(f"shard={gigabytes}: a number of gigabytes above 0")
    return size


if __name__ == "__main__":
    main(sys.argv[1:])
