"""A run that begins with another's weights: what it takes over, what begins anew, how it resumes, what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from gatedlm import loss
from gatedlm.findings.finding import Row, resolve
from gatedlm.findings.scales import SCALES
from gatedlm.findings.sweep import _generations
from gatedlm.model.rope import RopeSpec
from gatedlm.recipe import Run, load
from gatedlm.training.callbacks import read_metrics
from gatedlm.training.run import train
from gatedlm.training.weights import newest, read, shapes

BRIEF = ["trainer.threads=1", "trainer.accelerator=cpu", "trainer.val_batches=1"]
FIRST = ["recipe=sink", "scale=nano", "gate=sdpa-elementwise", "data.context=24", "trainer.steps=5", *BRIEF]
LONGER = ["recipe=extend", "data.context=48", "model.rope.base=40000", "trainer.steps=6", "optim.warmup=3"]

WHOLE = [*LONGER, "optim.state=kept", "trainer.checkpoint_every=2", "trainer.keep=5", "name=whole"]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run at a context of 24."""
    return fit([*FIRST, "name=first"], tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="module")
def whole(first: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that goes on from there at 48, never interrupted."""
    return fit([*WHOLE, f"from={first}"], tmp_path_factory.mktemp("longer"))


def fit(words: list[str], out: Path) -> Path:
    (run,) = load([*words, f"out={out}"])
    train(run, Console(quiet=True))
    return out / run.recipe.name


def state(folder: Path) -> dict[str, Any]:
    return torch.load(newest(folder) / "state", weights_only=True)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return read(newest(folder), shapes(newest(folder)))


def complaint(words: list[str], out: Path) -> str:
    with pytest.raises(ValueError) as caught:
        fit(words, out)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_recipe_is_the_runs_own_under_the_new_words(first: Path) -> None:
    (run,) = load([*LONGER, f"from={first}"])
    (before,) = load(FIRST)
    assert run.recipe.model.gates == before.recipe.model.gates
    assert run.recipe.model.rope == RopeSpec(40_000.0)
    assert (run.recipe.data.context, run.recipe.data.corpus) == (48, "backcopy")
    assert (run.recipe.trainer.steps, run.recipe.optim.lr, run.recipe.optim.schedule) == (6, 3e-3, "constant")
    assert run.recipe.origin == str(first) and run.recipe.name.startswith("extend-")


@pytest.mark.parametrize("kept", ["fresh", "kept"])
def test_weights_go_on_and_the_schedule_begins_anew(kept: str, first: Path, tmp_path: Path) -> None:
    still = ["trainer.steps=1", "optim.lr=1e-9", "optim.warmup=1", "optim.weight_decay=0"]
    folder = fit([*LONGER, *still, f"from={first}", f"optim.state={kept}"], tmp_path)
    before, after = weights(first), weights(folder)
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, atol=1e-7, rtol=0)
    (line,) = read_metrics(folder / "metrics.jsonl")
    assert line["step"] == 1 and line["optim/lr"] == pytest.approx(1e-9) and line["tokens"] == 4 * 48
    steps = {float(s["step"]) for s in state(folder)["optimizer_states"][0]["state"].values()}
    assert steps == {1.0 if kept == "fresh" else 6.0}


def test_a_broken_extension_resumes_exactly(first: Path, whole: Path, tmp_path: Path) -> None:
    broken = tmp_path / "whole"
    shutil.copytree(whole, broken)
    (broken / "ledger.json").unlink()
    for step in (4, 6):
        shutil.rmtree(broken / "checkpoints" / f"step-{step:08d}")
    fit([*WHOLE, f"from={first}"], tmp_path)
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(broken)[name], tensor), name
    lines = read_metrics(whole / "metrics.jsonl")
    assert [line["optim/lr"] for line in lines] == pytest.approx([1e-3, 2e-3, 3e-3, 3e-3, 3e-3, 3e-3])
    assert [line["train/loss"] for line in read_metrics(broken / "metrics.jsonl")] == [x["train/loss"] for x in lines]


def test_a_begun_run_keeps_its_beginning(first: Path, whole: Path) -> None:
    said = complaint([*WHOLE, f"from={whole}"], whole.parent)
    assert f"was begun with origin={first}, not {whole}" in said
    assert "optim.state=kept, not fresh" in complaint([*WHOLE, f"from={first}", "optim.state=fresh"], whole.parent)
    elsewhere = shutil.copytree(first, whole.parent / "elsewhere" / first.name)
    assert fit([*WHOLE, f"from={elsewhere}"], whole.parent) == whole, "the same run in another place"


def test_fsdp_takes_over_the_weights_of_one_process(
    first: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank, which goes the same way as many: it shards one process's checkpoint, its optimizer's state too.

    The loss is read out in parts of 7 tokens here, which must leave it as it is.
    """
    monkeypatch.setattr(loss, "LARGE", 7 * 64)
    folder = fit([*WHOLE, f"from={first}", "trainer.strategy=fsdp"], tmp_path)
    losses = [[line["train/loss"] for line in read_metrics(f / "metrics.jsonl")] for f in (folder, whole)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model.width=40"], "its weights have model.width=32, not 40"),
        (["gate=none"], "its weights have model.gates="),
        (["model.vocab=70"], "its weights have model.vocab=64, not 70"),
        (["scale=tiny"], "its weights have model.layers=2, not 4"),
    ],
)
def test_another_model_is_refused(words: list[str], says: str, first: Path, tmp_path: Path) -> None:
    assert says in complaint([*LONGER, f"from={first}", *words], tmp_path)


def test_other_tokens_are_refused(first: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three\n" * 2000)
    text = ["data=files", f"data.path={tmp_path}/a.txt", "data.vocab=300", "name=text", "data.max_tokens=0"]
    folder = fit([*FIRST, *text, "model.vocab=320"], tmp_path)
    (tmp_path / "a.txt").write_text("eins zwei drei vier\n" * 2000)
    said = complaint([*LONGER, f"from={folder}"], tmp_path)
    assert "its tokens are others, add data.tokenizer=" in said


def test_what_no_run_lies_under_is_said(tmp_path: Path) -> None:
    assert "no run lies there" in complaint([*LONGER, "from=nowhere"], tmp_path)
    assert "no run lies there" in complaint([*LONGER], tmp_path)
    assert "write from=FOLDER" in complaint([*FIRST, "optim.state=kept"], tmp_path)


# --- rows that begin with other rows' runs


def two() -> list[Row]:
    short = Row("short", ("gate=none", "data.context=64"))
    return [short, Row("long", ("data.context=128", "model.rope.base=30000"), origin=short)]


def test_rows_go_on_from_rows() -> None:
    short, long = (resolve(row, SCALES["tiny"], "dense", 2, ("out=there",)) for row in two())
    assert [run.recipe.origin for run in long.values()] == [f"there/{run.recipe.name}" for run in short.values()]
    assert (long[1].recipe.seed, long[1].recipe.model.rope.base, long[1].recipe.data.context) == (1, 30_000.0, 128)
    assert load(list(long[0].overrides))[0].recipe.origin == long[0].recipe.origin, "its words say where it begins"
    moved = resolve(two()[1], SCALES["tiny"], "dense", 2, ("out=elsewhere",))
    assert moved[0].recipe.name == long[0].recipe.name, "where runs lie is no part of their names"


def test_runs_wait_for_those_they_begin_with() -> None:
    short, long = (resolve(row, SCALES["tiny"], "dense", 2, ()) for row in two())
    runs: list[Run] = [*long.values(), *short.values()]
    assert [*_generations(runs)] == [[*short.values()], [*long.values()]]
    assert [*_generations([*long.values()])] == [[*long.values()]], "once those are done there is nothing to wait for"
