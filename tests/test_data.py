"""The data room: tokenizer, packing, cache, order, baselines, synthetic task, and the DataModule that joins them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as L
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gatedlm.catalogue import shipped
from gatedlm.data import tokenizer as tokens
from gatedlm.data.baselines import PRIOR, count_losses
from gatedlm.data.cards import card, cards
from gatedlm.data.corpora import Document, documents, pieces
from gatedlm.data.module import LMData
from gatedlm.data.order import StepSampler, batch_indices, validation_batches
from gatedlm.data.packing import Rows, RowWriter, build_once, document_ids, prepare, split
from gatedlm.data.synthetic import BOS, TRIGGERS, Backcopy, active, chain, dormant
from gatedlm.recipe import DataSpec

STRANGE = "".join(map(chr, range(256))) + " <|endoftext|> 🦉👩‍👩‍👧 naïve 日本語\r\n\t  \u202e\x00"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GATEDLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def texts(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    words = ["gate", "score", "head", "sink", "value", "query", "🦉", "<|endoftext|>", "naïve", "\n"]
    return [" ".join(rng.choice(words, size=rng.integers(20, 90))) for _ in range(count)]


@pytest.fixture
def spec(tmp_path: Path) -> DataSpec:
    """62 rows of jsonl: 40 of domain a, 20 of b, one null and one blank text."""
    bodies = [*texts(60), None, " \n"]
    rows = [{"body": bodies[i - 9], "kind": "b" if i % 3 == 2 else "a"} for i in range(62)]
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return DataSpec(
        corpus="files", path=str(path), text_field="body", domain_field="kind",
        vocab=300, context=13, holdout=0.1, batch=8,
    )  # fmt: skip


def silent(line: str) -> None:
    pass


# Tokenizer --------------------------------------------------------------------------------------------------------


def trained_with_end_last(vocab: int = 280) -> Tokenizer:
    """Like GPT-2's: the end of text has the highest id."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts(20), trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([tokens.END])
    tokenizer.enable_truncation(5)
    return tokenizer


@pytest.mark.parametrize("kind", ["trained", "saved", "end last"])
def test_tokenizer_round_trip_and_bytes(kind: str, tmp_path: Path) -> None:
    tokenizer = trained_with_end_last() if kind == "end last" else tokens.train(texts(20), 280)
    if kind != "trained":
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        tokenizer = tokens.load(str(tmp_path))
    assert tokenizer.token_to_id(tokens.END) == 0
    assert sorted(tokenizer.get_vocab().values()) == list(range(tokens.size(tokenizer)))
    sizes = tokens.token_bytes(tokenizer, 300)
    assert sizes.shape == (300,) and sizes[0] == 0 and sizes[tokens.size(tokenizer) :].sum() == 0
    for text, ids in zip([STRANGE, *texts(5)], tokens.encode(tokenizer, [STRANGE, *texts(5)]), strict=True):
        assert ids[0] == 0 and 0 not in ids[1:]
        assert tokenizer.decode(ids[1:].tolist(), skip_special_tokens=False) == text
        assert sizes[ids].sum() == len(text.encode())


def test_moving_the_end_of_text_exchanges_two_ids_and_nothing_else(tmp_path: Path) -> None:
    original = trained_with_end_last()
    original.save(str(tmp_path / "tokenizer.json"))
    moved, before = tokens.load(str(tmp_path / "tokenizer.json")), original.get_vocab()
    assert {t: i for t, i in moved.get_vocab().items() if before[t] != i} == {tokens.END: 0, "!": before[tokens.END]}


def test_vocabulary_smaller_than_a_loaded_tokenizer(spec: DataSpec, tmp_path: Path) -> None:
    tokens.train(texts(20), 280).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r" has 280 tokens: set data\.vocab=280$"):
        prepare(replace(spec, tokenizer=str(tmp_path), vocab=279), silent)
    assert prepare(replace(spec, tokenizer=str(tmp_path), vocab=280), silent).corpus.documents == 60


def test_sample_is_spread_and_bounded() -> None:
    stream = [f"{i:04}" for i in range(1000)]
    assert tokens.sample(stream, reach=2000, budget=10**6) == stream[:500]
    kept = tokens.sample(stream, reach=10**6, budget=1000)
    assert kept == stream[::4]


# Corpora ----------------------------------------------------------------------------------------------------------


def test_stdlib_has_both_domains_in_any_beginning_and_no_text_twice() -> None:
    found = list(documents(DataSpec()))
    assert found[:60] == list(islice(documents(DataSpec()), 60))
    for part in (found[:60], found):
        share = Counter(document.domain for document in part)
        assert set(share) == {"code", "prose"} and share["prose"] > 0.1 * len(part)
    code = "\0".join(document.text for document in found if document.domain == "code")
    prose = [document.text for document in found if document.domain == "prose"]
    assert len(code) > 5_000_000 and sum(map(len, prose)) > 400_000
    assert "def namedtuple(" in code and "class TestCase(" in code and "Autogenerated by Sphinx" not in code
    assert not [text for text in prose if text[:300] in code]


def test_folder_glob_and_every_kind_of_file(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "deep" / ".git").mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n")
    (folder / "b.md").write_text("two")
    (folder / "deep" / "c.py").write_text("three")
    (folder / "deep" / ".git" / "d.txt").write_text("hidden")
    (folder / "e.csv").write_text("another kind")
    pq.write_table(pa.table({"text": ["four", None]}), folder / "f.parquet")
    found = [text for text, _ in documents(DataSpec(corpus="files", path=str(folder)))]
    assert found == ["one\r\n", "two", "three", "four", ""]
    assert [text for text, _ in documents(DataSpec(corpus="files", path=str(folder / "**/*.py")))] == ["three"]


def test_parquet_with_two_domains(tmp_path: Path) -> None:
    rows = texts(40)
    table = pa.table({"id": range(40), "body": rows, "source": ["web", None] * 20})
    pq.write_table(table, tmp_path / "two.parquet", row_group_size=7)
    spec = DataSpec(corpus="files", path=str(tmp_path / "two.parquet"), text_field="body", domain_field="source")
    assert list(documents(spec)) == [Document(t, d) for t, d in zip(rows, ["web", "none"] * 20, strict=True)]
    prepared = prepare(replace(spec, vocab=300, context=16, holdout=0.2), silent)
    assert set(prepared.corpus.domains) == {"web", "none"} and prepared.corpus.documents == 40


def test_hub_set_is_streamed_and_never_runs_code(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def stream(*args: object, **keys: object) -> Iterator[dict[str, object]]:
        asked.append((args, keys))
        yield from ({"text": "one", "score": 1.5}, {"text": None, "score": 2.0})
        raise ConnectionError("cable\ncut")

    monkeypatch.setattr("gatedlm.data.corpora.load_dataset", stream)
    found = documents(DataSpec(corpus="fineweb_edu"))
    assert [next(found), next(found)] == [Document("one", "text"), Document("", "text")]
    name = ("HuggingFaceFW/fineweb-edu", "sample-10BT")
    assert asked == [(name, {"split": "train", "revision": "main", "streaming": True})]
    with pytest.raises(ValueError, match=r"^data\.corpus=fineweb_edu: cannot read it from the Hub \(cable\); check"):
        next(found)
    with pytest.raises(ValueError, match=r"^org/name, row 1: no field body, but text, score; "):
        next(documents(DataSpec(corpus="org/name", text_field="body")))


def test_long_texts_are_cut_at_line_ends() -> None:
    text = "".join(f"line {i}\n" for i in range(1000)) + "x" * 500
    parts = list(pieces(text, 100))
    assert "".join(parts) == text and max(map(len, parts)) <= 100
    assert all(part.endswith("\n") for part in parts[: text.count("\n") * 7 // 100])
    assert list(pieces("", 100)) == [""]


def test_cards_groups_and_readme_agree() -> None:
    readme = (shipped("data") / "README.md").read_text()
    larger = {"fineweb_edu_all", "fineweb_edu_score_2"}
    assert set(cards()) == {"stdlib", "needles", "files", "tinystories", "fineweb_edu", "backcopy", *larger}
    for name, one in cards().items():
        assert f"| `{name}` |" in readme and one.licence in readme
        group = shipped("recipes") / "data" / f"{name}.yaml"
        assert group.read_text().startswith("# ")
        settings = OmegaConf.load(group)
        assert list(settings) == ["data"] and DataSpec(**settings.data).corpus == name


def test_unknown_corpus_names_the_nearest_and_the_hub_needs_no_card() -> None:
    with pytest.raises(
        ValueError, match=r"^data\.corpus=tinystory: did you mean tinystories\? choose one of backcopy, "
    ):
        card("tinystory")
    assert (card("some/set").hub, card("some/set").config) == ("some/set", None)
    assert (card("some/set/part").hub, card("some/set/part").config) == ("some/set", "part")


# Packing ----------------------------------------------------------------------------------------------------------


def reference_streams(spec: DataSpec, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Training and validation tokens, written out document by document."""
    train, validation, seen = [], [], Counter()
    for text, domain in documents(spec):
        if text.strip():
            stream = validation if seen[domain] % round(1 / spec.holdout) == 1 else train
            stream += [0, *tokenizer.encode(text, add_special_tokens=False).ids]
            seen[domain] += 1
    return train, validation


def test_packing_loses_and_repeats_no_token(spec: DataSpec) -> None:
    prepared = prepare(replace(spec, fixed_first=False), silent)
    for rows, stream in zip(
        (prepared.train, prepared.validation), reference_streams(spec, prepared.tokenizer), strict=True
    ):
        table = rows[np.arange(len(rows))]
        assert table.dtype == torch.int64 and table.shape == (len(rows), 14)
        rebuilt = [*table[:, :-1].flatten().tolist(), int(table[-1, -1])]
        assert rebuilt == stream[: len(rebuilt)] and len(stream) - len(rebuilt) < 13
    corpus, lengths = prepared.corpus, [len(s) for s in reference_streams(spec, prepared.tokenizer)]
    assert (corpus.documents, corpus.skipped, corpus.tokens) == (60, 2, sum(lengths))
    assert set(corpus.domains) == {"a", "b"} and sum(corpus.domains.values()) == corpus.tokens


def test_fixed_first_overwrites_the_overlap_only(spec: DataSpec) -> None:
    fixed, packed = (prepare(replace(spec, fixed_first=first), silent).train for first in (True, False))
    rows = np.array([5, 0, 3])
    assert (fixed[rows][:, 0] == 0).all() and (packed[rows][1:, 0] != 0).any()
    assert torch.equal(fixed[rows][:, 1:], packed[rows][:, 1:])


def test_many_chunks_pack_like_one(spec: DataSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = prepare(spec, silent).train
    monkeypatch.setattr("gatedlm.data.packing.CHUNK", 700)
    parts = prepare(replace(spec, cache=str(tmp_path / "other")), silent).train
    assert torch.equal(whole[np.arange(len(whole))], parts[np.arange(len(parts))])


def test_split_is_by_whole_documents_of_every_domain() -> None:
    found = [Document(f"{i}", domain) for i, domain in enumerate("aabaaabab" * 5)]
    held = [document for document, out in split(found, 0.2) if out]
    assert [document for document, _ in split(found, 0.2)] == found
    by_domain = {d: [x for x in found if x.domain == d] for d in "ab"}
    assert sorted(held) == sorted(by_domain["a"][1::5] + by_domain["b"][1::5])


def test_a_single_document_is_cut_so_that_both_splits_have_text(tmp_path: Path) -> None:
    (tmp_path / "only.txt").write_text("\n".join(texts(40)))
    prepared = prepare(DataSpec(corpus="files", path=str(tmp_path / "only.txt"), vocab=300, context=13), silent)
    assert len(prepared.train) > 5 * len(prepared.validation) > 0


def test_max_tokens_is_exact(spec: DataSpec) -> None:
    assert prepare(replace(spec, max_tokens=1000), silent).corpus.tokens == 1000


def test_large_vocabulary_is_kept_in_32_bits(tmp_path: Path) -> None:
    state = json.loads(trained_with_end_last(257).to_str())
    state["model"] |= {"merges": [], "vocab": {t: i for t, i in state["model"]["vocab"].items() if len(t) == 1}}
    state["model"]["vocab"] |= {f"unused{i}": i for i in range(256, 70_000)}
    state["added_tokens"][0]["id"] = 70_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    path = tmp_path / "loud.txt"
    path.write_text("Hi! Ho!\n" * 99)
    prepared = prepare(
        DataSpec(corpus="files", path=str(path), tokenizer=str(tmp_path), vocab=70_001, context=5), silent
    )
    rows = prepared.train[np.arange(9)]
    assert rows.max() == 70_000  # "!" gave its id 0 to the end of text
    assert prepared.tokenizer.decode(rows[0, 1:].tolist()) == "Hi! Ho!"[:5]


def test_rows_are_a_datasets_table(tmp_path: Path) -> None:
    with RowWriter(tmp_path / "rows.arrow", 4, np.uint16) as writer:
        writer.add(np.arange(1, 11))
    rows = Rows(tmp_path / "rows.arrow", fixed_first=False)
    assert str(rows.table.features["tokens"]) == "List(Value('uint16'), length=5)"
    assert rows[np.array([1, 0])].tolist() == [[5, 6, 7, 8, 9], [1, 2, 3, 4, 5]]


def test_document_ids_count_ends_of_text() -> None:
    assert document_ids(torch.tensor([[5, 0, 7, 7, 0], [0, 3, 0, 0, 9]])).tolist() == [[0, 1, 1, 1, 2], [1, 1, 2, 3, 3]]


# Cache ------------------------------------------------------------------------------------------------------------


def test_cache_is_reused_and_keyed_by_all_that_matters(spec: DataSpec, own_cache: Path) -> None:
    def steps(changed: DataSpec) -> str:
        lines: list[str] = []
        prepare(changed, lines.append)
        return " ".join(word for word in ("tokenizer", "rows", "skipped") if word in " ".join(lines))

    assert steps(spec) == "tokenizer rows skipped"
    assert steps(spec) == steps(replace(spec, batch=3, fixed_first=False, workers=1)) == ""
    assert steps(replace(spec, context=14)) == "rows skipped"
    for change in ({"vocab": 301}, {"holdout": 0.2}, {"max_tokens": 900}, {"domain_field": None}):
        assert steps(replace(spec, **change)).startswith("tokenizer rows")
    with open(str(spec.path), "a") as file:
        file.write('{"body": "one more", "kind": "a"}\n')
    assert steps(spec) == "tokenizer rows skipped"
    assert not list(own_cache.rglob(".unfinished*"))


def test_fingerprint_follows_the_text_alone(spec: DataSpec) -> None:
    first = prepare(spec, silent).corpus.fingerprint
    assert prepare(replace(spec, context=20, vocab=290), silent).corpus.fingerprint == first
    with open(str(spec.path), "a") as file:
        file.write('{"body": "one more", "kind": "a"}\n')
    assert prepare(spec, silent).corpus.fingerprint != first


def test_the_first_of_two_builders_wins(tmp_path: Path) -> None:
    folder = tmp_path / "rows" / "key"

    def slow(unfinished: Path) -> None:
        (unfinished / "mine").touch()
        build_once(folder, lambda other: (other / "theirs").touch())

    assert [path.name for path in build_once(folder, slow).iterdir()] == ["theirs"]
    assert [path.name for path in folder.parent.iterdir()] == ["key"]


def test_an_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(unfinished: Path) -> None:
        (unfinished / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "rows" / "key", interrupted)
    assert not list((tmp_path / "rows").iterdir())


def test_two_processes_at_once(spec: DataSpec, own_cache: Path) -> None:
    script = (
        "from gatedlm.data.packing import prepare; from gatedlm.recipe import DataSpec; print('ready', flush=True)\n"
        f"train = prepare({spec!r}, lambda line: None).train; print(len(train), train[range(len(train))].sum().item())"
    )
    command = [sys.executable, "-W", "error", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout and other.stdout.readline() == "ready\n"
        train = prepare(spec, silent).train
        theirs = other.stdout.read().split()
    assert other.returncode == 0
    assert theirs == [str(len(train)), str(train[np.arange(len(train))].sum().item())]
    assert len(list((own_cache / "rows").iterdir())) == 1 and not list(own_cache.rglob(".unfinished*"))


def test_cache_folder_that_cannot_be_written(spec: DataSpec) -> None:
    with pytest.raises(
        ValueError, match=r"own\.jsonl/tokenizers: cannot keep prepared corpora there; set data\.cache="
    ):
        prepare(replace(spec, cache=spec.path), silent)


# Order ------------------------------------------------------------------------------------------------------------


def test_every_epoch_is_a_permutation_whatever_the_batch() -> None:
    for n, batch in ((37, 8), (5, 12), (8, 8)):
        stream = np.concatenate([batch_indices(n, batch, seed=3, step=step) for step in range(3 * n)])
        epochs = stream[: len(stream) // n * n].reshape(-1, n)
        assert (np.sort(epochs, axis=1) == np.arange(n)).all()
    assert len(np.unique(epochs, axis=0)) > 3
    assert batch_indices(37, 8, 3, 4).tolist() != batch_indices(37, 8, 4, 4).tolist()
    assert batch_indices(None, 8, 3, 4).tolist() == list(range(32, 40))


def test_ranks_together_see_what_one_sees_and_resume_needs_the_step_alone() -> None:
    def first(steps: int, start: int, rank: int, world: int) -> list[np.ndarray]:
        return [rows for rows, _ in zip(StepSampler(37, 8, 1, lambda: start, rank, world), range(steps), strict=False)]

    whole = first(10, 0, 0, 1)
    for step, parts in enumerate(zip(*(first(10, 0, rank, 4) for rank in range(4)), strict=True)):
        assert [len(part) for part in parts] == [2, 2, 2, 2]
        assert np.concatenate(parts).tolist() == whole[step].tolist()
    assert np.array_equal(first(4, 6, 0, 1), whole[6:])
    with pytest.raises(ValueError, match=r"data\.batch=8 does not divide among 3 ranks"):
        first(1, 0, 0, 3)


@pytest.mark.parametrize(("n", "read"), [(37, 32), (8, 8), (6, 4)])
def test_validation_rows_are_read_once_on_any_number_of_ranks(n: int, read: int) -> None:
    ranks = [np.concatenate(validation_batches(n, 8, rank, 4)) for rank in range(4)]
    assert len({len(rows) for rows in ranks}) == 1
    together = np.concatenate(ranks).tolist()
    assert len(together) == len(set(together)) == read and set(together) <= set(range(n))
    if n >= 8:
        assert set(together) == set(np.concatenate(validation_batches(n, 8)).tolist())


# Baselines --------------------------------------------------------------------------------------------------------


def brute_force(train: list[list[int]], validation: list[list[int]], vocab: int, skip: int) -> dict[str, float]:
    def pairs(rows: list[list[int]]) -> list[tuple[int, int]]:
        return [(x, y) for row in rows for x, y in pairwise(row) if y != skip]

    one, two, context = Counter(), Counter(), Counter()
    for x, y in pairs(train):
        one[y], two[x, y], context[x] = one[y] + 1, two[x, y] + 1, context[x] + 1
    losses = {"unigram": [], "bigram": []}
    for x, y in pairs(validation):
        p = (one[y] + 0.5) / (one.total() + 0.5 * vocab)
        losses["unigram"].append(-np.log(p))
        losses["bigram"].append(-np.log((two[x, y] + PRIOR * p) / (context[x] + PRIOR)))
    return {name: float(np.mean(values)) for name, values in losses.items()}


@pytest.mark.parametrize("within", [False, True])
def test_baselines_equal_counting_by_hand(within: bool) -> None:
    rng = np.random.default_rng(0)
    train, validation = rng.integers(0, 7, (40, 9)), rng.integers(0, 11, (5, 9))
    found = count_losses(torch.from_numpy(train), torch.from_numpy(validation), 11, within)
    assert found == pytest.approx(brute_force(train.tolist(), validation.tolist(), 11, 0 if within else -1), abs=1e-12)


def test_data_module_counts_the_rows_a_model_sees(spec: DataSpec) -> None:
    data = LMData(spec, seed=0, say=silent)
    data.setup()
    train, validation = (rows[np.arange(len(rows))].tolist() for rows in (data.train, data.validation))
    assert data.baselines() == pytest.approx(brute_force(train, validation, 300, -1), abs=1e-9)
    assert data.baselines()["bigram"] < data.baselines()["unigram"] < np.log(300)


# Bigram-Backcopy --------------------------------------------------------------------------------------------------


def test_backcopy_is_its_definition_symbol_by_symbol() -> None:
    rows = Backcopy(64, 50, [0, 7])[np.array([3, 100_000, 5])]
    p = chain(64).transitions
    for index, row in zip((3, 100_000, 5), rows.tolist(), strict=True):
        uniform, expected = np.random.default_rng([0, 7, index]).random(50), [0]
        for t in range(50):
            if 1 <= expected[t] <= 8:
                expected.append(expected[t - 1])
            else:
                total, symbol = p[expected[t], 0], 0
                while total <= uniform[t]:
                    symbol += 1
                    total += p[expected[t], symbol]
                expected.append(symbol)
        assert row == expected


def test_backcopy_chain() -> None:
    p = chain(64).transitions
    assert p.shape == (64, 64) and np.allclose(p.sum(1), 1) and (p[:, BOS] == 0).all()
    assert (p[BOS, 1 : TRIGGERS + 1] == 0).all()
    stationary = np.linalg.matrix_power(p[1:, 1:], 1000)[0]
    assert np.allclose(stationary @ p[1:, 1:], stationary)
    assert set(np.argsort(stationary)[-TRIGGERS:]) == set(range(TRIGGERS))
    assert np.allclose(p[BOS, TRIGGERS + 1 :], stationary[TRIGGERS:] / stationary[TRIGGERS:].sum())
    with pytest.raises(ValueError, match=r"data\.vocab=9: too few"):
        chain(9)


def test_backcopy_queries_and_entropy() -> None:
    rows = Backcopy(64, 64, [0, 0])[np.arange(1500)]
    inputs, targets = rows[:, :-1], rows[:, 1:]
    copying, resting = active(inputs), dormant(inputs)
    assert torch.equal(copying | resting, inputs != BOS) and not (copying & resting).any()
    assert (inputs[:, 1:] != BOS).all() and not (copying[:, 1:] & copying[:, :-1]).any()
    assert torch.equal(targets[:, 1:][copying[:, 1:]], inputs[:, :-1][copying[:, 1:]])
    assert 0.15 < copying.float().mean() < 0.4
    p = torch.from_numpy(chain(64).transitions)
    nats = -p[inputs, targets].log()[~copying]
    assert nats.mean().item() == pytest.approx(chain(64).entropy[inputs][~copying].mean().item(), abs=0.02)
    assert (chain(64).entropy[1 : TRIGGERS + 1] == 0).all()


def test_backcopy_rows_depend_on_stream_and_index_alone() -> None:
    rows = Backcopy(64, 20, [0, 1])
    assert torch.equal(rows[np.array([4, 9])][1], rows[np.array([9])][0])
    assert not torch.equal(rows[np.arange(8)], Backcopy(64, 20, [0, 2])[np.arange(8)])
    data = LMData(DataSpec(corpus="backcopy", vocab=64, context=20, batch=8), seed=1)
    data.setup()
    other = LMData(data.spec, seed=2)
    other.setup()
    assert torch.equal(data.val_rows(9), other.val_rows(9))
    assert torch.equal(next(iter(data.train_dataloader())), rows[np.arange(8)])
    assert not set(map(tuple, data.val_rows(512).tolist())) & set(map(tuple, rows[np.arange(512)].tolist()))


def test_backcopy_baselines_lie_between_its_entropy_and_uniform() -> None:
    data = LMData(DataSpec(corpus="backcopy", vocab=64, context=30), seed=0)
    data.setup()
    assert data.task and data.tokenizer is None and data.token_bytes.tolist() == [0] * 64
    floor = data.task.entropy[data.val_rows(512)[:, :-1]].mean().item()
    found = data.baselines()
    assert floor < found["bigram"] < found["unigram"] < np.log(64)


# DataModule -------------------------------------------------------------------------------------------------------


def test_loader_begins_at_the_trainer_step_and_leaves_random_state_alone(spec: DataSpec) -> None:
    data = LMData(spec, seed=5, say=silent)
    data.prepare_data()
    state = torch.get_rng_state()
    data.trainer = SimpleNamespace(global_rank=1, world_size=4, global_step=3)  # pyright: ignore
    for step, rows in zip((3, 4), data.train_dataloader(), strict=False):
        assert torch.equal(rows, data.train[batch_indices(len(data.train), 8, 5, step)[2:4]])
    shares = [rows.shape for rows in data.val_dataloader()]
    assert shares and set(shares) == {(2, 14)}
    assert torch.equal(torch.get_rng_state(), state)


def test_workers_load_the_same_rows_in_the_same_order(spec: DataSpec) -> None:
    def batches(workers: int) -> list[torch.Tensor]:
        data = LMData(replace(spec, workers=workers), seed=0, say=silent)
        data.setup()
        return [rows for rows, _ in zip(data.train_dataloader(), range(5), strict=False)]

    assert torch.equal(torch.stack(batches(0)), torch.stack(batches(2)))


def test_validation_begins_with_the_probe_rows(spec: DataSpec) -> None:
    data = LMData(spec, seed=0, say=silent)
    data.setup()
    batches = list(data.val_dataloader())
    assert torch.equal(data.val_rows(8), batches[0])
    assert len(data.val_rows(10**6)) == len(data.validation)


def test_specs_that_make_no_rows(spec: DataSpec) -> None:
    for change, message in (
        ({"batch": 0}, r"data\.batch=0: take at least 1"),
        ({"context": 0}, r"data\.context=0: take at least 1"),
        ({"holdout": 0.0}, r"data\.holdout=0\.0: "),
        ({"vocab": 256}, r"data\.vocab=256: smaller than the 256 bytes"),
        ({"context": 5000}, r"own\.jsonl: \d+ tokens in 60 documents give no training row of data\.context=5000"),
    ):
        with pytest.raises(ValueError, match=message):
            LMData(replace(spec, **change), seed=0, say=silent).setup()


class Collect(L.LightningModule):
    """Keeps the batches it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[torch.Tensor] = []

    def training_step(self, rows: torch.Tensor, index: int) -> None:
        self.seen.append(rows)
        self.optimizers().step()  # pyright: ignore

    def validation_step(self, rows: torch.Tensor, index: int) -> None:
        assert rows.shape == (8, 14)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning 2.6 with torch 2.13
def test_trainer_reads_one_batch_a_step_without_a_warning(spec: DataSpec) -> None:
    data, module = LMData(spec, seed=0, say=silent), Collect()
    trainer = L.Trainer(
        max_steps=30, max_epochs=-1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, num_sanity_val_steps=0,
        val_check_interval=10, check_val_every_n_epoch=None,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    assert len(module.seen) == 30
    for step, rows in enumerate(module.seen):
        assert torch.equal(rows, data.train[batch_indices(len(data.train), 8, 0, step)])
