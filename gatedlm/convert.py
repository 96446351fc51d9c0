"""``python -m gatedlm.convert in=MODEL out=FOLDER to=LAYOUT``: weights of one layout in another."""

from __future__ import annotations

import sys
from pathlib import Path

from gatedlm.catalogue import expanded
from gatedlm.command import command

USAGE = """\
usage: python -m gatedlm.convert in=MODEL out=FOLDER to=gatedlm|transformers|official

writes a model and its tokenizer into the new FOLDER, in files of at most about 1 gigabyte; nothing is unpickled

  in=runs/NAME               a run
  in=FOLDER                  weights as safetensors or pytorch_model.bin with a config.json: the paper's release, or
                             Qwen3, Qwen3-MoE, Qwen3-Next with full attention, Llama or Qwen2-MoE without biases
  in=org/name[/subfolder]    the same on the Hub
  to=gatedlm                 for this project's commands
  to=transformers            for AutoModelForCausalLM and servers: Qwen3, Qwen3-MoE, with a gate on the SDPA output
                             Qwen3-Next, without QK-norm Llama or Qwen2-MoE
  to=official                for the code of the paper's release

for example: python -m gatedlm.convert in=runs/NAME out=NAME-transformers to=transformers"""
WORDS = ("in", "out", "to")


def main(words: list[str]) -> None:
    """Write the folder and say what loads it; exit status 2 with one line for what cannot be read, held or written.

    130 after Ctrl-C, and then nothing is left.
    """
    command(words, USAGE, _convert)


def _convert(words: list[str]) -> None:
    given = _options(words)

    from gatedlm.hub import convert

    class_name, files = convert(given["in"], Path(expanded(given["out"])), given["to"])
    print(*files, sep="\n")
    print(f"{given['out']}: {class_name}")


def _options(words: list[str]) -> dict[str, str]:
    given = {key: value for key, _, value in (word.partition("=") for word in words)}
    for word, value in given.items():
        if word not in WORDS or not value:
            raise ValueError(f"{word}={value}: write in=MODEL, out=FOLDER and to=gatedlm, transformers or official")
    for word in WORDS:
        if word not in given:
            raise ValueError(f"{word}= is missing: write in=MODEL, out=FOLDER and to=gatedlm, transformers or official")
    return given


if __name__ == "__main__":
    main(sys.argv[1:])
