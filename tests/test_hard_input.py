"""Whatever is wrong with words, files or folders: a command ends with status 2 and one line that names the culprit."""

from __future__ import annotations

import gzip
import json
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from gatedlm import fit
from gatedlm.catalogue import GROUPS
from gatedlm.data import packing
from gatedlm.data import tokenizer as tokens
from gatedlm.recipe import KEYS

SINK = ["recipe=sink", "scale=nano", "trainer.steps=2"]
FILES = ["recipe=quickstart", "scale=nano", "trainer.steps=2", "data.corpus=files", "data.vocab=300", "data.context=16"]
Refused = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run a command in an empty folder; the one line it says as it ends with status 2."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, status: int = 2) -> str:
        monkeypatch.setattr(sys, "argv", ["fit", *words])
        with pytest.raises(SystemExit) as ended:
            fit.main(list(words))
        said = capsys.readouterr().err
        assert ended.value.code == status, (words, said)
        assert said.endswith("\n") and len(said.splitlines()) == 1, (words, said)
        return said.rstrip("\n")

    return run


# Words: misspelt keys at every depth, values of the wrong kind for every key


def slips(key: str) -> list[str]:
    """The key with a letter lost, doubled, swapped or changed; with dashes; too deep; and below a wrong root."""
    letters = random.Random(key)
    at = letters.choice([i for i in range(1, len(key) - 1) if key[i - 1 : i + 2].isalpha()] or [1])
    slipped = [
        key[:at] + key[at + 1 :],
        key[:at] + 2 * key[at] + key[at + 1 :],
        key[: at - 1] + key[at] + key[at - 1] + key[at + 1 :],
        key[:at] + "q" + key[at + 1 :],
    ]
    return [*slipped, f"--{key}", f"{key}.deeper", f"modle.{key}"]


def unfit(kind: Any) -> list[str]:
    """Words that a key of this type must not take."""
    if get_origin(kind) is Literal:
        first = get_args(kind)[0]
        return [f"{first}x", first.upper(), f"[{first}]", "7", "true", "null"]
    if get_origin(kind) is tuple:
        return ["3", "[]", "[0.9]", "[a,b]", "[0.9,0.9,0.9]", "[-0.1,0.9]", "[null,0.9]", "{a: 1}"]
    if kind is int:
        return ["many", "-1", "1.5", "1e99", "true", "null", "[1]", "9007199254740992"]
    if kind is float:
        return ["much", "-0.5", ".nan", ".inf", "1e38", "false", "null", "{a: 1}"]
    if kind is bool:
        return ["maybe", "1", "0.0", "null", "[true]"]
    if str in (kind, *get_args(kind)):
        return ["${seed}", "???", "a\x07b", "\udcff", "'a", ""]
    return ["maybe", "3", "null", "{nothing: 1}" if get_origin(kind) is None else "[3]"]


LEAVES = [key.replace("*", "0") for key in KEYS if key != "model.gates.*"]
MISSPELT = [slip for key in LEAVES for slip in slips(key) if slip not in (*LEAVES, *KEYS, *GROUPS, "recipe")]
WRONG = [f"{key}={text}" for key in LEAVES for text in unfit(KEYS[key.replace(".0", ".*")])]
WRONG = [word for word in WRONG if word != "name='a"]


def test_no_generated_word_slips_through(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("model.gates: [{position: value}]")
    sample = random.Random(0).sample(MISSPELT, 150) + WRONG
    assert len(sample) > 450
    for word in sample:
        key = word.partition("=")[0]
        assert key in refused("recipe=one.yaml", word if "=" in word else f"{word}=1"), word


# Words that fit one by one and not together, or not this machine

SIZES = {
    "model.heads=3": "model.heads=3 is not a multiple of model.kv_heads=2",
    "model.kv_heads=3": "model.kv_heads=3",
    "model.kv_heads=8": "model.kv_heads=8",
    "model.head_dim=7": "model.head_dim=7",
    "model.rope.base=1": "model.rope.base=1.0",
    "model.vocab=63": "model.vocab=63 is less than data.vocab=64",
    "model.experts={count: 2, used: 3}": "count=2 used=3",
    "model.experts={count: 4, used: 0}": "count=4 used=0",
    "model.experts.count=4 model.width=36": "model.width=36",
    "model.experts.count=4 model.ffn=20": "model.ffn=20",
    "model.gates=[{},{}]": "two gates at sdpa",
    "model.gates=[{combine: replace}]": "source=self and combine=replace go together",
    "model.gates=[{source: self}]": "source=self and combine=replace go together",
    "model.gates=[{combine: replace, source: self, activation: identity}]": "would do nothing",
    "model.gates=[{combine: replace, source: self, activation: silu, granularity: headwise}]": "f(Y) acts on each",
    "model.gates=[{activation: rmsnorm}]": "rmsnorm normalises Y itself",
    "model.gates=[{position: output, granularity: headwise}]": "the output projection has mixed the heads",
    "model={qk_norm: true, gates: [{position: key, granularity: headwise}]}": "QK-norm cancels",
    "model={sandwich_norm: true, gates: [{sharing: shared, granularity: headwise}]}": "sandwich norm cancels",
    "data.vocab=10": "data.vocab=10: too few",
    "data.batch=5 trainer.devices=2": "data.batch=5",
    "data.batch=4 trainer.devices=3": "data.batch=4",
    "data.holdout=0": "data.holdout=0.0",
    "data.holdout=0.6": "data.holdout=0.6",
    "data.workers=100000": "data.workers=100000",
    "trainer.threads=100000": "trainer.threads=100000",
    "optim.betas=[1,0.9]": "optim.betas=[1.0, 0.9]",
    "optim.betas=[0.9,1.5]": "optim.betas=[0.9, 1.5]",
    "optim.floor=1.01": "optim.floor=1.01",
    "name=../elsewhere": "name=../elsewhere",
    "name=..": "name=..",
    "name=a/b": "name=a/b",
    "data.corpus=stdlob": "data.corpus=stdlob: did you mean stdlib?",
    "data.corpus=a/b/c/d": "data.corpus=a/b/c/d",
    "data.corpus=files": "data.path=",
    "data.corpus=stdlib data.vocab=256": "data.vocab=256: smaller than the 256 bytes",
    "model.ffn=100000000000000": "make room",
    "data.batch=1000000000000000": "data.batch=1000000000000000 and",
    "gate=nowhere": "gate='nowhere'",
    "scale=nano,tinny": "scale='tinny'",
    "gate=none+": "gate=''",
    "data=": "'data=' lacks a value",
    "out=taken": "taken/",
    "seed=1,1": "seed=1",
    f"name={'a' * 300}": "File name too long",
    f"gate={'a' * 300}": "gate='aaa",
    "gate=~nobody/x.yaml": "~nobody/x.yaml",
    **{
        f"{key}=0": f"{key}=0"
        for key in (
            "model.vocab", "model.layers", "model.width", "model.heads", "model.kv_heads", "model.head_dim",
            "model.ffn", "data.context", "data.batch", "trainer.steps", "trainer.devices", "trainer.nodes",
            "trainer.log_every", "trainer.keep", "optim.lr", "optim.eps",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("words", SIZES)
def test_sizes_that_do_not_fit(words: str, refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the folder should be")
    assert SIZES[words] in refused(*SINK, *re.split(r" (?=model\.|data\.|trainer\.)", words))


@pytest.mark.parametrize(
    ("gpus", "words"), [(0, ["trainer.accelerator=gpu"]), (1, ["trainer.devices=2"]), (3, ["trainer.devices=4"])]
)
def test_more_gpus_than_there_are(
    gpus: int, words: list[str], refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    assert refused(*SINK, *words).startswith(f"{words[0]}: ")


# Files

GOOD = "".join(json.dumps({"text": f"a sentence about gates, number {i}", "kind": "a"}) + "\n" for i in range(300))
TEXT = "".join(f"sentence {i} about gates {'word ' * (i % 7)}\n" for i in range(300))


def parquet(texts: Any, damage: Callable[[bytes], bytes] = bytes) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": texts}), sink, compression="snappy", use_dictionary=False, row_group_size=100)
    return damage(sink.getvalue().to_pybytes())


def gz(cut: Callable[[bytes], bytes] = bytes) -> bytes:
    return cut(gzip.compress(GOOD.encode(), mtime=0))


def put(file: Path, content: str | bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())


RECIPES: dict[str, str | bytes] = {
    "an open bracket": "optim: {lr: 3",
    "a tab": "seed: 1\n\tlr: 2",
    "two documents": "seed: 1\n---\nseed: 2",
    "a key twice": "seed: 1\nseed: 2",
    "a list": "- seed",
    "a number": "3",
    "a page of the web": "<!DOCTYPE html><html>404: not found</html>",
    "a tag of Python": "seed: !!python/object:os.system x",
    "a number that is none": "seed: !!int x",
    "an alias to nothing": "seed: *nothing",
    "an alias to itself": "model: &a {rope: *a}",
    "brackets without end": "[" * 5000,
    "a picture": b"\x89PNG\r\n\x1a\n",
    "zeros": bytes(99),
    "UTF-16": "seed: 1".encode("utf-16"),
    "control characters in text": 'out: "a\\0b"',
    "a line end in text": 'name: "a\\nb"',
    "its own base": "base: x.yaml",
    "no such base": "base: scale/tinny",
    "a base that is no name": "base: {a: 1}",
    "a base in another": "base: [[quickstart]]",
    "a misspelt key": "optim: {lt: 3}",
    "a list for keys": "optim: [lr, 3]",
    "a gate that is none": "model.gates: [null]",
    "another program's": "model:\n  _target_: torch.nn.Linear",
}


@pytest.mark.parametrize("case", RECIPES)
def test_recipes_that_are_none(case: str, refused: Refused, tmp_path: Path) -> None:
    put(tmp_path / "x.yaml", RECIPES[case])
    assert refused("recipe=x.yaml").startswith(f"{tmp_path / 'x.yaml'}")


@pytest.mark.parametrize("name", ["folder.yaml", "missing.yaml", "~nobody/x.yaml", "a" * 300 + ".yaml", "a" * 300, "/"])
def test_recipes_that_are_no_files(name: str, refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    assert refused(f"recipe={name}").startswith(f"recipe={name!r}: ")


CORPORA: dict[str, tuple[str, str | bytes]] = {
    "an empty text": ("a.txt", ""),
    "blank text": ("a.txt", " \n\t\n"),
    "one short line": ("a.txt", "too short"),
    "Latin-1": ("a.txt", TEXT.encode() + b"na\xefve\n"),
    "UTF-16": ("a.txt", TEXT.encode("utf-16")),
    "another ending": ("a.csv", "text\nhello\n"),
    "no ending": ("a", TEXT),
    "an empty jsonl": ("a.jsonl", ""),
    "a broken line": ("a.jsonl", GOOD + '{"text": "open'),
    "a page of the web": ("a.jsonl", "<!DOCTYPE html><html>404</html>"),
    "a jsonl of numbers": ("a.jsonl", "3\n4\n"),
    "a jsonl of lists": ("a.jsonl", '["text"]\n'),
    "brackets without end": ("a.jsonl", GOOD + "[" * 100_000),
    "digits without end": ("a.jsonl", GOOD + '{"text": ' + "1" * 5000 + "}"),
    "another field": ("a.jsonl", '{"txt": "hello"}\n'),
    "no field": ("a.jsonl", "{}\n"),
    "a field that goes missing": ("a.jsonl", GOOD + '{"kind": "b"}\n'),
    "a number for text": ("a.jsonl", '{"text": 5}\n'),
    "nulls alone": ("a.jsonl", '{"text": null}\n' * 5),
    "half a surrogate pair": ("a.jsonl", GOOD + '{"text": "\\ud83e"}\n'),
    "bytes that are no UTF-8": ("a.jsonl", GOOD.encode() + b'{"text": "na\xefve"}\n'),
    "an empty gz": ("a.jsonl.gz", b""),
    "a gz cut at its end": ("a.jsonl.gz", gz(lambda data: data[:-1])),
    "a gz cut in half": ("a.jsonl.gz", gz(lambda data: data[: len(data) // 2])),
    "a gz with zeros inside": ("a.jsonl.gz", gz(lambda data: data[:30] + bytes(50) + data[80:])),
    "a gz of another sum": ("a.jsonl.gz", gz(lambda data: data[:-8] + bytes(8))),
    "a gz that is none": ("a.jsonl.gz", GOOD),
    "a gz of nothing": ("a.jsonl.gz", gzip.compress(b"")),
    "an empty parquet": ("a.parquet", b""),
    "a page for a parquet": ("a.parquet", "<!DOCTYPE html><html>404</html>"),
    "a parquet without its end": ("a.parquet", parquet(TEXT.splitlines(), lambda data: data[:-100])),
    "a parquet that is only an end": ("a.parquet", b"PAR1"),
    "a parquet of numbers": ("a.parquet", parquet([1, 2])),
    "a parquet of bytes": ("a.parquet", parquet(pa.array([b"\xff"] * 9, pa.binary()))),
    "a parquet without rows": ("a.parquet", parquet(pa.array([], pa.string()))),
    "a parquet with zeros inside": (
        "a.parquet",
        parquet(TEXT.splitlines(), lambda data: data[:200] + bytes(100) + data[300:]),
    ),
}


@pytest.mark.parametrize("case", CORPORA)
def test_corpora_that_cannot_be_read(case: str, refused: Refused, tmp_path: Path) -> None:
    name, content = CORPORA[case]
    put(tmp_path / name, content)
    assert refused(*FILES, f"data.path={name}").startswith(name)


@pytest.mark.parametrize("path", ["missing.txt", "empty", "empty/**/*.md", "loop.txt", "~nobody/a.txt", "a" * 300, "["])
def test_paths_without_a_file(path: str, refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    assert path in refused(*FILES, f"data.path={path}")


def test_a_file_name_of_two_lines(refused: Refused, tmp_path: Path) -> None:
    put(tmp_path / "folder" / "two\nlines.txt", b"\xff")
    assert refused(*FILES, "data.path=folder").startswith("folder/two lines.txt, line 1: not UTF-8")


def test_a_field_of_domains_with_half_a_surrogate_pair(refused: Refused, tmp_path: Path) -> None:
    put(tmp_path / "a.jsonl", GOOD + '{"text": "x", "kind": "\\ud83e"}\n')
    assert refused(*FILES, "data.path=a.jsonl", "data.domain_field=kind").startswith("a.jsonl, row 301: half a surr")


def test_a_context_longer_than_the_corpus(refused: Refused, tmp_path: Path) -> None:
    put(tmp_path / "a.txt", TEXT)
    assert "data.context=100000" in refused(*FILES, "data.path=a.txt", "data.context=100000")


def bpe(vocab: dict[str, int], merges: str = "") -> str:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": vocab, "merges": merges.split(",") if merges else []}
    return json.dumps({"version": "1.0", "model": model, "pre_tokenizer": level, "decoder": level})


TOKENIZERS: dict[str, str | bytes] = {
    "empty": "",
    "cut": tokens.train([TEXT], 300).to_str()[:1000],
    "a list": "[]",
    "another json": '{"version": "1.0"}',
    "no vocabulary": '{"version": "1.0", "model": {"type": "BPE"}}',
    "words": '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}',
    "characters": '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}',
    "an alphabet of one": bpe({"a": 0}),
    "an empty alphabet": bpe({}),
    "a merge of nothing": bpe({"a": 0, "b": 1}, "a c"),
    "more tokens than data.vocab": tokens.train([TEXT], 301).to_str(),
    "a picture": b"\x89PNG\r\n\x1a\n",
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_tokenizers_that_are_none(case: str, refused: Refused, tmp_path: Path) -> None:
    put(tmp_path / "a.txt", TEXT)
    put(tmp_path / "t.json", TOKENIZERS[case])
    assert refused(*FILES, "data.path=a.txt", "data.tokenizer=t.json").startswith("data.tokenizer=t.json")


@pytest.mark.parametrize("name", ["missing.json", "a/b/c", "empty"])
def test_tokenizers_that_are_not_there(name: str, refused: Refused, tmp_path: Path) -> None:
    put(tmp_path / "a.txt", TEXT)
    (tmp_path / "empty").mkdir()
    assert refused(*FILES, "data.path=a.txt", f"data.tokenizer={name}").startswith(f"data.tokenizer={name}: no file")


def test_the_hub_without_a_network(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert refused("recipe=quickstart", "data=tinystories").startswith("data.corpus=tinystories: cannot read it from")


def test_a_cache_that_cannot_be_written(refused: Refused, tmp_path: Path) -> None:
    put(tmp_path / "a.txt", TEXT)
    assert refused(*FILES, "data.path=a.txt", "data.cache=a.txt").startswith("a.txt/tokenizers: cannot keep prepared")


def test_a_disk_that_fills_up_in_the_preparation(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "a.txt", TEXT)
    monkeypatch.setattr(packing.RowWriter, "_write", raising(OSError(28, "No space left on device")))
    said = refused(*FILES, "data.path=a.txt", "data.cache=kept")
    assert said.startswith("kept/rows: ") and "No space left on device" in said
    assert not list((tmp_path / "kept" / "rows").iterdir())


def test_ctrl_c_in_the_preparation(refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "a.txt", TEXT)
    monkeypatch.setattr(packing.RowWriter, "_write", raising(KeyboardInterrupt()))
    assert "the same command goes on" in refused(*FILES, "data.path=a.txt", "data.cache=kept", status=130)
    assert not list((tmp_path / "kept" / "rows").iterdir())


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


# Folders of runs

RUN = [*SINK, "name=r", "trainer.checkpoint_every=1"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of two steps with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        fit.main(RUN)
        yield folder / "runs" / "r"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "runs" / "r")


NO_LEDGER = ["", "{", "[]", "[1]", "3", "null", "{}", '{"status": "finished"}', '{"schema": 99}', "\x00", "[" * 9999]
NO_METRICS = ["garbage\n", "3\n", '{"step": 1}\n', "\x00\n", "[" * 99_999 + "\n"]
NO_RECIPE = ["{", "[]", "3", "modle: 3", "model: {width: x}", "trainer.steps: 0", "seed: !!int x", "\x00", "<html>"]


@pytest.mark.parametrize("content", NO_LEDGER, ids=range(len(NO_LEDGER)))
def test_a_ledger_that_is_none(content: str, refused: Refused, run: Path) -> None:
    put(run / "ledger.json", content)
    assert refused(*RUN).startswith("runs/r/ledger.json: not a ledger")


@pytest.mark.parametrize("content", NO_RECIPE, ids=range(len(NO_RECIPE)))
def test_a_recipe_of_a_run_that_is_none(content: str, refused: Refused, run: Path) -> None:
    put(run / "recipe.yaml", content)
    assert refused(*RUN).startswith("runs/r/recipe.yaml: ")


@pytest.mark.parametrize("content", NO_METRICS, ids=range(len(NO_METRICS)))
def test_metrics_that_are_none(content: str, refused: Refused, run: Path) -> None:
    first, *rest = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    put(run / "metrics.jsonl", "".join([first, content, *rest]))
    assert refused(*RUN, "trainer.steps=3").startswith("runs/r/metrics.jsonl, line 2: ")


@pytest.mark.parametrize("word", ["model.width=64", "model.layers=1", "data.context=16", "seed=3", "gate=sdpa-silu"])
def test_a_checkpoint_of_another_model(word: str, refused: Refused, run: Path) -> None:
    assert f"runs/r was begun with {'model.gates' if 'gate' in word else word.partition('=')[0]}=" in refused(
        *RUN, word
    )


NO_MANIFEST = ["3", '{"step": 1, "files": []}']  # each trains a step


@pytest.mark.parametrize("content", NO_MANIFEST, ids=range(len(NO_MANIFEST)))
def test_a_manifest_that_is_none(content: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The run goes on from the checkpoint before it."""
    monkeypatch.chdir(run.parents[1])
    put(run / "checkpoints" / "step-00000002" / "manifest.json", content)
    fit.main([*RUN, "trainer.steps=3"])
    said = capsys.readouterr().out
    assert "step-00000002/manifest.json is damaged" in said and "going on from runs/r/checkpoints/step-00000001" in said


def test_a_run_without_its_recipe(refused: Refused, run: Path) -> None:
    (run / "recipe.yaml").unlink()
    assert "runs/r has lost its recipe.yaml" in refused(*RUN, "model.ffn=64", "trainer.steps=3")


def test_a_checkpoint_from_another_run(refused: Refused, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder, manifest and all, was put in the place of this run's own."""
    monkeypatch.chdir(run.parents[1])
    fit.main([*RUN, "model.ffn=64", "name=other"])
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(run.parent / "other" / "checkpoints", run / "checkpoints")
    assert "checkpoints/step-00000002: a checkpoint of another model" in refused(*RUN, "trainer.steps=3")
