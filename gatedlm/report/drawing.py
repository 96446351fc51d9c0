"""Figures as SVG elements: matplotlib draws them, the page they stand in gives ink, colours and width."""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import RcKeyType

# Okabe and Ito's colours, told apart by colour-blind readers too: on light paper, on dark paper.
COLOURS = {
    "blue": ("#0072b2", "#56b4e9"),
    "vermillion": ("#d55e00", "#f07b2a"),
    "green": ("#009e73", "#2fc79c"),
    "purple": ("#cc79a7", "#e0a3c5"),
}
BLUE, VERMILLION, GREEN, PURPLE = (light for light, _ in COLOURS.values())
INK = "#000000"
DASHES = ("-", "--", "-.", ":")
LINES = [((BLUE, VERMILLION, GREEN, PURPLE, INK)[i % 5], DASHES[(i + i // 5) % 4]) for i in range(20)]  # no two alike
SMOOTHING = 0.9
DRAWING: dict[RcKeyType, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "gatedlm",  # the same figure is the same file
    "text.parse_math": False,
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": f"cycler(color={[colour for colour, _ in LINES]}, linestyle={[dash for _, dash in LINES]})",
    "axes.formatter.useoffset": False,
    "legend.frameon": False,
}
Line = tuple[np.ndarray, np.ndarray]


def palette() -> str:
    """The colours as variables of a style sheet."""
    light, dark = ("".join(f"--{name}:{shades[i]};" for name, shades in COLOURS.items()) for i in (0, 1))
    return f":root{{{light}}}\n@media (prefers-color-scheme: dark) {{:root{{{dark}}}}}"


def loss_curve(
    training: Line, validation: Line, baselines: Mapping[str, float | None], spikes: list[dict[str, Any]]
) -> str:
    """Losses over steps, the training loss as it is and smoothed, and the baselines; a mark at each spike's peak."""
    steps, loss = training
    if not np.isfinite(loss).any():
        return sentence("No finite training loss was recorded.")
    axes = _axes("step", "loss (nats per token)")
    axes.plot(steps, loss, color=BLUE, alpha=0.35, linewidth=0.8, linestyle="-", marker=_marker(loss), label="training")
    axes.plot(steps, smoothed(loss), color=BLUE, linestyle="-", label=f"training, smoothed ({SMOOTHING})")
    validated = np.isfinite(validation[1]).any()
    if validated:
        axes.plot(*validation, "o--", color=VERMILLION, label="validation")
    _levels(axes, baselines)
    if spikes:
        top = axes.get_xaxis_transform()
        peaks = [spike["peak"] for spike in spikes]
        axes.plot(peaks, [0.98] * len(peaks), "v", color=PURPLE, markersize=6, transform=top, label="spike")
    notes = [_spikes_in_words(spikes), "" if validated else "No validation was recorded."]
    twice = 2 * loss[np.isfinite(loss)][0]
    if axes.get_ylim()[1] > twice:  # a diverging run would press all the rest into a line
        axes.set_ylim(top=twice)
        notes.append("The axis ends at twice the first loss.")
    return _figure(axes, "Loss over steps", " ".join(filter(None, notes)))


def chart(
    label: str,
    x: str,
    y: str,
    lines: dict[str, Line],
    levels: Mapping[str, float | None],
    log: str = "",
) -> str:
    """Lines (x, y) by name with level lines behind them; a gap where a value is not finite.

    ``log`` names the logarithmic axes, x, y or xy; without one both begin at zero.
    """
    known = {name for name, (_, values) in lines.items() if np.isfinite(values).any()}
    if not known:
        return sentence(f"{label}: nothing was recorded.")
    axes = _axes(x, y)
    for name, (at, values) in lines.items():  # one of which nothing is known keeps its colour from the others
        axes.plot(at, values, marker=_marker(values), label=name if name in known else "_")
    _levels(axes, levels)
    if not log:
        axes.update_datalim([(0, 0)])
    axes.autoscale_view()
    for axis in log:
        _log(axes, axis)
    if not log and axes.dataLim.y0 >= 0:
        axes.set_ylim(bottom=0)
    missing = [name for name in lines if name not in known]
    return _figure(axes, label, f"Nothing was recorded of: {', '.join(missing)}." if missing else "")


def attention_map(label: str, attention: np.ndarray) -> str:
    """One head's map (T, T), column 0 drawn wide and apart; what a query could not see stays blank."""
    time = len(attention)
    # Laying out each of many small drawings by itself would take most of the report's time.
    axes = _axes("key position", "query position", size=(2.2, 2.2), layout=None)
    axes.set_position((0.2, 0.19, 0.78, 0.78))
    colours = np.ma.masked_equal(attention, 0) ** 0.5
    width = time / 12
    for part, left, right in ((colours[:, :1], -1.5 * width, -0.5 * width), (colours[:, 1:], 0.5, time - 0.5)):
        if part.size:
            edges = (left, right, time - 0.5, -0.5)
            axes.imshow(part, vmin=0, vmax=1, extent=edges, interpolation="none", aspect="auto")
    later = range(time // 4, time, max(time // 4, 1))
    axes.set(
        xlim=(-1.5 * width, time - 0.5), xticks=[-width, *later], xticklabels=["first", *later], yticks=[0, *later]
    )
    axes.get_xticklabels()[0].set_fontweight("bold")
    first = f"first token {number(float(attention[1:, 0].mean()))}" if time > 1 else "one query"
    return _figure(axes, label, first)


def colour_scale() -> str:
    """Which colour is which probability in ``attention_map``; a tick stands at the square root of its number."""
    axes = _axes("attention probability (colour follows its square root)", "", size=(4.6, 0.7))
    axes.imshow(np.linspace(0, 1, 256)[None], extent=(0, 1, 0, 1), aspect="auto")
    ticks = (0, 0.01, 0.05, 0.2, 0.5, 1)
    axes.set(yticks=[], xticks=np.sqrt(ticks), xticklabels=ticks)
    return f'<div class="scale">{_svg(axes, "Colour scale of the attention maps")}</div>'


def ridges(label: str, mean: list[float], share_below: list[float], histogram: list[list[int]]) -> str:
    """One gate's scores, a histogram per layer on a line of its own; lists are by layer."""
    layers = range(len(histogram))
    axes = _axes("gate score", "layer", size=(4.6, min(1.6 + 0.35 * len(layers), 9)))
    for layer, counts in enumerate(histogram):
        top = layer + 0.9 * np.array(counts) / max(*counts, 1)
        edges = np.linspace(0, 1, len(counts) + 1)
        tenth = len(counts) // 10
        axes.stairs(top[: tenth + 1], edges[: tenth + 2], baseline=layer, fill=True, color=VERMILLION)
        axes.stairs(top[tenth:], edges[tenth:], baseline=layer, fill=True, color=BLUE)
    right = axes.twinx()
    right.spines["right"].set_visible(False)
    means, percent = floats(mean), 100 * floats(share_below)
    numbers = [f"mean {number(m, '.2f')}, <0.1: {number(p, '.1f')} %" for m, p in zip(means, percent, strict=True)]
    for side, labels in ((axes, [str(layer) for layer in layers]), (right, numbers)):
        side.set(ylim=(-0.1, len(layers)), yticks=layers, yticklabels=labels)
    overall = f"mean {number(means.mean(), '.2f')}, {number(percent.mean(), '.1f')} % below 0.1 (orange)"
    note = "each layer has its own height; what lies beyond 0 and 1 counts in the outermost bars."
    return _figure(axes, label, f"{overall}, over all layers; {note}")


def _axes(
    x: str,
    y: str,
    size: tuple[float, float] = (4.6, 2.9),
    layout: Literal["constrained"] | None = "constrained",
) -> Axes:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    axes = Figure(figsize=size, layout=layout).subplots()
    axes.set(xlabel=x, ylabel=y)
    if x in ("step", "layer"):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(color=INK, alpha=0.12, linewidth=0.6)
    return axes


def _log(axes: Axes, name: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    getattr(axes, f"set_{name}scale")("log", nonpositive="mask")
    axis = getattr(axes, f"{name}axis")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _levels(axes: Axes, levels: Mapping[str, float | None]) -> None:
    dashes = (":", (0, (6, 3)))
    for (name, value), dash in zip(levels.items(), dashes, strict=False):
        if value is not None:
            axes.axhline(value, color=INK, alpha=0.75, linewidth=1, linestyle=dash, label=f"{name} {number(value)}")


def _spikes_in_words(spikes: list[dict[str, Any]]) -> str:
    """How many and which is the largest, a rise of None being one that was not finite; nothing if there are none."""
    if not spikes:
        return ""
    rise, peak = max((np.inf if spike["rise"] is None else spike["rise"], spike["peak"]) for spike in spikes)
    several = len(spikes) > 1
    size = f"{rise:.2f} nats" if np.isfinite(rise) else "not finite"
    return f"{len(spikes)} spike{'s' * several}, {'the largest ' * several}{size} at step {peak}."


def _figure(axes: Axes, label: str, note: str) -> str:
    names = axes.get_legend_handles_labels()[1]
    if names:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=_columns(names), borderaxespad=0.2)
    return f"<figure>{_svg(axes, label)}<figcaption><b>{escape(label)}</b> {escape(note)}</figcaption></figure>"


def _columns(names: list[str]) -> int:
    """Two where the names, the first half of them in the left one, fit side by side over a figure."""
    half = (len(names) + 1) // 2
    return 2 if sum(max(map(len, side), default=0) for side in (names[:half], names[half:])) <= 40 else 1


def _svg(axes: Axes, label: str) -> str:
    """The drawing as an element of the page: its width, its ink and its colours are the page's, its ids its own."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    box, drawn = re.findall(r'<svg.*?viewBox="(.*?)".*?>(.*)</svg>', out.getvalue(), re.DOTALL)[0]
    drawn = re.sub(r"<style.*?</style>", "", drawn, flags=re.DOTALL).replace("xlink:href", "href")
    drawn = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>s{zlib.crc32(label.encode(errors='replace')):x}-", drawn)
    for name, (light, _) in COLOURS.items():
        drawn = drawn.replace(light, f"var(--{name})")
    drawn = drawn.replace(INK, "currentColor")
    return f'<svg role="img" aria-label="{escape(label)}" viewBox="{box}">{drawn}</svg>'


def floats(values: Iterable[float | None]) -> np.ndarray:
    """An array with nan for what is missing or not finite."""
    numbers = np.array([np.nan if value is None else value for value in values], dtype=float)
    return np.where(np.isfinite(numbers), numbers, np.nan)


def _marker(values: np.ndarray) -> str:
    return "o" if len(values) <= 60 else ""


def number(value: float | None, style: str = "") -> str:
    """Four significant digits, all of a whole or a large number, or as ``style`` says; words for None or nan."""
    if value is None or not np.isfinite(value):
        return "not finite"
    if style:
        return f"{value:{style}}"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.4g}"


def smoothed(values: np.ndarray) -> np.ndarray:
    """sum_i s^(t-i) x_i / sum_i s^(t-i) over the finite x up to t."""
    total, weight, smooth = 0.0, 0.0, []
    for value in values:
        if np.isfinite(value):
            total, weight = SMOOTHING * total + value, SMOOTHING * weight + 1
        smooth.append(total / weight if weight and np.isfinite(value) else np.nan)
    return np.array(smooth)


def sentence(text: str) -> str:
    """What stands where a figure would."""
    return f'<p class="none">{escape(text)}</p>'
