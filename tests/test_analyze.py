"""``gatedlm.analyze`` as a person calls it: spikes of curves from anywhere, and one line for what is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from gatedlm.analyze import USAGE, main
from gatedlm.probes import SpikeSpec

SPIKED = {120: 3.25, 124: 2.75, 170: 4.5}
SMALL = ["window=50", "skip=40", "merge=10"]
EVENTS = [("120", "120", "1.250"), ("170", "170", "2.500")]
SUMMARY = "points that spike: 3, events: 2, or 12.5 per thousand steps from 41 to 200"


def lines(loss: str = "train/loss", steps: int = 200) -> list[str]:
    """A curve at 2 nats with three spikes, as jsonl."""
    return [json.dumps({"step": step, loss: SPIKED.get(step, 2.0), "lr": 0.1}) for step in range(1, steps + 1)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines()) + "\n")
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[list[tuple[str, ...]], str]:
    """The table's rows and the line below it."""
    main(["spikes=" + words[0], *words[1:]])
    out = capsys.readouterr().out
    rows = re.findall(r"^\W*([\d,]+)\W+([\d,]+)\W+(\d+\.\d+|not finite)\W*$", out, re.M)
    return rows, out.splitlines()[-1]


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == "" and len(err.splitlines()) == 1
    return err


def test_usage_comes_without_torch_and_names_all_limits_with_their_defaults():
    script = "import sys; from gatedlm.analyze import main; main([]); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == USAGE + "\n"
    for key, value in asdict(SpikeSpec()).items():
        assert re.search(rf"^  {key}={value:g} ", USAGE, re.M)


def test_a_run_its_metrics_and_a_csv_of_them_read_alike(run: Path, capsys: pytest.CaptureFixture[str]):
    rows = [json.loads(line) for line in lines("loss")]
    text = "\ufeffstep,note,loss\n" + "".join(f'{r["step"]}.0,"a, b",{r["loss"]}\n' for r in rows)
    (run / "other.csv").write_text(text, encoding="utf-8")
    for file in (run, run / "metrics.jsonl", run / "other.csv"):
        assert printed(capsys, str(file), *SMALL) == (EVENTS, SUMMARY)


def test_the_limits_reach_the_rule(run: Path, capsys: pytest.CaptureFixture[str]):
    assert printed(capsys, str(run), *SMALL, "rise=1.3")[0] == EVENTS[1:]
    assert printed(capsys, str(run), *SMALL, "merge=3")[1].startswith("points that spike: 3, events: 3,")
    assert printed(capsys, str(run), *SMALL, "skip=150")[0] == EVENTS[1:]
    jagged = "".join(f"{step},{2 + step % 2},{step}\n" for step in range(80))
    (run / "jagged.csv").write_text("step,loss,x\n" + jagged + "80,6,80\n")
    found = [printed(capsys, str(run / "jagged.csv"), "skip=79", f"sigmas={sigmas}")[0] for sigmas in (4.8, "4.7")]
    assert found == [[], [("80", "80", "3.500")]]


def test_columns_of_any_name(run: Path, capsys: pytest.CaptureFixture[str]):
    renamed = "".join(lines("val loss")).replace("}", "}\n").replace('"step"', '"iter"')
    (run / "other.jsonl").write_text(renamed)
    assert printed(capsys, str(run / "other.jsonl"), *SMALL, "step=iter", "loss=val loss") == (EVENTS, SUMMARY)


def test_the_training_loss_comes_before_another(run: Path, capsys: pytest.CaptureFixture[str]):
    both = [json.dumps({"loss": 2.0, **json.loads(line)}) for line in lines()]
    (run / "metrics.jsonl").write_text("\n".join(both))
    assert printed(capsys, str(run), *SMALL)[0] == EVENTS
    assert printed(capsys, str(run), *SMALL, "loss=loss")[0] == []


def test_lines_without_a_loss_are_passed_over_and_null_is_not_finite(run: Path, capsys: pytest.CaptureFixture[str]):
    other = [*lines()[:100], '{"step": 100, "val/loss": 9.0}', "", '{"step": 101, "train/loss": null}']
    (run / "metrics.jsonl").write_text("\n".join([*other, '{"step": 102, "train/lo']))
    (run / "same.csv").write_text(
        "step,train/loss,val/loss\n" + "".join(f"{s},2,\n" for s in range(1, 101)) + "100,,9\n101,nan,\n"
    )
    for file in (run, run / "same.csv"):
        rows, summary = printed(capsys, str(file), *SMALL)
        assert rows == [("101", "101", "not finite")]
        assert summary == "points that spike: 1, events: 1, or 16.4 per thousand steps from 41 to 101"


def test_a_curve_that_gets_no_verdict_says_which_limit_to_change(run: Path, capsys: pytest.CaptureFixture[str]):
    rows, says = printed(capsys, str(run))
    assert not rows and says == "all 200 points lie in the first skip=5000 steps: give skip=20 or so"
    rows, says = printed(capsys, str(run), "skip=20", "window=19")
    assert not rows and "window=19" in says and "larger window" in says


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("spike={run}", "'spike': did you mean spikes="),
        ("window=3 spikes={run}", "first word 'window'"),
        ("spikes={run} widnow=50", "'widnow': did you mean window="),
        ("spikes={run} optim.lr=3", "skip="),
        ("spikes", "key=value"),
        ("spikes=", "key=value"),
        ("spikes={run} window=50.5", "'window' is '50.5', not a whole number"),
        ("spikes={run} skip=few", "'skip' is 'few', not a number"),
        ("spikes={run} merge=inf", "'merge'"),
        ("spikes={run} rise=-0.1", "rise=-0.1"),
        ("spikes={run} sigmas=nan", "sigmas=nan"),
        ("spikes={run}/nothing.csv", "nothing.csv"),
        ("spikes={run}/nothing", "nothing"),
        ("spikes={run}/empty", "metrics.jsonl"),
        ("spikes={run} loss=lss", "no column 'lss', give loss=COLUMN, one of 'step', 'train/loss', 'lr'"),
        ("spikes={run} step=iter", "no column 'iter', give step=COLUMN"),
    ],
)
def test_wrong_words_end_in_one_line(words: str, says: str, run: Path, capsys: pytest.CaptureFixture[str]):
    (run / "empty").mkdir()
    assert says in refusal(capsys, *words.format(run=run).split())


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b"", "holds no points"),
        ("a.csv", b"", "holds no points"),
        ("a.csv", b"step,loss\n", "holds no points"),
        ("a.csv", b"step,loss\n1,\n", "no line has a 'loss'"),
        ("a.csv", b"step;loss\n1;2\n", "'step;loss'"),
        ("a.csv", b"step,loss\n1,2\n3\n", "line 3"),
        ("a.csv", b"step,loss\n1,2,3\n", "line 2"),
        ("a.csv", b"step,loss\n1,two\n", "line 2: 'loss' is 'two', not a number"),
        ("a.csv", b"step,loss\n,2\n", "line 2: 'step' is ''"),
        ("a.csv", b"step,loss\n1.5,2\n", "line 2: 'step' is '1.5', not a whole number"),
        ("a.csv", b"step,loss\n1,2\n1,2\n", "step 1 comes after step 1"),
        ("a.csv", b"step,loss\n2,2\n1,2\n", "step 1 comes after step 2"),
        ("a.csv", b'step,"lo\nss"\n1,2\n', r"'lo\nss'"),
        ("a.csv", b"step,loss\n1," + b"2" * 200_000, "field"),
        ("a.csv", b"\xff\xfe\x00", "utf-8"),
        ("a.jsonl", b'{"step": 1, "loss": 2}\n{"step": 2, "lo\n{"step": 3, "loss": 2}\n', "line 2 is no JSON object"),
        ("a.jsonl", b'{"step": 1, "loss": 2}\n[1, 2]\n', "line 2 is no JSON object"),
        ("a.jsonl", b"[" * 100_000 + b"\n", "line 1"),
        ("a.jsonl", b'{"step": 1, "loss": [2]}\n', "line 1: 'loss' is [2], not a number"),
        ("a.jsonl", b'{"step": 1, "loss": true}\n', "line 1: 'loss' is True, not a number"),
        ("a.jsonl", b'{"step": 1, "loss": 2}\n{"loss": 2}\n', "line 2: 'step' is None"),
        ("a.txt", b"step,loss\n1,2\n", "ends in .csv or .jsonl"),
    ],
)
def test_wrong_files_end_in_one_line(
    name: str, content: bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / name).write_bytes(content)
    assert says in refusal(capsys, f"spikes={tmp_path / name}")


def test_the_command_itself(tmp_path: Path):
    words = [sys.executable, "-m", "gatedlm.analyze", "spike=nothing.csv"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
