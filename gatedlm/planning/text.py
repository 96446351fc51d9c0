"""Whether there is enough text for a run, and what it takes to keep and to order it."""

from __future__ import annotations

from math import inf

from gatedlm.data.cards import card
from gatedlm.data.order import EPOCHS, LISTED
from gatedlm.recipe import Recipe

FEW = 4  # readings of the same text that train about as well as new text (Muennighoff et al. 2023, arXiv 2305.16264)
INDEX = 8  # bytes of a row's number
COPIES = 10  # of a batch's places while they are permuted
SHORT = 2**16  # vocabulary up to which a token takes two bytes on disk


def asked(recipe: Recipe) -> int:
    """Tokens that the run trains on, repeated ones included."""
    return recipe.trainer.steps * recipe.data.batch * recipe.data.context


def held(recipe: Recipe) -> float:
    """Tokens there are to train on; infinite where neither ``data.max_tokens`` nor the corpus's card says."""
    data = recipe.data
    said = [tokens for tokens in (data.max_tokens, card(data.corpus).tokens) if tokens]
    return (1 - data.holdout) * min(said, default=inf)


def prepared_bytes(recipe: Recipe) -> float:
    """Of the training rows on disk."""
    return held(recipe) * (2 if recipe.data.vocab <= SHORT else 4)


def order_bytes(recipe: Recipe) -> float:
    """What a rank holds to know which rows it reads: the lists of two epochs, or of a long one a batch, some copies."""
    data, tokens = recipe.data, held(recipe)
    rows = (tokens if tokens < inf else asked(recipe)) // data.context
    return INDEX * (EPOCHS * rows if rows <= LISTED else COPIES * data.batch)
