"""What a model keeps of the tokens it has read, so that a further one costs one row of attention, not the whole map."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gatedlm.shapes import Bool, Float, Int

ROOM = 256  # free columns of a new store: it is copied once in so many tokens


class Cache:
    """Keys and values of one text a row, layer by layer; each pass takes the same one: ``model(tokens, cache=cache)``.

    Query i sees key j if j <= i and (j > i - window or j < keep_first), counted from the row's first token. Keys keep
    the angle of their place in the text, so distances are those of an uncached pass and any split gives its logits.

    layers      the model's
    padding     (B,): how many tokens at the left of each row are none. They see each other and no one sees them
    window      how many of the last keys are seen, the query's own included; None is all
    keep_first  how many of the first keys are seen for ever (Xiao et al. 2023, arXiv 2309.17453)

    For passes without gradients. ValueError for a window or a keep_first that cannot be.
    """

    def __init__(
        self, layers: int, padding: Int[Tensor, " B"] | None = None, window: int | None = None, keep_first: int = 0
    ) -> None:
        if window is not None and window < 1:
            raise ValueError(f"window={window}: a token sees at least itself, give 1 or more")
        if keep_first < 0:
            raise ValueError(f"keep_first={keep_first}: give 0 or more")
        self.window = math.inf if window is None else window
        self.keep_first = keep_first
        self.padding = torch.zeros(1, dtype=torch.long) if padding is None else padding
        self.length = self.room = self.used = 0
        self.places = torch.arange(0)  # of the tokens whose columns are stored
        self.kept: Tensor | None = None  # which columns a new store takes over, None while the old one has room
        self.layers = [Past(self) for _ in range(layers)]

    def advance(self, tokens: Int[Tensor, "B T"]) -> tuple[Int[Tensor, "1 T"], Bool[Tensor, "b 1 T S"]]:
        """Make room for T more columns: the places of these tokens, and which of the S columns each of them sees."""
        count, device = tokens.shape[1], tokens.device
        self.padding, self.places = self.padding.to(device), self.places.to(device)
        place = torch.arange(self.length, self.length + count, device=device)
        self.kept = self._needed() if len(self.places) + count > self.room else None
        if self.kept is not None:
            self.places = self.places[self.kept]
            self.room = len(self.places) + count + ROOM
        self.used = len(self.places)
        self.places = torch.cat((self.places, place))
        self.length += count
        return place[None], self._seen(place)

    def _needed(self) -> Tensor:
        """Columns that some later token sees in some row; the mask hides those that another row is done with."""
        first = self.padding.max() + self.keep_first
        return ((self.places < first) | (self.places > self.length - self.window)).nonzero().flatten()

    def _seen(self, place: Tensor) -> Tensor:
        query, key, start = place[:, None], self.places, self.padding[:, None, None]
        near = (key > query - self.window) | (key < start + self.keep_first)
        apart = (key < start) != (query < start)  # padding sees padding, so that no row of the map is empty
        return ((key <= query) & near & ~apart)[:, None]


class Past:
    """One layer's keys and values in a ``Cache``, as softmax attention takes them."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.store: Tensor | None = None

    def extended(
        self, k: Float[Tensor, "B T G D"], v: Float[Tensor, "B T G D"]
    ) -> tuple[Float[Tensor, "B S G D"], Float[Tensor, "B S G D"]]:
        """Those of earlier tokens and then these, which are kept."""
        used, end = self.cache.used, len(self.cache.places)
        new = torch.stack((k, v))
        old = new if self.store is None else self.store
        if self.cache.kept is not None:
            self.store = new.new_empty(2, len(k), self.cache.room, *k.shape[2:])
            self.store[:, :, :used] = old[:, :, self.cache.kept]
        assert self.store is not None
        self.store[:, :, used:end] = new
        k, v = self.store[:, :, :end]
        return k, v
