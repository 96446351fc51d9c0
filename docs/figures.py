"""Runs lessons and keeps what they draw in tutorials/figures, where their pages find it.

python docs/figures.py [NUMBER ...]
"""

from __future__ import annotations

import os
import runpy
import sys
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib
import matplotlib.pyplot as plt

TUTORIALS = Path(__file__).parents[1] / "tutorials"


def main(numbers: list[str]) -> None:
    """Lessons by number, without one all of them, each in an empty folder."""
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "gatedlm"  # the same drawing, the same file
    (TUTORIALS / "figures").mkdir(exist_ok=True)
    for lesson in sorted(TUTORIALS.glob("[0-9]*.py")):
        if not numbers or lesson.stem[:2] in numbers:
            draw(lesson)


def draw(lesson: Path) -> None:
    """Run a lesson and save each figure where it would be shown."""
    shown = count(1)

    def keep() -> None:
        for number in plt.get_fignums():
            place = TUTORIALS / "figures" / f"{lesson.stem}-{next(shown)}.svg"
            plt.figure(number).savefig(place, metadata={"Date": None}, bbox_inches="tight")
        plt.close("all")

    plt.show = keep
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        runpy.run_path(str(lesson), run_name="__main__")
        os.chdir(TUTORIALS)


if __name__ == "__main__":
    main(sys.argv[1:])
