"""The paper's tables and claims as runs: each finding is a file with its rows, its figures and its claims."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gatedlm.findings.finding import Finding

NAMES = {
    "table1": "fifteen variants on the mixture of experts",
    "table2": "dense models at equal parameters and two learning rates",
    "table3": "non-linearity between value and output projection",
    "table4": "sparse scores, massive activations and the sink",
    "table5": "longer contexts: the base raised, then YaRN without training",
    "table6": "switch heads",
    "figure2": "attention on the first token by layer",
    "figure3": "gate scores",
    "figure5": "small SDPA outputs before and after the gate",
    "stability": "larger learning rates: loss, activations, spikes",
    "sink": "Bigram-Backcopy with and without a gate",
    "streaming": "the first token leaves a sliding window",
    "spikes": "a search for a small setting whose loss spikes tell the arms apart",
}
LONG = ("table5", "spikes")  # each trains about as long as a third of the others together, so that `all` leaves it out


def find(name: str) -> "Finding":
    """The finding of a name of ``NAMES``."""
    return import_module(f"gatedlm.findings.{name}").FINDING
