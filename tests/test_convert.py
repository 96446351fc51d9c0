"""The command that turns weights of one layout into another, on a run from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import pipeline

from gatedlm import consolidate, convert, fit
from gatedlm.hub import open_model, opening
from gatedlm.hub.config import config_of
from gatedlm.hub.layout import OFFICIAL, QWEN3_MOE, Layout, links
from gatedlm.model.feedforward import ExpertsSpec
from gatedlm.model.gate import GateSpec
from gatedlm.model.lm import GatedLM, ModelSpec

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the quickstart that has a checkpoint and no safetensors yet."""
    out = tmp_path_factory.mktemp("runs")
    fit.main(["recipe=quickstart", "gate=sdpa-headwise", "scale=nano", "name=try", f"out={out}"])
    return out / "try"


def test_a_run_writes_the_same_tokens_in_transformers(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "out"
    convert.main([f"in={run}", f"out={out}", "to=transformers"])
    assert capsys.readouterr().out.splitlines() == [str(out / "model.safetensors"), f"{out}: Qwen3NextForCausalLM"]
    write = pipeline("text-generation", str(out))
    text = "def main("
    found = write(text, do_sample=False, max_new_tokens=16, return_tensors=True)[0]["generated_token_ids"]
    here = open_model(str(run))
    assert here.tokenizer and here.first == 0
    tokens = [here.first, *here.tokenizer.encode(text, add_special_tokens=False).ids]
    for _ in range(16):
        tokens.append(int(here.net(torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] in here.stop:
            break
    assert found == tokens


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_of_one_rank_and_of_shards_and_consolidated_weights_are_one(run: Path, tmp_path: Path) -> None:
    whole = open_model(str(run))
    assert whole.name == "try"
    sharded = tmp_path / "runs" / "sharded"
    state = sharded / "checkpoints" / "step-00000001" / "state"
    state.mkdir(parents=True)
    (sharded / "recipe.yaml").write_text((run / "recipe.yaml").read_text())
    weights = {f"net.{name}": tensor for name, tensor in whole.net.state_dict().items()}
    save({"state_dict": weights, "other": torch.ones(3)}, checkpoint_id=state, no_dist=True)
    (state.parent / "manifest.json").write_text(json.dumps({"step": 1, "files": {}}))
    consolidate.main([f"run={run}", f"out={tmp_path / 'flat'}"])
    for folder in (sharded, tmp_path / "flat"):
        found = open_model(str(folder)).net
        assert found.spec == whole.net.spec
        assert all(torch.equal(a, b) for a, b in zip(found.parameters(), whole.net.parameters(), strict=True))


def test_a_run_as_ours_keeps_its_recipe(run: Path, tmp_path: Path) -> None:
    convert.main([f"in={run}", f"out={tmp_path / 'out'}", "to=gatedlm"])
    assert (tmp_path / "out" / "recipe.yaml").read_text() == (run / "recipe.yaml").read_text()
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == open_model(str(run)).net.state_dict().keys()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["in=RUN", "out=OUT"], "to= is missing"),
        (["in=RUN", "out=OUT", "to="], "to="),
        (["in=RUN", "out=OUT", "to=onnx"], "to=onnx"),
        (["in=RUN", "out=OUT", "to=official", "x=1"], "x=1"),
        (["in=RUN", "out=RUN", "to=official"], "exists"),
        (["in=nowhere", "out=OUT", "to=official"], "nowhere"),
        (["in=RUN/report.html", "out=OUT", "to=official"], "a file"),
        (["in=RUN", "out=RUN/report.html/x", "to=official"], "report.html"),
        (["in=EMPTY", "out=OUT", "to=official"], "recipe.yaml"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    words: list[str], says: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"RUN": run, "OUT": tmp_path / "out", "EMPTY": tmp_path / "empty"}
    for place, path in places.items():
        words = [word.replace(place, str(path)) for word in words]
    with pytest.raises(SystemExit) as exit:
        convert.main(words)
    assert exit.value.code == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert says in captured.err
    assert len(captured.err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_ctrl_c_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(opening, "write", interrupt)
    with pytest.raises(SystemExit) as exit:
        convert.main([f"in={run}", f"out={tmp_path / 'out'}", "to=transformers"])
    assert exit.value.code == 130
    assert not [*tmp_path.iterdir()]


def test_usage_answers_before_torch_is_loaded() -> None:
    script = "import sys; sys.modules['torch'] = None; from gatedlm import convert; convert.main([])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "to=gatedlm|transformers|official" in done.stdout


MEMORY = r"""
import re, sys
from pathlib import Path
from gatedlm.hub import convert, opening
def most(): return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
opening.SHARD = 10**8
before = most()
convert(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
print(most() - before)
"""
LARGE = ModelSpec(vocab=32_000, layers=6, width=1024, heads=8, kv_heads=4, head_dim=128, ffn=16_384)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        (replace(LARGE, gates=[GateSpec()]), OFFICIAL),
        (replace(LARGE, ffn=768, experts=ExpertsSpec(64, 2)), QWEN3_MOE),
    ],
)
def test_memory_does_not_hold_the_model(spec: ModelSpec, layout: Layout, tmp_path: Path) -> None:
    """Most that conversion adds to the process, mapped pages counted, for a model of eight or more written files."""
    here = tmp_path / "there"
    here.mkdir()
    (here / "config.json").write_text(json.dumps(config_of(spec, layout, 64, torch.bfloat16)))
    torch.save(drawn(spec, layout), here / "pytorch_model.bin")
    size = (here / "pytorch_model.bin").stat().st_size
    for to in ("gatedlm", "transformers"):
        words = [sys.executable, "-c", MEMORY, str(here), str(tmp_path / to), to]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
        here = tmp_path / to
        assert len(list(here.glob("*.safetensors"))) >= 8
        assert int(done.stdout) < 0.7 * size


def drawn(spec: ModelSpec, layout: Layout) -> dict[str, torch.Tensor]:
    ours = GatedLM(spec).to(torch.bfloat16).state_dict()
    pairs = ((link.theirs, link.pack([ours[name] for name in link.ours])) for link in links(spec, layout))
    return {name: tensor.clone() for names, some in pairs for name, tensor in zip(names, some, strict=True)}
