"""What all tests share. The shape hook has to stand before the first import of gatedlm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch
from torch import nn

jaxtyping.install_import_hook(["gatedlm.model", "gatedlm.loss", "gatedlm.probes"], "beartype.beartype")
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of prepared corpora, new for each session and never the user's own."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GATEDLM_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def scramble() -> Callable[..., nn.Module]:
    """Redraw all parameters, norms around 1 and the rest around 0, so that nothing stands at a neutral value."""

    @torch.no_grad()
    def draw(module: nn.Module, seed: int = 0) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        for p in module.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.3 * noise if p.dim() == 1 else noise / math.sqrt(p.shape[-1]))
        return module

    return draw
