"""Training end to end on the synthetic task: golden losses, resume, what a run leaves, and what it refuses."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from rich.console import Console

from gatedlm import loss
from gatedlm.catalogue import choices
from gatedlm.data.module import LMData
from gatedlm.fit import main
from gatedlm.model.lm import GatedLM
from gatedlm.recipe import OptimSpec, Recipe, Run, TrainerSpec, load
from gatedlm.training.apart import apart
from gatedlm.training.callbacks import read_metrics
from gatedlm.training.checkpoint import manifests
from gatedlm.training.module import LitLM, learning_rate, parameter_groups
from gatedlm.training.resume import alone
from gatedlm.training.run import Stopped, train
from gatedlm.training.strategy import threads
from gatedlm.training.weights import consolidate

NANO = ["recipe=sink", "scale=nano", "gate=sdpa-elementwise", "data.context=32", "trainer.threads=1", "optim.warmup=4"]
MIXTURE = [*NANO, "model.experts.count=4", "model.experts.used=2", "model.ffn=24", "trainer.micro_batch=2"]

# The first 20 losses of seed 0: a refactor leaves them as they are. Another processor may round otherwise.
GOLDEN = {
    "dense": "4.1653 4.1399 4.1189 4.0965 4.0808 4.0189 4.0059 3.9454 3.9856 3.9254 "
    "3.9698 3.7881 3.7225 3.8223 3.7460 3.9326 3.7273 3.7399 3.7686 3.7361",
    "mixture": "4.1658 4.1422 4.1220 4.0982 4.0818 4.0168 4.0170 3.9304 3.9996 3.9335 "
    "3.9503 3.7578 3.7066 3.8032 3.7761 3.9582 3.7561 3.6925 3.7652 3.7327",
}


def runs(words: list[str], out: Path) -> list[Run]:
    return load([*words, f"out={out}"])


def fit(words: list[str], out: Path) -> tuple[dict[str, Any], Path]:
    (run,) = runs(words, out)
    return train(run, Console(quiet=True)), out / run.recipe.name


def losses(folder: Path) -> list[float]:
    return [line["train/loss"] for line in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.parametrize(("name", "words"), [("dense", NANO), ("mixture", MIXTURE)])
def test_golden_losses_and_determinism(name: str, words: list[str], tmp_path: Path) -> None:
    first, again = (losses(fit(words, tmp_path / out)[1]) for out in "ab")
    assert first == again
    assert first == pytest.approx([float(loss) for loss in GOLDEN[name].split()], abs=2e-4)


def test_learning_rate_follows_its_formula() -> None:
    optim = OptimSpec(lr=0.5, warmup=4, floor=0.1)
    rates = [learning_rate(step, optim, steps=12) for step in range(20)]
    assert rates[:4] == [0.125, 0.25, 0.375, 0.5]
    assert rates[8] == pytest.approx(0.5 * (0.1 + 0.9 * 0.5))
    assert rates[12:] == pytest.approx([0.05] * 8)
    constant = OptimSpec(lr=0.5, warmup=0, schedule="constant")
    assert learning_rate(10**6, constant, steps=3) == 0.5


@pytest.mark.parametrize(
    ("asked", "devices", "cores", "given"), [(2, 1, 8, 2), (2, 2, 2, 1), (8, 2, 6, 3), (2, 1, 1, 1)]
)
def test_a_process_computes_on_no_more_than_its_share_of_the_cores(
    asked: int, devices: int, cores: int, given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert threads(TrainerSpec(threads=asked, devices=devices)) == given


@pytest.mark.skipif(sys.platform != "linux", reason="the threads are GNU's there")
def test_threads_wait_asleep() -> None:
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | {
        "OMP_DISPLAY_ENV": "verbose"
    }
    loaded = [sys.executable, "-c", "import gatedlm.loss"]
    assert "GOMP_SPINCOUNT = '0'" in subprocess.run(loaded, env=env, check=True, capture_output=True, text=True).stderr


@pytest.mark.parametrize(
    ("number", "error", "said"),
    [
        (signal.SIGTERM, KeyboardInterrupt, "15"),
        (signal.SIGINT, KeyboardInterrupt, "2"),
        (signal.SIGKILL, ValueError, "-9"),
    ],
)
def test_a_signal_that_the_process_could_not_hear_yet_ends_all(
    number: int, error: type[BaseException], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = tmp_path / "python"
    early.write_text(f"#!/bin/sh\nkill -{int(number)} $$\n")
    early.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(early))
    with pytest.raises(error, match=said):
        apart(load([*NANO, f"out={tmp_path}"])[0])


def test_a_sweep_is_refused_where_each_rank_would_make_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit) as ended:
        main([*NANO, "gate=none,sdpa-headwise"])
    assert ended.value.code == 2 and "a single run" in capsys.readouterr().err


def test_only_matrices_decay() -> None:
    (run,) = load([*MIXTURE, "gate=sdpa-constant+value-headwise", "model.qk_norm=true"])
    with torch.device("meta"):
        net = GatedLM(run.recipe.model)
    matrices, others = parameter_groups(net, 0.3)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    spared = {names[id(parameter)] for parameter in others["params"]}
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert len(matrices["params"]) + len(others["params"]) == len(names)
    assert spared == {name for name in names.values() if "norm" in name or name.endswith("sdpa.score.table")}


def test_a_line_for_each_step_and_probes_where_due(tmp_path: Path) -> None:
    _, folder = fit([*NANO, "trainer.probe_every=8", "trainer.val_every=6", "trainer.val_batches=2"], tmp_path)
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert [line["tokens"] for line in lines] == [step * 4 * 32 for step in range(1, 21)]
    assert [line["step"] for line in lines if "probe/f_attn_dormant" in line] == [8, 16, 20]
    assert [line["step"] for line in lines if "val/loss" in line] == [6, 12, 18, 20]
    assert lines[0]["optim/lr"] == pytest.approx(0.01 / 4)


def interrupted_at(step: int, monkeypatch: pytest.MonkeyPatch, number: int = signal.SIGTERM) -> None:
    """The next run gets a signal in the middle of this step."""
    original = LitLM.training_step

    def training_step(lit: LitLM, rows: torch.Tensor, batch_idx: int) -> dict[str, torch.Tensor]:
        if lit.trainer.global_step == step - 1:
            os.kill(os.getpid(), number)
        return original(lit, rows, batch_idx)

    monkeypatch.setattr(LitLM, "training_step", training_step)


@pytest.mark.parametrize("words", [NANO, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(
    words: list[str], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = losses(fit(words, tmp_path / "whole")[1])
    with monkeypatch.context() as patch:
        interrupted_at(7, patch, number)
        with pytest.raises(Stopped, match="after step 7"):
            fit(words, tmp_path / "parts")
    content, folder = fit(words, tmp_path / "parts")
    assert losses(folder) == whole
    assert content["status"] == "finished"


def test_a_finished_run_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, folder = fit(NANO, tmp_path)
    monkeypatch.setattr(LitLM, "training_step", None)
    again, _ = fit(NANO, tmp_path)
    assert again == json.loads((folder / "ledger.json").read_text())
    assert again["final"] == content["final"]


def test_a_name_holds_one_model(tmp_path: Path) -> None:
    named = [*NANO, "name=mine"]
    fit(named, tmp_path)
    with pytest.raises(ValueError, match=r"begun with model\.width=32, not 48: give this run another name="):
        fit([*named, "model.width=48"], tmp_path)
    with pytest.raises(ValueError, match=r"begun with seed=0, not 1"):
        fit([*named, "seed=1"], tmp_path)


def test_a_folder_is_trained_by_one_process_at_a_time(tmp_path: Path) -> None:
    with alone(tmp_path / "mine"), pytest.raises(ValueError, match=r"mine: another process trains this run"):
        fit([*NANO, "name=mine"], tmp_path)
    assert fit([*NANO, "name=mine"], tmp_path)[0]["status"] == "finished"


def test_more_steps_go_on_from_a_finished_run(tmp_path: Path) -> None:
    named = [*NANO, "name=mine", "optim.schedule=constant"]
    whole = losses(fit([*named, "trainer.steps=26"], tmp_path / "whole")[1])
    fit(named, tmp_path)
    content, folder = fit([*named, "trainer.steps=26"], tmp_path)
    assert losses(folder) == whole
    assert content["steps"] == 26


def test_the_ledger_tells_what_is_true(tmp_path: Path) -> None:
    content, folder = fit([*MIXTURE, "trainer.val_batches=3"], tmp_path)
    (run,) = runs(MIXTURE, tmp_path)
    assert content == json.loads((folder / "ledger.json").read_text())
    assert content["schema"] == 1
    assert content["params"] == dict(zip(("total", "active", "gate"), run.recipe.model.parameters(), strict=True))
    assert content["tokens"] == 20 * 4 * 32
    assert content["final"]["train/loss"] == losses(folder)[-1]
    assert content["final"]["val/loss"] == pytest.approx(by_hand(folder, run.recipe, batches=3), rel=1e-6)
    assert len(content["by_layer"]["m_act"]) == 2
    assert content["final"]["m_act"] == pytest.approx(sum(content["by_layer"]["m_act"]) / 2)
    assert content["corpus"]["name"] == "backcopy"
    assert 0 < content["baselines"]["bigram"] < content["baselines"]["unigram"] < math.log(64)


def saved_in(folder: Path) -> list[Path]:
    return list(manifests(folder / "checkpoints"))


def by_hand(folder: Path, recipe: Recipe, batches: int) -> float:
    """Validation loss of the newest checkpoint, straight from its tensors."""
    saved = torch.load(saved_in(folder)[-1] / "state", weights_only=True)
    net = GatedLM(recipe.model)
    net.load_state_dict({name.removeprefix("net."): value for name, value in saved["state_dict"].items()})
    data = LMData(recipe.data, recipe.seed)
    data.setup()
    rows = torch.cat(list(data.val_dataloader())[:batches])
    with torch.no_grad():
        picked = net(rows[:, :-1]).logits.log_softmax(-1).gather(-1, rows[:, 1:, None])
    return -float(picked.mean())


def test_micro_batches_change_nothing(tmp_path: Path, text: Path) -> None:
    """With documents kept apart, rows have unequal numbers of valid targets."""
    words = ["recipe=quickstart", "scale=nano", f"data.path={text}", "data.corpus=files", "data.vocab=300"]
    words += ["data.documents=true", "trainer.threads=1"]
    whole, parts = (losses(fit([*words, f"trainer.micro_batch={n}"], tmp_path)[1]) for n in (0, 1))
    assert whole == pytest.approx(parts, abs=1e-6)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of small documents of unequal length."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(f"{number} times {number} is {number**2}. " * (1 + number % 7))
    return folder


def test_the_newest_and_the_best_checkpoints_stay(tmp_path: Path) -> None:
    """With a rate far too large the loss rises, so that an early checkpoint is the best."""
    words = [*NANO, "optim.lr=3", "trainer.checkpoint_every=2", "trainer.val_every=2", "trainer.keep=3"]
    _, folder = fit(words, tmp_path)
    rated = {line["step"]: line["val/loss"] for line in read_metrics(folder / "metrics.jsonl") if "val/loss" in line}
    best = min(rated, key=lambda step: rated[step])
    assert best < 16
    assert [path.name for path in saved_in(folder)] == [f"step-{step:08}" for step in (best, 16, 18, 20)]


@pytest.mark.parametrize("harm", ["cut", "flipped", "gone", "no manifest"])
def test_a_damaged_checkpoint_is_passed_over(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*NANO, "trainer.checkpoint_every=3"]
    whole = losses(fit(words, tmp_path / "whole")[1])
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        interrupted_at(8, patch)
        fit(words, tmp_path / "parts")
    (run,) = runs(words, tmp_path / "parts")
    newest = saved_in(tmp_path / "parts" / run.recipe.name)[-1]
    damage_it(newest, harm)
    train(run, Console())
    printed = capsys.readouterr().out
    assert ("step-00000008/state is damaged" in printed) == (harm != "no manifest")
    assert "going on from" in printed and "step-00000006" in printed.split("going on from")[1]
    assert losses(newest.parents[1]) == whole


def damage_it(checkpoint: Path, harm: str) -> None:
    state = checkpoint / "state"
    content = bytearray(state.read_bytes())
    if harm == "cut":
        state.write_bytes(content[: len(content) // 2])
    elif harm == "flipped":
        content[len(content) // 2] ^= 255
        state.write_bytes(content)
    else:
        (state if harm == "gone" else checkpoint / "manifest.json").unlink()


def test_a_full_disk_leaves_the_checkpoint_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*NANO, "trainer.checkpoint_every=3"]
    whole = losses(fit(words, tmp_path / "whole")[1])
    save = L.Trainer.save_checkpoint

    def full_at_step_9(trainer: L.Trainer, path: Path) -> None:
        if trainer.global_step == 9:
            path.parent.mkdir()
            path.write_bytes(b"half of it")
            raise OSError(28, "No space left on device")
        save(trainer, path)

    with monkeypatch.context() as patch:
        patch.setattr(L.Trainer, "save_checkpoint", full_at_step_9)
        with pytest.raises(
            ValueError, match=r"step 9 could not be saved \(.*No space left.*\), the checkpoints before"
        ):
            fit(words, tmp_path / "parts")
    (run,) = runs(words, tmp_path / "parts")
    folder = tmp_path / "parts" / run.recipe.name
    assert [path.name for path in saved_in(folder)] == ["step-00000003", "step-00000006"]
    assert losses(fit(words, tmp_path / "parts")[1]) == whole


def test_bf16_keeps_weights_and_optimizer_state_in_fp32(tmp_path: Path) -> None:
    plain, half = (fit([*MIXTURE, f"trainer.precision={word}"], tmp_path)[1] for word in ("fp32", "bf16"))
    assert losses(half) == pytest.approx(losses(plain), abs=0.05)
    assert losses(half) != losses(plain)
    saved = torch.load(saved_in(half)[-1] / "state", weights_only=True)
    states = [value for state in saved["optimizer_states"][0]["state"].values() for value in state.values()]
    tensors = [*saved["state_dict"].values(), *(value for value in states if isinstance(value, torch.Tensor))]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}


def poisoned_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """This step's loss is not a number."""
    original = loss.next_token

    def next_token(logits: torch.Tensor, targets: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        poisoned_at.calls += 1  # type: ignore[attr-defined]
        return original(logits, targets, valid) * (math.nan if poisoned_at.calls == step else 1)  # type: ignore[attr-defined]

    poisoned_at.calls = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(loss, "next_token", next_token)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*NANO, "trainer.checkpoint_every=3", "name=x"]
    with monkeypatch.context() as patch:
        poisoned_at(8, patch)
        content, folder = fit(words, tmp_path)
    assert (content["status"], content["steps"], content["final"]["train/loss"]) == ("diverged", 8, None)
    assert math.isfinite(content["final"]["val/loss"])  # the step was not applied
    assert [path.name for path in saved_in(folder)][-1] == "step-00000006"
    assert json.loads((folder / "nonfinite.json").read_text()) == {"step": 8, "rows": [28, 29, 30, 31]}
    assert fit(words, tmp_path)[0]["status"] == "diverged"  # the same words do not train it again


def test_a_loss_that_is_not_finite_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = losses(fit([*NANO, "trainer.nonfinite=skip", "trainer.log_every=5"], tmp_path / "whole")[1])
    poisoned_at(8, monkeypatch)
    content, folder = fit([*NANO, "trainer.nonfinite=skip", "trainer.log_every=5"], tmp_path)
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [5, 8, 10, 15, 20]
    assert [line["step"] for line in lines if line.get("train/skipped")] == [8]
    assert content["status"] == "finished"
    assert losses(folder)[0] == whole[0]
    assert losses(folder)[-1] != whole[-1]


def test_what_is_computed_anew_is_the_same(tmp_path: Path) -> None:
    plain, anew = (losses(fit([*MIXTURE, *words], tmp_path)[1]) for words in ([], ["trainer.checkpoint_blocks=true"]))
    assert anew == pytest.approx(plain, abs=1e-5)


def test_compiled_blocks_are_the_same_and_can_be_probed(tmp_path: Path) -> None:
    """In a process of its own, because the shape checks of the tests cannot be compiled."""
    words = [*NANO, "trainer.steps=3", "trainer.probe_every=2"]
    given = [*words, f"out={tmp_path}", "trainer.compile=true", "name=compiled"]
    command = [sys.executable, "-m", "gatedlm.fit", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "compiled") == pytest.approx(losses(fit(words, tmp_path)[1]), abs=1e-5)


@pytest.mark.slow
def test_gates_that_the_paper_names_train(tmp_path: Path) -> None:
    for gate in choices("gate"):
        content, folder = fit([*NANO, f"gate={gate}", "trainer.steps=2", "model.qk_norm=true"], tmp_path)
        assert content["status"] == "finished"
        assert (content["params"]["gate"] == 0) == (gate in ("none", "sdpa-silu-only")), gate
        assert (folder / "report.html").exists()


# --- a run that is given again


def stop_at(step: int, words: list[str], out: Path) -> None:
    """Train until a signal in the middle of this step."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        interrupted_at(step, patch)
        fit(words, out)


def test_changed_words_of_the_optimizer_hold_from_the_checkpoint_on(tmp_path: Path) -> None:
    words = [*NANO, "name=run"]
    stop_at(10, words, tmp_path)
    _, folder = fit([*words, "optim.lr=1e-4", "optim.betas=[0.5,0.6]", "optim.weight_decay=2"], tmp_path)
    lines, optim = read_metrics(folder / "metrics.jsonl"), OptimSpec(lr=1e-4, warmup=4, schedule="constant")
    assert [line["optim/lr"] for line in lines[4:10]] == pytest.approx([1e-2] * 6)
    assert [line["optim/lr"] for line in lines[10:]] == pytest.approx(
        [learning_rate(s, optim, 20) for s in range(10, 20)]
    )
    state = torch.load(folder / "checkpoints" / "step-00000020" / "state", weights_only=True)
    groups = state["optimizer_states"][0]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [2, 0] and groups[0]["betas"] == (0.5, 0.6)


def test_a_run_whose_last_save_failed_is_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*NANO, "name=run", "trainer.checkpoint_every=8"]
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="step 20 could not be saved"):
        save = L.Trainer.save_checkpoint

        def full_at_the_end(trainer: L.Trainer, path: Path) -> None:
            if trainer.global_step == 20:
                raise OSError("No space left on device")
            save(trainer, path)

        patch.setattr(L.Trainer, "save_checkpoint", full_at_the_end)
        fit(words, tmp_path)
    assert not (tmp_path / "run" / "ledger.json").exists()
    ledger, folder = fit(words, tmp_path)
    assert ledger["status"] == "finished" and [*manifests(folder / "checkpoints")][-1].name == "step-00000020"
    assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == list(range(1, 21))


def test_weights_are_those_of_the_ledger(tmp_path: Path) -> None:
    words = [*NANO, "name=run", "trainer.checkpoint_every=8"]
    _, folder = fit(words, tmp_path)
    last = folder / "checkpoints" / "step-00000020"
    before = manifests(folder / "checkpoints")[last]
    (folder / "ledger.json").unlink()
    fit([*words, "optim.clip=0.01"], tmp_path)
    assert manifests(folder / "checkpoints")[last]["files"] != before["files"]


def test_fewer_steps_than_are_done_are_refused(tmp_path: Path) -> None:
    words = [*NANO, "name=run"]
    stop_at(10, words, tmp_path)
    with pytest.raises(ValueError, match=r"is at step 10 already, beyond trainer.steps=5"):
        fit([*words, "trainer.steps=5"], tmp_path)
    assert [*manifests(tmp_path / "run" / "checkpoints")][-1].name == "step-00000010"


def test_another_text_under_the_same_path_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    words = ["recipe=quickstart", "scale=nano", "data=files", f"data.path={text}", "data.vocab=300", "name=run"]
    words += [f"data.cache={tmp_path / 'cache'}", "data.holdout=0.5", "trainer.val_batches=1"]
    text.write_text("one line and another " * 400)
    stop_at(10, words, tmp_path)
    text.write_text("something else altogether " * 400)
    with pytest.raises(ValueError, match=r"begun on other text than data.corpus=files"):
        fit(words, tmp_path)


def test_a_step_that_was_not_finite_is_not_saved(tmp_path: Path) -> None:
    words = [*NANO, "optim.lr=1e30", "optim.clip=0", "trainer.checkpoint_every=1", "trainer.keep=1"]
    ledger, folder = fit(words, tmp_path)
    (saved,) = manifests(folder / "checkpoints").values()
    assert ledger["status"] == "diverged" and saved["step"] == ledger["steps"] - 1


def test_consolidating_again_leaves_nothing_of_before(tmp_path: Path) -> None:
    _, folder = fit(NANO, tmp_path)
    for size, several in ((2**20, False), (2**14, True), (2**16, True), (2**20, False)):
        files = consolidate(folder, folder, size)
        assert {*folder.glob("model*.safetensors")} == {*files} and (len(files) > 1) == several
        index = folder / "model.safetensors.index.json"
        assert index.exists() == several
        if several:
            assert {*json.loads(index.read_text())["weight_map"].values()} == {file.name for file in files}
