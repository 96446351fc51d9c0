"""How much of attention's output is next to nothing, before and after its gate (Figure 5, Appendix A.3)."""

from __future__ import annotations

from torch import Tensor

from gatedlm.probes.trace import LayerTrace
from gatedlm.shapes import Float

THRESHOLDS = (0.01, 0.001)


def small_outputs(layer: LayerTrace) -> dict[str, Float[Tensor, ""]]:
    """``sdpa_W`` is the mean of |y|, ``small_W_X`` the share of |y| < X; y is the SDPA output, W before or after G1.

    X is 0.01 or 0.001, over rows, tokens, heads and channels; without a gate after is before.
    """
    figures: dict[str, Tensor] = {}
    for when, y in {"before": layer.sdpa, "after": layer.gated}.items():
        size = y.float().abs()
        figures[f"sdpa_{when}"] = size.mean()
        figures |= {f"small_{when}_{most}": (size < most).float().mean() for most in THRESHOLDS}
    return figures
