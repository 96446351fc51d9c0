"""Gated attention for language models, reproduced (arXiv 2505.06708)."""

__version__ = "0.1.0"
