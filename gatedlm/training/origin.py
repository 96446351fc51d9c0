"""The run whose weights another one begins with: which checkpoint that is, and whether the two fit together."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from gatedlm.data import tokenizer as tokens
from gatedlm.recipe import Recipe, changed, from_yaml, recipe_file
from gatedlm.training.weights import newest

FREE = "model.rope."  # what weights can bear to see changed


def origin(recipe: Recipe) -> Path | None:
    """The newest checkpoint of ``recipe.origin``, None where the recipe begins with weights of its own.

    Raises ValueError, one line, where there is none and for a model whose weights are others.
    """
    if not recipe.origin:
        if recipe.optim.state == "kept":
            raise ValueError("optim.state=kept: kept from which run? write from=FOLDER")
        return None
    file = recipe_file(recipe.origin)
    for key, (there, here) in changed(from_yaml(file.read_text(encoding="utf-8")), recipe).items():
        if key.startswith("model.") and not key.startswith(FREE):
            raise ValueError(f"from={recipe.origin}: its weights have {key}={there}, not {here}: leave that word out")
    return newest(file.parent)


def same_words(recipe: Recipe, tokenizer: Tokenizer | None) -> None:
    """ValueError where ``tokenizer`` has other words than the run that ``recipe`` begins with."""
    file = recipe_file(recipe.origin).with_name("tokenizer.json")
    before = tokens.load(str(file)).get_vocab() if file.is_file() else None
    if before != (tokenizer.get_vocab() if tokenizer else None):
        raise ValueError(f"from={recipe.origin}: its tokens are others, add data.tokenizer={file}")
