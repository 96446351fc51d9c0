"""Writes the README's findings table, between its two marks, from the results of

python -m gatedlm.reproduce all seeds=3 workers=2
python results/readme.py
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from gatedlm.findings import NAMES
from gatedlm.findings.judge import spread
from gatedlm.findings.page import bar, interval
from gatedlm.reproduce import SCALES

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- findings: written by results/readme.py -->\n", "<!-- end of findings -->\n"


def main() -> None:
    """Replace what stands between the marks."""
    before, _, rest = README.read_text().partition(BEGIN)
    README.write_text(before + BEGIN + findings() + END + rest.partition(END)[2])


def findings() -> str:
    """Claims that are expected at the scale they were measured at, a line each, and a count of the others.

    A measurement that several findings make stands once.
    """
    files = [HERE / f"{name}-{scale}.json" for name in NAMES for scale in SCALES]  # of the findings' own settings
    found = [json.loads(file.read_text()) for file in files if file.exists()]
    if not found:
        return ""
    lines = ["| claim | verdict | mean, 90 % interval | seeds | measured by |", "|---|---|---|---|---|"]
    others: Counter[str] = Counter()
    seen, failing = [], []
    for content in found:
        for claim in content["claims"]:
            if claim["support"] in seen and any(claim["support"].values()):
                continue
            seen.append(claim["support"])
            if SCALES.index(claim["expected"]) > SCALES.index(content["scale"]):
                others[claim["verdict"]] += 1
                failing += [(claim, content)] * (claim["verdict"] == "fails")
            else:
                lines.append(_line(claim, content))
    counts = ", ".join(f"{verdict} {number}" for verdict, number in others.most_common())
    rest = f"Claims that are expected at larger scales only: {counts}.{_failing(failing)}\n" if others else ""
    return "\n".join(lines) + "\n\n" + rest


def _failing(claims: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    told = [f"{claim['claim']} ({_page(content)})" for claim, content in claims]
    return f" Those that fail: {'; '.join(told)}." if told else ""


def _page(content: dict[str, Any]) -> str:
    name = f"{content['finding']}-{content['scale']}"
    return f"[{name}](results/{name}.md)"


def _line(claim: dict[str, Any], content: dict[str, Any]) -> str:
    found = spread({int(seed): value for seed, value in claim["support"].items()})
    measured = f"{found.mean:.3g}, {interval(found)} {claim['unit']}"
    return bar((claim["claim"], claim["verdict"], measured, str(found.seeds), _page(content)))


if __name__ == "__main__":
    main()
