"""Pages made from what already says it: lessons, recipes, results and docstrings; mkdocs runs this before it builds.

Nothing is executed: a lesson's page shows the figures that lie in tutorials/figures.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import jupytext
import mkdocs_gen_files
import yaml

ROOT = Path(__file__).parents[1]
SOURCE = "https://github.com/gatedlm/gatedlm/blob/main/"  # for files that are no pages
CELLS = re.compile(r"^---\n.*?^---\n", re.M | re.S)


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
    """Each lesson as text and code, with the figures it has drawn."""
    entries = []
    for file in sorted((ROOT / "tutorials").glob("[0-9]*.py")):
        text = CELLS.sub("", jupytext.writes(jupytext.read(file), fmt="md"), count=1)
        pictures = sorted((ROOT / "tutorials" / "figures").glob(f"{file.stem}*.svg"))
        for picture in pictures:
            write(f"lessons/{picture.name}", picture.read_text())
        shown = "\n".join(f"![what this lesson draws]({picture.name})" for picture in pictures)
        write(f"lessons/{file.stem}.md", f"{text}\n\n{shown}\n\n`python tutorials/{file.name}` runs it.\n")
        entries.append((title(text), f"{file.stem}.md"))
    write("lessons/index.md", "# Lessons\n\n" + "".join(f"1. [{name}]({page})\n" for name, page in entries))
    menu("lessons", [("Lessons", "index.md"), *entries])


def recipes() -> None:
    """What each ready recipe shows, where it runs and how long it takes, from its own ``about``."""
    lines = ["# Recipes", "", "| recipe | shows | runs on | takes |", "|---|---|---|---|"]
    for file in sorted((ROOT / "recipes").glob("*.yaml")):
        about = yaml.safe_load(file.read_text())["about"]
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
    write("recipes.md", "\n".join(lines) + "\n")


def findings() -> None:
    """The maintainers' results and the log of what surprised them."""
    entries = []
    for file in sorted((ROOT / "results").glob("*.md")):
        text = file.read_text()
        write(f"findings/{file.name}", _with_links_out(text, file.parent))
        entries.append((title(text), file.name))
    log = [entry for entry in entries if entry[1] == "LOG.md"]
    rest = [entry for entry in entries if entry not in log]
    write("findings/index.md", "# Findings\n\n" + "".join(f"- [{name}]({page})\n" for name, page in rest + log))
    menu("findings", [("Findings", "index.md"), *rest, *log])


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
