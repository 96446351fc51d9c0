"""Gated attention for language models, reproduced (arXiv 2505.06708)."""

import os

# Before torch is loaded: threads that spin while they wait, OpenMP's default, all but stand still on shared cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

__version__ = "0.1.0"
