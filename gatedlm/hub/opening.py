"""Models from folders and into folders, tensor by tensor."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from gatedlm.data.corpora import brief
from gatedlm.hub.config import TARGETS, config_of, layout_for, spec_of
from gatedlm.hub.folder import (
    CONFIG,
    GENERATION,
    Checkpoint,
    Files,
    Source,
    find,
    metadata_recipe,
    read_json,
    weight_files,
    write_json,
)
from gatedlm.hub.layout import GATEDLM, NAMES, Layout, Link, expected, links, with_experts_of
from gatedlm.hub.words import Words, ids, of_folder, of_run, write_words
from gatedlm.model.lm import GatedLM
from gatedlm.recipe import DataSpec, Recipe, from_yaml, stretched, to_yaml
from gatedlm.training.checkpoint import manifests
from gatedlm.training.weights import split, write

SHARD = 10**9  # bytes of a written file, all of which are in memory at once


class Opened(NamedTuple):
    """A model on the CPU and its words: ``first`` begins every text, or is None; ``stop`` are the ids that end one."""

    net: GatedLM
    tokenizer: Tokenizer | None
    name: str
    first: int | None
    stop: set[int]

    def check(self, token: int) -> None:
        """ValueError for a token of the tokenizer, or of what its files say, that the weights do not know."""
        last = self.net.spec.vocab - 1
        if token > last:
            raise ValueError(f"{self.name}: token {token} has no weights, which end with token {last}")


class Found(NamedTuple):
    """What a folder turned out to hold: a model, with its recipe, in some layout, and its words."""

    folder: Path
    recipe: Recipe
    layout: Layout
    source: Source
    words: Words

    @property
    def dtype(self) -> torch.dtype:
        """The checkpoint's type, which is that of its embedding."""
        embedding = "embed.weight"
        return self.source.shapes[embedding if self.layout == GATEDLM else NAMES[embedding]].dtype


def open_model(where: str, dtype: torch.dtype | None = None, words: Sequence[str] = ()) -> Opened:
    """The model in a run's folder, in one that convert or transformers wrote, or of org/name[/subfolder] on the Hub.

    All parameters take ``dtype``, or else the type of the checkpoint's embedding; ``words`` such as
    model.rope.scaling=yarn model.rope.factor=4 stretch its context (see ``gatedlm.recipe.stretched``). Nothing is
    unpickled, no code of a checkpoint is run. ValueError, one line, names what is missing, damaged, of another shape,
    or without a match here.
    """
    found = look(where)
    model = stretched(found.recipe, words).model
    kind = {"dtype": dtype or found.dtype, "memory_format": torch.contiguous_format}
    tensors: dict[str, Tensor] = {}
    for link, read in zip(chain.from_iterable(_parts(found, found.layout)), _read(found), strict=True):
        tensors |= {name: tensor.to(copy=True, **kind) for name, tensor in zip(link.ours, read, strict=True)}
    with torch.device("meta"):
        net = GatedLM(model)
    net.load_state_dict(tensors, assign=True)
    tokenizer, first, stop, _ = found.words
    return Opened(net, tokenizer, found.recipe.name, first, stop)


def convert(where: str, out: Path, to: str) -> tuple[str, list[Path]]:
    """Write the model found at ``where`` into the new folder ``out``; the class that loads it, and the weights' files.

    ``to`` is one of ``TARGETS``. ValueError as for ``open_model``, and with the reason where the target has no place
    for the model; then nothing is written.
    """
    if to not in TARGETS:
        raise ValueError(f"to={to}: write one of {', '.join(TARGETS)}")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"out={out}: exists already, give the name of a new folder")
    found = look(where)
    layout = layout_for(found.recipe.model, to)
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{out.name}.", dir=out.parent))
    try:
        files = _write(found, layout, draft)
        draft.chmod(0o755)
        os.replace(draft, out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return layout.class_name, [out / file.name for file in files]


def look(where: str) -> Found:
    """What ``where`` holds, with every name and shape checked and no tensor read."""
    folder, name = find(where)
    found = _foreign(folder, name) if (folder / CONFIG).exists() else _own(folder)
    _check(found)
    return found


def _foreign(folder: Path, name: str) -> Found:
    config, words = read_json(folder / CONFIG), of_folder(folder)
    try:
        layout, model = spec_of(config)
        context = int(config.get("max_position_embeddings") or DataSpec.context)
        data = DataSpec(vocab=model.vocab, context=context, fixed_first=words.first is not None)
        recipe = Recipe(name=name, model=model, data=data)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{folder / CONFIG}: {brief(error)}") from None
    if not weight_files(folder):
        raise ValueError(f"{folder}: a config.json, but neither model.safetensors nor pytorch_model.bin")
    source = Files(folder)
    return Found(folder, recipe, with_experts_of(layout, source.shapes), source, words)


def _own(folder: Path) -> Found:
    file = folder / "recipe.yaml"
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else metadata_recipe(folder)
    if text is None:
        raise ValueError(f"{folder}: neither the folder of a run (recipe.yaml) nor one of weights (config.json)")
    try:
        recipe = from_yaml(text)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    words = of_folder(folder) if (folder / GENERATION).exists() else of_run(folder, recipe.data)
    consolidated = weight_files(folder) and not manifests(folder / "checkpoints")
    return Found(folder, recipe, GATEDLM, Files(folder) if consolidated else Checkpoint(folder), words)


def _check(found: Found) -> None:
    """ValueError for the first tensor that is missing, of another shape, or not the model's."""
    model, shapes = found.recipe.model, found.source.shapes
    if max(model.layers, 0 if found.layout.stacked else model.experts.count) > len(shapes):
        raise ValueError(f"{found.folder}: {model.layers} layers or more are said to be in {len(shapes)} tensors")
    wanted = expected(model, found.layout)
    for name, shape in wanted.items():
        if name not in shapes:
            raise ValueError(f"{found.folder}: no tensor {name} in it")
        if shapes[name].shape != shape:
            raise ValueError(f"{found.folder}: {name} is {tuple(shapes[name].shape)}, expected {tuple(shape)}")
    for name in sorted(shapes.keys() - wanted.keys()):
        if not _idle(name, found):
            raise ValueError(f"{found.folder}: {name} has no place in this model")


def _idle(name: str, found: Found) -> bool:
    """Whether a tensor without a place changes nothing: a bias of zeros, or the embedding once more as the head."""
    if name.endswith("_proj.bias"):
        return not found.source.read({name})[name].any()
    if name != NAMES["head.weight"] or not found.recipe.model.tied:
        return False
    return torch.equal(*found.source.read({name, NAMES["embed.weight"]}).values())


def _write(found: Found, layout: Layout, out: Path) -> list[Path]:
    recipe, metadata = found.recipe, {}
    if layout == GATEDLM:
        metadata["recipe"] = to_yaml(recipe)
        (out / "recipe.yaml").write_text(metadata["recipe"], encoding="utf-8")
    else:
        config = config_of(recipe.model, layout, recipe.data.context, found.dtype)
        write_json(out / CONFIG, config | ids(found.words))
    write_words(found.words, out, recipe.data.context)
    return write(_groups(found, layout), out, metadata)


def _groups(found: Found, layout: Layout) -> Iterator[dict[str, Tensor]]:
    """All tensors in the new layout, about ``SHARD`` bytes at a time."""
    read = _read(found)
    for part in _parts(found, layout):
        pairs = ((link.theirs, map(_alone, link.pack(next(read)))) for link in part)
        yield dict(chain.from_iterable(zip(*pair, strict=True) for pair in pairs))


def _read(found: Found) -> Iterator[list[Tensor]]:
    """The tensors of one link after the other, under our names; those of a part are mapped together."""
    for part in _parts(found, found.layout):
        tensors = found.source.read({name for link in part for name in link.theirs})
        for link in part:
            try:
                yield link.unpack([tensors[name] for name in link.theirs])
            except ValueError as error:
                raise ValueError(f"{found.folder}: {link.theirs[0]}: {error}") from None
        del tensors  # before the next part is read


def _parts(found: Found, layout: Layout) -> list[list[Link]]:
    """The layout's links, parted after about ``SHARD`` bytes of what was found: for every layout at the same links."""
    here, there = (links(found.recipe.model, each, found.dtype) for each in (found.layout, layout))
    sizes = {link.ours[0]: sum(found.source.shapes[name].nbytes for name in link.theirs) for link in here}
    by_name = {link.ours[0]: link for link in there}
    return [[by_name[name] for name in names] for names in split(sizes, SHARD)]


def _alone(tensor: Tensor) -> Tensor:
    """The tensor in row order and in memory that it shares with no other, as safetensors has it."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor.contiguous()
    return tensor.clone(memory_format=torch.contiguous_format)
