"""Pages made from what already says it: lessons, recipes, results and docstrings; mkdocs runs this before it builds.

Nothing is executed: a lesson's page shows what its cells printed and drew, as it lies in tutorials/figures.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jupytext
import mkdocs_gen_files
import yaml

ROOT = Path(__file__).parents[1]
SOURCE = "https://github.com/gatedlm/gatedlm/blob/main/"  # for files that are no pages
KEPT = ROOT / "tutorials" / "figures"
WIDE = "---\nhide: [toc]\n---\n\n"  # the width of the table of contents goes to code and tables
VERDICTS = ("holds", "fails", "too small to say")
LESSONS = """One idea each, a picture each, about a minute of computing or less. Each builds on earlier ones alone and
ends in assertions of what was learnt. They are scripts, `python tutorials/04_the_sink_seen.py`; `jupytext --to notebook
tutorials/*.py` makes notebooks of them."""
FINDINGS = """Tables and figures of the paper, trained anew at sizes for two CPU cores, and how many of the paper's
claims hold there. Many are claims about large models: each page says from which scale on one is expected. What
surprised us is in the [log](LOG.md)."""


def main() -> None:
    """Write lessons/, recipes.md, findings/ and reference/, each folder with its own navigation."""
    write("sink.svg", (ROOT / "results" / "sink.svg").read_text())
    lessons()
    recipes()
    findings()
    reference()


def write(page: str, text: str) -> None:
    """A page of the site."""
    with mkdocs_gen_files.open(page, "w") as file:
        file.write(text)


def menu(folder: str, entries: list[tuple[str, str]]) -> None:
    """The navigation of a folder: titles and the files they lead to."""
    write(f"{folder}/SUMMARY.md", "".join(f"* [{title}]({page})\n" for title, page in entries))


def title(text: str) -> str:
    """The first heading of a Markdown text."""
    return next(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))


def lessons() -> None:
    """Each lesson as text and code, every cell with what it printed and drew."""
    entries, lines = [], []
    for file in sorted((ROOT / "tutorials").glob("[0-9]*.py")):
        parts = [*_cells(file), f"`python tutorials/{file.name}` runs this lesson."]
        page, name = f"{file.stem}.md", title(parts[0])
        write(f"lessons/{page}", WIDE + "\n\n".join(parts) + "\n")
        entries.append((name, page))
        known = re.search(r"\*\*You will know\*\* (.*?)(?=\n\n|\Z)", parts[0], re.S)
        lines.append(f"**[{name}]({page})** You will know {known[1] if known else ''}\n\n")
    write("lessons/index.md", f"# Lessons\n\n{LESSONS}\n\n" + "".join(lines))
    menu("lessons", [("Lessons", "index.md"), *entries])


def _cells(lesson: Path) -> Iterator[str]:
    """A lesson's text, code, output and drawings, in this order for each cell; a drawing is named by its heading."""
    number, heading = 0, ""
    for cell in jupytext.read(lesson).cells:
        if cell.cell_type == "markdown":
            heading = (re.findall(r"^#+ (.+)$", cell.source, re.M) or [heading])[-1]
            yield cell.source
            continue
        number += 1
        place = KEPT / f"{lesson.stem}-{number:02}"
        yield f"```python\n{cell.source}\n```"
        if (printed := place.with_suffix(".txt")).exists():
            yield f"``` {{ .text .output }}\n{printed.read_text()}```"
        if (drawn := place.with_suffix(".svg")).exists():
            write(f"lessons/{drawn.name}", drawn.read_text())
            yield f"![{heading}: what the cell above draws]({drawn.name})"


def recipes() -> None:
    """What each ready recipe shows, where it runs and how long it takes, from its own ``about``."""
    lines = ["# Recipes", "", "| recipe | shows | runs on | takes |", "|---|---|---|---|"]
    abouts = {file: yaml.safe_load(file.read_text())["about"] for file in (ROOT / "recipes").glob("*.yaml")}
    for file, about in sorted(abouts.items(), key=_small_first):
        said = " | ".join(map(str, about.values()))
        lines.append(f"| [`{file.stem}`]({SOURCE}recipes/{file.name}) | {said} |")
    lines += [
        "",
        "`python -m gatedlm.fit recipe=NAME` trains one. Words that change it:",
        "",
        "| word | values |",
        "|---|---|",
    ]
    for group in ("scale", "gate", "data", "debug"):
        names = ", ".join(f"`{file.stem}`" for file in sorted((ROOT / "recipes" / group).glob("*.yaml")))
        lines.append(f"| `{group}=` | {names} |")
    write("recipes.md", WIDE + "\n".join(lines) + "\n")


def _small_first(entry: tuple[Path, dict[str, str]]) -> tuple[bool, int, str]:
    file, about = entry
    machines = re.match(r"\d+", about["runs_on"])
    return "GPU" in about["runs_on"], int(machines[0]) if machines else 99, file.stem


def findings() -> None:
    """The maintainers' results, with their figures a page further, and the log of what surprised them."""
    entries, lines = [], []
    for file in sorted((ROOT / "results").glob("*-*.md")):
        text, drawn, verdicts = file.read_text(), file.with_suffix(".html"), _verdicts(file.with_suffix(".json"))
        write(f"findings/{drawn.name}", drawn.read_text())
        link = f"[The same with figures]({drawn.name})\n\n" * ("<svg" in drawn.read_text())
        shown = _with_links_out(text, file.parent).replace(" ± ", " ±\u00a0").replace("## ", f"{link}## ", 1)
        write(f"findings/{file.name}", WIDE + shown)
        entries.append((title(text), file.name))
        lines.append(f"| [{title(text)}]({file.name}) | " + " | ".join(str(verdicts[each]) for each in VERDICTS) + " |")
    log = ROOT / "results" / "LOG.md"
    write("findings/LOG.md", _with_links_out(log.read_text(), log.parent))
    entries.append((title(log.read_text()), log.name))
    head = f"| finding | {' | '.join(VERDICTS)} |\n|---|---:|---:|---:|"
    write("findings/index.md", f"{WIDE}# Findings\n\n{FINDINGS}\n\n{head}\n" + "\n".join(lines) + "\n")
    menu("findings", [("Findings", "index.md"), *entries])


def _verdicts(result: Path) -> Counter[str]:
    return Counter(claim["verdict"] for claim in json.loads(result.read_text())["claims"])


def _with_links_out(text: str, folder: Path) -> str:
    """Links to files that are no pages lead to the source instead."""

    def out(link: re.Match[str]) -> str:
        target = (folder / link[1]).resolve()
        known = target.suffix == ".md" and target.parent == folder
        return link[0] if known or not target.exists() else f"]({SOURCE}{target.relative_to(ROOT)})"

    return re.sub(r"\]\((?!https?:|#)([^)]+)\)", out, text)


def reference() -> None:
    """A page for each room, from its docstrings."""
    entries = []
    for room, modules in _rooms():
        page = f"{room}.md"
        text = "\n\n".join(f"::: {module}" for module in modules)
        write(f"reference/{page}", f"# {room}\n\n{text}\n")
        entries.append((room, page))
    write("reference/index.md", "# Reference\n\n" + "".join(f"- [{room}]({page})\n" for room, page in entries))
    menu("reference", [("Reference", "index.md"), *entries])


def _rooms() -> Iterator[tuple[str, list[str]]]:
    package = ROOT / "gatedlm"
    for entry in sorted(package.iterdir()):
        if entry.suffix == ".py" and entry.stem != "__init__":
            yield f"gatedlm.{entry.stem}", [f"gatedlm.{entry.stem}"]
        elif (entry / "__init__.py").exists():
            stems = sorted(file.stem for file in entry.glob("*.py") if file.stem != "__init__")
            yield f"gatedlm.{entry.name}", [f"gatedlm.{entry.name}.{stem}" for stem in stems]


main()
