"""Documents of a corpus, in an order that never changes, and one sentence for whatever is wrong with its files."""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import load_dataset

from gatedlm.data.cards import Card, card
from gatedlm.data.needles import lesson
from gatedlm.recipe import DataSpec

LONGEST = 1_000_000  # characters: tokenizing one longer text takes three times as long as its parts
PROSE = 400  # characters from which on a module's docstring counts as prose
ENDINGS = (".txt", ".md", ".py", ".jsonl", ".jsonl.gz", ".parquet")


class Document(NamedTuple):
    """One text and the domain it belongs to."""

    text: str
    domain: str


WHOLE = 0, 1


def documents(spec: DataSpec, share: tuple[int, int] = WHOLE) -> Iterator[Document]:
    """Every document of ``spec.corpus``, with empty text where a row holds null; texts above 1 MB come as several.

    ``share`` (i, n) is the i-th of n parts: on the Hub of its files, elsewhere each n-th document. ValueError, one
    sentence that names file and row, for whatever cannot be read.
    """
    origin = card(spec.corpus)
    if origin.kind == "hub":
        found = _hub(spec, origin, share)
    else:
        read = {"stdlib": _stdlib, "needles": _needles, "files": _files}[origin.kind]
        found = islice(read(spec), share[0], None, share[1])
    for text, domain in found:
        for piece in pieces(text, LONGEST):
            yield Document(piece, domain)


def signature(spec: DataSpec) -> str:
    """Hash of what a corpus is read from: the texts of stdlib, the bytes of files, the name and revision on the Hub."""
    origin = card(spec.corpus)
    if origin.kind in ("stdlib", "needles"):
        parts = [f"{domain}\0{text}" for text, domain in _stdlib(spec)]
        parts += islice(_lessons(), SHOWN) if origin.kind == "needles" else []
    else:
        parts = [spec.text_field, str(spec.domain_field)]
        parts += _hub_name(origin) if origin.kind == "hub" else map(_file_hash, files_of(spec.path))
    return hashlib.sha256("\0\0".join(parts).encode(errors="surrogateescape")).hexdigest()


def pieces(text: str, size: int) -> Iterator[str]:
    """``text`` in parts of at most ``size`` characters that end at line ends where there are any."""
    start = 0
    while len(text) - start > size:
        end = text.rfind("\n", start, start + size) + 1 or start + size
        yield text[start:end]
        start = end
    yield text[start:]


# The standard library ---------------------------------------------------------------------------------------------

_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}
_DOCSTRING = re.compile(r"((?:[ \t]*(?:#[^\n]*)?\n)*)[rR]?(\"\"\"|''')(.*?)\2", re.DOTALL)


def _stdlib(spec: DataSpec) -> Iterator[Document]:
    """Sources as ``code``; language topics and long module docstrings, taken out of their sources, as ``prose``.

    Sorted by the hash of their names, so that any beginning holds both domains.
    """
    named = {f"topic {name}": Document(text, "prose") for name, text in topics.items()}
    root = Path(sysconfig.get_path("stdlib"))
    for path in _stdlib_sources(root):
        name, code = path.relative_to(root).as_posix(), path.read_text("utf-8", errors="replace")
        if (opening := _DOCSTRING.match(code)) and len(opening[3]) >= PROSE:
            named[f"docstring {name}"] = Document(opening[3].strip(), "prose")
            code = opening[1] + code[opening.end() :].lstrip("\n")
        if code.strip():
            named[name] = Document(code, "code")
    yield from (named[name] for name in sorted(named, key=lambda name: hashlib.sha256(name.encode()).digest()))


def _stdlib_sources(root: Path) -> Iterator[Path]:
    for folder, inside, names in os.walk(root):
        inside[:] = set(inside) - _LEFT_OUT
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


# Needles ----------------------------------------------------------------------------------------------------------

SHORTEST, LONGEST_LESSON = 80, 1600  # characters
SHOWN = 8  # lessons that stand for all in a signature


def _lessons() -> Iterator[str]:
    """Lessons in finding a needle, without end: in all as many characters of a length as of twice that length."""
    rng = Random(0)
    for number in count():
        length = SHORTEST / (1 - rng.random() * (1 - SHORTEST / LONGEST_LESSON))
        yield lesson("needle", int(length), number)


def _needles(spec: DataSpec) -> Iterator[Document]:
    """The standard library's texts, and behind each about as many characters of lessons."""
    lessons = _lessons()
    for document in _stdlib(spec):
        yield document
        left = len(document.text)
        while left > 0:
            yield Document(taught := next(lessons), "needles")
            left -= len(taught)


# Files ------------------------------------------------------------------------------------------------------------


def files_of(path: str | None) -> list[Path]:
    """The readable files that a file, folder or glob stands for, sorted; hidden ones in folders are passed over."""
    if path is None:
        raise ValueError("data.corpus=files needs data.path=PATH, a file, folder or glob")
    root = Path(os.path.expanduser(path))
    if root.is_dir():
        inside = (found for found in root.rglob("*") if not re.search(r"(^|/)\.", found.relative_to(root).as_posix()))
        found = [file for file in inside if file.is_file() and file.name.endswith(ENDINGS)]
    else:
        matches = [root] if root.exists() else map(Path, glob.glob(str(root), recursive=True))
        found = [file for file in matches if file.is_file()]
    if not found:
        raise ValueError(f"data.path={path}: no file there; give a file, folder or glob of {' '.join(ENDINGS)}")
    for file in found:
        if not file.name.endswith(ENDINGS):
            raise ValueError(f"{file}: cannot read this kind of file; turn it into one of {' '.join(ENDINGS)}")
    return sorted(found)


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}"


def _files(spec: DataSpec) -> Iterator[Document]:
    for path in files_of(spec.path):
        if path.name.endswith((".jsonl", ".jsonl.gz")):
            yield from _jsonl(path, spec)
        elif path.name.endswith(".parquet"):
            yield from _parquet(path, spec)
        else:
            yield from _plain(path)


def _plain(path: Path) -> Iterator[Document]:
    try:
        yield Document(path.read_bytes().decode("utf-8-sig"), "text")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line}: not UTF-8; convert the file with iconv -t utf-8") from error


def _jsonl(path: Path, spec: DataSpec) -> Iterator[Document]:
    row, found = 0, False
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for row, line in enumerate(lines, start=1):
                if line.strip():
                    found = True
                    where = f"{path}, row {row}"
                    yield _document(parsed(line, where), where, spec)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}, after row {row}: the gzip data is cut short or damaged; fetch it again") from error
    if not found:
        raise ValueError(f"{path}: no rows; fill the file or leave it out of data.path")


def parsed(line: bytes, where: str) -> Any:
    """What a line of JSON holds. ValueError, one sentence that begins with ``where``, for any other line."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8; convert the file with iconv -t utf-8") from error
    except (ValueError, RecursionError) as error:  # the second for brackets without end
        why = error.msg if isinstance(error, json.JSONDecodeError) else brief(error)
        raise ValueError(f"{where}: not JSON ({why}); mend or delete that line") from error


def _parquet(path: Path, spec: DataSpec) -> Iterator[Document]:
    row = 0
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        wanted = [name for name in (spec.text_field, spec.domain_field) if name]
        known = set(wanted) <= set(file.schema_arrow.names)
        # Where one is missing all are read, so that the error can name them.
        for batch in file.iter_batches(batch_size=256, columns=wanted if known else None):
            for record in batch.to_pylist():
                row += 1
                yield _document(record, f"{path}, row {row}", spec)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}, after row {row}: not readable as parquet ({brief(error)}); fetch it again"
        ) from error
    if not row:
        raise ValueError(f"{path}: no rows; fill the file or leave it out of data.path")


def _document(record: Any, where: str, spec: DataSpec) -> Document:
    """Text and domain of one row; null text is empty, null domain is ``none``."""
    if not isinstance(record, dict):
        raise ValueError(f'{where}: not a JSON object; write {{"{spec.text_field}": "..."}} on every line')
    for key, name in (("text_field", spec.text_field), ("domain_field", spec.domain_field)):
        if name is not None and name not in record:
            raise ValueError(
                f"{where}: no field {name}, but {', '.join(record) or 'none at all'}; choose one with data.{key}=FIELD"
            )
    text = record[spec.text_field]
    if not isinstance(text, str | None):
        kind = type(text).__name__
        raise ValueError(
            f"{where}: field {spec.text_field} holds {kind}, not text; choose one with data.text_field=FIELD"
        )
    domain = "text" if spec.domain_field is None else record[spec.domain_field]
    document = Document(text or "", "none" if domain is None else str(domain))
    try:
        "".join(document).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: half a surrogate pair, which UTF-8 cannot hold; delete that row") from error
    return document


# The Hub ----------------------------------------------------------------------------------------------------------


def _hub_name(origin: Card) -> list[str]:
    return [origin.hub, str(origin.config), origin.split, origin.revision]


def _hub(spec: DataSpec, origin: Card, share: tuple[int, int]) -> Iterator[Document]:
    part = "" if share == WHOLE else f" of part {share[0]}"
    for row, record in enumerate(_hub_records(origin, share), start=1):
        yield _document(record, f"{origin.hub}, row {row}{part}", spec)


def _hub_records(origin: Card, share: tuple[int, int]) -> Iterator[Any]:
    place = {"split": origin.split, "revision": origin.revision, "streaming": True}
    try:
        found: Any = load_dataset(origin.hub, origin.config, **place)
        files = found.num_shards if share != WHOLE else 1
        if share[1] <= files:
            yield from found if share == WHOLE else found.shard(num_shards=share[1], index=share[0])
            return
    except Exception as error:  # the library raises a dozen unrelated types, bare ones among them
        raise ValueError(
            f"data.corpus={origin.name}: cannot read it from the Hub ({brief(error)}); check name and network, "
            "or choose data.corpus=stdlib or data.corpus=files, which need neither"
        ) from error
    raise ValueError(f"shards={share[1]}: data.corpus={origin.name} lies in {files} files, take at most so many")


def brief(error: Exception) -> str:
    """First line of an error of another library, short enough to quote."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:160].rstrip(". ")
