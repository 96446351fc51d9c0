"""Text from a model, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from gatedlm.model.lm import GatedLM


@torch.no_grad()
def sample(net: GatedLM, start: Tensor, length: int, context: int, temperature: float, seed: int) -> Tensor:
    """``start`` (T,) and ``length`` tokens drawn from softmax(logits / temperature) of the last ``context`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = start
    for _ in range(length):
        logits = net(tokens[None, -context:]).logits[0, -1].float().cpu()
        drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat((tokens, drawn.to(tokens.device)))
    return tokens
