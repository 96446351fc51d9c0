"""How a run is spread over processes and in which type it computes: all that knows DDP, FSDP2 and precision."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gatedlm.model.lm import GatedLM
from gatedlm.recipe import TrainerSpec


def placement(spec: TrainerSpec) -> dict[str, Any]:
    """Trainer arguments that place a run: accelerator, devices, strategy, precision.

    Weights and optimizer state are fp32 in all cases. bf16 computes under autocast, or with FSDP under its mixed
    precision policy (bf16 parameters in the pass, gradients reduced in fp32).
    """
    sharded = spec.strategy == "fsdp"
    return {
        "accelerator": spec.accelerator,
        "devices": spec.devices,
        "strategy": _strategy(spec),
        "precision": "bf16-mixed" if spec.precision == "bf16" and not sharded else "32-true",
    }


def _strategy(spec: TrainerSpec) -> str | Strategy:
    if spec.strategy == "fsdp":
        # Both sizes are set: "auto" would shard over nodes, not devices.
        return ModelParallelStrategy(data_parallel_size=spec.devices, tensor_parallel_size=1)
    if spec.devices > 1 or spec.strategy == "ddp":
        return DDPStrategy(static_graph=False)
    return "auto"


def shard(net: GatedLM, strategy: Strategy, spec: TrainerSpec) -> None:
    """With FSDP, split each block's parameters and then the rest over the data-parallel ranks; else do nothing."""
    if not isinstance(strategy, ModelParallelStrategy):
        return
    mesh = strategy.device_mesh["data_parallel"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy} if spec.precision == "bf16" else {"mesh": mesh}
    for block in net.blocks:
        fully_shard(block, **options)
    fully_shard(net, **options)
