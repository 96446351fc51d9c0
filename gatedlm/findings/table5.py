"""Table 5: contexts beyond the trained one, with the base raised and a little training, then with YaRN and none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gatedlm.data.module import LMData
from gatedlm.data.needles import examples
from gatedlm.data.packing import END_OF_TEXT
from gatedlm.findings.finding import Claim, Finding, Row, Scale, Table, minus
from gatedlm.findings.records import folder
from gatedlm.hub import open_model
from gatedlm.loss import read_out, shift
from gatedlm.model.lm import GatedLM
from gatedlm.recipe import Run
from gatedlm.report.drawing import chart

FACTOR = 4  # the paper's: from 32k to 128k
TIMES = (1, 2, 4)  # lengths, as multiples of the context trained at
NEEDLES, TEXTS, AT_ONCE = 128, 32, 2**14  # examples of a length, rows of the longest, tokens of a pass
# By scale the words of the first stage and those of the second, which come on top
STAGES = {
    "tiny": (
        ("data=needles", "data.context=128", "trainer.steps=3000"),
        ("data.context=256", "data.batch=8", "model.rope.base=100000", "optim.lr=3e-3", "trainer.steps=500"),
    ),
    # The paper's model: 4k, then 32k
    "full": (("recipe=dense-1.7b-28l",), ("recipe=extend-1.7b-28l",)),
}
LARGER = (
    ("data=needles", "data.max_tokens=0", "data.context=256", "data.batch=128"),
    ("data.context=512", "data.batch=64", "model.rope.base=100000", "trainer.steps=2000"),
)
PAPER = {  # RULER at 32k, then after YaRN at 32k, 64k and 128k
    "baseline": (79.50, 37.94, 37.51, 31.65),
    "SDPA elementwise": (79.77, 72.88, 66.60, 58.82),
}
ARMS = {"baseline": "gate=none", "SDPA elementwise": "gate=sdpa-elementwise"}


def rows(scale: Scale, rates: tuple[float, ...]) -> list[Row]:
    """Both arms at the first context, then both at the longer one."""
    first, longer = STAGES.get(scale.name, LARGER)
    short = {arm: Row(arm, (*first, gate), against="baseline") for arm, gate in ARMS.items()}
    long = [Row(extended(arm), longer, PAPER[arm], against=extended("baseline"), origin=short[arm]) for arm in ARMS]
    return [*short.values(), *long]


def extended(arm: str) -> str:
    """The label of an arm's second stage."""
    return f"{arm} extended"


# Measures ---------------------------------------------------------------------------------------------------------


def by_length(run: Run) -> dict[str, float]:
    """Needle score in percent and loss in nats at 1, 2 and 4 times the context, as trained and by YaRN, if finite."""
    data = LMData(run.recipe.data, run.recipe.seed)
    data.setup()
    assert data.tokenizer
    net = open_model(str(folder(run))).net.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    context, trained = run.recipe.data.context, net.spec
    yarn = replace(trained.rope, scaling="yarn", factor=float(FACTOR), original=context)
    text, figures = _text(data, TEXTS * TIMES[-1]), {}
    for name, rope in {"": trained.rope, "yarn_": yarn}.items():
        net.spec = replace(trained, rope=rope)
        for times in TIMES:
            length = times * context
            figures[f"{name}needle_x{times}"] = needle_score(net, data.tokenizer, length)
            figures[f"{name}loss_x{times}"] = text_loss(net, text.unfold(0, length + 1, length))
    return {key: value for key, value in figures.items() if np.isfinite(value)}


def _text(data: LMData, rows: int) -> Tensor:
    """The first validation rows as the one stream that they were cut from."""
    packed = data.validation.packed(np.arange(min(rows, len(data.validation))))
    return torch.cat((packed[:, :-1].flatten(), packed[-1, -1:]))


@torch.no_grad()
def needle_score(net: GatedLM, tokenizer: Tokenizer, length: int) -> float:
    """Percent of needles that greedy decoding gives back: every token of the answer is the most probable one."""
    device, right = net.embed.weight.device, 0
    drawn, at_once = examples("needle", tokenizer, length, NEEDLES, seed=0), max(1, AT_ONCE // length)
    for start in range(0, NEEDLES, at_once):
        part = drawn[start : start + at_once]
        answers = [tokenizer.encode(f" {e.answers[0]}", add_special_tokens=False).ids for e in part]
        prompts = [[END_OF_TEXT, *e.prompt] for e in part]
        rows = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, answers, strict=True)]
        x, _ = net.hidden(pad_sequence(rows, batch_first=True).to(device))
        for row, prompt, answer in zip(x, prompts, answers, strict=True):
            asked = row[len(prompt) - 1 :][: len(answer)]
            right += (asked @ net.readout.T).argmax(-1).tolist() == answer
    return 100 * right / NEEDLES


@torch.no_grad()
def text_loss(net: GatedLM, rows: Tensor) -> float:
    """Mean nats per token of rows (N, T + 1), each with the end of text as its first token."""
    inputs, targets = shift(rows)
    inputs = inputs.clone()
    inputs[:, 0] = END_OF_TEXT
    device, nats = net.embed.weight.device, 0.0
    for few in torch.arange(len(rows)).split(max(1, AT_ONCE // inputs.shape[1])):
        wanted = targets[few].to(device)
        x, _ = net.hidden(inputs[few].to(device))
        nats += float(read_out(x, net.readout, wanted, torch.ones_like(wanted, dtype=torch.bool)))
    return nats / targets.numel()


# Claims -----------------------------------------------------------------------------------------------------------


def above(key: str) -> Callable[[Table], dict[int, float]]:
    """By how much the gated model's figure lies above the baseline's, after the second stage."""
    return lambda table: minus(*(table.finals(extended(arm), key) for arm in ("SDPA elementwise", "baseline")))


def below(key: str) -> Callable[[Table], dict[int, float]]:
    """By how much it lies below."""
    return lambda table: {seed: -gap for seed, gap in above(key)(table).items()}


def harmed_less(before: str, after: str) -> Callable[[Table], dict[int, float]]:
    """By how much less the gated model's figure falls from one key to the other than the baseline's."""
    return lambda table: minus(above(after)(table), above(before)(table))


def over_length(figure: str, title: str, unit: str) -> Callable[[Table], str]:
    """A drawing of a figure by length, a line for each arm after the second stage, as trained and under YaRN."""

    def draw(table: Table) -> str:
        lines = {}
        for arm in ARMS:
            for kind, words in (("", "as trained"), ("yarn_", "YaRN")):
                found = [[*table.finals(extended(arm), f"{kind}{figure}_x{times}").values()] for times in TIMES]
                if all(found):
                    lines[f"{arm}, {words}"] = np.array(TIMES), np.array([np.mean(values) for values in found])
        return chart(title, "length / context trained at", unit, lines, {})

    return draw


FINDING = Finding(
    "table5",
    "Table 5: contexts beyond the trained one",
    "dense",
    rows,
    columns=("needle_x1", "yarn_needle_x1", "yarn_needle_x2", "yarn_needle_x4", "loss_x4", "yarn_loss_x4"),
    paper=("32k", "YaRN 32k", "YaRN 64k", "YaRN 128k"),
    claims=(
        Claim(
            "under YaRN the gated model finds more at 4 times the context", above("yarn_needle_x4"), "points", "medium"
        ),
        Claim("and at twice the context", above("yarn_needle_x2"), "points", "medium"),
        Claim(
            "at the context trained at YaRN costs the gated model fewer points",
            harmed_less("needle_x1", "yarn_needle_x1"),
            "points less lost than by the baseline",
            "medium",
        ),
        Claim("without YaRN the gated model finds a little more", above("needle_x1"), "points", "full"),
        Claim(
            "under YaRN the gated model's loss at 4 times the context is lower",
            below("yarn_loss_x4"),
            "nats below the baseline",
            "small",
        ),
    ),
    figures=(
        over_length("needle", "Needles found by length", "percent"),
        over_length("loss", "Loss by length", "nats per token"),
    ),
    after=by_length,
    notes="x1, x2 and x4 are multiples of the context that the row was last trained at. The needle score is the share "
    "of 128 needles, one in filler as long as the input, whose every token greedy decoding gives back; the loss is of "
    "the same validation text cut into rows of each length. YaRN has factor 4 and comes without training. The "
    "claims compare the two rows after the longer context. The paper's figures are means over RULER's tasks.",
)
