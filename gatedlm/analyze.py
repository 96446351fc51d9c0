"""``python -m gatedlm.analyze model=...`` or ``spikes=...``: the sink of any model, the spikes of any curve."""

from __future__ import annotations

import sys
from collections.abc import Callable

from gatedlm.command import command
from gatedlm.studies.words import check, option

USAGE = """\
usage: python -m gatedlm.analyze model=MODEL[,MODEL ...] [key=value ...]
       python -m gatedlm.analyze spikes=FILE [key=value ...]

model: how much attention each layer rests on the first token, what massive activations it has and where, and what its
gates do; MODEL is the folder of a run, a folder of weights or org/name on the Hub, several are set side by side

  text=FILE        any text; without it a run reads its own validation rows, all others prose of the standard library
  data=CORPUS      the beginning of a corpus instead: stdlib, tinystories, fineweb_edu or org/name on the Hub
  tokens=512       in a row of text, or the models' context if that is shorter; rows=4 how many rows
  gate=ones        the loss with all scores set to 1, gate=mean with each at its mean over tokens, gate=ones,mean both
  mask_first=true  the loss with the first token hidden from all later ones
  model.rope.scaling=yarn model.rope.factor=4   as models of contexts 4 times as long
  out=FOLDER       study.json and study.html with charts, tables and attention maps
  layers=0,13,27   whose maps the page shows; without it the first, the middle and the last

spikes: a point spikes where its loss stands above the median of the window before it, by more than rise and by more
than sigmas x 1.4826 x the median distance from it; FILE is a csv, a jsonl or the folder of a run

  step=COLUMN  without it: step
  loss=COLUMN  without it: train/loss, or else loss
  window=2000  steps that a point is compared with; there is no verdict where they hold fewer than 20 points
  skip=5000    steps at the start of a run that get no verdict
  rise=0.2     nats above the median
  sigmas=6     standard deviations of the noise
  merge=200    steps between two points that still belong to one event

for example: python -m gatedlm.analyze model=runs/A,runs/B gate=ones mask_first=true out=study
             python -m gatedlm.analyze spikes=runs/NAME skip=50 window=50"""


def main(words: list[str]) -> None:
    """Print what the first word asks for; without words say what there is.

    Exit status 2 with one line for words, or a file or model that cannot be read, 130 after Ctrl-C.
    """
    command(words, USAGE, _analyze)


def _analyze(words: list[str]) -> None:
    options = dict(option(word) for word in words)
    subject = next(iter(options))
    check("first word", subject, SUBJECTS)
    SUBJECTS[subject](options)


def _model(options: dict[str, str]) -> None:
    from gatedlm.studies.model import study_models

    study_models(options)


def _spikes(options: dict[str, str]) -> None:
    from gatedlm.studies.spikes import study_spikes

    study_spikes(options)


# Each imports what it needs: usage and a wrong first word answer before torch is loaded.
SUBJECTS: dict[str, Callable[[dict[str, str]], None]] = {"model": _model, "spikes": _spikes}


if __name__ == "__main__":
    main(sys.argv[1:])
