"""What a model loses when its first token leaves the window: those that rest on a sink break when it goes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gatedlm.loss import shift
from gatedlm.model.cache import Cache
from gatedlm.model.lm import GatedLM
from gatedlm.shapes import Float, Int

CHUNK = 256


@torch.no_grad()
def streaming_loss(model: GatedLM, tokens: Int[Tensor, "B T"], window: int, keep_first: int) -> Float[Tensor, "B T1"]:
    """-log softmax(logits)[next token] in nats, token by token, read through a sliding ``Cache``; T1 is T - 1.

    Each query sees the last ``window`` keys and the first ``keep_first``; from query ``window`` on, keep_first=0 has
    dropped the first token and keep_first=1 has not (Xiao et al. 2023, arXiv 2309.17453). With window >= T both are
    the plain loss.
    """
    cache = Cache(model.spec.layers, window=window, keep_first=keep_first)
    parts = zip(*(part.split(CHUNK, dim=1) for part in shift(tokens.to(model.embed.weight.device))), strict=True)
    losses = [
        F.cross_entropy(model(inputs, cache=cache).logits.mT.float(), targets, reduction="none")
        for inputs, targets in parts
    ]
    return torch.cat(losses, dim=1)
