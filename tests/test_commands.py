"""The commands as a person types them: usage, sweeps, one line for what is wrong, and every command in the README."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gatedlm.catalogue import choices

README = Path(__file__).parents[1] / "README.md"
QUICK = ["scale=nano", "trainer.threads=1", "trainer.steps=2"]


def call(*words: str, cwd: Path, module: str = "gatedlm.fit") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *words], cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )


def test_usage_names_every_recipe_and_word(tmp_path: Path) -> None:
    done = call(cwd=tmp_path)
    assert done.returncode == 0
    for word in (*choices(), *(name for group in ("scale", "gate", "data", "debug") for name in choices(group))):
        assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", done.stdout), word


def test_a_sweep_ends_with_a_table(tmp_path: Path) -> None:
    done = call("recipe=sink", "gate=none,sdpa-headwise", "data.context=32", *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table = done.stdout[done.stdout.rindex("2 of 2") :]
    assert "gate=none" in table and "gate=sdpa-headwise" in table and "val/loss" in table
    ledgers = [json.loads(file.read_text()) for file in tmp_path.glob("runs/*/ledger.json")]
    assert sorted(bool(ledger["params"]["gate"]) for ledger in ledgers) == [False, True]


def test_the_same_command_says_that_it_is_finished(tmp_path: Path) -> None:
    words = ["recipe=sink", "data.context=32", "name=one", *QUICK]
    call(*words, cwd=tmp_path)
    done = call(*words, cwd=tmp_path)
    assert done.returncode == 0
    assert "runs/one is finished" in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["recipe=quickstat"], "quickstart"),
        (["recipe=sink", "modle.width=3"], "model.width"),
        (["recipe=sink", "gate=sdpa-headwize"], "sdpa-headwise"),
        (["recipe=sink", "model.heads=3", "model.kv_heads=2"], "model.heads=3"),
        (["recipe=quickstart", "data.corpus=files", "data.path=nowhere.txt", *QUICK], "nowhere.txt"),
        (["recipe=sink", "out=file", *QUICK], "out="),
        (["recipe=sink", "trainer.devices=3", "trainer.accelerator=cpu", *QUICK], "data.batch"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words: list[str], says: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    done = call(*words, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def readme_commands() -> list[str]:
    return re.findall(r"^\$ python -m (gatedlm\.\S+ .*)$", README.read_text(), re.M)


def test_the_readme_has_commands() -> None:
    assert len(readme_commands()) >= 5


@pytest.mark.parametrize("command", readme_commands())
def test_readme_commands_run(command: str, tmp_path: Path) -> None:
    """Each as it stands but for its length and size; text of one's own is made up."""
    (tmp_path / "notes").mkdir()
    for number in range(40):
        (tmp_path / "notes" / f"{number}.md").write_text(f"# Note {number}\n" + "A line of a note. " * (20 + number))
    module, *words = command.split()
    done = call(*words, *QUICK, cwd=tmp_path, module=module)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.glob("runs/*/report.html"))
