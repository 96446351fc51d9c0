"""The sink study: interventions against models without the gate, readings against dense maps, the command."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from test_probes import Largest
from test_report import Page
from tokenizers import Tokenizer
from torch import Tensor, nn

from gatedlm.analyze import USAGE, main
from gatedlm.data import tokenizer as tokens_of
from gatedlm.model.gate import GateSpec
from gatedlm.model.lm import GatedLM, ModelSpec
from gatedlm.probes import INTERVENTIONS, hide_first, summarise, tracing
from gatedlm.recipe import DataSpec, Recipe, to_yaml
from gatedlm.studies import reading
from gatedlm.studies.reading import applicable, passes, read, study
from gatedlm.studies.sample import Sample, corpus_text, text_rows

L, B, T, H, G, D, C, V = 3, 2, 7, 8, 4, 6, 40, 300
SPEC = ModelSpec(vocab=V, layers=L, width=C, heads=H, kv_heads=G, head_dim=D, ffn=16)
GATES = [GateSpec(), GateSpec("value", "headwise")]
ADDED = GateSpec(combine="add", activation="silu")
TEXT = "".join(f"Line {n} of a text, with numbers like {n * n} and {n**3} in it.\n" for n in range(200))


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return tokens_of.train([TEXT], V)


@pytest.fixture(scope="session")
def build(scramble: Callable[..., nn.Module]) -> Callable[..., GatedLM]:
    """A model in which nothing is neutral; the same names hold the same weights whatever the gates."""

    def build(*gates: GateSpec, **changes: Any) -> GatedLM:
        net = GatedLM(replace(SPEC, gates=list(gates), **changes)).eval()
        plain = scramble(GatedLM(replace(SPEC, **changes)))
        scramble(net, seed=1)
        net.load_state_dict(plain.state_dict(), strict=False)
        return net

    return build


def rows_of(count: int, length: int) -> Tensor:
    return torch.randint(0, V, (count, length + 1), generator=torch.Generator().manual_seed(2))


def dense(q: Tensor, k: Tensor) -> Tensor:
    """The causal map (B, H, T, T), in double precision and all at once."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    logits = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / math.sqrt(q.shape[-1])
    return logits.masked_fill(~torch.ones(q.shape[1], q.shape[1]).tril().bool(), -torch.inf).softmax(-1)


# Interventions ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_gates_held_at_one_are_no_gates(build: Callable[..., GatedLM], tokens: Tensor):
    gated, plain = build(*GATES), build()
    before = gated(tokens).logits
    assert not torch.allclose(before, plain(tokens).logits, atol=0.1)
    with INTERVENTIONS["gate=ones"](gated):
        torch.testing.assert_close(gated(tokens).logits, plain(tokens).logits)
        with tracing(gated) as trace:
            gated(tokens)
    assert all((score == 1).all() for layer in trace for score in layer.scores.values()), "a reader sees what was done"
    assert torch.equal(gated(tokens).logits, before)


@torch.no_grad()
def test_gates_held_at_their_mean(build: Callable[..., GatedLM], tokens: Tensor):
    gated = build(*GATES)
    with tracing(gated) as free:
        gated(tokens)
    with INTERVENTIONS["gate=mean"](gated), tracing(gated) as held:
        gated(tokens)
    for position, score in free[0].scores.items():
        expected = torch.stack([row.mean(0) for row in score])
        for t in range(T):
            torch.testing.assert_close(held[0].scores[position][:, t], expected)
    constant = build(GateSpec(source="constant"))
    before = constant(tokens).logits
    with INTERVENTIONS["gate=mean"](constant):
        torch.testing.assert_close(constant(tokens).logits, before)


@torch.no_grad()
def test_scores_that_do_not_multiply_are_left_alone(build: Callable[..., GatedLM], tokens: Tensor):
    added = build(ADDED)
    before = added(tokens).logits
    with INTERVENTIONS["gate=ones"](added):
        assert torch.equal(added(tokens).logits, before)
    asked = list(INTERVENTIONS)
    assert applicable(added, asked) == applicable(build(), asked) == ["mask_first=true"]
    assert applicable(build(ADDED, GateSpec("value")), asked) == asked


@torch.no_grad()
def test_a_hidden_first_token_is_seen_by_none_but_itself(build: Callable[..., GatedLM], tokens: Tensor):
    net, other = build(*GATES), tokens.clone()
    other[:, 0] = (other[:, 0] + 1) % V
    seen = net(tokens).logits
    with hide_first(net):
        with tracing(net) as trace:
            hidden = net(tokens).logits
        changed = net(other).logits
    torch.testing.assert_close(hidden[:, 0], seen[:, 0])
    torch.testing.assert_close(hidden[:, 1:], changed[:, 1:])
    assert not torch.allclose(hidden[:, 1:], seen[:, 1:], atol=0.01)
    for layer in trace:
        rest = dense(layer.q, layer.k)
        rest[..., 1:, 0] = 0
        v = layer.v.repeat_interleave(H // G, dim=2).double()
        expected = torch.einsum("bhij,bjhd->bihd", rest / rest.sum(-1, keepdim=True), v)
        torch.testing.assert_close(layer.sdpa, expected.float())
    assert torch.equal(net(tokens).logits, seen)


@torch.no_grad()
def test_a_hidden_first_token_in_rows_of_documents(build: Callable[..., GatedLM], tokens: Tensor):
    net, documents = build(), torch.tensor([[0] * 4 + [1] * 3, [0] * 2 + [1] * 5])
    seen = net(tokens, documents).logits
    with hide_first(net):
        hidden = net(tokens, documents).logits
    same = (hidden - seen).abs().amax(-1) < 1e-5
    assert same.tolist() == [[True] + [False] * 3 + [True] * 3, [True, False] + [True] * 5]


# Readings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "length"), [(5, 30), (1, 90)])
def test_loss_and_figures_of_a_reading(
    build: Callable[..., GatedLM], count: int, length: int, monkeypatch: pytest.MonkeyPatch
):
    """In passes of two rows or of a long one, and parts of 16 positions, against all at once."""
    monkeypatch.setattr(reading, "AT_ONCE", 70)
    monkeypatch.setattr(reading, "CHUNK", 16)
    net, rows, ticks = build(*GATES), rows_of(count, length), []
    found = read(net, rows, 9, lambda: ticks.append(1))
    inputs = rows[:, :-1].clone()
    inputs[:, 0] = 9
    with torch.no_grad():
        expected = F.cross_entropy(net(inputs).logits.flatten(0, 1), rows[:, 1:].flatten())
    assert found.loss == pytest.approx(float(expected), rel=1e-5)
    whole = summarise(net, rows[:, :-1], batch=count, first=9)
    assert found.summary.rows == count
    for name, layers in whole.by_layer.items():
        assert found.summary.by_layer[name] == pytest.approx(layers, rel=1e-4), name
    assert 3 * len(ticks) == passes(net, Sample(rows, "", 0), ["mask_first=true"])


def test_a_reading_needs_memory_in_proportion_to_its_length(build: Callable[..., GatedLM]):
    """Nothing it touches is as large as a head's map; twice the tokens take twice the memory."""
    net, sizes = build(*GATES, layers=1, heads=2, kv_heads=1, vocab=16), []
    for length in (2048, 4096):
        with Largest() as seen:
            read(net, torch.zeros(1, length + 1, dtype=torch.long), None, lambda: None)
        sizes.append(seen.size)
        assert seen.size < 4 * length**2
    assert 1.5 < sizes[1] / sizes[0] < 2.1


def test_bf16_weights_stay_bf16_and_are_read_in_fp32(build: Callable[..., GatedLM]):
    net, rows = build(*GATES).bfloat16(), rows_of(2, 64)
    half = read(net, rows, None, lambda: None)
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    full = read(net.float(), rows, None, lambda: None)
    assert half.loss == pytest.approx(full.loss, rel=1e-6)
    assert half.summary.totals == pytest.approx(full.summary.totals, rel=1e-6)


def test_one_block_at_a_time_is_in_fp32(build: Callable[..., GatedLM]):
    net, kinds = build().bfloat16(), []

    def note(block: nn.Module, args: Any, out: Any) -> None:
        kinds.append([next(block.parameters()).dtype for block in net.blocks])

    for block in net.blocks:
        block.get_submodule("attention").register_forward_hook(note)
    read(net, rows_of(1, 9), None, lambda: None)
    wide, narrow = torch.float32, torch.bfloat16
    assert kinds == [[wide if i == layer else narrow for i in range(L)] for layer in range(L)]


@torch.no_grad()
def test_a_planted_activation_is_found_where_it_stands(build: Callable[..., GatedLM]):
    net, rows = build(GateSpec()), rows_of(3, 20)
    rows[rows == 4] = 5
    rows[2, 13] = 4
    net.embed.weight[4, 31], net.embed.weight[8, 17] = 4000, -9000
    told = study(net, Sample(rows, "", 0), 8, False, [], lambda: None)
    assert [list(outlier.values())[1:] for outlier in told["outliers"]] == [[2, 13, 31]] * L
    fixed = study(net, Sample(rows, "", 0), 8, True, [], lambda: None)
    assert [list(outlier.values())[2:] for outlier in fixed["outliers"]] == [[0, 17]] * L
    assert fixed["figures"]["m_act"] == pytest.approx(9000, rel=0.05)
    assert fixed["figures"]["f_attn"] == told["figures"]["f_attn"] != fixed["figures"]["f_attn_fixed_first"]


def test_an_effect_is_the_difference_that_the_intervention_makes(build: Callable[..., GatedLM]):
    gated, plain, sample = build(GateSpec()), build(), Sample(rows_of(4, 16), "", 0)
    told = study(gated, sample, 0, False, ["gate=ones"], lambda: None)
    without = study(plain, sample, 0, False, ["gate=ones"], lambda: None)
    changed = told["interventions"]["gate=ones"]
    assert changed["loss"] == pytest.approx(without["loss"], rel=1e-5) and without["interventions"] == {}
    assert changed["difference"] == pytest.approx(without["loss"] - told["loss"], abs=1e-5)
    assert changed["figures"]["f_attn"] == pytest.approx(without["figures"]["f_attn"], rel=1e-4)
    assert changed["figures"]["gate_score"] == 1


# Text -------------------------------------------------------------------------------------------------------------


def test_rows_of_text_follow_each_other(tokenizer: Tokenizer):
    ids = tokenizer.encode(TEXT).ids
    sample = text_rows(TEXT, "here", tokenizer, 3, 50)
    assert sample.rows.tolist() == [ids[0:51], ids[50:101], ids[100:151]]
    assert sample.size == len(tokenizer.decode(ids[1:151]).encode())
    short = text_rows(TEXT, "here", tokenizer, 3, len(ids))
    assert short.rows.shape == (1, len(ids)), "as much as there is"
    with pytest.raises(ValueError, match="here: 2 tokens are too few"):
        text_rows("\n\n\n"[:2], "here", tokenizer, 3, 50)


def test_a_text_cannot_speak_as_a_control_token(tokenizer: Tokenizer):
    assert 0 not in text_rows(TEXT[:30] + tokens_of.END + TEXT, "", tokenizer, 1, 60).rows


def test_prose_of_the_standard_library_is_always_there():
    text = corpus_text(None, 512)
    assert len(text) > 512 * 16 and text == corpus_text(None, 512)
    assert not re.search(r"^import \w+$", text[:2000], re.M)


# The command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path, build: Callable[..., GatedLM], tokenizer: Tokenizer) -> Path:
    """Two models' weights, ``gated`` and ``plain``, with the first token fixed, and a text."""
    (tmp_path / "text.txt").write_text(TEXT)
    for name, gates in (("gated", [GateSpec()]), ("plain", [])):
        recipe = Recipe(name=name, model=replace(SPEC, gates=gates), data=DataSpec(vocab=V, context=32))
        keep(tmp_path / name, recipe, build(*gates))
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
    return tmp_path


def keep(folder: Path, recipe: Recipe, net: GatedLM) -> None:
    folder.mkdir()
    (folder / "recipe.yaml").write_text(to_yaml(recipe))
    save_file(net.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == "" and len(err.splitlines()) == 1
    return err


@torch.no_grad()
def test_two_models_side_by_side(
    folders: Path, capsys: pytest.CaptureFixture[str], tokenizer: Tokenizer, build: Callable[..., GatedLM]
):
    """The json against dense maps and losses of this test's own, the terminal and the page against the json."""
    words = [f"text={folders / 'text.txt'}", "tokens=40", "rows=3", "gate=ones,mean", "mask_first=true", "layers=1"]
    main([f"model={folders / 'gated'},{folders / 'plain'}", *words, f"out={folders / 'out'}"])
    out, studies = capsys.readouterr().out, json.loads((folders / "out" / "study.json").read_text())
    assert [told["name"] for told in studies] == ["gated", "plain"]
    assert [list(told["interventions"]) for told in studies] == [list(INTERVENTIONS), ["mask_first=true"]]
    rows = torch.tensor(tokenizer.encode(TEXT).ids[:121]).unfold(0, 41, 40)
    size = len(tokenizer.decode(rows[:, 1:].flatten().tolist()).encode())
    inputs = rows[:, :-1].clone()
    inputs[:, 0] = 0
    for told, net in zip(studies, (build(GateSpec()), build()), strict=True):
        with tracing(net) as trace:
            loss = float(F.cross_entropy(net(inputs).logits.flatten(0, 1), rows[:, 1:].flatten()))
        f_attn = [float(dense(layer.q, layer.k)[..., 1:, 0].mean()) for layer in trace]
        assert told["loss"] == pytest.approx(loss, rel=1e-5)
        assert told["bits_per_byte"] == pytest.approx(loss * 120 / math.log(2) / size, rel=1e-5)
        assert told["by_layer"]["f_attn_fixed_first"] == pytest.approx(f_attn, rel=1e-4)
        assert (told["rows"], told["tokens"], told["fixed_first"], told["precision"]) == (3, 40, True, "float32")
        for figure in (told["loss"], *told["by_layer"]["f_attn"], told["figures"]["effective_sink"]):
            assert f"{figure:.3f}" in out
    page = Page(folders / "out" / "study.html")
    assert {f"{name}: Layer 1, head {h}" for name in ("gated", "plain") for h in range(H)} <= set(page.figures)
    assert "gated: scores at the SDPA output (G1)" in page.figures and "gate=mean" in page.text
    assert f"{studies[0]['interventions']['gate=ones']['difference']:.4g}" in page.text


@torch.no_grad()
def test_a_model_of_transformers_by_its_own_attention(
    tmp_path: Path, scramble: Callable[..., nn.Module], tokenizer: Tokenizer
):
    """F-Attn and M-Act against the maps and hidden states that transformers itself gives out."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes: dict[str, Any] = {"hidden_size": C, "intermediate_size": 16, "num_hidden_layers": L, "head_dim": D}
    heads: dict[str, Any] = {"num_attention_heads": H, "num_key_value_heads": G}
    config = Qwen3Config(vocab_size=V, eos_token_id=7, max_position_embeddings=30, **sizes, **heads)
    theirs: Any = scramble(Qwen3ForCausalLM(config)).eval()
    theirs.set_attn_implementation("eager")
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizer.save(str(tmp_path / "theirs" / "tokenizer.json"))
    (tmp_path / "text.txt").write_text(TEXT)
    words = [f"text={tmp_path / 'text.txt'}", "rows=2", "layers=0", f"out={tmp_path}"]
    main([f"model={tmp_path / 'theirs'}", *words])
    (told,) = json.loads((tmp_path / "study.json").read_text())
    rows = torch.tensor(tokenizer.encode(TEXT).ids[:61]).unfold(0, 31, 30)[:, :-1].clone()
    packed = theirs(rows, output_attentions=True, output_hidden_states=True)
    rows[:, 0] = 7
    fixed = theirs(rows, output_attentions=True)
    for name, output in (("f_attn", packed), ("f_attn_fixed_first", fixed)):
        shares = [float(attention[:, :, 1:, 0].mean()) for attention in output.attentions]
        assert told["by_layer"][name] == pytest.approx(shares, rel=1e-4)
    assert not told["fixed_first"], "no first token is this tokenizer's policy"
    largest = [float(hidden.abs().max()) for hidden in packed.hidden_states[1:-1]]
    assert told["by_layer"]["m_act"][:-1] == pytest.approx(largest, rel=1e-4), "their last one is normed already"


def test_names_are_no_markup(folders: Path, capsys: pytest.CaptureFixture[str]):
    name = "[red]a$_b$"
    recipe = Recipe(name=name, model=replace(SPEC, gates=[GateSpec()]), data=DataSpec(vocab=V, context=32))
    (folders / "gated" / "recipe.yaml").write_text(to_yaml(recipe))
    main([f"model={folders / 'plain'},{folders / 'gated'}", f"text={folders / 'text.txt'}", f"out={folders / 'out'}"])
    assert f"{name}, on 4 x 32 tokens" in capsys.readouterr().out
    assert name in Page(folders / "out" / "study.html").text


def test_a_run_reads_its_own_validation_rows(tmp_path: Path, build: Callable[..., GatedLM]):
    data = DataSpec(corpus="backcopy", vocab=64, context=24)
    net = build(GateSpec(granularity="headwise"), vocab=64)
    keep(tmp_path / "run", Recipe(name="run", model=net.spec, data=data), net)
    (tmp_path / "run" / "ledger.json").touch()
    main([f"model={tmp_path / 'run'}", "rows=5", "tokens=20", "layers=0", f"out={tmp_path}"])
    (told,) = json.loads((tmp_path / "study.json").read_text())
    assert (told["rows"], told["tokens"], told["text"]) == (5, 20, "validation rows of backcopy")
    assert told["bits_per_byte"] is None and {"f_attn_dormant", "f_attn_active"} <= told["figures"].keys()
    seen = [told["figures"][key] for key in ("f_attn", "f_attn_fixed_first")]
    assert seen[0] == seen[1], "its rows begin alike as they are"


def test_a_run_whose_corpus_has_changed_says_so(folders: Path, capsys: pytest.CaptureFixture[str]):
    run, corpus = folders / "gated", folders / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text(TEXT.replace("numbers", "letters") * 3)
    data = DataSpec(corpus="files", path=str(corpus), vocab=V, context=32)
    (run / "recipe.yaml").write_text(to_yaml(Recipe(name="gated", model=replace(SPEC, gates=[GateSpec()]), data=data)))
    (run / "ledger.json").touch()
    with pytest.raises(SystemExit):
        main([f"model={run}"])
    assert "not the text this run was trained on, give text=FILE" in capsys.readouterr().err


def test_text_rows_are_no_longer_than_a_run_has_seen(folders: Path):
    main([f"model={folders / 'plain'}", f"text={folders / 'text.txt'}", "layers=0", f"out={folders}"])
    (told,) = json.loads((folders / "study.json").read_text())
    assert (told["rows"], told["tokens"]) == (4, 32), "the recipe's context"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("model=", "key=value"),
        ("model={plain},{plain}", "name each model once"),
        ("model={plain},", "name each model once"),
        ("model={plain} txt=a", "'txt': did you mean text="),
        ("model={plain} text=a data=stdlib", "give one of them"),
        ("model={plain} tokens=7", "tokens=7: must be a whole number from 8 up"),
        ("model={plain} rows=0", "rows=0: must be a whole number from 1 up"),
        ("model={plain} layers=1,a", "layers=a: must be a whole number"),
        ("model={plain} layers=0,3 text={text}", "layers=3: plain has layers 0 to 2"),
        ("model={plain} gate=twos", "gate=twos: write one of gate=ones, gate=mean, mask_first=true"),
        ("model={plain} gate=ones,", "gate=: write one of"),
        ("model={plain} mask_first=yes", "mask_first=yes: write one of"),
        ("model={plain} text={plain}/none.txt", "none.txt: No such file"),
        ("model={plain} text={plain}/model.safetensors", "model.safetensors: not UTF-8 at byte"),
        ("model={plain} data=backcopy", "data=backcopy: holds no text of its own"),
        ("model={plain} data=stdlb", "did you mean stdlib?"),
        ("model={plain}/none text={text}", "none"),
        ("model={plain},{plain}/none text={text}", "none"),
    ],
)
def test_wrong_words_end_in_one_line(words: str, says: str, folders: Path, capsys: pytest.CaptureFixture[str]):
    text = words.format(plain=folders / "plain", text=folders / "text.txt")
    assert says in refusal(capsys, *text.split())


def test_a_model_without_words_reads_no_text(folders: Path, capsys: pytest.CaptureFixture[str]):
    (folders / "plain" / "tokenizer.json").unlink()
    said = refusal(capsys, f"model={folders / 'plain'}", f"text={folders / 'text.txt'}")
    assert said.startswith("plain: no tokenizer.json, so it reads no text")


def test_a_token_without_weights_is_said(folders: Path, capsys: pytest.CaptureFixture[str], tokenizer: Tokenizer):
    words = Tokenizer.from_str(tokenizer.to_str())
    words.add_tokens(["with numbers"])
    words.save(str(folders / "plain" / "tokenizer.json"))
    said = refusal(capsys, f"model={folders / 'plain'}", f"text={folders / 'text.txt'}")
    assert said == f"plain: token {V} has no weights, which end with token {V - 1}\n"


def test_ctrl_c_is_no_traceback(folders: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(where: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gatedlm.studies.model.look", interrupt)
    with pytest.raises(SystemExit) as ended:
        main([f"model={folders / 'plain'}"])
    assert ended.value.code == 130


def test_usage_names_every_word_and_default():
    from gatedlm.studies.model import ROWS, TOKENS, WORDS

    assert all(f"{word}=" in USAGE for word in WORDS)
    assert f"tokens={TOKENS} " in USAGE and f"rows={ROWS} " in USAGE
    assert all(name in USAGE for name in INTERVENTIONS)
