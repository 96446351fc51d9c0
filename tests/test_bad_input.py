"""Whatever is wrong with a file reaches a person as one sentence that names it, and nothing half-made stays behind."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gatedlm.data import tokenizer as tokens
from gatedlm.data.packing import prepare
from gatedlm.recipe import DataSpec

GOOD = "".join(json.dumps({"text": f"a sentence about gates, number {i}", "kind": "a"}) + "\n" for i in range(300))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GATEDLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def lines(*bad: str) -> bytes:
    """300 good rows, then these."""
    return (GOOD + "\n".join(bad)).encode()


def parquet(texts: list, damage: Callable[[bytes], bytes] = bytes) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": texts}), sink, compression="snappy", use_dictionary=False, row_group_size=100)
    return damage(sink.getvalue().to_pybytes())


def flipped(data: bytes) -> bytes:
    """Bytes of a page in the second half turned over."""
    middle = len(data) * 2 // 3
    return data[:middle] + bytes(255 - byte for byte in data[middle : middle + 60]) + data[middle + 60 :]


MANY = [f"{i} {'gate' * (i % 50)}" for i in range(900)]
CASES: dict[str, tuple[str, bytes, dict, str]] = {
    "broken line": ("a.jsonl", lines('{"text": "open', '{"text": "fine"}'), {}, r", row 301: not JSON \(.*\); mend or"),
    "not an object": (
        "a.jsonl",
        lines('"text"'),
        {},
        r', row 301: not a JSON object; write {"text": "\.\.\."} on every',
    ),
    "empty jsonl": ("a.jsonl", b"", {}, r": no rows; fill the file"),
    "blank jsonl": ("a.jsonl", b"\n\n", {}, r": no rows; fill the file"),
    "jsonl not UTF-8": ("a.jsonl", GOOD.encode() + b'{"text": "na\xefve"}', {}, r", row 301: not UTF-8; .*iconv"),
    "text not UTF-8": ("a.txt", b"one\ntwo\nna\xefve\n", {}, r", line 3: not UTF-8; .*iconv"),
    "misspelt field": (
        "a.jsonl",
        lines(),
        {"text_field": "txt"},
        r", row 1: no field txt, but text, kind; .*text_field=",
    ),
    "misspelt domain": ("a.jsonl", lines(), {"domain_field": "knd"}, r", row 1: no field knd, but text.*domain_field="),
    "field gone later": ("a.jsonl", lines('{"kind": "b"}'), {}, r", row 301: no field text, but kind;"),
    "number for text": ("a.jsonl", lines('{"text": 5}'), {}, r", row 301: field text holds int, not text;"),
    "half a surrogate": ("a.jsonl", lines(r'{"text": "\ud83e"}'), {}, r", row 301: half a surrogate pair"),
    "nulls alone": ("a.jsonl", b'{"text": null}\n{"text": ""}\n', {}, r": no text in it \(2 empty documents\)"),
    "too short": (
        "a.jsonl",
        b'{"text": "a b"}\n{"text": "c d"}\n',
        {},
        r" give no training row of data\.context=8 tokens",
    ),
    "truncated gz": ("a.jsonl.gz", gzip.compress(lines())[:-400], {}, r", after row \d+: the gzip data is cut short"),
    "not gz": ("a.jsonl.gz", lines(), {}, r", after row 0: the gzip data is cut short or damaged"),
    "damaged gz": ("a.jsonl.gz", gzip.compress(lines())[:12] + bytes(99), {}, r", after row 0: the gzip data is cut"),
    "html": ("a.parquet", b"<!DOCTYPE html><html>404</html>", {}, r", after row 0: not readable as parquet \(.*fetch"),
    "empty parquet": ("a.parquet", b"", {}, r", after row 0: not readable as parquet"),
    "no rows": ("a.parquet", parquet(pa.array([], pa.string())), {}, r": no rows; fill the file"),
    "truncated parquet": ("a.parquet", parquet(MANY)[:-300], {}, r", after row 0: not readable as parquet"),
    "flipped page": ("a.parquet", parquet(MANY, flipped), {}, r", after row [1-9]\d+: not readable as parquet"),
    "parquet field": ("a.parquet", parquet(MANY), {"text_field": "body"}, r", row 1: no field body, but text;"),
    "parquet domain": ("a.parquet", parquet(MANY), {"domain_field": "kind"}, r", row 1: no field kind, but text;"),
    "parquet numbers": ("a.parquet", parquet([1, 2]), {}, r", row 1: field text holds int, not text;"),
    "another kind": ("a.csv", b"text\nhello\n", {}, r": cannot read this kind of file; turn it into one of \.txt"),
}


def refusal(spec: DataSpec) -> str:
    with pytest.raises(ValueError) as caught:
        prepare(spec, lambda line: None)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message


@pytest.mark.parametrize("case", CASES)
def test_bad_file(case: str, tmp_path: Path, own_cache: Path) -> None:
    name, content, changes, expected = CASES[case]
    (tmp_path / name).write_bytes(content)
    message = refusal(DataSpec(corpus="files", path=str(tmp_path / name), vocab=300, context=8, **changes))
    assert message.startswith(str(tmp_path / name))
    assert re.search(expected, message)
    assert not list(own_cache.glob("rows/*")) and not list(own_cache.rglob(".unfinished*"))


@pytest.mark.parametrize("path", ["missing.txt", "empty", "missing/*.txt"])
def test_no_file(path: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    message = refusal(DataSpec(corpus="files", path=str(tmp_path / path)))
    assert message.startswith(f"data.path={tmp_path / path}: no file there; give a file, folder or glob")


def test_no_path() -> None:
    assert refusal(DataSpec(corpus="files")).startswith("data.corpus=files needs data.path=")


def test_what_was_prepared_outlives_a_later_fault(tmp_path: Path, own_cache: Path) -> None:
    (tmp_path / "good.jsonl").write_text(GOOD)
    good = DataSpec(corpus="files", path=str(tmp_path / "good.jsonl"), vocab=300, context=8)
    before = prepare(good, lambda line: None)
    (tmp_path / "bad.jsonl").write_text(GOOD + "{")
    refusal(DataSpec(corpus="files", path=str(tmp_path / "*.jsonl"), vocab=300, context=8))
    said: list[str] = []
    assert prepare(good, said.append).corpus == before.corpus and not said


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "no file "),
        ("{", "cannot be read ("),
        (
            '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}',
            "not a byte-level BPE",
        ),
    ],
)
def test_bad_tokenizer(content: str | None, expected: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError) as caught:
        tokens.load(str(tmp_path))
    assert str(caught.value).startswith(f"data.tokenizer={tmp_path}") and expected in str(caught.value)


def test_the_hub_without_a_network_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refusal(DataSpec(corpus="tinystories"))
    assert message.startswith("data.corpus=tinystories: cannot read it from the Hub (")
    assert "data.corpus=stdlib" in message
    with pytest.raises(ValueError, match=r"^data\.tokenizer=no/such: cannot be read \("):
        tokens.load("no/such")
