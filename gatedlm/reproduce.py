"""``python -m gatedlm.reproduce NAME [key=value ...]``: a table or figure of the paper at a size one can afford."""

from __future__ import annotations

import difflib
import shlex
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gatedlm.findings import NAMES, find

if TYPE_CHECKING:  # imported where it is used: usage and a wrong word answer before torch is loaded
    from rich.console import Console

    from gatedlm.findings.finding import Finding, Row, Scale
    from gatedlm.recipe import Run

USAGE = """\
usage: python -m gatedlm.reproduce NAME [key=value ...]

{names}
  all        all of them, each run trained once; list prints these names

  scale=tiny    tiny: two CPU cores; small: one GPU; medium: eight; full: the paper's size and schedule
  seeds=1       seeds 0 to N-1; a claim gets its verdict from two on, better three
  workers=1     runs side by side, each with its share of the cores or GPUs
  arch=         dense or moe, where the finding does not leave the choice to the paper
  rates=        learning rates of stability and table2, such as 3e-3,3e-2
  rows=         a part of the rows, by their labels
  out=results   where NAME-SCALE.md, .json and .html go; runs=runs where the runs lie
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
    further: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)


@dataclass
class Plan:
    """One finding with the run of each row and seed."""

    finding: Finding
    architecture: str
    rows: list[Row]
    runs: dict[str, dict[int, Run]]


def main(words: list[str]) -> None:
    """Train what is missing, write the results, print where; exit status 2 with one line for what can't be done."""
    if not words or {"-h", "--help"} & set(words) or words == ["list"]:
        print(USAGE.format(names="\n".join(f"  {name:<10} {text}" for name, text in NAMES.items())))
        return
    try:
        _reproduce(_order(words), f"python -m gatedlm.reproduce {shlex.join(words)}")
    except (ValueError, OSError) as error:
        print(*str(error).splitlines(), file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("stopped, all is saved: the same command goes on", file=sys.stderr)
        raise SystemExit(130) from None


def _order(words: list[str]) -> Order:
    name, *rest = words
    _known("finding", name, (*NAMES, "all"))
    order = Order([*NAMES] if name == "all" else [name])
    order.further = ["out=runs"]
    for word in rest:
        key, _, value = word.partition("=")
        if not value:
            raise ValueError(f"{word!r} lacks a value: write key=value, such as seeds=3 or scale=tiny")
        if key in READ:
            setattr(order, *READ[key](key, value))
            order.parts += [word] * (key in ("arch", "rates", "rows"))
        elif key == "runs":
            order.further[0] = f"out={value}"
        elif key in ("seed", "recipe", "gate", "name", "debug"):
            raise ValueError(f"{word!r}: the rows of a finding choose that, change other keys or train runs by fit")
        else:
            order.further.append(word)
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
    if not rates or rates[0] <= 0 or rates[-1] == float("inf"):
        raise ValueError(f"rates={value}: learning rates above 0 with commas between, such as 3e-3,3e-2")
    return key, rates


def _out(key: str, value: str) -> tuple[str, Path]:
    place = Path(value).expanduser()
    if place.exists() and not place.is_dir():
        raise ValueError(f"{key}={value}: a file, give the folder that results go to")
    return key, place


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
    "out": _out,
    "dry": _dry,
}


def _reproduce(order: Order, command: str) -> None:
    from rich.console import Console

    from gatedlm.findings.scales import SCALES
    from gatedlm.findings.sweep import sweep

    console, scale = Console(markup=False), SCALES[order.scale]
    plans = [_plan(find(name), order, scale) for name in order.names]
    runs = {run.recipe.name: run for plan in plans for seeds in plan.runs.values() for run in seeds.values()}
    if order.dry:
        _print_plan(plans, runs, order, scale, console)
        return
    problems = sweep([*runs.values()], order.workers, console)
    for plan in plans:
        console.print(_write(plan, order, command), soft_wrap=True, highlight=False)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        raise SystemExit(2)


def _plan(found: Finding, order: Order, scale: Scale) -> Plan:
    from gatedlm.findings.finding import resolve

    architecture = order.arch if order.arch and found.architecture != "backcopy" else found.architecture
    rows = found.rows(scale, order.rates)
    if order.rows:
        labels = [row.label for row in rows]
        for label in order.rows:
            _known("row", label, labels)
        asked = [row for row in rows if row.label in order.rows]
        begun = (row.origin.label for row in asked if row.origin)
        wanted = {labels[0], *order.rows, *(row.against for row in asked), *begun}
        rows = [row for row in rows if row.label in wanted]
    words = tuple(order.further)
    runs = {row.label: resolve(row, scale, architecture, order.seeds, words) for row in rows}
    if words[1:] and _apart(runs) < _apart({row.label: resolve(row, scale, architecture, 1) for row in rows}):
        raise ValueError(
            f"{' '.join(words[1:])}: some rows differ in just that; change other keys or train runs by fit"
        )
    return Plan(found, architecture, rows, runs)


def _apart(runs: dict[str, dict[int, Run]]) -> int:
    """How many of the rows are runs of their own."""
    return len({of_row[0].recipe.name for of_row in runs.values()})


def _write(plan: Plan, order: Order, command: str) -> str:
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
        "command": command,
        "scale": order.scale,
        "architecture": plan.architecture,
        "seeds": [*range(order.seeds)],
        "words": [*order.parts, *(word for word in order.further if not word.startswith("out="))],
    }
    return f"{plan.finding.name}: {write(plan.finding, Table(plan.rows, found), about, order.out)}"


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
    console.print(f"{len(todo)} of {len(runs)} runs to do, about {seconds:,.0f} s with workers={order.workers}")


if __name__ == "__main__":
    main(sys.argv[1:])
