"""The lessons: their form at once, what they teach by running them, each in an empty folder of its own."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jupytext
import pytest

from gatedlm.findings import NAMES

ROOT = Path(__file__).parent.parent
LESSONS = sorted((ROOT / "tutorials").glob("*.py"))
QUICK = ("01", "02")
RUN = """
import runpy, sys
import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt

def show():
    assert plt.get_fignums()
    for axes in (axes for number in plt.get_fignums() for axes in plt.figure(number).axes if axes.axison):
        assert axes.get_xlabel() or axes.get_ylabel(), "an axis without a label"
        assert axes.get_title() or axes.get_label() == "<colorbar>", "a drawing without a title"
    plt.close("all")

plt.show = show
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def each_lesson(*quick: str) -> pytest.MarkDecorator:
    """All lessons, those not among ``quick`` as slow tests if any are named."""
    slow = [quick and path.name[:2] not in quick for path in LESSONS]
    marks = [[pytest.mark.slow] if far else [] for far in slow]
    params = [pytest.param(path, id=path.stem, marks=mark) for path, mark in zip(LESSONS, marks, strict=True)]
    return pytest.mark.parametrize("path", params)


def cells(path: Path, kind: str = "") -> list[str]:
    """The text of a lesson's cells, as a notebook has them; of one kind, markdown or code, if it is given."""
    return [cell.source for cell in jupytext.read(path).cells if not kind or cell.cell_type == kind]


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of everything that a lesson takes from gatedlm."""
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.Import) or not any(a.name.startswith("gatedlm") for a in node.names)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gatedlm"):
            yield from ((str(node.module), alias.name) for alias in node.names)


def test_there_are_ten():
    assert [path.name[:2] for path in LESSONS] == [f"{number:02}" for number in range(1, 11)]


@each_lesson()
def test_a_lesson_says_what_one_knows_after_it_and_checks_it(path: Path):
    first, *_, last = cells(path)
    assert first.startswith(f"# {int(path.name[:2])}. ") and "**You will know**" in first
    assert last.startswith("## Larger") and "python -m gatedlm." in last
    closing = ast.parse(cells(path, "code")[-1]).body
    asserts = [node for node in closing if isinstance(node, ast.Assert) or "assert_close" in ast.unparse(node)]
    assert len(asserts) >= 3 and closing[-1] is asserts[-1]
    assert "plt.show()" in path.read_text()


@each_lesson()
def test_a_lesson_takes_what_any_user_may(path: Path):
    for module, name in imported(path):
        assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"
        assert not any(part.startswith("_") for part in f"{module}.{name}".split(".")), f"{module}.{name} is private"
    attributes = [node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    assert not [name for name in attributes if name.startswith("_") and not name.endswith("__")]


@each_lesson()
def test_a_lesson_sends_on_to_commands_that_exist(path: Path):
    text = "\n".join(cells(path, "markdown"))
    for command in set(re.findall(r"python -m (gatedlm\.\w+)", text)):
        assert importlib.util.find_spec(command), command
    assert set(re.findall(r"gatedlm\.reproduce (\w+)", text)) <= {*NAMES}


@each_lesson(*QUICK)
def test_a_lesson_teaches_what_it_says(path: Path, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", RUN, path], cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
