"""What stands beside the weights: the tokenizer, the token every text begins with, and those that end one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from tokenizers.processors import ByteLevel, TemplateProcessing

from gatedlm.data.corpora import brief
from gatedlm.data.tokenizer import END
from gatedlm.hub.folder import CONFIG, GENERATION, WORDS, read_json, write_json
from gatedlm.recipe import DataSpec


class Words(NamedTuple):
    """``first`` is the id that begins every text, None where there is no such policy; ``stop`` are ids that end one.

    ``folder`` is where their files lie, None for a run, which has no such files.
    """

    tokenizer: Tokenizer | None
    first: int | None
    stop: set[int]
    folder: Path | None


def of_run(run: Path, data: DataSpec) -> Words:
    """The words of a run's folder: <|endoftext|>, or the first token of the synthetic task, is id 0."""
    tokenizer = _load(run / "tokenizer.json")
    if tokenizer:
        tokenizer.encode_special_tokens = True
    return Words(tokenizer, 0 if data.fixed_first else None, {0} if tokenizer else set(), None)


def of_folder(folder: Path) -> Words:
    """The words of a folder that convert or transformers wrote.

    A first token is what the tokenizer puts before a text by itself; many configs name a beginning of text that no
    tokenizer ever writes. Where there is no tokenizer, the config's word has to do.
    """
    tokenizer = _load(folder / "tokenizer.json")
    first, stop = (_ids(folder, key) for key in ("bos_token_id", "eos_token_id"))
    if tokenizer is None:
        return Words(None, next(iter(first), None), set(stop), folder)
    settings = folder / "tokenizer_config.json"
    tokenizer.encode_special_tokens = settings.is_file() and read_json(settings).get("split_special_tokens") is True
    text = tokenizer.encode("a")
    return Words(tokenizer, text.ids[0] if text.ids and text.special_tokens_mask[0] else None, set(stop), folder)


def write_words(words: Words, out: Path, context: int) -> None:
    """Put the words into ``out``, such that transformers begins texts as this model's own do.

    Those of a run are written; those of another folder are copied as they are.
    """
    for file in (words.folder / name for name in WORDS if words.folder and (words.folder / name).is_file()):
        shutil.copyfile(file, out / file.name)
    if not (out / GENERATION).exists():
        write_json(out / GENERATION, ids(words))
    if words.tokenizer and not words.folder:
        tokenizer = Tokenizer.from_str(words.tokenizer.to_str())
        template = TemplateProcessing(single=f"{END} $A", pair=f"{END} $A {END} $B", special_tokens=[(END, 0)])
        tokenizer.post_processor = ByteLevel() if words.first is None else template
        tokenizer.save(str(out / "tokenizer.json"))
        write_json(out / "tokenizer_config.json", _settings(context))


def ids(words: Words) -> dict[str, Any]:
    """What config.json and generation_config.json say of the first token and the last."""
    first = {} if words.first is None else {"bos_token_id": words.first}
    return first | ({"eos_token_id": sorted(words.stop)} if words.stop else {})


def _settings(context: int) -> dict[str, Any]:
    ends = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END)
    split = {"split_special_tokens": True, "clean_up_tokenization_spaces": False}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **ends, **split, "model_max_length": context}


def _ids(folder: Path, key: str) -> list[int]:
    """What the folder's files say, the one for generation rather than the one for the model."""
    for file in (folder / GENERATION, folder / CONFIG):
        found = read_json(file).get(key) if file.is_file() else None
        if found is not None:
            values = found if isinstance(found, list) else [found]
            return [value for value in values if isinstance(value, int) and value >= 0]
    return []


def _load(file: Path) -> Tokenizer | None:
    if not file.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file}: cannot be read ({brief(error)})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
