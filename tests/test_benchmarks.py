"""The benchmarks' arithmetic, and that each of them runs; never how fast anything is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import NAMES, main
from benchmarks.harness import Bench, Result, Spread, ratios, report, spread, timed

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
    assert written["results"] == [{"title": "steps", "rows": json.loads(json.dumps(table)), "notes": ["a note"]}]
    assert written["results"][0]["rows"][0]["speed"] == [1, 0.5, 2]
    assert written["machine"]["rounds"] == 3
    out = capsys.readouterr().out
    assert all(word in out for word in ("steps", "1 (0.5..2)", "a note", torch.__version__))


@pytest.mark.parametrize("words", [["dens"], ["dense", "round=3"], ["dense", "rounds=0"], ["dense", "device=tpu"]])
def test_wrong_words_get_one_line(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1), err


def test_every_benchmark_is_named():
    kept = {"harness", "models", "gpu", "soak"}
    files = {path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")} - kept
    assert files == set(NAMES)
    for name in NAMES:
        assert callable(import_module(f"benchmarks.{name}").run)


@pytest.mark.slow
def test_the_gpus_script_runs_without_one():
    subprocess.run(["bash", "benchmarks/gpu.sh"], cwd=ROOT, check=True, env={**os.environ, "PYTHON": sys.executable})
