"""Folders of weights: where they lie, here or on the Hub, and what is in them; nothing in them is ever run."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from gatedlm.data.corpora import brief
from gatedlm.training.weights import newest, read, shapes

CONFIG, GENERATION = "config.json", "generation_config.json"
WORDS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    GENERATION,
)
SAFE = ("model*.safetensors", "model.safetensors.index.json")
TORCH = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Source(Protocol):
    """Tensors by name: ``shapes`` holds them without memory, ``read`` maps or loads those that are asked for."""

    shapes: dict[str, Tensor]

    def read(self, names: set[str]) -> dict[str, Tensor]: ...


class Files:
    """The tensors of a folder's safetensors files or else of its torch files, mapped anew at each read.

    Only the pages of the tensors that are used cost memory, and only as long as they are used. ValueError names the
    file that is missing, damaged, or holds anything but tensors of floating-point numbers.
    """

    def __init__(self, folder: Path) -> None:
        self.shapes: dict[str, Tensor] = {}
        self.place: dict[str, Path] = {}
        for file in weight_files(folder):
            for name, tensor in _mapped(file).items():
                if name in self.place:
                    raise ValueError(f"{file}: {name} stands in {self.place[name].name} too")
                self.shapes[name], self.place[name] = tensor.to("meta"), file

    def read(self, names: set[str]) -> dict[str, Tensor]:
        files = {self.place[name] for name in names}
        return {name: tensor for file in files for name, tensor in _mapped(file).items() if name in names}


class Checkpoint:
    """The tensors of the newest checkpoint of a run, of however many ranks."""

    def __init__(self, run: Path) -> None:
        self.checkpoint = newest(run)
        self.shapes = shapes(self.checkpoint)

    def read(self, names: set[str]) -> dict[str, Tensor]:
        return read(self.checkpoint, names)


def find(where: str) -> tuple[Path, str]:
    """The folder and its name: a folder here, or that of org/name[/subfolder] on the Hub, now in the Hub's own cache.

    ValueError, one line, where there is neither.
    """
    folder = Path(os.path.expanduser(where))
    if folder.is_dir():
        return folder, folder.resolve().name
    if folder.exists():
        raise ValueError(f"{where}: a file, give the folder that it lies in")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)+", where):
        raise ValueError(f"{where}: no such folder; give one, or org/name[/subfolder] on the Hub")
    org, name, *sub = where.split("/")
    return _download(where, f"{org}/{name}", "/".join(sub)), where.split("/")[-1]


def _download(where: str, repository: str, sub: str) -> Path:
    folder = Path()
    try:
        from huggingface_hub import snapshot_download

        for files in ((CONFIG, "recipe.yaml", *WORDS, *SAFE), TORCH):
            patterns = [f"{sub}/{file}".lstrip("/") for file in files]
            folder = Path(snapshot_download(repository, allow_patterns=patterns)) / sub
            if any(folder.glob(SAFE[0])):
                break
    except Exception as error:  # the library's own, its transport's and the system's errors
        raise ValueError(
            f"{where}: no such folder, and the Hub does not give it ({brief(error)}); check name and network"
        ) from None
    if not folder.is_dir():
        raise ValueError(f"{where}: the Hub has {repository}, but no weights in {sub}")
    return folder


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder's weights, safetensors rather than torch's own; empty where there are none."""
    for whole in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{whole}.index.json"
        if (folder / whole).is_file():
            return [folder / whole]
        if index.is_file():
            return _indexed(folder, index)
    return []


def _indexed(folder: Path, index: Path) -> list[Path]:
    places = read_json(index).get("weight_map")
    names = set(map(str, places.values())) if isinstance(places, dict) else set()
    if not names or any(Path(name).name != name for name in names):
        raise ValueError(f"{index}: its weight_map does not say which file of this folder holds which tensor")
    files = [folder / name for name in sorted(names)]
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file}: missing, though {index.name} names it")
    return files


def _mapped(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            tensors: Any = load_file(file)
        else:
            tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # what a damaged file raises depends on which byte it is
        raise ValueError(f"{file}: {_unreadable(file, error)}") from None
    found: dict[Any, Any] = tensors if isinstance(tensors, dict) else {"it": None}
    for name, tensor in found.items():
        if not isinstance(name, str) or not _plain(tensor):
            raise ValueError(f"{file}: {name} is no tensor of floating-point numbers")
    return {name: tensor.detach() for name, tensor in found.items()}  # parameters would take gradients along


def _unreadable(file: Path, error: Exception) -> str:
    if "weights_only" in str(error):
        return "holds more than tensors, which gatedlm does not unpickle, or is damaged; ask for safetensors"
    return f"damaged or not a file of weights ({brief(error)})"


def _plain(tensor: Any) -> bool:
    known = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.dtype in FLOATS
    return known and not tensor.is_meta


def metadata_recipe(folder: Path) -> str | None:
    """The recipe in the metadata of a folder's safetensors, None where there is none."""
    files = [file for file in weight_files(folder) if file.suffix == ".safetensors"]
    if not files:
        return None
    _mapped(files[0])  # says what is wrong with a damaged one
    with safe_open(files[0], "pt") as opened:
        return (opened.metadata() or {}).get("recipe")


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. ValueError names the file where it holds none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: cannot be read ({brief(error)})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file}: must hold a JSON object")
    return found


def write_json(file: Path, found: dict[str, Any]) -> None:
    """Write an object as indented JSON."""
    file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
