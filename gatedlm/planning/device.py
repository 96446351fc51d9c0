"""The devices a plan knows, from their makers' data sheets, and how much of those figures a training run gets."""

from __future__ import annotations

from dataclasses import dataclass

# Shares of the peak that training reaches, recomputed passes counted as work. Published for dense models: 33 to 39 %
# without counting recomputation (Llama-3.1-8B on H100, torchtitan), 41 to 52 % at 0.3 to 2 G parameters (nanochat,
# TinyLlama); for mixtures 20 to 28 % (Qwen3-30B-A3B on H100, NeMo AutoModel; 16 G on B200, torchtitan).
DENSE, MIXTURE = 0.45, 0.25
MEMORY, NETWORK = 0.7, 0.7  # our assumptions: what copies and collectives of large buffers usually reach
FRAGMENTED = 0.06  # of what is allocated, lost between blocks of the allocator: our assumption


@dataclass(frozen=True)
class Device:
    """One accelerator: sizes in bytes, rates a second.

    fp32, bf16  FLOP/s of dense matrix products
    memory      bytes it has; bandwidth to them; taken: context, libraries' workspaces and collectives' buffers
    node        devices of a machine
    inside      bytes/s to the others of its machine, one direction; outside to other machines, its share of the links
    dollars     an hour of one, our assumption: prices differ by two and more
    fused       whether RMSNorm is one kernel, which keeps its input alone for the backward pass
    """

    name: str
    fp32: float
    bf16: float
    memory: float
    bandwidth: float
    inside: float
    outside: float
    dollars: float
    node: int = 8
    taken: float = 2e9
    fused: bool = True


DEVICES = {
    device.name: device
    for device in (
        Device("h100", 67e12, 989e12, 80e9, 3.35e12, 450e9, 50e9, 2.5),
        Device("h200", 67e12, 989e12, 141e9, 4.8e12, 450e9, 50e9, 3.0),
        Device("b200", 75e12, 2250e12, 180e9, 8.0e12, 900e9, 50e9, 5.0),
        Device("a100", 19.5e12, 312e12, 80e9, 2.0e12, 300e9, 25e9, 1.5),
        Device("l40s", 91.6e12, 362e12, 48e9, 0.86e12, 25e9, 12.5e9, 1.0),
        Device("4090", 82.6e12, 165e12, 24e9, 1.0e12, 12.5e9, 3e9, 0.4),
        # Two cores of a server CPU of 2023, measured
        Device("cpu", 180e9, 430e9, 8e9, 20e9, 5e9, 1e9, 0.1, node=1, taken=0.6e9, fused=False),
    )
}
