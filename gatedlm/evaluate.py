"""``python -m gatedlm.evaluate run=RUN|model=MODEL[,MODEL ...] tasks=TASK[,TASK ...]``: how good models are."""

from __future__ import annotations

import sys

from gatedlm.command import command
from gatedlm.evaluation.words import asked

USAGE = """\
usage: python -m gatedlm.evaluate run=RUN|model=MODEL[,MODEL ...] tasks=TASK[,TASK ...] [key=value ...]

figures with standard errors; several models are set side by side, with their differences from the first. RUN is the
folder of a run, MODEL one of weights or org/name on the Hub. What is finished is not measured again

perplexity          by domain, with bits per byte and what counting words reaches; a run reads its held-out documents
positions           loss by position, beyond the trained context too
needle, needle_multikey, needle_multivalue, needle_multiquery, variables, common_words, qa
                    long context after RULER, at any length
hellaswag, mmlu, gsm8k, ceval, cmmlu
                    few-shot tasks with data of the Hub; FILE.yaml is one of your own, with your own data
lm-eval:NAME        any task of lm-eval, if that is installed (extra eval); lm-eval:FILE.yaml one of its kind

  data=CORPUS      the text for perplexity and positions: stdlib, tinystories, fineweb_edu or org/name on the Hub
  data.path=FILE   a file, folder or glob of your own; data.text_field= and data.domain_field= name its fields
  bytes=500000     how much of each domain; documents are read whole
  context=T        tokens that a model is shown; without it those it was trained with
  lengths=L,L      of positions (the longest) and the long context tasks, in tokens; without it the trained context,
                   twice and four times as many
  count=100        how many examples of each
  passages=FILE    for qa: rows with text, question and answer, as json, jsonl or parquet
  shots=N limit=N  for few-shot tasks: solved examples, and how many items of each subject
  seed=0           of the long context tasks and lm-eval
  batch=8192       tokens in a pass
  model.rope.KEY=  another RoPE than the trained one, such as model.rope.scaling=yarn model.rope.factor=4
  out=evaluation   results.json, and the items of each task

for example: python -m gatedlm.evaluate run=runs/A,runs/B tasks=perplexity,needle"""


def main(words: list[str]) -> None:
    """Print the figures; exit status 2 with one line for what cannot be read, 130 after Ctrl-C."""
    command(words, USAGE, _evaluate)


def _evaluate(words: list[str]) -> None:
    wanted = asked(words)

    from gatedlm.evaluation.session import evaluate  # here: usage and a wrong word answer before torch is loaded

    evaluate(wanted)


if __name__ == "__main__":
    main(sys.argv[1:])
