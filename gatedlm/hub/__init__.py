"""Weights in and out: runs, the paper's release, transformers' classes. The only place that knows packed gates."""

from gatedlm.hub.config import TARGETS
from gatedlm.hub.opening import Opened, convert, look, open_model

__all__ = ["TARGETS", "Opened", "convert", "look", "open_model"]
