"""Draws results/sink.svg, the README's figure, from the runs of

python -m gatedlm.fit recipe=sink gate=none,sdpa-elementwise,sdpa-headwise seed=0,1,2,3,4
python results/sink.py runs
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gatedlm.training.callbacks import read_metrics

# Okabe and Ito's colours, which colour-blind readers can tell apart
ARMS = {"none": ("no gate", "#D55E00"), "elementwise": ("elementwise", "#0072B2"), "headwise": ("headwise", "#009E73")}
DORMANT, ACTIVE = "f_attn_dormant", "f_attn_active"


def main(folder: Path) -> None:
    """Left: attention on the first token over training; right: where it ends, seed by seed."""
    runs = _runs(folder)
    figure = Figure(figsize=(7.6, 3.6), layout="constrained")
    curves, ends = figure.subplots(1, 2, width_ratios=[3, 2], sharey=True)
    for arm, (label, colour) in ARMS.items():
        _curves(curves, runs[arm], f"{label}, {len(runs[arm])} seeds", colour)
    for axes in (curves, ends):
        axes.axhline(_uniform(64), color="black", linestyle=":", linewidth=1.2, label="an even spread")
    curves.set(xlabel="step", ylabel="share of attention on the first token", title="dormant queries")
    curves.set_ylim(-0.01, 0.72)  # the legend above the curves, marks at 0 whole
    curves.legend(frameon=False, loc="upper left")
    _ends(ends, runs)
    for axes in (curves, ends):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


def _runs(folder: Path) -> dict[str, list[Path]]:
    runs = defaultdict(list)
    for file in sorted(folder.glob("sink-*/ledger.json")):
        gates = json.loads(file.read_text())["recipe"]["model"]["gates"]
        runs[gates[0]["granularity"] if gates else "none"].append(file.parent)
    return runs


def _curves(axes: Axes, folders: list[Path], label: str, colour: str) -> None:
    curves = [_curve(folder) for folder in folders]
    for curve in curves:
        axes.plot(*zip(*curve, strict=True), color=colour, linewidth=0.6, alpha=0.5)
    mean = [(points[0][0], sum(value for _, value in points) / len(points)) for points in zip(*curves, strict=True)]
    axes.plot(*zip(*mean, strict=True), color=colour, linewidth=2, label=label)


def _curve(folder: Path) -> list[tuple[int, float]]:
    key = f"probe/{DORMANT}"
    return [(line["step"], line[key]) for line in read_metrics(folder / "metrics.jsonl") if key in line]


def _ends(axes: Axes, runs: dict[str, list[Path]]) -> None:
    for place, (arm, (_, colour)) in enumerate(ARMS.items()):
        finals: list[dict[str, Any]] = [json.loads((f / "ledger.json").read_text())["final"] for f in runs[arm]]
        axes.scatter([place] * len(finals), [final[DORMANT] for final in finals], color=colour, s=24)
        axes.scatter([place + 0.25] * len(finals), [final[ACTIVE] for final in finals], color=colour, s=24, marker="x")
    axes.set_xticks([place + 0.12 for place in range(len(ARMS))], [label for label, _ in ARMS.values()])
    axes.set(title="at the end: ● dormant, × active", xlabel="gate", xlim=(-0.4, len(ARMS) - 0.3))


def _uniform(context: int) -> float:
    """The mean over queries i >= 1 of 1/(i+1)."""
    return sum(1 / (i + 1) for i in range(1, context)) / (context - 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
