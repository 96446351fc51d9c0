"""What the ready recipes must reach: claims of the README, trained for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gatedlm.recipe import load
from gatedlm.training.run import train


def finals(words: list[str], out: Path) -> list[dict[str, Any]]:
    return [train(run, Console(quiet=True)) for run in load([*words, "trainer.threads=1", f"out={out}"])]


def test_quickstart_beats_the_bigram_model_long_before_its_end(tmp_path: Path) -> None:
    (ledger,) = finals(["recipe=quickstart", "trainer.steps=250"], tmp_path)
    assert ledger["final"]["val/loss"] < ledger["baselines"]["bigram"] - 0.1
    assert ledger["baselines"]["bigram"] < ledger["baselines"]["unigram"] - 1


@pytest.mark.slow
def test_quickstart_and_its_mixture(tmp_path: Path) -> None:
    dense, mixture = (finals([f"recipe={name}"], tmp_path)[0] for name in ("quickstart", "quickstart-moe"))
    for ledger in (dense, mixture):
        assert ledger["final"]["val/loss"] < ledger["baselines"]["bigram"] - 0.35
    assert mixture["params"]["active"] < mixture["params"]["total"]


@pytest.mark.slow
def test_the_sink_goes_with_a_gate(tmp_path: Path) -> None:
    ungated, gated = finals(["recipe=sink", "gate=none,sdpa-headwise"], tmp_path)
    assert ungated["final"]["f_attn_dormant"] > 0.1 > 0.04 > gated["final"]["f_attn_dormant"]
    for ledger in (ungated, gated):
        assert ledger["final"]["f_attn_active"] < 0.04
        assert ledger["final"]["val/loss"] < ledger["baselines"]["bigram"] - 0.3
