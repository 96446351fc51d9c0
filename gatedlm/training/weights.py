"""A run's weights out of its checkpoint, whatever number of ranks wrote it, and in and out of safetensors."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

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


def shapes(checkpoint: Path) -> dict[str, Tensor]:
    """{name: tensor without memory} of the model in a checkpoint."""
    state = checkpoint / "state"
    if not state.is_dir():
        return {name: tensor.to("meta") for name, tensor in _mapped(state).items()}
    found = FileSystemReader(state).read_metadata().state_dict_metadata
    kinds = {k: v for k, v in found.items() if k.startswith(PREFIX) and isinstance(v, TensorStorageMetadata)}
    return {
        name.removeprefix(PREFIX): torch.empty(kind.size, dtype=kind.properties.dtype, device="meta")
        for name, kind in kinds.items()
    }


def read(checkpoint: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Those tensors of the model in a checkpoint, of one rank mapped and of several loaded."""
    state = checkpoint / "state"
    if not state.is_dir():
        mapped = _mapped(state)
        return {name: mapped[name] for name in names}
    kinds = shapes(checkpoint)
    tensors = {PREFIX + name: torch.empty_like(kinds[name], device="cpu") for name in names}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is the intent here
        load(tensors, checkpoint_id=state, no_dist=True)
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def groups(checkpoint: Path, size: int) -> Iterator[dict[str, Tensor]]:
    """The model's tensors in groups of about ``size`` bytes, one group in memory at a time."""
    sizes = {name: tensor.nbytes for name, tensor in shapes(checkpoint).items()}
    return (read(checkpoint, names) for names in split(sizes, size))


def _mapped(file: Path) -> dict[str, Tensor]:
    # Mapped, so that a tensor is read when it is used and the optimizer's state never is.
    tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)["state_dict"]
    return {name.removeprefix("net."): tensor for name, tensor in tensors.items() if name.startswith("net.")}


def split(sizes: dict[str, int], most: int) -> list[list[str]]:
    """Names in order, a new part where the next one would exceed ``most``."""
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
    """Write a run's newest weights as safetensors of about ``size`` bytes each, the recipe in their metadata."""
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = newest(run)
    metadata = {"recipe": (run / "recipe.yaml").read_text(), "checkpoint": checkpoint.name}
    return write(groups(checkpoint, size), out, metadata)


def write(parts: Iterable[dict[str, Tensor]], out: Path, metadata: dict[str, str]) -> list[Path]:
    """Each part as a safetensors file of ``out``, one in memory at a time.

    One file is model.safetensors; several are model-I.safetensors with an index of which holds what.
    """
    places, total = {}, 0
    with TemporaryDirectory(dir=out) as draft:  # so that neither half a set nor parts of an older one stand in ``out``
        for tensors in parts:  # without enumerate, which would keep each part until the next is there
            file = Path(draft, f"model-{len(set(places.values())) + 1:05}.safetensors")
            _save(tensors, file, {"format": "pt"} | metadata)
            places |= dict.fromkeys(tensors, file.name)
            total += sum(tensor.nbytes for tensor in tensors.values())
            del tensors
        for old in (*out.glob("model*.safetensors"), out / INDEX):
            old.unlink(missing_ok=True)
        names = sorted(set(places.values()))
        if len(names) == 1:
            return [Path(draft, names[0]).rename(out / "model.safetensors")]
        (out / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1))
        return [Path(draft, name).rename(out / name) for name in names]


def _save(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
    try:
        save_file(tensors, file, metadata=metadata)
        file.chmod(0o644)  # safetensors would let the owner alone read it
    except SafetensorError as error:  # no OSError, whatever the cause
        raise OSError(f"{file}: {error}") from None
