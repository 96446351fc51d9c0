"""Findings: how claims are judged, what rows are made of, and what a reader gets."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from gatedlm import reproduce
from gatedlm.data.needles import lesson
from gatedlm.data.tokenizer import train
from gatedlm.findings import NAMES, find
from gatedlm.findings.arms import arms_table
from gatedlm.findings.finding import Claim, Finding, Row, Table, by_seed, halvings, resolve
from gatedlm.findings.judge import judge, spearman, spread
from gatedlm.findings.page import cell, write
from gatedlm.findings.records import recovery
from gatedlm.findings.scales import SCALES
from gatedlm.findings.stability import sensitivity
from gatedlm.findings.table5 import _text, needle_score, text_loss
from gatedlm.model.lm import GatedLM
from gatedlm.training.ledger import read_ledger, write_ledger

NANO = ["trainer.steps=2", "trainer.val_batches=1", "model.layers=1", "data.context=16", "data.batch=4"]


def record(loss: float | None, initial: float = 7.0, **final: float | None) -> dict[str, Any]:
    return {
        "status": "finished" if loss is not None else "diverged",
        "steps": 400,
        "seconds": 10.0,
        "params": {"total": 1000},
        "initial_loss": initial,
        "final": {"val/loss": loss, **final},
        "by_layer": {},
        "scores": {},
        "spikes": [],
        "spike_events": [],
        "curves": {},
    }


def table(**losses: Sequence[float | None]) -> Table:
    rows = {label: {seed: record(loss) for seed, loss in enumerate(values)} for label, values in losses.items()}
    return Table([Row(label) for label in losses], rows)


# --- the rule


def test_the_interval_is_students() -> None:
    found = spread({0: 1.0, 1: 2.0, 2: 4.0})
    # mean 7/3, sd sqrt(7/3), t(0.95; 2) = 2.920
    assert (found.mean, found.sd) == (pytest.approx(7 / 3), pytest.approx(math.sqrt(7 / 3)))
    assert found.high - found.mean == pytest.approx(2.920 * math.sqrt(7 / 3) / math.sqrt(3))


@pytest.mark.parametrize(
    ("support", "verdict"),
    [
        ([0.30, 0.32, 0.28], "holds"),
        ([-0.30, -0.32, -0.28], "fails"),
        ([0.30, -0.32, 0.05], "too small to say"),
        ([0.30], "too small to say"),
        ([0.3, 0.1], "too small to say"),  # t(0.95; 1) = 6.31
        ([0.30, 0.29], "holds"),
        ([], "not measured"),
        ([math.nan], "not measured"),
        ([0.0, 0.0, 0.0], "too small to say"),
        ([0.3, math.nan, 0.31, 0.29], "holds"),
    ],
)
def test_verdicts(support: list[float], verdict: str) -> None:
    assert judge(dict(enumerate(support))) == verdict


def test_rank_correlation() -> None:
    assert spearman([1, 2, 3, 4, 5], [5, 6, 7, 8, 7]) == pytest.approx(0.8207826816681233)
    assert spearman([3, 1, 2], [9, 0, 4]) == pytest.approx(1)
    assert math.isnan(spearman([1, 1, 1], [1, 2, 3]))
    paper = find("table4").rows(SCALES["tiny"], ())[1:]
    score, m_act, f_attn = zip(*(row.paper[:3] for row in paper), strict=True)
    assert spearman([*score], [*f_attn]) == spearman([*score], [*m_act]) == pytest.approx(1)


def test_differences_are_paired_by_seed() -> None:
    found = table(baseline=[4.0, 5.0, 6.0], gated=[3.9, 4.9, 5.9])
    assert found.below("gated", "baseline") == pytest.approx({0: 0.1, 1: 0.1, 2: 0.1})
    assert judge(found.below("gated", "baseline")) == "holds"


def test_a_diverged_run_is_a_result() -> None:
    found = table(baseline=[None, None], gated=[3.0, 3.01])
    assert found.losses("baseline") == {0: 7.0, 1: 7.0}
    assert judge(found.below("gated", "baseline")) == "holds"
    broken_off = record(3.5) | {"status": "diverged"}
    assert Table([Row("baseline")], {"baseline": {0: broken_off}}).losses("baseline") == {0: 7.0}


def test_a_missing_run_supports_nothing() -> None:
    found = Table(
        [Row("baseline"), Row("gated")], {"baseline": {0: record(4.0), 1: record(4.0)}, "gated": {1: record(3.0)}}
    )
    assert found.below("gated", "baseline") == {1: 1.0}


def test_a_run_that_began_with_no_finite_loss_has_none_when_it_diverged() -> None:
    rows = {0: record(None), 1: record(4.0)}
    for run in rows.values():
        run["initial_loss"] = None
    found = Table([Row("baseline")], {"baseline": rows})
    assert found.losses("baseline") == found.capped("baseline") == {1: 4.0}


def test_of_nothing_nothing_is_folded() -> None:
    assert by_seed([]) == {}
    assert halvings({0: 8.0, 1: 8.0, 2: 0.0, 3: 1.0}, {0: 2.0, 1: 0.0, 2: 1.0}) == {0: 2.0}


def test_sensitivity_by_hand() -> None:
    losses = {"baseline lr=0.1": [9.0], "baseline lr=0.01": [4.0], "baseline lr=0.001": [5.0]}
    # 9 counts as the initial 7: (7 + 4 + 5) / 3 - 4
    assert sensitivity(table(**losses), "baseline")[0] == pytest.approx(4 / 3)
    assert sensitivity(table(**{"baseline lr=0.1": [9.0]}), "baseline") == {}, "no rate to compare with"


def support(name: str, claim: str, found: Table) -> dict[int, float]:
    (wanted,) = (each for each in find(name).claims if each.text == claim)
    return wanted.support(found)


def test_lower_losses_by_hand() -> None:
    losses = {
        "baseline lr=0.1": 4.0,
        "baseline lr=0.01": 3.0,
        "SDPA headwise lr=0.1": 3.5,
        "SDPA headwise lr=0.01": 3.2,
    }
    found = table(**{label: [loss] for label, loss in losses.items()})
    for words, lead in {
        "at the smallest rate": -0.2,
        "in the mean over the rates": 0.15,
        "at the largest rate": 0.5,
    }.items():
        measured = support("stability", f"SDPA headwise has the lower loss {words}", found)
        assert measured == {0: pytest.approx(lead)}


def test_the_setting_that_spikes_most_by_hand() -> None:
    counts = {"a: baseline": 0.0, "a: SDPA elementwise": 1.0, "b: baseline": 4.0, "b: SDPA elementwise": 2.0}
    runs = {label: {7: record(3.0, spikes_per_thousand=count)} for label, count in counts.items()}
    found = Table([Row(label) for label in counts], runs)
    assert support("spikes", "over all settings the gated model's loss spikes less", found) == {7: 0.5}
    most = "so it does in the setting that spikes most, both arms counted"
    assert support("spikes", most, found) == {7: 2.0}
    calm = {label: {7: record(3.0, spikes_per_thousand=0.0)} for label in counts}
    assert support("spikes", most, Table(found.rows, calm)) == {}


@pytest.mark.parametrize("name", NAMES)
def test_claims_on_rows_left_out_are_not_measured(name: str) -> None:
    rows = find(name).rows(SCALES["tiny"], ())
    alone = Table(rows, {rows[0].label: {seed: record(3.0, m_act=1.0, harm=1.0) for seed in range(3)}})
    verdicts = {claim.text: judge(claim.support(alone)) for claim in find(name).claims}
    own = {text for text in verdicts if "baseline" in text and name == "streaming" and ":" not in text}
    assert {text for text, verdict in verdicts.items() if verdict != "not measured"} == own


@pytest.mark.parametrize(
    ("values", "style", "text"),
    [
        ([0.5, 0.7], "+.3f", "+0.600 ± 0.141"),
        ([3000.0, 4000.0], ".3g", "3,500 ± 707"),
        ([1500.0], "+.3f", "+1,500"),
        ([-0.25], "+.3f", "-0.250"),
        ([math.inf], ".2f", "-"),
        ([], ".2f", "-"),
    ],
)
def test_a_cell_is_mean_and_deviation(values: list[float], style: str, text: str) -> None:
    assert cell(dict(enumerate(values)), style) == text


def test_recovery_is_how_long_events_last() -> None:
    found = record(3.0) | {"spikes": [10, 12, 13, 90], "spike_events": [{"start": 10}, {"start": 90}]}
    assert recovery(found) == pytest.approx((4 + 1) / 2)
    assert recovery(record(3.0)) is None


# --- rows

# What the paper's figures cannot be reproduced by, see the notes of table1 and table6
ODD = {"+4 experts": 453.0, "switch kv 8top8": 355.5, "switch kv 4top4": 152.6, "switch v 4top4": 76.3}
ODD |= {"switch v 8top2": 177.7, "switch v 1top1": 0.2}


@pytest.mark.parametrize("name", NAMES)
def test_rows_build_and_add_the_papers_parameters(name: str) -> None:
    found, scale = find(name), SCALES["tiny" if name in ("sink", "streaming") else "full"]
    rows = found.rows(scale, ())
    specs = [resolve(row, scale, found.architecture, 1)[0].recipe.model for row in rows]
    with torch.device("meta"):
        for spec in {repr(spec): spec for spec in specs}.values():
            assert sum(p.numel() for p in GatedLM(spec).parameters()) == spec.parameters().total
    for row, spec in zip(rows, specs, strict=True):
        added = (spec.parameters().total - specs[0].parameters().total) / 1e6
        if row.added is not None:
            assert added == pytest.approx(ODD.get(row.label, row.added), abs=0.7)
        if row.matched:
            assert -1e-9 <= added / specs[0].parameters().total * 1e6 < 0.007


def run_names(name: str) -> set[str]:
    found, scale = find(name), SCALES["tiny"]
    runs = [resolve(row, scale, found.architecture, 1)[0] for row in found.rows(scale, ())]
    return {run.recipe.name for run in runs}


def test_rows_are_fair_and_shared() -> None:
    scale, runs = SCALES["tiny"], {}
    for name in sorted(NAMES.keys() - {"spikes"}):
        found = find(name)
        for row in found.rows(scale, ()):
            for seed, run in resolve(row, scale, found.architecture, 2).items():
                assert run.recipe.seed == seed
                same = runs.setdefault(run.recipe.name, run.recipe)
                assert same == run.recipe
    names = {name: run_names(name) for name in ("table1", "table3", "table4", "figure2", "stability", "table2")}
    assert len(names["table3"] & names["table1"]) == 4 and len(names["table4"] & names["table1"]) == 5
    assert names["figure2"] <= names["table4"] and names["table2"] <= names["stability"]


def test_table5_reads_needles_and_lengths_off_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A net whose hidden states tell the next token scores 100, one that is a token off 0; losses are of all tokens."""
    tokenizer = train([lesson("needle", 600, seed) for seed in range(9)], 400)
    told: dict[str, int] = {"off": 0}

    class Oracle(torch.nn.Module):
        embed, readout = torch.nn.Embedding(400, 400), torch.eye(400)

        def hidden(self, tokens: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
            return 50 * torch.nn.functional.one_hot(tokens.roll(told["off"] - 1, 1), 400).float(), []

    net: Any = Oracle()
    assert needle_score(net, tokenizer, 200) == 100
    rows = torch.arange(2 * 9).view(2, 9)
    assert text_loss(net, rows) == pytest.approx(50 * 2 / 16, abs=1e-3), "all but the last, which it cannot see"
    told["off"] = 1
    assert needle_score(net, tokenizer, 200) == 0


def test_table5_cuts_the_validation_stream() -> None:
    rows = torch.arange(1, 41).unfold(0, 9, 8)  # rows of 8 + 1 tokens that share their ends

    class Split:
        packed = staticmethod(lambda indices: rows[indices])
        __len__ = lambda self: len(rows)  # noqa: E731

    data: Any = SimpleNamespace(validation=Split())
    assert _text(data, 99).tolist() == list(range(1, 34))


@pytest.mark.parametrize("scale", ["small", "medium"])
def test_larger_scales_resolve(scale: str) -> None:
    for name in ("table1", "table5", "stability"):
        found = find(name)
        row = found.rows(SCALES[scale], ())[1]
        assert resolve(row, SCALES[scale], found.architecture, 1)[0].recipe.trainer.accelerator == "gpu"


# --- the command


def rows_of(name: str) -> list[str]:
    """A gated row, or what stands first after the baseline."""
    labels = [row.label for row in find(name).rows(SCALES["tiny"], ())]
    wanted = {"stability": "SDPA elementwise lr=0.01", "table2": "SDPA elementwise lr=0.01", "table6": "switch v 8top2"}
    wanted |= {"table5": "SDPA elementwise extended"}
    return [wanted.get(name, next((label for label in labels if label == "SDPA elementwise"), labels[1]))]


@pytest.fixture(scope="module", autouse=True)
def few_needles() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gatedlm.findings.table5.NEEDLES", 3)
        patch.setattr("gatedlm.findings.table5.TEXTS", 2)
        yield


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reproduced")


@pytest.mark.parametrize("name", NAMES)
def test_each_finding_trains_and_renders(name: str, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [name, f"rows={','.join(rows_of(name))}", f"runs={out / 'runs'}", f"out={out}", *NANO, "trainer.threads=1"]
    if name == "table5":  # whose rows differ in their contexts, which have to hold a needle
        words = [*(word for word in words if "context" not in word), "data.max_tokens=100_000"]
    reproduce.main(words)
    (file,) = out.glob(f"{name}-tiny-changed-*.json")
    assert file.with_suffix(".md").name in capsys.readouterr().out.replace("\n", "")
    content = json.loads(file.read_text())
    text, page = (file.with_suffix(kind).read_text() for kind in (".md", ".html"))
    assert content["words"][0] == words[1]
    for row in content["rows"]:
        loss = row["runs"]["0"]["final"]["val/loss"]
        assert f"| {row['label']} | {loss:.3f} |" in text and f"<td>{loss:.3f}</td>" in page
    verdicts = [claim["verdict"] for claim in content["claims"]]
    assert {*verdicts} <= {"too small to say", "not measured"}  # one seed
    assert len(verdicts) == text.count("too small to say**") + text.count("not measured**") and "Student" in page
    reproduce.main([*words, "dry=true"])
    assert "0 of" in capsys.readouterr().out


def test_a_part_does_not_take_the_place_of_the_whole() -> None:
    whole, part = (
        reproduce._order(["stability", *words]) for words in ([], ["rows=baseline", "rates=1e-2", "seeds=2"])
    )
    assert (whole.parts, part.parts) == ([], ["rows=baseline", "rates=1e-2"])


def test_what_was_measured_is_written(tmp_path: Path) -> None:
    rows = [Row("baseline", paper=(6.026,)), Row("gated", paper=(5.761,), added=201)]
    measured = {"baseline": {0: record(4.0), 1: record(4.2)}, "gated": {0: record(3.9), 1: record(None)}}
    claim = Claim("it helps", lambda t: t.below("gated", "baseline"), "nats", "tiny")
    made = Finding("made", "Made up", "moe", lambda scale, rates: rows, claims=(claim,))
    text = write(made, Table(rows, measured), ABOUT, tmp_path).read_text()
    # 0.1 nats below and, diverged from 7.0, 2.8 above: mean +1.35, sd 2.05
    assert "| gated (diverged: 1 of 2) | 5.450 ± 2.192 |" in text and "| +1.350 ± 2.051 |" in text
    assert "| it helps | **too small to say** | 0.1, -2.8 |" in text
    assert "| gated | 5.761 | 201 M |" in text


ABOUT = {"command": "x", "scale": "tiny", "architecture": "moe", "seeds": [0, 1], "words": []}


def write_made(out: Path, words: Sequence[str] = (), **losses: Sequence[float | None]) -> Path:
    made = Finding("made", "Made up", "moe", lambda scale, rates: [], columns=("m_act",))
    return write(made, table(**losses), ABOUT | {"words": [*words]}, out)


def test_a_loss_beyond_any_perplexity_is_written(tmp_path: Path) -> None:
    assert "| baseline | 400.000 ± 565.685 | 1.00 |" in write_made(tmp_path, baseline=[0.0, 800.0]).read_text()


def test_fewer_runs_do_not_replace_a_result(tmp_path: Path) -> None:
    whole = write_made(tmp_path, baseline=[4.0, 4.1], gated=[3.9, 3.8])
    before = whole.read_text()
    part = write_made(tmp_path, baseline=[5.0, 5.1], gated=[5.0])
    assert (whole.name, part.name, whole.read_text()) == ("made-tiny.md", "made-tiny-part-3.md", before)
    assert "1 of 4 runs are missing." in part.read_text() and "missing" not in before
    assert write_made(tmp_path, baseline=[5.0, 5.1], gated=[5.0, 5.1]) == whole and whole.read_text() != before
    (tmp_path / "made-tiny.json").write_text("{")
    assert write_made(tmp_path, baseline=[4.0]) == whole, "what cannot be read is no fuller result"
    assert not [*tmp_path.glob("*.part")]


def test_other_words_have_results_of_their_own(tmp_path: Path) -> None:
    names = {write_made(tmp_path, words, baseline=[4.0]).stem for words in (["rows=a"], ["rows=b"], ["rows=a", "c=1"])}
    assert len(names) == 3 and all(name.startswith("made-tiny-changed-") for name in names)


def test_a_page_says_what_its_columns_are(tmp_path: Path) -> None:
    text = write_made(tmp_path, baseline=[4.0]).read_text()
    assert 0 < text.index("M-Act: largest |h|") < text.index("| M-Act |")


def test_a_sweep_with_a_problem_ends_with_status_2_and_keeps_the_fuller_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gatedlm.findings.sweep.sweep", lambda runs, workers, console: ["baseline seed=0: locked"])
    rows = [{"label": "baseline", "runs": {"0": {}}}]
    (tmp_path / "sink-tiny.json").write_text(json.dumps({"rows": rows}))
    with pytest.raises(SystemExit) as ended:
        reproduce.main(["sink", f"runs={tmp_path / 'runs'}", f"out={tmp_path}"])
    said = capsys.readouterr()
    assert (ended.value.code, said.err) == (2, "baseline seed=0: locked\n")
    assert "sink-tiny-part-0.md, beside a result of more runs" in said.out
    assert json.loads((tmp_path / "sink-tiny.json").read_text()) == {"rows": rows}


@pytest.mark.parametrize(("args", "status"), [((signal.SIGTERM,), 143), ((), 130)])
def test_a_stopped_sweep_ends_with_the_status_of_its_signal(
    args: tuple[int, ...], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt(*args)

    monkeypatch.setattr("gatedlm.findings.sweep.sweep", stop)
    with pytest.raises(SystemExit) as ended:
        reproduce.main(["sink", f"runs={tmp_path / 'runs'}", f"out={tmp_path}"])
    assert ended.value.code == status


LEDGER = {
    "schema": 1,
    "name": "row-1",
    "seed": 0,
    "recipe": {},
    "tokens": 9,
    "tokens_per_second": 2.5,
    "baselines": {"bigram": None},
    "scores": {"sdpa": {"mean": [0.5], "share_below": [0.1], "histogram": [[3, 4]]}},
    "params": {"total": 9, "active": 9, "gate": 0},
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": None},
        {"seconds": "3"},
        {"params": {"total": 9, "active": 9}},
        {"baselines": []},
        {"final": {"val/loss": 3.0, "m_act": "large"}},
        {"by_layer": {"m_act": 3.0}},
        {"scores": {"sdpa": {"mean": [0.5], "share_below": [0.1], "histogram": [3, 4]}}},
        {"spikes": ["4"]},
        {"spike_events": [{"start": 4}]},
    ],
)
def test_a_ledger_of_another_shape_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    whole = record(None, m_act=None) | {"initial_loss": None} | LEDGER
    write_ledger(tmp_path, whole)
    assert read_ledger(tmp_path) == whole
    for content in (whole | wrong, {key: value for key, value in whole.items() if key not in wrong}):
        write_ledger(tmp_path, content)
        with pytest.raises(ValueError, match=r"ledger\.json: not a ledger, remove the file to train the run again"):
            read_ledger(tmp_path)


@pytest.mark.parametrize("key", ["out", "runs"])
def test_a_place_that_cannot_be_made_is_refused_before_the_sweep(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gatedlm.findings.sweep.sweep", lambda *_: pytest.fail("trained"))
    Path("file").write_text("")
    with pytest.raises(SystemExit) as ended:
        reproduce.main(["sink", f"{key}=file/sub"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"{key}=file/sub: cannot write there (Not a directory), give another folder\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tabel1"], "did you mean table1"),
        (["table1", "scale=tiney"], "did you mean tiny"),
        (["table1", "seeds=0"], "seeds=0: a whole number above 0"),
        (["table1", "rows=SDPA elementwis"], "did you mean SDPA elementwise"),
        (["stability", "rates=3e-3,x"], "rates=3e-3,x: learning rates"),
        (["table1", "seed=3"], "the rows of a finding choose that"),
        (["table1", "optim.lr"], "lacks a value"),
        (["table1", "optim.lrr=3"], "unknown key 'optim.lrr'"),
        (["sink", "scale=medium"], "scale=medium has dense, moe"),
        (["table1", "dry=yes"], "there are true, false"),
        (["table2", "optim.lr=1e-3"], "optim.lr=1e-3: some rows differ in just that"),
        (["sink", "model.gates=[]"], "some rows differ in just that"),
        (["table1", "trainer.steps=2,3"], "the rows of a finding do not sweep"),
        (["table1", f"out={__file__}"], "a file, give the folder"),
        (["stability", "rates=nan,3e-3"], "rates=nan,3e-3: learning rates above 0"),
        (["table1", "rates=3e-3"], "the rows of table1 are not made of learning rates"),
        (["sink", "arch=moe"], "arch=moe: the model of sink is one attention layer"),
        (["table1", "arch=dense"], "arch=dense: table1 cannot have k=8, q=48, +4 experts then"),
        (["table3", "data.path=notes"], "data.path=notes: data.corpus=stdlib reads no files of yours, add data=files"),
        (["figure2", "from=runs/mine"], "'from=runs/mine': the rows of a finding choose that"),
        (["figure2", "rows=baseline", "rows=SDPA headwise"], "'rows=SDPA headwise': rows= is there already"),
        (["all", "rows=baseline"], "rows=baseline: each finding has rows of its own"),
    ],
)
def test_wrong_words_end_in_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        reproduce.main(words)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and says in said and said.count("\n") == 1


def test_usage_names_every_finding(capsys: pytest.CaptureFixture[str]) -> None:
    reproduce.main(["list"])
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in NAMES)


def test_a_reader_who_has_enough_of_the_list() -> None:
    """As ``| head -1``: the other end of the pipe is closed before all is written."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "gatedlm.reproduce", "list"], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_sweep_goes_on(number: int, tmp_path: Path) -> None:
    words = ["table2", f"runs={tmp_path / 'runs'}", f"out={tmp_path}", "seeds=1", "workers=2", *NANO]
    words += ["trainer.steps=60", "trainer.checkpoint_every=5", "trainer.threads=1"]
    command = [sys.executable, "-m", "gatedlm.reproduce", *words]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not any(tmp_path.glob("runs/*/ledger.json")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(timeout=60) == (-number if number == signal.SIGKILL else 128 + number)
    ended = {file: file.stat().st_mtime_ns for file in tmp_path.glob("runs/*/ledger.json")}
    while subprocess.run(["pgrep", "-s", str(process.pid)], capture_output=True).returncode == 0:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert ended and {file: file.stat().st_mtime_ns for file in ended} == ended  # none was trained again
    (result,) = tmp_path.glob("table2-tiny-changed-*.json")
    assert [len(row["runs"]) for row in json.loads(result.read_text())["rows"]] == [1] * 8
    assert result.with_suffix(".md").exists()


# --- a sweep of one's own


def ledgers(**arms: Sequence[float | None]) -> dict[str, Any]:
    """By the labels that ``fit gate=... seed=...`` gives its runs."""
    return {
        f"gate={arm} seed={seed} optim.lr=1e-2": record(loss) | {"seed": seed}
        for arm, losses in arms.items()
        for seed, loss in enumerate(losses)
    }


def shown(ledgers: dict[str, Any]) -> list[list[str]]:
    """The cells of the table, row by row."""
    made = arms_table(ledgers)
    assert made is not None
    return [list(cells) for cells in zip(*(column.cells for column in made.columns), strict=True)]


def test_arms_are_compared_seed_by_seed() -> None:
    rows = shown(ledgers(none=[3.0, 4.0, 5.0], value=[2.5, 3.4, 4.6], key=[3.1, 3.9, 5.0]))
    assert rows[1][:2] == ["  gate=none\n  optim.lr=1e-2", "4 ± 1"]
    # 0.5, 0.6, 0.4: mean 0.5, sd 0.1, half the interval 2.920 * 0.1 / sqrt(3) = 0.169
    assert rows[2] == ["  gate=value\n  optim.lr=1e-2", "3.5 ± 1.05", "0.5", "0.331 to 0.669", "holds"]
    assert rows[3][-1] == "too small to say"


def test_arms_stay_whole_on_a_narrow_terminal() -> None:
    runs = ledgers(**{"none": [3.0, 3.01], "sdpa-elementwise": [3.01, 3.0], "sdpa-headwise": [3.2, 3.3]})
    for run in runs.values():
        run["final"]["f_attn_fixed_first"] = 0.0123
    console = Console(width=80, file=io.StringIO())
    console.print(arms_table(runs))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(word in said for word in ("gate=sdpa-elementwise ", "gate=sdpa-headwise ", "-0.0631 to 0.0631", "fails"))


def test_an_arm_that_diverged_counts_with_the_loss_it_began_with() -> None:
    rows = shown(ledgers(none=[3.0, 3.2], value=[None, None]))
    assert rows[2][1:] == ["7 ± 0", "-3.9", "-4.53 to -3.27", "fails"]


@pytest.mark.parametrize("arms", [{}, {"none": [3.0], "value": [2.5]}])
def test_arms_of_one_seed_have_no_table(arms: dict[str, list[float]]) -> None:
    assert arms_table(ledgers(**arms)) is None
