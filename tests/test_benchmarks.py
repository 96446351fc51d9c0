"""The benchmarks' arithmetic, and that each of them runs; never how fast anything is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import NAMES, main
from benchmarks.harness import Bench, Result, Spread, judged, ratios, report, spread, timed
from benchmarks.targets import TARGETS, Target
from gatedlm.model.kernels import multiplies_bf16

ROOT = Path(__file__).parent.parent


class Ticking(Bench):
    """A clock that work itself moves on."""

    def clock(self) -> float:
        return NOW[0]


NOW = [0.0]


def lasting(seconds: float, log: list[str], name: str):
    def work() -> None:
        NOW[0] += seconds
        log.append(name)

    return work


def test_rounds_alternate_after_a_warm_up():
    log: list[str] = []
    seconds = Ticking(rounds=3).alternate({name: lasting(t, log, name) for name, t in {"a": 0.5, "b": 0.25}.items()})
    assert "".join(log) == "aabb" + "ab" + "ba" + "ab"
    assert seconds == {"a": [0.5] * 3, "b": [0.25] * 3}


def test_short_work_is_called_until_the_clock_can_tell():
    log: list[str] = []
    seconds = Ticking(rounds=2).alternate({"a": lasting(2**-5, log, "a")})
    assert len(log) == 2 + 2 * 4
    assert seconds == {"a": [2**-5] * 2}


def test_ratios_are_taken_round_by_round():
    seconds = {"ours": [1.0, 2.0, 4.0], "theirs": [2.0, 2.0, 12.0]}
    assert ratios(seconds, of="theirs", over="ours") == Spread(2, 1, 3)
    ours, theirs = timed(seconds, "theirs")
    assert (ours["variant"], ours["ms"], ours["time, theirs = 1"]) == ("ours", 2000, (0.5, 1 / 3, 1))
    assert theirs["time, theirs = 1"] == (1, 1, 1)


def test_a_spread_in_words():
    assert str(spread([1.2345, 0.5, 20.0])) == "1.23 (0.5..20)"


def test_the_peak_is_that_of_the_work_alone():
    before = torch.ones(2**24)

    def work() -> None:
        held = torch.ones(2**22)  # 16 MiB
        del held
        before[: 2**20].clone()

    assert Bench().peak(work) == pytest.approx(2**24, rel=1e-3)


def test_results_are_shown_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    table = [{"variant": "ours", "ms": 1.5, "speed": Spread(1, 0.5, 2)}, {"variant": "theirs"}]
    report("dense", [Result("steps", table, ("a note",))], Bench(rounds=3), tmp_path)
    written = json.loads((tmp_path / "dense.json").read_text())
    (result,) = written["results"]
    assert result == {"title": "steps", "rows": json.loads(json.dumps(table)), "notes": ["a note"], "targets": []}
    assert written["targets not measured"] == [str(target) for target in TARGETS["dense"]]
    assert written["results"][0]["rows"][0]["speed"] == [1, 0.5, 2]
    assert written["machine"]["rounds"] == 3
    out = capsys.readouterr().out
    assert all(word in out for word in ("steps", "1 (0.5..2)", "a note", torch.__version__))
    assert out.count("target not measured here: ") == len(TARGETS["dense"])


def test_a_target_is_met_missed_or_within_the_spread():
    rows = [{"variant": "a", "time": Spread(1.1, 0.9, 1.4)}, {"variant": "b", "time": 0.5}, {"variant": "c"}]
    result = Result("steps, fp32", rows)

    def verdicts(*words: str, **bounds: float) -> list[str]:
        return [line["verdict"] for line in judged(Target("steps", "fp32", words, "time", **bounds), result)]

    assert verdicts(least=1) == ["met", "missed"]
    assert verdicts("b", most=0.5) == verdicts("a", least=1.0, most=1.2) == ["met"]
    assert verdicts("a", most=1) == verdicts("a", least=1.2) == ["missed, within the spread of the rounds"]
    assert verdicts("a", most=0.8) == verdicts("a", least=1.5) == ["missed"]
    assert verdicts("c") == judged(Target("steps", "bf16", (), "time"), result) == []
    assert str(Target("steps", "", (), "time", least=0.9, most=1.1)) == "steps, at least 0.9 and at most 1.1"


SMALL = """
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from benchmarks import dense, gate, generate, kernels, loss, memory, models, moe, probe, trainer
from benchmarks.harness import Bench, report

tiny = replace(models.NARROW, vocab=256, layers=2, width=64, head_dim=16, ffn=96)
dense.SIZES, gate.NARROW, probe.WIDE = {"width 256": (tiny, 2, 32)}, tiny, tiny
moe.CONTEXT, trainer.STEPS, trainer.TURNS, loss.VOCAB, generate.POSITIONS = 16, 5, 2, 40_000, (8,)
kernels.LENGTHS, memory.SETTINGS = (256, 512), {"dense": ""}
for name in sys.argv[2:]:
    report(name, import_module(f"benchmarks.{name}").run(Bench(rounds=1)), Bench(rounds=1), Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_each_runs_and_measures_what_its_targets_are_about(tmp_path: Path):
    """In a process of its own, because the shape checks of the tests cannot be compiled."""
    subprocess.run([sys.executable, "-c", SMALL, tmp_path, *NAMES], cwd=ROOT, check=True)
    left = {name: json.loads((tmp_path / f"{name}.json").read_text())["targets not measured"] for name in NAMES}
    absent = {name for name in ("transformers", "litgpt") if find_spec(name) is None}
    for name, target in ((name, target) for name, targets in TARGETS.items() for target in targets):
        needed = {row.split()[0].lower() for row in target.rows}
        emulated = "bf16" in target.title and not multiplies_bf16("cpu")
        assert (str(target) in left[name]) == (emulated or (bool(needed) and needed <= absent)), target


@pytest.mark.parametrize("words", [["dens"], ["dense", "round=3"], ["dense", "rounds=0"], ["dense", "device=tpu"]])
def test_wrong_words_get_one_line(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1), err


def test_every_benchmark_is_named():
    kept = {"harness", "models", "targets", "gpu", "soak"}
    files = {path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")} - kept
    assert files == set(NAMES) and set(TARGETS) == files - {"generate"}
    for name in NAMES:
        assert callable(import_module(f"benchmarks.{name}").run)


@pytest.mark.slow
def test_the_gpus_script_runs_without_one():
    subprocess.run(["bash", "benchmarks/gpu.sh"], cwd=ROOT, check=True, env={**os.environ, "PYTHON": sys.executable})
