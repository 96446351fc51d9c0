"""The cache against uncached passes and transformers' generation, its filters against the sampler, the command."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_lm import LAYERS, MIXTURE, SPEC, V, oracle_sizes, renamed
from tokenizers import Tokenizer, decoders, models
from torch import Tensor, nn

from gatedlm import generate as command
from gatedlm.catalogue import choices
from gatedlm.data import tokenizer as tokens
from gatedlm.model import cache as cache_module
from gatedlm.model.cache import Cache
from gatedlm.model.feedforward import ExpertsSpec
from gatedlm.model.gate import GateSpec
from gatedlm.model.lm import GatedLM
from gatedlm.model.sampling import Sampling, draw, generate
from gatedlm.probes import streaming_loss
from gatedlm.recipe import load, to_yaml

B, T = 3, 9
SPLITS = [[T], [1] * T, [3, 1, 5]]
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores are renewed every few tokens, as they are in long texts."""
    monkeypatch.setattr(cache_module, "ROOM", 2)


@pytest.fixture(scope="module")
def rows() -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def drawn(scramble: Callable[..., nn.Module]) -> Callable[..., GatedLM]:
    """A model whose logits are of size 1, so that 1e-5 leaves room for the rounding of fp32."""

    def build(**changes: Any) -> GatedLM:
        model = scramble(GatedLM(replace(SPEC, **changes)))
        assert isinstance(model, GatedLM)
        return model

    return build


def cached(model: GatedLM, rows: Tensor, split: list[int], **words: Any) -> Tensor:
    cache = Cache(LAYERS, **words)
    with torch.no_grad():
        return torch.cat([model(part, cache=cache).logits for part in rows.split(split, dim=1)], dim=1)


def close(ours: Tensor, theirs: Tensor) -> None:
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def banded(window: int, keep_first: int, start: int = 0) -> Tensor:
    """Which keys each query of a row sees whose first ``start`` tokens are padding, (T, T), key by key."""
    seen = torch.eye(T, dtype=torch.bool)
    for i, j in itertools.product(range(start, T), repeat=2):
        seen[i, j] = j <= i and (i - j < window or j - start < keep_first)
    return seen


def under_mask(model: GatedLM, rows: Tensor, mask: Tensor) -> Tensor:
    """Logits of one uncached pass in which attention takes this mask instead of its own."""
    hooks = [s.core.register_forward_pre_hook(lambda core, args: (*args[:3], mask)) for s in model.stations()]
    with torch.no_grad():
        logits = model(rows).logits
    for hook in hooks:
        hook.remove()
    return logits


# --- the cache


@pytest.mark.parametrize("experts", [ExpertsSpec(), MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("gate", choices("gate"))
def test_cached_equals_uncached_in_any_split(gate: str, experts: ExpertsSpec, rows: Tensor, drawn) -> None:
    gates = load(["recipe=quickstart", f"gate={gate}"])[0].recipe.model.gates
    model = drawn(gates=gates, experts=experts)
    with torch.no_grad():
        whole = model(rows).logits
    for split in SPLITS:
        close(cached(model, rows, split), whole)


@pytest.mark.parametrize("changes", [{"kv_heads": 1}, {"kv_heads": 8}, {"qk_norm": False}, {"sandwich_norm": True}])
def test_cached_equals_uncached_whatever_the_heads_and_norms(changes: dict[str, Any], rows: Tensor, drawn) -> None:
    model = drawn(**changes)
    with torch.no_grad():
        close(cached(model, rows, [3, 1, 5]), model(rows).logits)


@pytest.mark.parametrize("experts", [ExpertsSpec(), MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("split", SPLITS)
def test_a_padded_batch_equals_single_rows(split: list[int], experts: ExpertsSpec, rows: Tensor, drawn) -> None:
    """Padding of any token, and chunks of which a row has nothing but padding; no logit is NaN."""
    model, padding = drawn(gates=[GateSpec(), GateSpec("value")], experts=experts), torch.tensor([0, 4, 8])
    logits = cached(model, rows, split, padding=padding)
    assert logits.isfinite().all()
    for b, start in enumerate(padding.tolist()):
        with torch.no_grad():
            close(logits[b : b + 1, start:], model(rows[b : b + 1, start:]).logits)


@pytest.mark.parametrize(("window", "keep_first"), [(1, 0), (3, 0), (3, 1), (4, 2), (1, 3), (T, 0), (2, T)])
def test_a_sliding_cache_is_a_band_and_the_first_keys(window: int, keep_first: int, rows: Tensor, drawn) -> None:
    model, padding = drawn(gates=[GateSpec()]), torch.tensor([0, 1, 2])
    mask = torch.stack([banded(window, keep_first, start) for start in padding.tolist()])[:, None]
    expected = under_mask(model, rows, mask)
    for split in SPLITS:
        logits = cached(model, rows, split, padding=padding, window=window, keep_first=keep_first)
        assert logits.isfinite().all()
        for b, start in enumerate(padding.tolist()):
            close(logits[b, start:], expected[b, start:])


def test_a_sliding_cache_holds_a_window_and_no_more(drawn) -> None:
    model, cache = drawn(), Cache(LAYERS, window=3, keep_first=2)
    with torch.no_grad():
        for _ in range(40):
            model(torch.ones(1, 1, dtype=torch.long), cache=cache)
            stores = [past.store for past in cache.layers]
            assert all(store is not None and store.shape[2] <= 3 + 2 + 1 + cache_module.ROOM for store in stores)


def test_under_autocast_keys_are_kept_in_bf16(rows: Tensor, drawn) -> None:
    model, cache = drawn(), Cache(LAYERS)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        parts = [model(part, cache=cache).logits for part in rows.split(4, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(rows).logits, rtol=0.1, atol=0.1)
    assert cache.layers[0].store is not None and cache.layers[0].store.dtype == torch.bfloat16


def test_what_a_cache_refuses(rows: Tensor, drawn) -> None:
    with pytest.raises(ValueError, match=r"documents= and cache= exclude each other"):
        drawn()(rows, torch.zeros_like(rows), Cache(LAYERS))
    with pytest.raises(ValueError, match=r"^window=0: .* give 1"):
        Cache(LAYERS, window=0)
    with pytest.raises(ValueError, match=r"^keep_first=-1: give 0"):
        Cache(LAYERS, keep_first=-1)


# --- what is drawn


def logits_of(seed: int, size: int = 40) -> Tensor:
    return 3 * torch.randn(2, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.5),
        Sampling(1.0, top_k=1),
        Sampling(1.0, top_k=5),
        Sampling(1.0, top_k=400),
        Sampling(1.0, top_p=0.3),
        Sampling(1.0, top_p=1e-9),
        Sampling(1.0, min_p=0.2),
        Sampling(1.0, min_p=1.0),
        Sampling(1.7, top_k=9, top_p=0.8, min_p=0.05),
    ],
    ids=str,
)
def test_filters_equal_those_of_transformers(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    seen: list[Tensor] = []

    def likeliest(p: Tensor, count: int, generator: torch.Generator) -> Tensor:
        seen.append(p / p.sum())
        return p.argmax(-1, keepdim=True)

    logits = logits_of(2)
    monkeypatch.setattr(torch, "multinomial", likeliest)
    assert torch.equal(draw(logits, sampling, [torch.Generator()] * 2), logits.argmax(-1))
    scores: Any = logits.double()
    for warper in (
        TemperatureLogitsWarper(sampling.temperature),
        TopKLogitsWarper(sampling.top_k or logits.shape[1]),
        TopPLogitsWarper(sampling.top_p),
        MinPLogitsWarper(sampling.min_p),
    ):
        scores = warper(torch.LongTensor(2, 1), scores)
    expected = scores.softmax(-1).sort(descending=True).values
    torch.testing.assert_close(torch.stack(seen), expected)


def test_draws_follow_the_probabilities() -> None:
    logits, count = logits_of(3, 6)[:1], 4000
    drawn = draw(logits.expand(count, -1), Sampling(temperature=1.5), [torch.Generator().manual_seed(0)] * count)
    p = (logits[0] / 1.5).softmax(-1)
    deviation = (p * (1 - p) / count).sqrt()
    assert ((drawn.bincount(minlength=6) / count - p).abs() < 4 * deviation + 1e-4).all()


def test_a_temperature_near_zero_takes_the_most_probable() -> None:
    logits = logits_of(3, 6)
    for temperature in (1e-9, 1e-300, 5e-324):
        drawn = draw(logits, Sampling(temperature), [torch.Generator()] * len(logits))
        assert drawn.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "words",
    [{"temperature": -1.0}, {"temperature": math.nan}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": 2.0}],
)
def test_sampling_out_of_range_is_refused(words: dict[str, float]) -> None:
    ((key, value),) = words.items()
    with pytest.raises(ValueError, match=rf"^{key}={value}: "):
        Sampling(**words)  # type: ignore[arg-type]


# --- token by token


def texts(steps: Iterator[list[int | None]]) -> list[list[int]]:
    return [[token for token in row if token is not None] for row in zip(*steps, strict=True)]


PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]


@pytest.mark.parametrize("kv_heads", [8, 4, 2])
def test_greedy_text_equals_qwen3s(kv_heads: int, drawn) -> None:
    """transformers' own generation with its own cache, one prompt at a time and as a left-padded batch."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = drawn(kv_heads=kv_heads)
    config = Qwen3Config(**oracle_sizes(model.spec), pad_token_id=0, bos_token_id=None, eos_token_id=None)
    oracle = Qwen3ForCausalLM(config).eval()
    oracle.load_state_dict({renamed(name): value for name, value in model.state_dict().items()})
    ours = texts(generate(model, PROMPTS, 20, GREEDY, chunk=2))
    longest = max(map(len, PROMPTS))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    theirs = oracle.generate(input_ids=padded, attention_mask=mask, max_new_tokens=20, do_sample=False)  # type: ignore
    assert ours == theirs[:, longest:].tolist()
    for prompt, text in zip(PROMPTS, ours, strict=True):
        alone = oracle.generate(input_ids=torch.tensor([prompt]), max_new_tokens=20, do_sample=False)  # type: ignore
        assert text == alone[0, len(prompt) :].tolist()
    assert len({token for text in ours for token in text}) > 5, "a text of one token would prove little"


def test_a_row_draws_alike_in_any_company(drawn) -> None:
    model, sampling = drawn(experts=MIXTURE, gates=[GateSpec()]), Sampling(temperature=2.0, seed=5)
    together = texts(generate(model, PROMPTS, 12, sampling))
    for row, prompt in enumerate(PROMPTS):
        alone = texts(generate(model, [prompt], 12, replace(sampling, seed=5 + row), chunk=1))
        assert alone == [together[row]]
    assert texts(generate(model, PROMPTS, 12, replace(sampling, seed=6))) != together


def test_a_row_ends_with_its_stop_and_others_go_on(drawn) -> None:
    model, sampling = drawn(), Sampling(temperature=2.0, seed=2)
    free = texts(generate(model, PROMPTS, 12, sampling))
    stop = free[1][3]
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    assert len(expected[1]) == 4 and max(map(len, expected)) == 12
    assert texts(generate(model, PROMPTS, 12, sampling, {stop})) == expected
    alone = generate(model, PROMPTS[1:2], 12, replace(sampling, seed=3), {stop})
    assert list(alone) == [[token] for token in expected[1]]


def test_each_token_is_read_once(drawn) -> None:
    model, read = drawn(), []
    model.embed.register_forward_pre_hook(lambda embed, args: read.append(args[0].shape[1]))
    list(generate(model, [[1] * 7], 6, GREEDY, chunk=3))
    assert read == [3, 3, 1, 1, 1, 1, 1, 1]


def test_logits_that_are_not_finite_are_said(drawn) -> None:
    model = drawn()
    nn.init.constant_(model.norm.weight, math.inf)
    with pytest.raises(ValueError, match="logits are not finite"):
        next(generate(model, PROMPTS, 1, GREEDY))


# --- the first token dropped


def test_streaming_loss_with_a_window_of_all_is_the_plain_loss(rows: Tensor, drawn) -> None:
    model = drawn(gates=[GateSpec()])
    with torch.no_grad():
        p = model(rows[:, :-1]).logits.softmax(-1)
    plain = -p.gather(2, rows[:, 1:, None]).squeeze(2).log()
    for keep_first in (0, 1):
        torch.testing.assert_close(streaming_loss(model, rows, T, keep_first), plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("keep_first", [0, 1])
def test_streaming_loss_with_a_small_window(
    keep_first: int, rows: Tensor, drawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gatedlm.probes.streaming.CHUNK", 4)
    model, window = drawn(), 3
    p = under_mask(model, rows, banded(window, keep_first)[None, None]).softmax(-1)[:, :-1]
    expected = -p.gather(2, rows[:, 1:, None]).squeeze(2).log()
    losses = streaming_loss(model, rows, window, keep_first)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5)
    differs = (losses - streaming_loss(model, rows, T, 0)).abs().amax(0) > 1e-4
    assert differs.tolist() == [False] * (window + keep_first) + [True] * (T - 1 - window - keep_first)


# --- the command


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, scramble) -> Path:
    """The folder of a run as far as the command reads it, weights not trained."""
    folder = tmp_path_factory.mktemp("runs") / "try"
    folder.mkdir()
    recipe = load(["recipe=quickstart", "scale=nano", "model.vocab=300", "data.vocab=300"])[0].recipe
    (folder / "recipe.yaml").write_text(to_yaml(recipe))
    tokens.train(["der Gärtner öffnet das Tor, " * 9], 300).save(str(folder / "tokenizer.json"))
    save_file(scramble(GatedLM(recipe.model)).state_dict(), folder / "model.safetensors")
    return folder


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run_(*words: str) -> tuple[int, str, str]:
        try:
            command.main(list(words))
            status = 0
        except SystemExit as exit:
            assert isinstance(exit.code, int)
            status = exit.code
        out, err = capsys.readouterr()
        return status, out, err

    return run_


def test_standard_output_holds_the_text_alone(run: Path, call) -> None:
    status, out, err = call(f"run={run}", "prompt=das Tor", "tokens=30", "seed=3")
    assert status == 0, err
    from gatedlm.hub import open_model

    tokenizer = tokens.load(str(run))
    ids = [0, *tokenizer.encode("das Tor", add_special_tokens=False).ids]
    (written,) = texts(generate(open_model(str(run)).net, [ids], 30, Sampling(seed=3), {0}))
    assert out == "das Tor" + tokenizer.decode(written) + "\n"
    assert err.startswith(f"{len(written)} tokens in ")


def test_several_prompts_are_the_texts_of_each(run: Path, tmp_path: Path, call) -> None:
    (tmp_path / "prompts").write_text("das Tor\n\nder Gärtner\nöffnet\n", encoding="utf-8")
    _, out, _ = call(f"run={run}", f"prompts={tmp_path / 'prompts'}", "prompt=das", "batch=3", "tokens=5", "seed=7")
    alone = [
        call(f"run={run}", f"prompt={prompt}", "tokens=5", f"seed={7 + i}")[1]
        for i, prompt in enumerate(["das Tor", "der Gärtner", "öffnet", "das"])
    ]
    assert out == "".join(alone)


def test_without_a_prompt_a_text_begins(run: Path, call) -> None:
    assert call(f"run={run}", "tokens=5")[1] == call(f"run={run}", "prompt=", "tokens=5")[1] != "\n"


def test_text_comes_in_whole_characters() -> None:
    tokenizer = tokens.train(["abc"], 257)
    text = "aé€😀z"
    ids = tokenizer.encode(text).ids
    assert len(ids) == 1 + 2 + 3 + 4 + 1
    assert [piece for piece in command._characters(tokenizer, [], iter(ids)) if piece] == list(text)
    half = command._characters(tokenizer, [], iter(ids[:2]))
    assert "".join(half) == tokenizer.decode(ids[:2]) == "a\ufffd"


def test_spaces_stay_where_a_tokenizer_drops_that_of_a_texts_beginning() -> None:
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "▁the": 1, "▁fox": 2, "▁jumps": 3}, unk_token="<s>"))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Metaspace()
    assert tokenizer.decode([2]) == "fox"
    for before, tokens_, pieces in (
        ([0, 1], [2, 3], [" fox", " jumps"]),
        ([0], [1, 2], ["the", " fox"]),
        ([1], [2, 0, 3], [" fox", " jumps"]),
    ):
        assert [piece for piece in command._characters(tokenizer, before, tokens_) if piece] == pieces


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["prompt=x"], "which model?"),
        (["run=RUN", "model=RUN"], "one of them"),
        (["run="], "which model?"),
        (["run=nowhere", "prompt=x"], "nowhere"),
        (["run=RUN", "promt=x"], "did you mean prompt=?"),
        (["run=RUN", "--prompt", "x"], "did you mean prompt=?"),
        (["run=RUN", "temperature=warm"], "temperature=warm: write a number"),
        (["run=RUN", "temperature=-1"], "temperature=-1.0: 0 (greedy) or more"),
        (["run=RUN", "tokens=1.5"], "tokens=1.5: write a whole number"),
        (["run=RUN", "tokens=0"], "tokens=0: a whole number from 1"),
        (["run=RUN", f"seed={2**80}"], "a whole number from 0"),
        (["run=RUN", "window=0"], "window=0: a whole number from 1"),
        (["run=RUN", "keep_first=2"], "keep_first=2: all is kept unless window=W"),
        (["run=RUN", "prompt=a\udcff"], "prompt=a\\udcff: not UTF-8"),
        (["run=RUN", "prompts=nowhere.txt"], "prompts=nowhere.txt: No such file"),
        (["run=RUN", "prompts=empty.txt"], "prompts=empty.txt: no prompt in it"),
        (["run=RUN", "prompts=latin.txt"], "prompts=latin.txt: not UTF-8"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value)[:40],
)
def test_what_is_wrong_is_said_in_one_line(
    words: list[str], says: str, run: Path, tmp_path: Path, call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("latin.txt").write_bytes("Gärtner".encode("latin-1"))
    status, out, err = call(*(word.replace("RUN", str(run)) for word in words))
    assert (status, out) == (2, "")
    assert says in err and err.count("\n") == 1


def test_a_run_without_text_is_refused(tmp_path: Path, run: Path, call) -> None:
    for name in ("recipe.yaml", "model.safetensors"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    status, out, err = call(f"run={tmp_path}", "prompt=x")
    assert (status, out) == (2, "")
    assert "no tokenizer.json" in err and err.count("\n") == 1


def test_a_token_without_weights_is_said(tmp_path: Path, run: Path, call) -> None:
    shutil.copytree(run, tmp_path / "run")
    tokenizer = Tokenizer.from_file(str(run / "tokenizer.json"))
    tokenizer.add_tokens([f"Einhorn {i}" for i in range(100, 200)])
    tokenizer.save(str(tmp_path / "run" / "tokenizer.json"))
    size = tokenizer.get_vocab_size() - 1
    status, out, err = call(f"run={tmp_path / 'run'}", "prompt=das Einhorn 199", "tokens=1")
    assert (status, out) == (2, "")
    assert f"token {size} has no weights" in err and err.count("\n") == 1
    assert call(f"run={tmp_path / 'run'}", "prompt=das Tor", "tokens=1")[0] == 0


def test_usage_comes_before_torch() -> None:
    script = "import sys; from gatedlm.generate import main; main([]); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    for word in command.WORDS:
        assert f"{word}=" in done.stdout


def test_a_reader_that_has_enough_ends_the_command(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit, match="141"):
            command.main([f"run={run}", "prompt=das"])
        monkeypatch.undo()
