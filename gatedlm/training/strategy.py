"""How a run is spread over processes and in which type it computes: all that knows DDP, FSDP2 and precision."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_only
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

from gatedlm.model.lm import GatedLM
from gatedlm.recipe import TrainerSpec


def is_first_rank() -> bool:
    """Whether this process prints and writes; known before a Trainer is."""
    return getattr(rank_zero_only, "rank", 0) == 0


def lacks_memory(error: Exception) -> bool:
    """Whether memory ran out, whichever library noticed; torch says it of a CPU in a bare RuntimeError."""
    said = "can't allocate memory" in str(error) or "Storage size calculation overflowed" in str(error)
    return said or isinstance(error, MemoryError | torch.OutOfMemoryError)


def placement(spec: TrainerSpec, sharded: bool) -> dict[str, Any]:
    """Trainer arguments that place a run: accelerator, devices, strategy, precision.

    Weights and optimizer state are fp32 in all cases. bf16 computes under autocast, or with FSDP under its mixed
    precision policy (bf16 parameters in the pass, gradients reduced in fp32). ``sharded`` says that FSDP is needed
    whatever the recipe asks, to read the checkpoint of several ranks. ValueError for more GPUs than the machine has.
    """
    assert spec.precision != "auto", "a recipe resolves it as it is read"
    gpus = torch.accelerator.device_count()
    if spec.accelerator == "gpu" and not gpus:
        raise ValueError("trainer.accelerator=gpu: this machine has none, take cpu or auto")
    if spec.accelerator != "cpu" and 0 < gpus < spec.devices:
        raise ValueError(f"trainer.devices={spec.devices}: more GPUs than the {gpus} of this machine, take fewer")
    fsdp = sharded or spec.strategy == "fsdp"
    return {
        "accelerator": spec.accelerator,
        "devices": spec.devices,
        "num_nodes": spec.nodes,
        "strategy": _strategy(spec, fsdp),
        "precision": "bf16-mixed" if spec.precision == "bf16" and not fsdp else "32-true",
    }


def threads(spec: TrainerSpec) -> int:
    """Cores that one process computes on: ``spec.threads``, at most its share of this machine's."""
    return min(spec.threads, share(spec.devices))


def share(processes: int) -> int:
    """Cores of this machine for each of so many processes."""
    return max(1, (os.cpu_count() or 1) // processes)


def _strategy(spec: TrainerSpec, fsdp: bool) -> str | Strategy:
    ranks = spec.devices * spec.nodes
    if fsdp:
        # Both sizes are set: "auto" would shard over nodes, not devices.
        return ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    return DDPStrategy() if ranks > 1 or spec.strategy == "ddp" else "auto"


def in_words(spec: TrainerSpec, sharded: bool) -> str:
    """The placement as a line for the reader."""
    ranks = spec.devices * spec.nodes
    how = "FSDP" if sharded or spec.strategy == "fsdp" else "DDP" if ranks > 1 or spec.strategy == "ddp" else ""
    processes = " ".join(filter(None, (f"{ranks} process{'es' if ranks > 1 else ''}", how)))
    extras = [word for word, on in (("block checkpointing", spec.checkpoint_blocks), ("compiled", spec.compile)) if on]
    compute = "bf16, reduced in fp32" if spec.precision == "bf16" else "fp32"
    return ", ".join((processes, f"weights and optimizer state in fp32, computing in {compute}", *extras))


def distribute(net: GatedLM, strategy: Strategy, spec: TrainerSpec) -> None:
    """Block by block: recompute activations in the backward pass, compile, shard over the data-parallel ranks.

    Each only where the recipe asks for it; names of parameters stay as they are.
    """
    for block in net.blocks:
        if spec.checkpoint_blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if spec.compile:
            block.compile()
    if isinstance(strategy, ModelParallelStrategy):
        assert strategy.device_mesh is not None
        options: dict[str, Any] = {"mesh": strategy.device_mesh["data_parallel"]}
        if spec.precision == "bf16":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*net.blocks, net):
            fully_shard(module, **options)
        register_fsdp_forward_method(net, "hidden")  # the loss begins there; embedding and head stay whole after it


@contextmanager
def eager(net: GatedLM) -> Iterator[None]:
    """Blocks as they are written for as long as the ``with`` block lasts: hooks do not fire in compiled ones."""
    compiled = [(block, block._compiled_call_impl) for block in net.blocks]
    for block, _ in compiled:
        block._compiled_call_impl = None
    try:
        yield
    finally:
        for block, call in compiled:
            block._compiled_call_impl = call
