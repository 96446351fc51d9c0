"""``python -m gatedlm.reproduce NAME [key=value ...]``: a table or figure of the paper at a size one can afford."""

from __future__ import annotations

import difflib
import math
import shlex
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gatedlm.command import command
from gatedlm.findings import LONG, NAMES, find
from gatedlm.studies.words import folder

if TYPE_CHECKING:  # imported where it is used: usage and a wrong word answer before torch is loaded
    from rich.console import Console

    from gatedlm.findings.finding import Finding, Row, Scale
    from gatedlm.recipe import Run

USAGE = """\
usage: python -m gatedlm.reproduce NAME [key=value ...]

{names}
  all        all but table5 and spikes, the long ones, each run trained once; list prints these names

  scale=tiny    tiny: two CPU cores; small: one GPU; medium: eight; full: the paper's size and schedule
  seeds=1       seeds 0 to N-1; a claim gets its verdict from two on, better three
  workers=1     runs side by side, each with its share of the cores or GPUs
  arch=         dense or moe in place of the finding's own, if its rows fit that
  rates=        learning rates of stability and table2, such as 3e-3,3e-2
  rows=         a part of the rows, by their labels
  out=results   where NAME-SCALE.md, .json and .html go; runs=runs where the runs lie. With other words or rows they are
                called -changed-HASH, and -part-RUNS where a result of more has the name already
  dry=true      only say what would be trained and about how long it takes
  KEY=VALUE     any key of a recipe, for all rows alike

for example: python -m gatedlm.reproduce stability scale=tiny seeds=3 workers=2"""
SCALES = ("tiny", "small", "medium", "full")


@dataclass
class Order:
    """What was asked for."""

    names: list[str]
    scale: str = "tiny"
    seeds: int = 1
    workers: int = 1
    arch: str = ""
    rates: tuple[float, ...] = ()
    rows: tuple[str, ...] = ()
    out: Path = Path("results")
    dry: bool = False
    further: list[str] = field(default_factory=lambda: ["out=runs"])
    parts: list[str] = field(default_factory=list)


@dataclass
class Plan:
    """One finding, all its rows, and the run of each row and seed that was asked for."""

    finding: Finding
    architecture: str
    rows: list[Row]
    runs: dict[str, dict[int, Run]]


def main(words: list[str]) -> None:
    """Train what is missing, write the results, print where.

    Exit status 2 with one line for what cannot be done; 128 + N after signal N.
    """
    usage = USAGE.format(names="\n".join(f"  {name:<10} {text}" for name, text in NAMES.items()))
    stopped = "stopped, all is saved: the same command goes on"
    command([] if words == ["list"] else words, usage, _reproduce, stopped)


def _order(words: list[str]) -> Order:
    (name, *rest), given = words, set[str]()
    _known("finding", name, (*NAMES, "all"))
    order = Order([n for n in NAMES if n not in LONG] if name == "all" else [name])
    for word in rest:
        key, _, value = word.partition("=")
        if not value:
            raise ValueError(f"{word!r} lacks a value: write key=value, such as seeds=3 or scale=tiny")
        if key in given and key in (*READ, "runs"):  # of a recipe's keys the last counts, as in fit
            raise ValueError(f"{word!r}: {key}= is there already, give it once")
        given.add(key)
        if key in READ:
            setattr(order, *READ[key](key, value))
            order.parts += [word] * (key in ("arch", "rates", "rows"))
        elif key == "runs":
            order.further[0] = f"out={value}"
        elif key in ("seed", "recipe", "gate", "name", "debug", "from", "origin"):
            raise ValueError(f"{word!r}: the rows of a finding choose that, change other keys or train runs by fit")
        else:
            order.further.append(word)
    if order.rows and name == "all":
        raise ValueError(f"rows={','.join(order.rows)}: each finding has rows of its own, name one in place of all")
    return order


def _known(what: str, word: str, known: Collection[str]) -> None:
    if word not in known:
        near = difflib.get_close_matches(word, known, 1)
        raise ValueError(f"{what} {word!r}: {f'did you mean {near[0]}? ' if near else ''}there are {', '.join(known)}")


def _count(key: str, value: str) -> tuple[str, int]:
    if not value.isdecimal() or not 0 < int(value) < 1000:
        raise ValueError(f"{key}={value}: a whole number above 0 and below 1000")
    return key, int(value)


def _scale(key: str, value: str) -> tuple[str, str]:
    _known("scale", value, SCALES)
    return key, value


def _arch(key: str, value: str) -> tuple[str, str]:
    _known("arch", value, ("dense", "moe"))
    return key, value


def _rates(key: str, value: str) -> tuple[str, tuple[float, ...]]:
    try:
        rates = tuple(sorted({float(part) for part in value.split(",")}))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise ValueError(f"rates={value}: learning rates above 0 with commas between, such as 3e-3,3e-2")
    return key, rates


def _dry(key: str, value: str) -> tuple[str, bool]:
    _known("dry", value, ("true", "false"))
    return key, value == "true"


READ: dict[str, Any] = {
    "scale": _scale,
    "seeds": _count,
    "workers": _count,
    "arch": _arch,
    "rates": _rates,
    "rows": lambda key, value: (key, tuple(value.split(","))),
    "out": lambda key, value: (key, folder(key, value)),
    "dry": _dry,
}


def _reproduce(words: list[str]) -> None:
    from rich.console import Console

    from gatedlm.findings.scales import SCALES
    from gatedlm.findings.sweep import sweep

    order, asked = _order(words), f"python -m gatedlm.reproduce {shlex.join(words)}"
    console, scale = Console(markup=False), SCALES[order.scale]
    plans = [_plan(find(name), order, scale) for name in order.names]
    runs = {run.recipe.name: run for plan in plans for seeds in plan.runs.values() for run in seeds.values()}
    if order.dry:
        _print_plan(plans, runs, order, scale, console)
        return
    _writable("out", order.out)
    _writable("runs", Path(next(iter(runs.values())).recipe.out))
    problems = sweep([*runs.values()], order.workers, console)
    for plan in plans:
        try:
            console.print(_write(plan, order, asked), soft_wrap=True, highlight=False)
        except (ValueError, OSError) as error:  # of a run that cannot be read; other findings may do without it
            problems.append(f"{plan.finding.name}: {error}")
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        raise SystemExit(2)


def _writable(key: str, place: Path) -> None:
    """Make a folder and write in it, before hours of training are lost for it; ValueError where that can't be done."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise ValueError(f"{key}={place}: cannot write there ({error.strerror}), give another folder") from None


def _plan(found: Finding, order: Order, scale: Scale) -> Plan:
    from gatedlm.findings.finding import resolve

    every = found.rows(scale, order.rates)
    if order.rates and [row.label for row in every] == [row.label for row in found.rows(scale, (math.inf,))]:
        raise ValueError(f"rates=: the rows of {found.name} are not made of learning rates, leave it out")
    rows, words = _asked(every, order.rows), tuple(order.further)
    architecture = _architecture(found, rows, order.arch, scale)
    runs = {row.label: resolve(row, scale, architecture, order.seeds, words) for row in rows}
    if words[1:] and _apart(runs) < _apart({row.label: resolve(row, scale, architecture, 1) for row in rows}):
        raise ValueError(
            f"{' '.join(words[1:])}: some rows differ in just that; change other keys or train runs by fit"
        )
    return Plan(found, architecture, every, runs)


def _asked(rows: list[Row], labels: tuple[str, ...]) -> list[Row]:
    """The rows of these labels and those they are compared with or begin with; without labels all."""
    for label in labels:
        _known("row", label, [row.label for row in rows])
    asked = [row for row in rows if row.label in labels]
    begun = (row.origin.label for row in asked if row.origin)
    wanted = {rows[0].label, *labels, *(row.against for row in asked), *begun}
    return [row for row in rows if row.label in wanted] if labels else rows


def _architecture(found: Finding, rows: list[Row], arch: str, scale: Scale) -> str:
    """That of ``arch``, without it the finding's own; ValueError where it leaves no choice or a row cannot be made."""
    if not arch:
        return found.architecture
    if found.architecture == "backcopy":
        raise ValueError(f"arch={arch}: the model of {found.name} is one attention layer, leave it out")
    if misfits := [row.label for row in rows if not _fits(row, arch, scale)]:
        raise ValueError(f"arch={arch}: {found.name} cannot have {', '.join(misfits)} then, name other rows by rows=")
    return arch


def _fits(row: Row, arch: str, scale: Scale) -> bool:
    from gatedlm.findings.finding import resolve

    try:
        return bool(resolve(row, scale, arch, 1))
    except ValueError:
        return False


def _apart(runs: dict[str, dict[int, Run]]) -> int:
    """How many of the rows are runs of their own."""
    return len({of_row[0].recipe.name for of_row in runs.values()})


def _write(plan: Plan, order: Order, asked: str) -> str:
    from gatedlm.findings.finding import Table
    from gatedlm.findings.page import write
    from gatedlm.findings.records import record

    found = {
        label: {
            seed: kept for seed, run in runs.items() if (kept := record(run, plan.finding.curves, plan.finding.after))
        }
        for label, runs in plan.runs.items()
    }
    about = {
        "command": asked,
        "scale": order.scale,
        "architecture": plan.architecture,
        "seeds": [*range(order.seeds)],
        "words": [*order.parts, *order.further[1:]],
    }
    path = write(plan.finding, Table(plan.rows, found), about, order.out)
    beside = ", beside a result of more runs, which stays" if "-part-" in path.stem else ""
    return f"{plan.finding.name}: {path}{beside}"


def _print_plan(plans: list[Plan], runs: dict[str, Run], order: Order, scale: Scale, console: Console) -> None:
    """Rows with parameters and runs to do, then the time that all of them take together."""
    from rich import box
    from rich.table import Table

    from gatedlm.findings.sweep import unfinished

    table = Table("finding", "row", "parameters", "runs to do", box=box.SIMPLE_HEAD)
    for plan in plans:
        for label, of_row in plan.runs.items():
            params = of_row[0].recipe.model.parameters().total
            table.add_row(
                plan.finding.name, label, f"{params:,}", f"{len(unfinished([*of_row.values()]))}/{len(of_row)}"
            )
    console.print(table)
    todo = unfinished([*runs.values()])
    seconds = sum(map(scale.seconds, todo)) / order.workers
    console.print(
        f"{len(todo)} of {len(runs)} runs to do, about {seconds:,.0f} s with workers={order.workers} on idle cores"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
