"""What only a GPU can tell, at the paper's widths and in bf16; without one the same code at toy sizes."""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.gate import compared as gates
from benchmarks.harness import RESULTS, Bench, Result, report
from benchmarks.models import ours, rows, training
from benchmarks.probe import compared as probed
from gatedlm.model.feedforward import ExpertsSpec
from gatedlm.model.gate import GateSpec
from gatedlm.model.lm import GatedLM, ModelSpec
from gatedlm.planning.device import DEVICES
from gatedlm.planning.work import flops

GPU = torch.cuda.is_available()
GATE = [GateSpec()]
if GPU:
    BATCH, CONTEXT, LENGTHS = 2, 4096, (4096, 32768)
    DENSE = ModelSpec(151_936, 28, 2048, 16, 8, 128, 6144, gates=GATE, tied=True)
    MIXTURE = ModelSpec(151_936, 24, 2048, 32, 4, 128, 768, ExpertsSpec(128, 8), GATE)
else:
    BATCH, CONTEXT, LENGTHS = 2, 32, (64, 128)
    DENSE = ModelSpec(512, 3, 64, 4, 2, 16, 192, gates=GATE, tied=True)
    MIXTURE = ModelSpec(512, 3, 64, 4, 2, 16, 32, ExpertsSpec(8, 2), GATE)


def run(bench: Bench) -> Iterator[Result]:
    """Every part, whatever becomes of the others."""
    for part in (_products, _dense, _mixture, _gates, _probes):
        try:
            yield from part(bench)
        except (RuntimeError, ImportError) as error:  # out of memory is a RuntimeError
            yield Result(part.__name__.strip("_"), [], (f"failed: {str(error).splitlines()[0]}",))
        gc.collect()
        torch.cuda.empty_cache() if GPU else None


def _products(bench: Bench) -> Iterator[Result]:
    """Experts' products in one call, beside one dense product of as many operations."""
    count, width, hidden = MIXTURE.experts.count, MIXTURE.width, 2 * MIXTURE.ffn
    tokens = BATCH * CONTEXT * MIXTURE.experts.used
    make = lambda *shape: torch.randn(shape, device=bench.device, dtype=torch.bfloat16)  # noqa: E731
    x, experts, whole = make(tokens, width), make(count, width, hidden), make(width, hidden)
    ends = torch.arange(1, count + 1, device=bench.device, dtype=torch.int32) * (tokens // count)
    works = {"grouped": lambda: F.grouped_mm(x, experts, offs=ends), "dense": lambda: x @ whole}
    seconds = bench.alternate(works)
    operations = 2e-12 * tokens * width * hidden
    table = [{"product": n, "TFLOP/s": operations / statistics.median(times)} for n, times in seconds.items()]
    yield Result(f"bf16 products, {tokens:,} rows among {count} experts, {width} x {hidden}", table)


def _dense(bench: Bench) -> Iterator[Result]:
    yield _steps("layers of the dense model", DENSE, bench)


def _mixture(bench: Bench) -> Iterator[Result]:
    yield _steps("layers of the mixture", MIXTURE, bench)


def _steps(title: str, spec: ModelSpec, bench: Bench) -> Result:
    """Time, MFU and peak of a step with as many layers as fit, eager and compiled, one model after the other."""
    spec = replace(spec, layers=_fitting(spec))
    tokens, table = BATCH * CONTEXT, []
    for compiled in (False, True):
        table.append({"blocks": "compiled" if compiled else "eager"} | _measured(spec, bench, compiled))
        gc.collect()
    notes = (f"MFU of {_peak() / 1e12:.3g} TFLOP/s, attention's causal half counted", _planned(spec))
    return Result(f"{spec.layers} {title}, elementwise gate, {tokens:,} tokens, bf16", table, notes)


def _measured(spec: ModelSpec, bench: Bench, compiled: bool) -> dict[str, float]:
    step = training(ours(spec, bench, compiled), rows(spec, BATCH, CONTEXT, bench), bf16=True)
    cold = bench.seconds(step)
    peak = (torch.cuda.memory_allocated() if GPU else 0) + bench.peak(step)
    seconds = statistics.median(bench.seconds(step) for _ in range(bench.rounds))
    rate = BATCH * CONTEXT / seconds
    mfu = flops(spec, CONTEXT).total * rate / _peak()
    return {"ms": 1000 * seconds, "tokens/s": rate, "MFU": mfu, "peak GiB": peak / 2**30, "first step s": cold}


def _planned(spec: ModelSpec) -> str:
    from gatedlm.planning.memory import Setting, peak
    from gatedlm.recipe import DataSpec, Recipe, TrainerSpec

    data, trainer = DataSpec(vocab=spec.vocab, context=CONTEXT, batch=BATCH), TrainerSpec(precision="bf16")
    setting = Setting(Recipe(model=spec, data=data, trainer=trainer), DEVICES[_name()], 1, BATCH)
    return f"the plan's peak: {sum(peak(setting).values()) / 2**30:.2f} GiB"


def _fitting(spec: ModelSpec) -> int:
    """Layers of which weights, gradients, averages and activations, roughly reckoned, take half of the memory."""
    if not GPU:
        return 2
    one, none = (replace(spec, layers=n).parameters().total for n in (2, 1))
    layer = 16 * (one - none) + 100 * BATCH * CONTEXT * spec.width
    top = 16 * (2 * none - one) + 10 * BATCH * CONTEXT * spec.vocab
    return max(1, min(spec.layers, int((torch.cuda.mem_get_info()[1] / 2 - top) / layer)))


def _name() -> str:
    name = torch.cuda.get_device_name().lower() if GPU else "cpu"
    return next((known for known in DEVICES if known in name), "h100")


def _peak() -> float:
    return DEVICES[_name()].bf16


def _gates(bench: Bench) -> Iterator[Result]:
    plain = replace(DENSE, vocab=min(DENSE.vocab, 8192), layers=min(DENSE.layers, 4), gates=[])
    for compiled in (False, True):
        yield gates(plain, BATCH, CONTEXT, bench, bf16=True, compiled=compiled)


def _probes(bench: Bench) -> Iterator[Result]:
    net = ours(replace(DENSE, layers=min(DENSE.layers, 8)), bench).net
    assert isinstance(net, GatedLM)
    for length in LENGTHS:
        with torch.autocast(bench.device.type, torch.bfloat16):
            yield probed(net, length, bench)


def main(rounds: str = "7") -> None:
    """Print all; write results/gpu-cuda.json where there is a GPU."""
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench.of(rounds, "1", "cuda" if GPU else "cpu")
        report("gpu", run(bench), bench, RESULTS if GPU else Path(scratch))


if __name__ == "__main__":
    main(*sys.argv[1:])
