"""What each benchmark is held to: bounds on cells of its tables."""

from __future__ import annotations

import math
from typing import NamedTuple


class Target(NamedTuple):
    """That cells lie within bounds: in tables whose title has these words, in rows of these names, or in all."""

    what: str
    title: str
    rows: tuple[str, ...]
    column: str
    least: float = -math.inf
    most: float = math.inf

    def __str__(self) -> str:
        bounds = (("at least", self.least), ("at most", self.most))
        return f"{self.what}, " + " and ".join(f"{word} {bound:g}" for word, bound in bounds if math.isfinite(bound))

    def verdict(self, median: float, low: float, high: float) -> str:
        """By the median; what misses by less than the rounds differ is said to."""
        if self.least <= median <= self.most:
            return "met"
        return "missed" if high < self.least or low > self.most else "missed, within the spread of the rounds"


OURS, COMPILED, UNGATED = "time, ours = 1", "time, ours, compiled = 1", "time, ungated = 1"
PEERS = ("transformers", "LitGPT")
LSE = ("F-Attn by the log-sum-exp",)
TARGETS = {
    "kernels": (Target("attention as chosen", "attention", ("256 bf16", "512 bf16"), "chosen, torch = 1", most=0.5),),
    "dense": (
        Target("a peer's step, both eager", "fp32", PEERS, OURS, least=1),
        Target("a peer's step, ours compiled", "bf16", PEERS, COMPILED, least=1.4),
        Target("an eager step, compiled = 1", "", ("ours",), COMPILED, least=1.15),
        Target("a step in fp32, bf16 = 1", "bf16", ("ours, fp32",), OURS, least=1.5),
    ),
    "moe": (
        Target("a loop that indexes stacked weights", "128 experts", ("transformers eager",), OURS, least=7),
        Target("grouped products of a peer", "128 experts", ("transformers grouped",), OURS, least=1.15),
        Target("a module for each expert", "128 experts, 8 of them used, bf16", ("LitGPT",), OURS, least=1.3),
        Target("128 experts, two used", "by number", ("128 experts",), "time, 8 experts = 1", most=1.3),
    ),
    "gate": (
        Target("a headwise gate", "", ("headwise",), UNGATED, most=1.015),
        Target("an elementwise gate", "", ("elementwise, ungated's parameters",), UNGATED, most=1.02),
    ),
    "trainer": (Target("Lightning", "", ("Lightning, a line a step",), "ms over the bare loop", most=1),),
    "probe": (
        Target("a forward pass with F-Attn", "4,096", LSE, "time, forward = 1", most=1.05),
        Target("its memory at four times the tokens", "growth", LSE, "growth", most=4.1),
    ),
    "loader": (Target("batches", "", ("loader",), "speed, training = 1", least=20),),
    "loss": (
        Target("peak of memory", "", ("in parts",), "memory, whole = 1", most=0.2),
        Target("time", "", ("in parts",), "time, logits whole = 1", most=1),
    ),
    "memory": (Target("the plan's estimate", "", (), "planned / measured", least=0.9, most=1.1),),
}
