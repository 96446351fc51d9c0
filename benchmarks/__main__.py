"""``python -m benchmarks [NAME ...] [rounds=7] [threads=1] [device=cpu]``: tables here, JSON in benchmarks/results/."""

from __future__ import annotations

import importlib
import os
import sys

USAGE = """\
python -m benchmarks [NAME ...] [rounds=7] [threads=1] [device=cpu]

  kernels   matrix products and attention by type and length
  dense     training steps against transformers and LitGPT, eager and compiled
  moe       mixtures of experts against transformers and LitGPT, and cost by number of experts
  gate      what a gate costs
  trainer   Lightning against a bare loop
  probe     F-Attn within a forward pass
  loader    batches against training steps
  loss      a vocabulary of 151,936: logits whole and in parts
  generate  time per token by position, with and without a cache
  memory    the peak of a training step against the plan's estimate

Without a name all of them, for half an hour, with bf16 for twice as long. Results go to benchmarks/results/.
Under each table stands which targets it meets; they lie in benchmarks/targets.py.
Peers are optional: pip install transformers; pip install --no-deps litgpt==0.5.13 psutil jsonargparse"""
NAMES = [line.split()[0] for line in USAGE.splitlines() if line.startswith("  ")]
OPTIONS = ("rounds", "threads", "device")


def main(words: list[str]) -> None:
    """Run the benchmarks that are named; exit status 2 and one line for a word that is none."""
    if {"-h", "--help"} & set(words):
        print(USAGE)
        return
    given = dict(word.split("=", 1) for word in words if "=" in word)
    names = [word for word in words if "=" not in word] or NAMES
    unknown = [*(name for name in names if name not in NAMES), *(key for key in given if key not in OPTIONS)]
    if unknown:
        sys.exit(_refuse(f"{unknown[0]!r}: there are {', '.join(NAMES)}, and {'=, '.join(OPTIONS)}="))
    try:
        _run(names, **given)
    except ValueError as error:
        sys.exit(_refuse(str(error)))


def _refuse(why: str) -> int:
    print(why, file=sys.stderr)
    return 2


def _run(names: list[str], rounds: str = "7", threads: str = "1", device: str = "cpu") -> None:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler would announce itself
    from benchmarks.harness import Bench, report

    bench = Bench.of(rounds, threads, device)
    for name in names:
        report(name, importlib.import_module(f"benchmarks.{name}").run(bench), bench)


if __name__ == "__main__":
    main(sys.argv[1:])
