"""The command against transformers and lm-eval: perplexity, few-shot tasks, positions, what it keeps and refuses."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from gatedlm.data import tokenizer as tokens_of
from gatedlm.evaluate import main
from gatedlm.evaluation import session, tasks
from gatedlm.evaluation.reader import Reader
from gatedlm.hub import open_model
from gatedlm.model.gate import GateSpec
from gatedlm.model.lm import GatedLM, ModelSpec
from gatedlm.recipe import DataSpec, Recipe, to_yaml

L, H, G, D, C, V, T = 2, 8, 4, 6, 40, 300, 32
SPEC = ModelSpec(vocab=V, layers=L, width=C, heads=H, kv_heads=G, head_dim=D, ffn=16)
TEXT = "".join(f"Line {n} of a text, with numbers like {n * n} and {n**3} in it. 日本é\n" for n in range(40))
DOCUMENTS = [
    ("law", TEXT[:70]),
    ("tale", "Es war einmal. 日本é"),
    ("law", TEXT[70:400]),
    ("tale", None),
    ("tale", " \n"),
]
OURS = {
    "choice": {"prompt": "Q: {{ q }}\nA:", "choices": "options", "answer": "right", "shots": 2},
    "exact": {"prompt": "{{ q }}", "answer": "{{ a }}", "before": "", "between": "\n", "tokens": 5, "shots": 1},
}
THEIRS = {
    "choice": {"doc_to_text": "Q: {{q}}\nA:", "doc_to_choice": "{{options}}", "doc_to_target": "{{right}}"}
    | {"output_type": "multiple_choice", "num_fewshot": 2, "metric_list": [{"metric": "acc"}, {"metric": "acc_bytes"}]},
    "exact": {"doc_to_text": "{{q}}", "doc_to_target": "{{a}}", "target_delimiter": "", "fewshot_delimiter": "\n"}
    | {"output_type": "generate_until", "num_fewshot": 1, "metric_list": [{"metric": "exact_match"}]}
    | {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 5, "do_sample": False}},
}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return tokens_of.train([TEXT], V)


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scramble: Callable[..., nn.Module], tokenizer: Tokenizer
) -> Path:
    """A folder with two runs, ``gated`` and ``plain``, trained on its own text; a parquet with domains; two tasks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.txt").write_text(TEXT)
    data = DataSpec(corpus="files", path="own.txt", vocab=V, context=T, holdout=0.25)
    for name, gates in (("gated", [GateSpec()]), ("plain", [])):
        recipe = Recipe(name=name, model=replace(SPEC, gates=gates), data=data)
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.yaml").write_text(to_yaml(recipe))
        (tmp_path / name / "ledger.json").write_text("{}")
        save_file(scramble(GatedLM(recipe.model)).state_dict(), tmp_path / name / "model.safetensors")
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
    domains, texts = zip(*DOCUMENTS, strict=True)
    pq.write_table(pa.table({"body": texts, "kind": domains}), tmp_path / "mine.parquet")
    choices = [{"q": f"{n}?", "options": [f"{n + 1}", f"the {n} 日本", "é"], "right": n % 3} for n in range(7)]
    (tmp_path / "choice.json").write_text(json.dumps(choices))
    (tmp_path / "exact.json").write_text(json.dumps([{"q": f"{n} and", "a": f"{n}"} for n in range(5)]))
    for name, keys in OURS.items():
        task = {"kind": name, "items": {"path": f"{name}.json"}} | keys
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task))
    return tmp_path


def figures(*words: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Run the command: by task, part and metric what results.json says."""
    main(list(words))
    told = json.loads(Path("evaluation/results.json").read_text())
    return {(one["task"], one["part"], one["metric"]): one for one in told["figures"]}


def net_of(name: str) -> tuple[GatedLM, Callable[[str], list[int]]]:
    opened = open_model(name)
    assert opened.tokenizer
    tokenizer = opened.tokenizer
    tokenizer.encode_special_tokens = True
    return opened.net.eval(), lambda text: tokenizer.encode(text, add_special_tokens=False).ids


@torch.no_grad()
def log_p(net: Any, ids: list[int]) -> Tensor:
    """log p of each token but the first, one row at a time, in double precision."""
    logits = net(torch.tensor([ids])).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def by_hand(net: Any, ids: list[int], first: int, context: int) -> float:
    """Nats of a document read in windows that move on by half a context."""
    half, nats, told = context // 2, 0.0, 0
    for start in range(0, len(ids), half):
        row = [first, *ids[start : start + context]]
        new = start + len(row) - 1 - told
        nats -= float(log_p(net, row)[-new:].sum()) if new > 0 else 0
        told += max(0, new)
    assert told == len(ids)
    return nats


# Perplexity -------------------------------------------------------------------------------------------------------


def test_a_parquet_with_domains_side_by_side(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["data.path=mine.parquet", "data.text_field=body", "data.domain_field=kind"]
    found = figures("run=gated,plain", "tasks=perplexity", *data)
    texts = {
        domain: [text for of, text in DOCUMENTS if of == domain and text and text.strip()] for domain in ("law", "tale")
    }
    texts["all"] = texts["law"] + texts["tale"]
    told = {}
    for name in ("gated", "plain"):
        net, encode = net_of(name)
        for domain, of in texts.items():
            nats = sum(by_hand(net, encode(text), 0, T) for text in of)
            told[name, domain] = math.exp(nats / sum(len(encode(text)) for text in of))
            bits = nats / math.log(2) / sum(len(text.encode()) for text in of)
            for metric, value in (("perplexity", told[name, domain]), ("bits_per_byte", bits)):
                assert found["perplexity", domain, metric]["by_model"][name]["value"] == pytest.approx(value, rel=1e-5)
        assert found["perplexity", "all", "perplexity"]["count"] == sum(len(encode(text)) for text in texts["all"])
    apart = found["perplexity", "law", "perplexity"]["differences"]["plain"]
    assert apart["value"] == pytest.approx(told["plain", "law"] - told["gated", "law"], rel=1e-4) and apart["error"] > 0
    assert {"unigram", "bigram"} <= {metric for _, part, metric in found if part == "law"}
    out = capsys.readouterr().out
    assert "fingerprint" in out and f"{told['gated', 'law']:.1f}" in out


def test_a_run_reads_what_it_held_out(here: Path) -> None:
    """The corpus is one document: it is cut into four, of which the second is held out."""
    net, encode = net_of("gated")
    found = figures("run=gated", "tasks=perplexity")["perplexity", "text", "bits_per_byte"]
    from gatedlm.data.corpora import Document
    from gatedlm.data.packing import split

    (held,) = [document.text for document, out in split([Document(TEXT, "text")], 0.25) if out]
    assert found["count"] == len(held.encode()) < len(TEXT.encode()) / 3
    bits = by_hand(net, encode(held), 0, T) / math.log(2) / len(held.encode())
    assert found["by_model"]["gated"]["value"] == pytest.approx(bits, rel=1e-5)


def test_loss_by_position(here: Path) -> None:
    """Stretches of 50 tokens, a context of 32 notwithstanding."""
    net, encode = net_of("gated")
    found = figures(
        "run=gated", "tasks=positions", "lengths=50", "count=3", "data.path=mine.parquet", "data.text_field=body"
    )
    rows = [
        ids[i : i + 50] for ids in map(encode, [d for _, d in DOCUMENTS if d]) for i in range(0, len(ids) - 49, 50)
    ][:3]
    nats = torch.stack([-log_p(net, [0, *row]) for row in rows])
    for part, cells in (("1-16", slice(0, 16)), ("17-32", slice(16, 32)), ("33-50", slice(32, 50))):
        told = found["positions", part, "loss"]["by_model"]["gated"]["value"]
        assert told == pytest.approx(float(nats[:, cells].mean()), rel=1e-5)


def test_a_model_of_transformers_is_its_own_oracle(
    here: Path, scramble: Callable[..., nn.Module], tokenizer: Tokenizer
) -> None:
    """No first token of its own: documents open with its end of text, prompts with nothing."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes: dict[str, Any] = {"hidden_size": C, "intermediate_size": 16, "num_hidden_layers": L, "head_dim": D}
    heads: dict[str, Any] = {"num_attention_heads": H, "num_key_value_heads": G}
    config = Qwen3Config(vocab_size=V, eos_token_id=7, max_position_embeddings=24, **sizes, **heads)
    theirs: Any = scramble(Qwen3ForCausalLM(config)).eval()
    theirs.save_pretrained("theirs")
    tokenizer.save("theirs/tokenizer.json")
    found = figures("model=theirs", "tasks=perplexity,choice.yaml", "shots=0", "data.path=own.txt")
    _, encode = net_of("theirs")
    bits = by_hand(theirs, encode(TEXT), 7, 24) / math.log(2) / len(TEXT.encode())
    assert found["perplexity", "text", "bits_per_byte"]["by_model"]["theirs"]["value"] == pytest.approx(bits, rel=1e-5)
    right = 0
    for item in json.loads(Path("choice.json").read_text()):
        prompt = f"Q: {item['q']}\nA:"
        sums = [float(log_p(theirs, encode(f"{prompt} {o}"))[len(encode(prompt)) - 1 :].sum()) for o in item["options"]]
        right += sums.index(max(sums)) == item["right"]
    assert found["choice", "", "acc"]["by_model"]["theirs"]["value"] == pytest.approx(right / 7)


# Few-shot tasks ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_greedy_writing_stops_where_it_should(here: Path) -> None:
    """Against the most probable token of uncached passes, for prompts of different lengths in one batch."""
    reader = Reader(open_model("gated"), T, 64)
    prompts = [[0, *reader.encode(text)] for text in ("Line", "a text, with numbers like 9", "in it")]
    whole = []
    for prompt in prompts:
        ids = list(prompt)
        while len(ids) < len(prompt) + 12 and (token := int(reader.net(torch.tensor([ids])).logits[0, -1].argmax())):
            ids.append(token)
        whole.append(reader.tokenizer.decode(ids[len(prompt) :]))
    assert reader.write(prompts, 12, lambda done, total: None) == whole
    mark = whole[1][3:5]
    assert reader.write(prompts, 12, lambda done, total: None, [mark]) == [text.split(mark)[0] for text in whole]


def test_rows_keep_their_right_end_and_the_first_token(here: Path) -> None:
    reader = Reader(open_model("gated"), 10, 64)
    ids = reader.encode(TEXT)[:30]
    assert reader.row(ids, 27) == ([0, *ids[-10:]], 8, True)
    assert reader.row(ids[:9], 5) == ([0, *ids[:9]], 6, False)
    assert reader.row(ids, 3) == ([0, *ids[-10:]], 1, True)
    spaced = reader.pair("Line 1 ", "of a")
    assert spaced.ids[spaced.start :] == reader.encode("Line 1 of a")[len(reader.encode("Line 1")) :]
    assert reader.pair("", "of a") == ([0, *reader.encode("of a")], 1, False)
    whole = reader.encode("Line")
    assert len(reader.encode("Lin")) >= len(whole), "the last letter is within the last token"
    assert reader.pair("Lin", "e") == ([0, *whole], len(whole), False)
    assert reader.prompt(TEXT, 4) == ([0, *reader.encode(TEXT)[-5:]], 6, True)


@pytest.mark.filterwarnings("ignore")
def test_lm_eval_agrees_on_the_same_data(here: Path) -> None:
    pytest.importorskip("lm_eval")
    for name, keys in THEIRS.items():
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(here / f"{name}.json")}}}
        pool = {"test_split": "test", "fewshot_split": "test", "fewshot_config": {"sampler": "first_n"}}
        (here / f"their_{name}.yaml").write_text(json.dumps({"task": f"their_{name}"} | source | pool | keys))
    tasks = "choice.yaml,exact.yaml,lm-eval:their_choice.yaml,lm-eval:their_exact.yaml"
    found = figures("run=gated", f"tasks={tasks}", "context=200")
    agree = 0
    for (task, _, metric), one in found.items():
        for (other, _, name), two in found.items():
            if other == f"lm-eval:their_{task}.yaml" and name == metric:
                assert (
                    one["by_model"]["gated"] == pytest.approx(two["by_model"]["gated"]) and one["count"] == two["count"]
                )
                agree += 1
    assert agree == 3
    ours, theirs = (
        json.loads(Path(f"evaluation/gated/{name}.json").read_text())
        for name in ("choice", "lm-eval-their_choice.yaml")
    )
    assert ours["scores"][0]["influences"] == pytest.approx(theirs["scores"][0]["influences"])


@pytest.mark.filterwarnings("ignore")
def test_lm_eval_reads_the_same_log_likelihoods(here: Path) -> None:
    """The adapter itself: choices, whole documents in windows, texts that stop."""
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    from gatedlm.evaluation.harness import adapter

    reader = Reader(open_model("gated"), T, 64)
    theirs: Any = adapter(reader, lambda done, total: None)
    net, encode = net_of("gated")

    def ask(kind: str, *arguments: Any) -> list[Any]:
        return [instance(request_type=kind, doc={}, arguments=one, idx=0) for one in arguments]

    ((one, _), (two, _)) = theirs.loglikelihood(ask("loglikelihood", ("Line 1 ", "of a"), ("", "of a")))
    assert one == pytest.approx(float(log_p(net, [0, *encode("Line 1 of a")])[len(encode("Line 1")) :].sum()), rel=1e-5)
    assert two == pytest.approx(float(log_p(net, [0, *encode("of a")]).sum()), rel=1e-5)
    (whole,) = theirs.loglikelihood_rolling(ask("loglikelihood_rolling", (TEXT[:300],)))
    assert whole == pytest.approx(-by_hand(net, encode(TEXT[:300]), 0, T), rel=1e-5)
    asked = {"until": ["\n"], "max_gen_toks": 6, "do_sample": False}
    few = {"until": "e", "max_gen_toks": 3}
    prompts = (("Line", asked), ("a text", few), ("in", asked))
    texts = theirs.generate_until(ask("generate_until", *prompts))
    alone = [
        theirs.generate_until(ask("generate_until", one))[0]
        for one in (("Line", asked), ("a text", few), ("in", asked))
    ]
    assert texts == alone and "\n" not in texts[0] + texts[2] and "e" not in texts[1]
    with pytest.raises(ValueError, match="at random"):
        theirs.generate_until(ask("generate_until", ("Line", {"do_sample": True})))


# What is kept and refused -----------------------------------------------------------------------------------------


def test_what_is_finished_is_not_measured_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["run=gated,plain", "tasks=choice.yaml,exact.yaml", "context=99"]
    before, opened = figures(*words), []
    monkeypatch.setattr(session, "open_model", lambda *where: opened.append(where[0]) or open_model(*where))
    assert figures(*words) == before and opened == []
    (here / "evaluation" / "plain" / "exact.json").unlink()
    assert figures(*words) == before and opened == ["plain"]
    figures(*words, "shots=1")
    assert opened == ["plain", "gated", "plain"], "other words, other figures"


def test_a_broken_models_figures_are_told_every_time(here: Path) -> None:
    """A perplexity beyond all numbers, without a warning; JSON has no word for it."""
    file = here / "plain" / "model.safetensors"
    save_file({name: tensor * (1e5 if name == "head.weight" else 1) for name, tensor in load_file(file).items()}, file)
    for _ in range(2):
        told = figures("run=plain,gated", "tasks=perplexity")["perplexity", "text", "perplexity"]
        assert told["by_model"]["plain"] == {"value": None, "error": None}
        assert told["by_model"]["gated"]["value"] > 1


def test_memory_that_runs_out_is_said(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nats(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("of all there is\n")

    monkeypatch.setattr(Reader, "nats", nats)
    with pytest.raises(SystemExit, match="2"):
        main(["run=gated", "tasks=choice.yaml"])
    assert capsys.readouterr().err.strip() == "choice: more memory than there is: lower batch=, context= or lengths="


def test_without_a_network_one_line_is_said(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_dataset(*arguments: Any, **keys: Any) -> None:
        assert not logging.getLogger("huggingface_hub.utils._http").isEnabledFor(logging.WARNING), "it says each retry"
        raise ConnectionError("Couldn't reach the Hub\nsaid at length")

    logging.getLogger("huggingface_hub").setLevel(logging.WARNING)
    monkeypatch.setattr(tasks, "load_dataset", load_dataset)
    with pytest.raises(SystemExit, match="2"):
        main(["run=gated", "tasks=hellaswag"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "Rowan/hellaswag from the Hub (Couldn't reach the Hub); check name and network" in line


def test_runs_that_a_hash_tells_apart_are_called_by_their_words(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = {"gated": ["recipe=sink", "gate=sdpa-elementwise", "seed=1", "out=there"], "plain": ["recipe=sink"]}
    for name, asked_for in words.items():
        file = here / name / "recipe.yaml"
        file.write_text(file.read_text().replace(f"name: {name}", f"name: sink-{name.encode().hex()[:8]}"))
        (here / name / "ledger.json").write_text(json.dumps({"overrides": asked_for}))
    told = figures("run=gated,plain", "tasks=choice.yaml")["choice", "", "acc"]
    assert [*told["by_model"]] == ["sink gate=sdpa-elementwise seed=1", "sink"]
    assert "sink-" not in capsys.readouterr().out and (here / "evaluation" / f"sink-{b'plai'.hex()}").is_dir()
    (here / "plain" / "ledger.json").write_text(json.dumps({"overrides": words["gated"]}))
    told = figures("run=gated,plain", "tasks=choice.yaml")["choice", "", "acc"]
    assert [*told["by_model"]] == ["gated", "plain"], "the same words, as of another version"


def test_another_rope_is_another_model(here: Path) -> None:
    words = ["run=gated", "tasks=perplexity", "context=64"]
    trained = figures(*words)
    yarn = figures(*words, "model.rope.scaling=yarn", "model.rope.factor=4")
    key = ("perplexity", "text", "perplexity")
    ((name, told),) = yarn[key]["by_model"].items()
    assert name == "gated model.rope.scaling=yarn model.rope.factor=4"
    assert abs(told["value"] / trained[key]["by_model"]["gated"]["value"] - 1) > 1e-4


REFUSED = [
    (["run=nowhere", "tasks=needle"], "nowhere"),
    (["run=gated", "tasks=perplexity", "data=backcopy"], "data=backcopy: holds no text"),
    (["run=gated", "tasks=perplexity", "data.path=nowhere.txt"], "nowhere.txt: no file there"),
    (["run=gated", "tasks=positions", "lengths=99999"], "positions over 99999 tokens: the longest document"),
    (["run=gated", "tasks=qa"], "passages=FILE"),
    (
        ["run=gated", "tasks=qa", "passages=exact.json"],
        "passages=exact.json, item 1: text, question and answer are texts",
    ),
    (["run=gated", "tasks=choice.yaml", "shots=7"], "the pool holds only 6 other items"),
    (["run=gated", "tasks=needle", "lengths=20"], "too short for needle"),
    (["run=gated", "tasks=perplexity", "model.rope.factor=2"], "add model.rope.scaling=yarn"),
    (["run=gated", "tasks=lm-eval:code.yaml"], "allow_code_execution=true"),
    (["run=gated", "tasks=lm-eval:nowhere.yaml"], "no such file"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("words", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_what_cannot_be_is_said_in_one_line(
    words: list[str], says: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "lm-eval" in words[1]:
        theirs: Any = pytest.importorskip("lm_eval.tasks")
        manager = theirs.TaskManager(include_defaults=False)  # reading all that it ships takes most of a minute
        monkeypatch.setattr(theirs, "TaskManager", lambda **_: manager)
    (here / "base.yaml").write_text("unsafe_code: true\n")
    (here / "code.yaml").write_text("task: code\ninclude: base.yaml\n")
    with pytest.raises(SystemExit) as ended:
        main(words)
    err = capsys.readouterr().err
    assert ended.value.code == 2 and says in err and len(err.strip().splitlines()) == 1


def test_usage_answers_before_torch_is_loaded() -> None:
    script = (
        "import sys; from gatedlm.evaluate import main; main([]); assert not {'torch', 'datasets'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "tasks=TASK" in done.stdout, done.stderr


def test_an_answer_beyond_the_context_is_refused(here: Path) -> None:
    """Only its end would count, so that long answers would seem likely."""
    reader = Reader(open_model("gated"), T, 64)
    with pytest.raises(ValueError, match=r"are more than the context, give context=\d+"):
        reader.pair("def", " x" * 10 * T)
