"""Launching: scripts that shellcheck accepts, checks before the first step, a corpus prepared by many processes."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only

from gatedlm import catalogue, prepare
from gatedlm.data import packing
from gatedlm.data.corpora import documents
from gatedlm.recipe import DataSpec, Recipe, load
from gatedlm.training import checks

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((catalogue.shipped("recipes") / "launch").glob("*.sh"))


def recipe(*words: str) -> Recipe:
    (run,) = load(["recipe=sink", "scale=nano", *words])
    return run.recipe


# Scripts


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_shellcheck(script: Path) -> None:
    if not (shellcheck := shutil.which("shellcheck")):
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([shellcheck, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert os.access(script, os.X_OK)


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """Run a script where the programs it calls only say how they were called; STATUS is srun's."""
    calls = tmp_path / "calls"
    for program in ("torchrun", "srun", "scontrol", "python", "nvidia-smi"):
        own = 'printf "GPU 0\\nGPU 1\\nGPU 2\\n"' if program == "nvidia-smi" else f'echo {program} "$@" >> {calls}'
        file = tmp_path / program
        file.write_text(f"#!/bin/sh\n{own}\n" + ("exit ${STATUS:-0}\n" if program == "srun" else ""))
        file.chmod(0o755)

    def run(name: str, *words: str, **env: str) -> tuple[int, list[str]]:
        (script,) = [path for path in SCRIPTS if path.name == name]
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **env}
        done = subprocess.run([script, *words], env=env, capture_output=True, text=True, timeout=30)
        return done.returncode, calls.read_text().splitlines() if calls.exists() else [done.stderr]

    return run


def test_one_machine(launch: Callable[..., tuple[int, list[str]]]) -> None:
    _, (checked, line) = launch("node.sh", "recipe=dense-500m", "gate=none")
    words = "recipe=dense-500m gate=none trainer.devices=3 trainer.nodes=1"
    assert checked == f"python -m gatedlm.plan {words}"
    assert line == f"torchrun --standalone --nproc-per-node 3 -m gatedlm.fit {words}"


def test_several_machines(launch: Callable[..., tuple[int, list[str]]]) -> None:
    _, (_, line) = launch("nodes.sh", "recipe=dense-500m", HEAD="node0", NODES="2", GPUS="4")
    assert "--nnodes 2 --nproc-per-node 4" in line and "--rdzv-endpoint node0:29400" in line
    assert line.endswith("-m gatedlm.fit recipe=dense-500m trainer.devices=4 trainer.nodes=2")


def test_several_machines_need_a_meeting_place(launch: Callable[..., tuple[int, list[str]]]) -> None:
    status, said = launch("nodes.sh", "recipe=dense-500m", NODES="2")
    assert status != 0 and "HEAD: the machine where they meet" in said[-1]


@pytest.mark.parametrize(
    ("name", "words", "env", "says"),
    [
        ("node.sh", ["recipe=dense-500m", "optim.lr=nan"], {"GPUS": "2"}, "optim.lr='nan': expected a number"),
        ("node.sh", ["recipe=dense-500m"], {"GPUS": "7"}, "does not divide among the 7 ranks"),
        ("node.sh", ["recipe=dense-500m"], {"GPUS": "0"}, "trainer.devices=0: must be above 0"),
        ("node.sh", [], {"GPUS": "2"}, "words of gatedlm.fit"),
        ("nodes.sh", ["recipe=dense-500l"], {"GPUS": "2", "NODES": "2", "HEAD": "a"}, "did you mean 'dense-500m'"),
        ("slurm.sh", ["recipe=dense-500m"], {"SLURM_JOB_NUM_NODES": "2"}, "--ntasks-per-node"),
        ("slurm.sh", ["recipe=m"], {"SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "2"}, "recipe='m': no such"),
        ("prepare.sh", ["recipe=dense-500m"], {}, "--array"),
    ],
)
def test_wrong_words_get_one_line_before_any_rank_starts(
    name: str, words: list[str], env: dict[str, str], says: str, tmp_path: Path
) -> None:
    for program in ("torchrun", "srun"):
        (tmp_path / program).write_text("#!/bin/sh\ntouch started\n")
        (tmp_path / program).chmod(0o755)
    env |= {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    script = SCRIPTS[0].parent / name
    done = subprocess.run([script, *words], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and says in done.stderr and done.stderr.count("\n") == 1
    assert not done.stdout and not (tmp_path / "started").exists()


@pytest.mark.parametrize(("status", "again"), [(0, False), (2, False), (138, True), (143, False)])
def test_slurm_requeues_what_was_stopped(
    status: int, again: bool, launch: Callable[..., tuple[int, list[str]]]
) -> None:
    env = {"SLURM_NTASKS_PER_NODE": "8", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_ID": "77", "STATUS": str(status)}
    ended, lines = launch("slurm.sh", "recipe=moe-15a2b", **env)
    assert ended == status
    assert lines[0] == "python -m gatedlm.plan recipe=moe-15a2b trainer.devices=8 trainer.nodes=4"
    assert lines[1].endswith("-m gatedlm.fit recipe=moe-15a2b trainer.devices=8 trainer.nodes=4")
    assert lines[2:] == ["scontrol requeue 77"] * again


def test_a_job_for_each_part_of_a_corpus(launch: Callable[..., tuple[int, list[str]]]) -> None:
    _, (line,) = launch("prepare.sh", "recipe=dense-500m", SLURM_ARRAY_TASK_COUNT="64", SLURM_ARRAY_TASK_ID="7")
    assert line == "python -m gatedlm.prepare recipe=dense-500m shards=64 shard=7"


# Checks


def test_no_room_for_the_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = recipe(f"out={tmp_path}", "trainer.keep=3", "trainer.checkpoint_every=5")
    size = 12 * given.model.parameters().total
    for free, fits in ((5 * size, True), (5 * size - 1, False)):
        monkeypatch.setattr(checks.shutil, "disk_usage", lambda place, free=free: SimpleNamespace(free=free))
        assert (checks.before_data(given, tmp_path / "run") == []) == fits
    saved = tmp_path / "run" / "checkpoints" / "step-5" / "state"
    saved.parent.mkdir(parents=True)
    saved.write_bytes(b"1")  # what is there already is room too
    assert checks.before_data(given, tmp_path / "run") == []


def test_a_corpus_that_all_ranks_would_prepare(tmp_path: Path) -> None:
    words = f"data.cache={tmp_path}", "data.corpus=fineweb_edu", "data.vocab=300", "data.batch=8"
    assert checks.before_data(recipe(*words), tmp_path) == []
    (line,) = checks.before_data(recipe(*words, "trainer.devices=2"), tmp_path)
    assert "fineweb_edu" in line and "python -m gatedlm.prepare" in line and "\n" not in line


def test_each_fact_that_differs_is_a_line() -> None:
    same = {"host": "a", "torch": "2.13", "recipe": "0123", "python": "3.11"}
    ranks = [same, same | {"host": "b"}, same | {"host": "c", "torch": "2.12"}, same | {"torch": "2.11", "recipe": "9"}]
    versions, recipes = checks.disagreements(ranks)
    assert "torch: rank 2 on c and 1 more has 2.12, rank 0 on a has 2.13" in versions
    assert "recipe: rank 3 on a has 9, rank 0 on a has 0123" in recipes
    assert checks.disagreements([same, same | {"host": "b"}]) == []


def test_several_problems_are_several_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"^third$"):
        checks.refuse(["first", "second", "third"], speaks=True)
    assert capsys.readouterr().err == "first\nsecond\n"
    with pytest.raises(SystemExit) as ended:
        checks.refuse(["first"], speaks=False)
    assert ended.value.code == 0
    checks.refuse([], speaks=True)


def together(work: Callable[[int], Any], tmp_path: Path) -> list[Any]:
    """What two connected processes find, forked since importing takes longer than what they do."""
    context = multiprocessing.get_context("fork")
    found = context.Queue()

    def run(rank: int) -> None:
        rank_zero_only.rank = rank
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=rank, world_size=2)
        try:
            found.put((rank, work(rank)))
        except (ValueError, SystemExit) as error:
            found.put((rank, repr(error)))

    processes = [context.Process(target=run, args=(rank,), daemon=True) for rank in (0, 1)]
    for process in processes:
        process.start()
    results = sorted(found.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(timeout=60)
    return [result for _, result in results]


forking = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@forking
def test_ranks_with_other_recipes_are_refused(tmp_path: Path) -> None:
    trainer: Any = SimpleNamespace(world_size=2, strategy=SimpleNamespace(root_device=torch.device("cpu")))

    def meet(rank: int) -> None:
        own = recipe("seed=3", f"optim.lr={1e-3 * (1 + rank)}", "name=run")
        checks.Agreement(own, tmp_path).setup(trainer, None, "fit")  # pyright: ignore

    first, second = together(meet, tmp_path)
    assert first.startswith("ValueError('recipe: rank 1 on ") and second == "SystemExit(0)"


@forking
def test_ranks_that_agree_begin(tmp_path: Path) -> None:
    trainer: Any = SimpleNamespace(world_size=2, strategy=SimpleNamespace(root_device=torch.device("cpu")))
    own = checks.Agreement(recipe("name=run"), tmp_path)
    assert together(lambda rank: own.setup(trainer, None, "fit"), tmp_path) == [None, None]  # pyright: ignore


@forking
def test_a_rank_that_is_not_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "PATIENCE", timedelta(seconds=1))
    here = torch.device("cpu")
    (line,), _ = together(lambda rank: time.sleep(3) if rank else checks.unreachable(here), tmp_path)
    assert line.startswith("gloo: the ranks do not reach each other (") and "NCCL_SOCKET_IFNAME" in line


# Preparing by many processes


@pytest.fixture
def texts(tmp_path: Path) -> DataSpec:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"text {number} " * (20 + number))
    return DataSpec(corpus="files", path=str(folder), vocab=300, context=16, cache=str(tmp_path / "cache"))


def test_parts_become_one_corpus(texts: DataSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    assert not packing.is_prepared(texts)
    assert [packing.prepare_part(texts, (part, 3), said.append) for part in (2, 0)] == [False, False]
    before = [line for line in said if line.startswith("prepared")]
    assert not packing.prepare_part(texts, (0, 3), said.append)  # there already
    assert [line for line in said if line.startswith("prepared")] == before and not packing.is_prepared(texts)
    assert packing.prepare_part(texts, (1, 3), said.append) and packing.is_prepared(texts)
    monkeypatch.setattr(packing, "_pack", lambda *_: pytest.fail("made again"))
    whole = packing.prepare(texts, said.append)
    assert packing.prepare_part(texts, (1, 3), said.append)
    assert whole.corpus.documents == 40
    ids = whole.tokenizer.encode_batch_fast([text for text, _ in documents(texts)], add_special_tokens=False)
    assert whole.corpus.tokens == sum(1 + len(own.ids) for own in ids)
    rows = whole.train.packed(torch.arange(len(whole.train)).numpy())
    assert rows.shape[1] == 17 and len(rows) > 60
    # Three streams follow each other: within each, a row ends with the token that the next one begins with.
    assert int((rows[:-1, -1] != rows[1:, 0]).sum()) <= 2
    assert not list((Path(str(texts.cache)) / "parts").iterdir())


def test_shares_are_the_documents(texts: DataSpec) -> None:
    shares = [[text for text, _ in documents(texts, (part, 3))] for part in range(3)]
    assert sorted(chain(*shares)) == sorted(text for text, _ in documents(texts))
    assert [len(share) for share in shares] == [14, 13, 13]


def test_shares_of_the_hub_are_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import IterableDataset

    def rows(files: list[int]):
        for file in files:
            yield from ({"text": f"{file} {row}"} for row in range(2))

    stream = IterableDataset.from_generator(rows, gen_kwargs={"files": [0, 1, 2, 3]})
    monkeypatch.setattr("gatedlm.data.corpora.load_dataset", lambda *_, **__: stream)
    spec = DataSpec(corpus="fineweb_edu")
    shares = [[text for text, _ in documents(spec, (part, 2))] for part in range(2)]
    assert sorted(chain(*shares)) == [f"{file} {row}" for file in range(4) for row in range(2)]
    assert all(len(share) == 4 for share in shares)
    with pytest.raises(ValueError, match=r"shards=5: data.corpus=fineweb_edu lies in 4 files"):
        list(documents(spec, (0, 5)))


def test_the_command_prepares_a_part(texts: DataSpec, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=quickstart", "data=files", f"data.path={texts.path}", f"data.cache={texts.cache}"]
    words += ["data.vocab=300", "data.context=16"]
    prepare.main([*words, "shards=2", "shard=1"])
    assert capsys.readouterr().out.splitlines()[-1] == "part 1 of 2 is there, others are not yet"
    prepare.main([*words, "shards=2", "shard=0"])
    assert capsys.readouterr().out.splitlines()[-1].endswith("tokens of 40 documents are ready")
    with pytest.raises(SystemExit) as ended:
        prepare.main([*words, "shards=2", "shard=2"])
    assert ended.value.code == 2 and "shards=2 shard=2" in capsys.readouterr().err
