"""The commands as a person types them: usage, sweeps, one line for what is wrong, and those of README and docs."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gatedlm import fit, reproduce
from gatedlm.catalogue import choices

README = Path(__file__).parents[1] / "README.md"
DOCS = sorted((README.parent / "docs").rglob("*.md"))
QUICK = ["scale=nano", "trainer.steps=2"]


@dataclass
class Done:
    status: int
    out: str
    err: str


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run a command in an empty folder, in this process: loading Lightning takes longer than what is tested."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["fit", *words])
        try:
            fit.main(list(words))
            status = 0
        except SystemExit as exit:
            status = exit.code
        assert isinstance(status, int)
        return Done(status, *map(str, capsys.readouterr()))

    return run


def test_usage_names_every_recipe_and_word(call: Callable[..., Done]) -> None:
    done = call()
    assert done.status == 0
    for word in (*choices(), *(name for group in ("scale", "gate", "data", "debug") for name in choices(group))):
        assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", done.out), word


def test_a_sweep_ends_with_a_table(tmp_path: Path, call: Callable[..., Done]) -> None:
    done = call("recipe=sink", "gate=none,sdpa-headwise", "data.context=32", *QUICK)
    assert done.status == 0, done.err
    table = done.out[done.out.rindex("dormant") :]
    assert "gate=none" in table and "gate=sdpa-headwise" in table
    ledgers = [json.loads(file.read_text()) for file in tmp_path.glob("runs/*/ledger.json")]
    assert sorted(bool(ledger["params"]["gate"]) for ledger in ledgers) == [False, True]


def test_the_same_command_says_that_it_is_finished(call: Callable[..., Done]) -> None:
    words = ["recipe=sink", "data.context=32", "name=one", *QUICK]
    call(*words)
    done = call(*words)
    assert done.status == 0
    assert "runs/one is finished" in done.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["recipe=quickstat"], "quickstart"),
        (["recipe=sink", "modle.width=3"], "model.width"),
        (["recipe=sink", "gate=sdpa-headwize"], "sdpa-headwise"),
        (["recipe=sink", "model.heads=3", "model.kv_heads=2"], "model.heads=3"),
        (["recipe=quickstart", "data.corpus=files", "data.path=nowhere.txt", *QUICK], "nowhere.txt"),
        (["recipe=sink", "out=file", *QUICK], "out="),
        (["recipe=sink", "out=~nosuchuser/x", *QUICK], "no home of ~nosuchuser"),
        (["recipe=sink", "trainer.devices=3", "trainer.accelerator=cpu", *QUICK], "data.batch"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    words: list[str], says: str, tmp_path: Path, call: Callable[..., Done]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    done = call(*words)
    assert done.status == 2, done.out + done.err
    assert says in done.err
    assert len(done.err.strip().splitlines()) == 1


def shown_commands() -> list[str]:
    """The README's lines that begin with $, and of the docs the blocks marked as bash."""
    blocks = (block for page in DOCS for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.S))
    found = re.findall(r"^\s*python -m (gatedlm\.\S+ .*)$", "\n".join(blocks), re.M)
    readme = re.findall(r"^\$ python -m (gatedlm\.\S+ .*)$", README.read_text(), re.M)
    return [*dict.fromkeys((*readme, *found))]


def trains_here(command: str) -> bool:
    """A run of several processes and what goes on from it have a test, and processes, of their own."""
    return command.startswith("gatedlm.fit") and "trainer.devices" not in command and "from=" not in command


@pytest.mark.parametrize("command", [c for c in shown_commands() if c.startswith("gatedlm.reproduce")])
def test_shown_findings_are_planned(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)[1:]
    reproduce.main([*words, *["dry=true"] * (words != ["list"])])


def test_the_readmes_findings_are_up_to_date() -> None:
    script = runpy.run_path(str(README.parent / "results" / "readme.py"))
    assert README.read_text().partition(script["BEGIN"])[2].partition(script["END"])[0] == script["findings"]()


def test_there_are_commands() -> None:
    assert len(shown_commands()) >= 9


@pytest.mark.parametrize("command", [c for c in shown_commands() if trains_here(c)])
def test_shown_commands_run(command: str, tmp_path: Path, call: Callable[..., Done]) -> None:
    """Each as it stands but for its length and size; text of one's own is made up."""
    (tmp_path / "notes").mkdir()
    texts = [f"# Note {number}\n" + "A line of a note. " * (20 + number) for number in range(40)]
    for number, text in enumerate(texts):
        (tmp_path / "notes" / f"{number}.md").write_text(text)
    pages = [json.dumps({"body": text, "source": "ab"[len(text) % 2]}) for text in texts]
    (tmp_path / "pages.jsonl").write_text("\n".join(pages))
    done = call(*shlex.split(command)[1:], *QUICK)
    assert done.status == 0, done.out + done.err
    assert list(tmp_path.glob("runs/*/report.html"))


def test_shown_commands_for_two_processes_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = [c for c in shown_commands() if not trains_here(c) and not c.startswith("gatedlm.reproduce")]
    for module, *words in map(shlex.split, commands):
        if module in ("gatedlm.fit", "gatedlm.plan"):  # which start processes, or go without torch
            more = [*QUICK, "trainer.steps=30"] if module == "gatedlm.fit" else []
            line = [sys.executable, "-m", module, *words, *more]
            done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == 0, done.stderr
        else:
            importlib.import_module(module).main(words)
    assert len(commands) >= 5
    assert (tmp_path / "runs" / "two" / "model.safetensors").exists()


def test_what_the_readme_links_to_is_there() -> None:
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", README.read_text())
    tracked = subprocess.run(["git", "ls-files"], cwd=README.parent, capture_output=True, text=True, check=False).stdout
    for link in links:
        assert (README.parent / link).exists(), link
        assert not tracked or any(file.startswith(link) for file in tracked.splitlines()), link
