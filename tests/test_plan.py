"""The plan: its FLOPs against torch's counter, its memory against what the allocator saw, its words and figures."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from gatedlm import catalogue, plan
from gatedlm.data import order
from gatedlm.model.feedforward import ExpertsSpec
from gatedlm.model.lm import GatedLM, initialise
from gatedlm.planning import pace, page, routing, text
from gatedlm.planning.device import DEVICES
from gatedlm.planning.memory import Setting, largest_micro, peak, with_margin
from gatedlm.planning.work import flops, matrices
from gatedlm.recipe import Recipe, load
from gatedlm.training.module import LitLM
from gatedlm.training.strategy import placement

ROOT = Path(__file__).parent.parent
PLANNED = [entry for entry in catalogue.recipes() if entry.takes.startswith("by plan")]
SMALL = ["recipe=quickstart", "model.layers=3", "model.width=96", "model.heads=4", "model.kv_heads=2"]
SMALL += ["model.head_dim=32", "model.ffn=256", "data.vocab=384", "data.context=80", "data.batch=8"]
SMALL += ["trainer.accelerator=cpu", "trainer.precision=fp32", "trainer.threads=1"]
KINDS = {"dense": ["model.ffn=320"], "mixture": ["model.experts.count=6", "model.experts.used=2", "model.ffn=64"]}
SIZES = {"kept": [], "recomputed": ["trainer.checkpoint_blocks=true"], "parts": ["trainer.micro_batch=2"]}


# Of Lightning, whose loaders and launchers are not what is tested here; newer Pythons warn of forking
pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


def recipe(*words: str) -> Recipe:
    (run,) = load([*SMALL, *words])
    return run.recipe


def planned(*words: str) -> Setting:
    (setting,) = page.settings(list(words))
    return setting


def printed(*words: str) -> list[str]:
    return [line for line in page.lines(planned(*words)) if isinstance(line, str)]


# FLOPs


def grouped(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * x[0] * x[1] * weight[-1]


@pytest.mark.parametrize(
    ("kind", "gate"),
    [
        ("dense", "sdpa-elementwise+value-headwise"),
        ("dense", "sdpa-constant"),
        ("mixture", "none"),
        ("mixture", "output-elementwise"),
    ],
)
def test_flops_are_those_torch_counts(kind: str, gate: str) -> None:
    spec = recipe(*KINDS[kind], f"gate={gate}", f"model.tied={str(kind == 'dense').lower()}").model
    net, tokens = GatedLM(spec), torch.randint(0, 384, (3, 40))
    initialise(net, 0)
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped})
    with sdpa_kernel(SDPBackend.MATH), counter:
        logits = net(tokens).logits
        (logits * torch.randn_like(logits)).sum().backward()
    own = flops(spec, 40)
    # The plain kernel multiplies the whole square, of which causal attention needs half.
    assert counter.get_total_flops() == 3 * 40 * (own.weights + 2 * own.attention)


@pytest.mark.parametrize("gate", ["none", "sdpa-elementwise", "sdpa-constant", "sdpa-rmsnorm"])
def test_matrices_are_what_the_model_multiplies_by(gate: str) -> None:
    spec = recipe(*KINDS["mixture"], f"gate={gate}", "model.switch.count=3", "model.sandwich_norm=true").model
    with torch.device("meta"):
        named = dict(GatedLM(spec).named_parameters())
    met = {name: p.numel() for name, p in named.items() if p.dim() > 1 and not name.endswith("table")}
    met.pop("embed.weight")
    unused = sum(size for name, size in met.items() if "feedforward" in name and "proj" in name) * 4 / 6
    assert matrices(spec) == sum(met.values()) - unused


# Memory


class Watch(Callback):
    """What the allocator hands out and takes back during each step after the first, over what is there before it."""

    def __init__(self) -> None:
        self.peaks: list[int] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step:
            states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
            held: list[Any] = [*pl_module.parameters(), *states]
            self.held = sum(t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes for t in held)
            self.profiler = torch.profiler.profile(profile_memory=True)
            self.profiler.start()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step > 1:
            self.profiler.stop()
            assert self.profiler.profiler is not None and self.profiler.profiler.kineto_results is not None
            events = self.profiler.profiler.kineto_results.events()
            memory: list[Any] = [event for event in events if event.name() == "[memory]"]
            changes = sorted((event.start_ns(), event.nbytes()) for event in memory)
            self.peaks.append(self.held + int(np.cumsum([change for _, change in changes]).max()))


def measured(recipe: Recipe) -> int:
    """Bytes of tensors that one rank holds at the fullest moment of a step.

    Between ranks the least of several steps: on a busy machine gloo's threads let go late of what they have sent.
    """
    watch, trainer, data = Watch(), recipe.trainer, recipe.data
    rows = torch.randint(0, data.vocab, (data.batch // trainer.devices, data.context + 1))
    steps = 2 if trainer.devices == 1 else 8
    L.Trainer(
        **placement(trainer, sharded=False),
        max_steps=steps,
        callbacks=[watch],
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    ).fit(LitLM(recipe), DataLoader([rows] * steps, batch_size=None))  # pyright: ignore
    return min(watch.peaks)


def on_ranks(recipe: Recipe, ranks: int) -> list[int]:
    """``measured`` on each of several processes, forked since importing takes longer than what they do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    found = context.Queue()

    def run(rank: int) -> None:
        here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
        os.environ |= {key: str(value) for key, value in here.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "plan"}
        found.put(measured(recipe))

    processes = [context.Process(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    peaks = [found.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(timeout=60)
    return peaks


def estimate(recipe: Recipe, ranks: int) -> float:
    share = recipe.data.batch // ranks
    return sum(peak(Setting(recipe, DEVICES["cpu"], ranks, recipe.trainer.micro_batch or share)).values())


@pytest.mark.parametrize("size", list(SIZES))
@pytest.mark.parametrize("kind", list(KINDS))
def test_memory_of_one_process_is_within_a_tenth(kind: str, size: str) -> None:
    given = recipe(*KINDS[kind], *SIZES[size])
    assert estimate(given, 1) == pytest.approx(measured(given), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("size", list(SIZES))
@pytest.mark.parametrize("kind", list(KINDS))
def test_memory_of_two_ranks_is_within_a_tenth(kind: str, size: str) -> None:
    given = recipe(*KINDS[kind], *SIZES[size], "trainer.devices=2", "trainer.strategy=fsdp")
    for found in on_ranks(given, 2):
        assert estimate(given, 2) == pytest.approx(found, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["gate=value-headwise+query-elementwise"],
        ["gate=none", "model.switch.count=3", "model.sandwich_norm=true"],
        ["gate=sdpa-shared", "model.tied=true", "model.qk_norm=false"],
        ["gate=none", "data.vocab=65536", "data.batch=16", "model.layers=1"],
        ["trainer.precision=bf16"],
    ],
)
def test_memory_of_other_settings_is_within_a_tenth(words: list[str]) -> None:
    given = recipe(*words)
    assert estimate(given, 1) == pytest.approx(measured(given), rel=0.1)


def test_more_ranks_and_smaller_passes_need_less() -> None:
    one = planned("recipe=dense-1.7b-28l", "devices=8")
    needs = [sum(peak(replace(one, ranks=ranks)).values()) for ranks in (1, 8, 64, 256)]
    assert needs == sorted(needs, reverse=True) and len(set(needs)) == 4
    # What N ranks share of weights, gradients and AdamW's two averages is 16 bytes a parameter over N.
    shared = [sum(peak(replace(one, ranks=n))[name] for name in ("weights", "optimizer")) for n in (1, 8)]
    total = one.model.parameters().total
    assert shared == [12 * total, 12 * total / 8]
    most = largest_micro(one)
    share = one.recipe.data.batch // 8
    fits = [sum(with_margin(replace(one, micro=n)).values()) <= 80e9 for n in range(1, share + 1) if share % n == 0]
    assert fits == [n <= most for n in range(1, share + 1) if share % n == 0] and 1 < most < share


# Figures


def test_parameters_are_the_papers() -> None:
    for name, total in {"dense-1.7b-28l": 1720.6e6, "dense-1.7b-48l": 1705.7e6, "moe-15a2b": 15.58e9}.items():
        assert planned(f"recipe={name}").model.parameters().total == pytest.approx(total, rel=5e-4)
    gated = planned("recipe=moe-15a2b", "gate=sdpa-elementwise").model.parameters().gate
    assert gated == pytest.approx(201e6, rel=2e-3)  # Table 1 row 5


def test_a_step_is_what_its_slowest_part_takes() -> None:
    one = planned("recipe=dense-500m", "devices=8", "trainer.checkpoint_blocks=false")
    tokens, work = 256 * 2048 / 8, flops(one.model, 2048).total
    found = pace.bounds(one)
    assert found["compute"] == pytest.approx(tokens * work / (989e12 * 0.45))
    # 2 x bf16 gathered, fp32 reduced, of which seven eighths come from elsewhere
    assert found["network"] == pytest.approx(one.passes * 8 * one.model.parameters().total * 7 / 8 / (450e9 * 0.7))
    assert pace.step(one) == max(found.values())
    assert pace.hours(one) == pytest.approx(20_000 * pace.step(one) / 3600)
    again = pace.bounds(planned("recipe=dense-500m", "devices=8", "trainer.checkpoint_blocks=true"))["compute"]
    assert 1.2 < again / found["compute"] < 4 / 3


def test_what_breaks_first() -> None:
    assert pace.breaks(planned("recipe=moe-15a2b", "devices=64")).startswith("the network")
    assert pace.breaks(planned("recipe=moe-15a2b", "devices=1")).endswith("take more devices")
    assert pace.breaks(planned("recipe=dense-1.7b-28l", "devices=1", "trainer.micro_batch=1024")).startswith("memory")
    # A larger micro-batch sends less only where a step has several passes.
    assert pace.breaks(planned("recipe=moe-15a2b", "devices=64")).endswith(
        "fewer devices or a larger data.batch send less"
    )
    small = planned("recipe=moe-15a2b", "trainer.micro_batch=2")
    assert pace.breaks(small).endswith("a larger trainer.micro_batch sends less")


def test_a_text_that_is_read_too_often_breaks_first() -> None:
    short = ["recipe=dense-1.7b-28l", "data.corpus=fineweb_edu", "data.holdout=0.01"]
    # 100,000 steps of 1024 x 4096 tokens on 99 % of 10 billion
    assert pace.limits(planned(*short))["text"] == pytest.approx(419.43 / 9.9 / 4, rel=1e-4)
    assert pace.breaks(planned(*short)) == "the text, read 42 times: give a data.corpus of 419.4 G tokens"
    assert pace.limits(planned(*short, "data.max_tokens=1_000_000_000"))["text"] == pytest.approx(105.9, rel=1e-3)
    for corpus in ("files", "org/name"):  # nobody knows how much there is
        assert pace.limits(planned(*short, f"data.corpus={corpus}"))["text"] == 0
        assert not any(line.startswith("text") for line in printed(*short, f"data.corpus={corpus}"))
    assert "text: 9.9 G tokens of fineweb_edu to train on, 40 GB prepared, read 42 times" in printed(*short)
    for entry in PLANNED:
        assert pace.limits(planned(f"recipe={entry.name}"))["text"] < 0.6, entry.name


def test_the_papers_schedules() -> None:
    for name, tokens, rate in (
        ("dense-1.7b-28l", 400e9, 4e-3),
        ("dense-1.7b-28l-3.5t", 3.5e12, 4.5e-3),
        ("dense-1.7b-48l", 400e9, 4e-3),
        ("dense-1.7b-48l-1t", 1e12, 5.3e-3),
        ("moe-15a2b", 400e9, 2e-3),
    ):
        recipe = planned(f"recipe={name}").recipe
        assert text.asked(recipe) == pytest.approx(tokens, rel=0.05) and recipe.optim.lr == rate
        assert text.held(recipe) > text.asked(recipe)


def test_auto_precision_is_that_of_the_planned_device() -> None:
    assert all(device.bf16 > device.fp32 for device in DEVICES.values())
    for words in (["recipe=moe-15a2b"], ["recipe=quickstart", "device=a100"], ["recipe=quickstart"]):
        as_said, auto = (planned(*words, f"trainer.precision={name}") for name in ("bf16", "auto"))
        assert auto.rate == as_said.rate == as_said.device.bf16
        assert with_margin(auto) == with_margin(as_said)


def test_the_ranks_are_those_asked_for_whatever_the_recipe_says() -> None:
    # 1000 sequences do not divide among the recipe's own 64 ranks.
    spec = planned("recipe=moe-15a2b", "data.batch=1000", "devices=40", "device=H200")
    assert (spec.ranks, spec.recipe.trainer.devices, spec.recipe.trainer.nodes) == (40, 8, 5)
    assert spec.device.name == "h200"
    assert planned("recipe=moe-15a2b", "devices=64").recipe == planned("recipe=moe-15a2b").recipe


def test_checkpoints_of_many_ranks_share_the_storage() -> None:
    total = planned("recipe=moe-15a2b").model.parameters().total
    for ranks, rate in ((1, 1e9), (8, 8e9), (64, 20e9), (1024, 20e9)):
        assert pace.checkpoint_seconds(planned("recipe=moe-15a2b", f"devices={ranks}")) == 12 * total / rate


# Simulated scale


def test_uneven_routing() -> None:
    even, strong = (routing.simulated(ExpertsSpec(128, 8), 8192, spread) for spread in (0.0, 1.0))
    # 512 tokens an expert, give or take a multinomial's root: the fullest of 128 stands about 2.6 deviations above
    assert even.fullest == pytest.approx(1 + 2.6 / 512**0.5, abs=0.03) and even.empty == 0
    assert even.padded == pytest.approx(64 / 512, rel=0.1)  # half a tile an expert
    # With spread 1 shares are exponential, and the largest of 128 of those is the 128th harmonic number
    assert strong.fullest == pytest.approx(sum(1 / n for n in range(1, 129)), rel=0.1)


def test_order_of_a_thousand_ranks_needs_no_list() -> None:
    rows, world, batch = 854_492_187, 1024, 4096  # 3.5 T tokens of 4096
    tracemalloc.start()
    steps = [order.batch_indices(rows, batch, seed=3, step=step) for step in (0, 1, 104_306, 208_613)]
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 2e6 < 8 * rows
    shares = [next(iter(order.StepSampler(rows, batch, 3, lambda: 1, rank, world))) for rank in (0, 511, 1023)]
    assert [share.tolist() for share in shares] == [steps[1][4 * r : 4 * r + 4].tolist() for r in (0, 511, 1023)]
    everything = np.concatenate(steps)
    assert everything.min() >= 0 and everything.max() < rows
    assert len(set(everything[: 2 * batch].tolist())) == 2 * batch  # one epoch meets no row twice
    assert abs(everything.mean() / rows - 0.5) < 0.02
    assert not np.array_equal(steps[0], order.batch_indices(rows, batch, seed=4, step=0))


@pytest.mark.parametrize("n", [2, 3, 64, 1000, 4097])
def test_a_keyed_permutation_is_one(n: int) -> None:
    sent = [order.keyed_permutation(np.arange(n), n, seed=1, epoch=epoch) for epoch in (0, 1)]
    for found in sent:
        assert sorted(found.tolist()) == list(range(n))
    if n == 4097:
        # Of a random permutation, about one place stays and neighbours land far apart: a third of n on the mean.
        assert sum(sent[0] == np.arange(n)) < 8 and sum(sent[0] == sent[1]) < 8
        assert np.abs(np.diff(sent[0])).mean() == pytest.approx(n / 3, rel=0.1)
        assert abs(np.corrcoef(np.arange(n), sent[0])[0, 1]) < 0.06


def test_long_epochs_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "LISTED", 99)
    read = np.concatenate([order.batch_indices(100, 32, seed=0, step=step) for step in range(25)])
    for epoch in read.reshape(8, 100):
        assert sorted(epoch.tolist()) == list(range(100))


# Words


def test_the_command_answers_without_torch(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=moe-15a2b", "gate=sdpa-elementwise", "devices=64", "device=h100"]
    script = f"import sys, runpy; sys.argv = ['plan', *{words}]; runpy.run_module('gatedlm.plan', run_name='__main__')"
    script += "; assert not hasattr(sys.modules['torch'], '__file__') and 'lightning' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    plan.main(words)  # with the true torch
    assert done.stdout == capsys.readouterr().out
    for said in ("15,778,553,856 parameters", "201,326,592 in gates", "419.4 G tokens", "64 h100", "what breaks first"):
        assert said in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["recipe=moe-15a2c"], "moe-15a2b"),
        (["recipe=moe-15a2b", "devices=0"], "devices=0"),
        (["recipe=moe-15a2b", "devices=3"], "does not divide"),
        (["recipe=moe-15a2b", "devices=-1"], "devices=-1"),
        (["recipe=moe-15a2b", "devices=nan"], "devices=nan"),
        (["recipe=moe-15a2b", "data.corpus=fineweb"], "did you mean fineweb_edu"),
        (["recipe=moe-15a2b", "device=h10"], "h100"),
        (["devices=3"], "which recipe?"),
    ],
)
def test_wrong_words_get_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        plan.main(words)
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and not out and says in err and err.count("\n") == 1


@pytest.mark.parametrize("words", [["recipe=quickstart"], ["-h"]])
def test_a_reader_that_has_enough_ends_it_quietly(words: list[str]) -> None:
    command = [sys.executable, "-m", "gatedlm.plan", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


def test_absurd_batches_are_planned_at_once() -> None:
    huge = planned("recipe=quickstart", "data.batch=9007199254740991")
    most = largest_micro(huge)
    assert huge.recipe.data.batch % most == 0 and sum(with_margin(replace(huge, micro=most)).values()) <= 8e9


def test_recipes_for_gpus_say_what_the_plan_says() -> None:
    assert {"dense-50m", "dense-150m", "dense-500m", "moe-300m", "moe-1b", "moe-15a2b"} < {e.name for e in PLANNED}
    for entry in PLANNED:
        one = planned(f"recipe={entry.name}")
        assert (entry.runs_on, entry.takes) == (f"{one.ranks} GPU{'s' * (one.ranks > 1)}", page.expected(one))
