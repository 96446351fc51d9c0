"""The docs' pages on adding things, done as they say."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jupytext
import pytest
import torch
from omegaconf import OmegaConf

from gatedlm.data.cards import Card
from gatedlm.evaluation.tasks import load_task
from gatedlm.findings.finding import Finding, resolve
from gatedlm.findings.scales import SCALES
from gatedlm.model.lm import GatedLM, ModelSpec, initialise
from gatedlm.recipe import load

ADD = Path(__file__).parents[1] / "docs" / "add"


def blocks(page: str, kind: str) -> list[str]:
    """The code of a page in one language."""
    return re.findall(rf"^```{kind}\n(.*?)^```", (ADD / f"{page}.md").read_text(), re.S | re.M)


def test_every_page_is_half_a_screen():
    assert {page.stem for page in ADD.glob("*.md")} == {"corpus", "finding", "gate", "probe", "recipe", "task"}
    assert all(len(page.read_text().splitlines()) < 45 for page in ADD.glob("*.md"))


def test_a_gate_is_added_as_the_page_says(tmp_path: Path):
    (script,), (words,), (command,) = (blocks("gate", kind) for kind in ("python", "yaml", "bash"))
    (tmp_path / "my_gate.py").write_text(script)
    (tmp_path / "tanh.yaml").write_text(words)
    _, *typed = shlex.split(command)
    done = subprocess.run(
        [sys.executable, *(word.replace("seed=0,1,2", "seed=0,1") for word in typed), "scale=nano", "trainer.steps=2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ledgers = [json.loads(file.read_text()) for file in tmp_path.glob("runs/*/ledger.json")]
    gates = [gate["activation"] for ledger in ledgers for gate in ledger["recipe"]["model"]["gates"]]
    assert sorted(gates) == ["sigmoid", "sigmoid", "tanh", "tanh"] and len(ledgers) == 6
    assert "lower?" in done.stdout and "gate=tanh.yaml" in done.stdout


def test_a_task_is_added_as_the_page_says(tmp_path: Path):
    (rows,), (words,) = (blocks("task", kind) for kind in ("json", "yaml"))
    (tmp_path / "questions.jsonl").write_text(rows)
    (tmp_path / "questions.yaml").write_text(words)
    task = load_task(str(tmp_path / "questions.yaml"))
    assert [item.answers[item.right] for item in task.items] == ["def", "for", "return"]
    solved, asked = (
        "Question: Which word opens a function in Python?\nAnswer: def\n\n",
        "Which word opens a loop in Python?",
    )
    assert task.items[1].prompt == f"{solved}Question: {asked}\nAnswer:"


def test_a_probe_is_added_as_the_page_says():
    function, use = blocks("probe", "python")
    model = GatedLM(ModelSpec(vocab=32))
    initialise(model, seed=0)
    room: dict[str, Any] = {"model": model, "tokens": torch.arange(7)[None]}
    exec("from __future__ import annotations\nfrom gatedlm.probes import LayerTrace\n" + function + use, room)
    assert [tuple(norm.shape) for norm in room["seen"]] == [(1, 7)] * 4


def test_a_finding_is_added_as_the_page_says():
    (text,) = blocks("finding", "python")
    room: dict[str, Any] = {}
    exec(text, room)
    finding, scale = room["FINDING"], SCALES["tiny"]
    assert isinstance(finding, Finding)
    rows = finding.rows(scale, scale.rates)
    gates = [resolve(row, scale, finding.architecture, 1)[0].recipe.model.gates for row in rows]
    assert [[gate.position for gate in each] for each in gates] == [[], ["sdpa"], ["value"]]


def test_a_corpus_is_added_as_the_page_says(tmp_path: Path):
    card, sizes = blocks("corpus", "yaml")
    assert Card(name="name", **OmegaConf.to_container(OmegaConf.create(card))).hub == "org/name"  # type: ignore[arg-type]
    (tmp_path / "mine.yaml").write_text(sizes.replace("NAME", "org/name"))
    (run,) = load(["recipe=quickstart", f"data={tmp_path / 'mine.yaml'}"])
    assert (run.recipe.data.corpus, run.recipe.data.domain_field) == ("org/name", "kind")


def test_a_recipe_is_added_as_the_page_says(tmp_path: Path):
    (text,) = blocks("recipe", "yaml")
    (tmp_path / "mine.yaml").write_text(text)
    (run,) = load([f"recipe={tmp_path / 'mine.yaml'}"])
    assert (run.recipe.optim.lr, run.recipe.model.gates[0].position) == (3e-2, "value")


@pytest.mark.parametrize("page", sorted(ADD.parent.rglob("*.md")), ids=lambda page: page.stem)
def test_a_page_names_modules_and_files_that_exist(page: Path):
    text = page.read_text()
    for module in set(re.findall(r"python -m (gatedlm\.\w+)", text)):
        assert importlib.util.find_spec(module), module
    root = ADD.parents[1]
    for name in set(re.findall(r"`((?:gatedlm|recipes|tests|data)/[\w/.-]*)`", text)) - {"recipes/gate/sdpa-tanh.yaml"}:
        assert (root / name).exists() or "NAME" in name, name


@pytest.mark.parametrize("lesson", sorted((ADD.parents[1] / "tutorials").glob("*.py")), ids=lambda file: file.stem)
def test_what_a_lesson_prints_and_draws_is_kept_for_its_page(lesson: Path):
    """By docs/figures.py, under the number of the cell: no drawing is missing, and none is left from another cell."""
    code = [cell.source for cell in jupytext.read(lesson).cells if cell.cell_type == "code"]
    for call, kind in (("plt.show(", "svg"), ("print(", "txt")):
        kept = {int(file.stem[-2:]) for file in (lesson.parent / "figures").glob(f"{lesson.stem}-*.{kind}")}
        assert kept == {number for number, source in enumerate(code, 1) if call in source}


def test_a_docstring_in_two_columns_becomes_a_list():
    pytest.importorskip("griffe", reason="the site's packages are not installed")
    as_list = runpy.run_path(str(ADD.parent / "docstrings.py"))["as_list"]
    assert as_list("rows   one\n       and two\nlonger three") == "- **rows**: one\n  and two\n- **longer**: three"
    for prose in ("One line.", "A line of prose.\nAnd  another", "key  text\nprose that goes on"):
        assert as_list(prose) == prose
