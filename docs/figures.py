"""Runs lessons and keeps what each cell prints and draws in tutorials/figures, where their pages find it.

python docs/figures.py [NUMBER ...]
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jupytext
import matplotlib
import matplotlib.pyplot as plt

TUTORIALS = Path(__file__).parents[1] / "tutorials"
KEPT = TUTORIALS / "figures"


def main(numbers: list[str]) -> None:
    """Lessons by number, without one all of them, each in an empty folder."""
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "gatedlm"  # the same drawing, the same file
    KEPT.mkdir(exist_ok=True)
    for lesson in sorted(TUTORIALS.glob("[0-9]*.py")):
        if not numbers or lesson.stem[:2] in numbers:
            with TemporaryDirectory() as folder:
                os.chdir(folder)
                run(lesson)
                os.chdir(TUTORIALS)


def run(lesson: Path) -> None:
    """Run a lesson cell by cell; LESSON-CELL.txt is what a cell has printed, LESSON-CELL.svg what it has shown."""
    for old in KEPT.glob(f"{lesson.stem}-*"):
        old.unlink()
    room: dict[str, Any] = {"__name__": "__main__"}
    code = (cell.source for cell in jupytext.read(lesson).cells if cell.cell_type == "code")
    for number, source in enumerate(code, 1):
        place = KEPT / f"{lesson.stem}-{number:02}"
        plt.show = lambda place=place: keep(place)
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(source, lesson.name, "exec"), room)
        if lines := [line.rstrip() for line in printed.getvalue().splitlines()]:
            place.with_suffix(".txt").write_text("\n".join(lines).strip("\n") + "\n")


def keep(place: Path) -> None:
    """Save the one figure of a cell."""
    plt.savefig(place.with_suffix(".svg"), metadata={"Date": None}, bbox_inches="tight")
    plt.close()


if __name__ == "__main__":
    main(sys.argv[1:])
