"""A run's weights out of its checkpoint, whatever number of ranks wrote it, and in and out of safetensors."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from gatedlm.model.lm import GatedLM
from gatedlm.recipe import from_yaml
from gatedlm.training.checkpoint import damage, manifests

PREFIX = "state_dict.net."
INDEX = "model.safetensors.index.json"


def newest(folder: Path) -> Path:
    """The newest checkpoint of a run's folder; ValueError where there is none or a file of it is damaged."""
    saved = manifests(folder / "checkpoints")
    if not saved:
        raise ValueError(f"{folder}: no checkpoint in it, give the folder of a run that was trained for a while")
    path = list(saved)[-1]
    broken = damage(path, saved[path])
    if broken:
        raise ValueError(f"{path / broken} is damaged: remove {path} to use the checkpoint before it")
    return path


def groups(checkpoint: Path, size: int) -> Iterator[dict[str, Tensor]]:
    """The model's tensors in groups of about ``size`` bytes, one group in memory at a time."""
    state = checkpoint / "state"
    return _sharded(state, size) if state.is_dir() else _whole(state, size)


def _whole(file: Path, size: int) -> Iterator[dict[str, Tensor]]:
    # Mapped, so that a tensor is read when it is used and the optimizer's state never is.
    tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)["state_dict"]
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    for names in _split(sizes, size):
        yield {name.removeprefix("net."): tensors[name].clone() for name in names}


def _sharded(folder: Path, size: int) -> Iterator[dict[str, Tensor]]:
    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    kinds = {k: v for k, v in found.items() if k.startswith(PREFIX) and isinstance(v, TensorStorageMetadata)}
    sizes = {name: kind.size.numel() * kind.properties.dtype.itemsize for name, kind in kinds.items()}
    for names in _split(sizes, size):
        tensors = {name: torch.empty(kinds[name].size, dtype=kinds[name].properties.dtype) for name in names}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is the intent here
            load(tensors, checkpoint_id=folder, no_dist=True)
        yield {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def _split(sizes: dict[str, int], most: int) -> list[list[str]]:
    """Names in order, a new group where the next one would exceed ``most``."""
    parts: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not parts or size > room:
            parts.append([])
            room = most
        parts[-1].append(name)
        room -= size
    return parts


def consolidate(run: Path, out: Path, size: int) -> list[Path]:
    """Write the newest checkpoint's weights as safetensors of about ``size`` bytes each, the recipe in their metadata.

    One file is model.safetensors; several are model-I.safetensors with an index of which holds what.
    """
    recipe = (run / "recipe.yaml").read_text()
    out.mkdir(parents=True, exist_ok=True)
    files, places = [], {}
    for number, tensors in enumerate(groups(newest(run), size), 1):
        files.append(out / f"model-{number:05}.safetensors")
        save_file(tensors, files[-1], metadata={"format": "pt", "recipe": recipe})
        places |= dict.fromkeys(tensors, files[-1].name)
    if len(files) == 1:
        return [files[0].rename(out / "model.safetensors")]
    (out / INDEX).write_text(json.dumps({"metadata": {"format": "pt"}, "weight_map": places}, indent=1))
    return files


def load_net(run: Path) -> GatedLM:
    """A run's network on the CPU, from consolidated weights in its folder or else from its newest checkpoint."""
    try:
        recipe = from_yaml((run / "recipe.yaml").read_text())
    except OSError as error:
        raise ValueError(f"{run}: not the folder of a run ({error.strerror}: recipe.yaml)") from None
    tensors: dict[str, Tensor] = {}
    files = sorted(run.glob("model*.safetensors"))
    for group in map(load_file, files) if files else groups(newest(run), 2**62):
        tensors |= group
    with torch.device("meta"):
        net = GatedLM(recipe.model)
    net.load_state_dict(tensors, assign=True)
    return net
