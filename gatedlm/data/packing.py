"""Documents become rows of T+1 token ids, split by whole documents and kept in a cache that is keyed by content."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, concatenate_datasets
from tokenizers import Tokenizer
from torch import Tensor

from gatedlm.data import tokenizer as tokens
from gatedlm.data.corpora import WHOLE, Document, brief, documents, pieces, signature
from gatedlm.recipe import DataSpec

END_OF_TEXT = 0
FORMAT = "1"  # raise it when the same text should give other rows
SAMPLE, REACH = 8_000_000, 64_000_000  # characters a tokenizer learns from, and how far into the corpus they are spread
CHUNK = 1_000_000  # characters tokenized together, tokens written together
SPLITS = ("train", "validation")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Corpus:
    """What a ledger keeps of a corpus: ``tokens`` of both splits, in total and by domain; 0 where rows never end."""

    name: str
    fingerprint: str
    tokens: int = 0
    documents: int = 0
    skipped: int = 0
    domains: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """A corpus as rows of tokens, its facts and the tokenizer that made them."""

    corpus: Corpus
    tokenizer: Tokenizer
    train: Rows
    validation: Rows


def document_ids(inputs: Tensor) -> Tensor:
    """Ends of text up to and including each token, (B, T): equal for two tokens of a row in the same document."""
    return (inputs == END_OF_TEXT).cumsum(1)


def prepare(spec: DataSpec, say: Say) -> Prepared:
    """Open the rows of a corpus, making them first if the cache lacks them; safe to call from many processes.

    ValueError, one sentence, for unreadable input and for a corpus too small for its context and holdout.
    """
    tokenizer, folder = _place(spec, say)
    build_once(folder, partial(_pack, spec, tokenizer, say, WHOLE))
    rows = (Rows(folder / f"{name}.arrow", spec.fixed_first) for name in SPLITS)
    return Prepared(_facts(folder), tokenizer, *rows)


def prepare_part(spec: DataSpec, share: tuple[int, int], say: Say) -> bool:
    """Make the i-th of n parts of a corpus, (i, n) = ``share``, unless it is there; True once all parts are one corpus.

    Each part has its share of ``max_tokens`` and holds out documents of its own. What makes the last part joins them,
    and ``prepare`` then opens the whole.
    """
    tokenizer, folder = _place(spec, say)
    if folder.exists():
        return True
    part, parts = share
    own = replace(spec, max_tokens=-(-spec.max_tokens // parts))
    folders = [cache_root(spec) / "parts" / f"{folder.name}-{i:05}-of-{parts:05}" for i in range(parts)]
    build_once(folders[part], partial(_pack, own, tokenizer, say, share))
    if not all(each.exists() for each in folders):
        return False
    build_once(folder, partial(_join, folders))
    for each in folders:
        rmtree(each, ignore_errors=True)
    return True


def is_prepared(spec: DataSpec) -> bool:
    """Whether ``prepare`` has no more to do than to open files; a tokenizer that it would train counts as more."""
    source = signature(spec)
    trained = _tokenizer_folder(spec, source)
    known = spec.tokenizer or trained.exists()
    return bool(known) and _rows_folder(spec, source, tokens.load(spec.tokenizer or str(trained))).exists()


def _place(spec: DataSpec, say: Say) -> tuple[Tokenizer, Path]:
    """The tokenizer of a corpus, trained first where there is none, and the folder of its rows."""
    source = signature(spec)
    tokenizer = tokens.load(spec.tokenizer) if spec.tokenizer else _trained(spec, source, say)
    if (needed := tokens.size(tokenizer)) > spec.vocab:
        raise ValueError(f"data.tokenizer={spec.tokenizer} has {needed} tokens: set data.vocab={needed}")
    return tokenizer, _rows_folder(spec, source, tokenizer)


# Cache ------------------------------------------------------------------------------------------------------------


def cache_root(spec: DataSpec) -> Path:
    """``data.cache``, $GATEDLM_CACHE, $XDG_CACHE_HOME/gatedlm or ~/.cache/gatedlm, the first that is set."""
    own = spec.cache or os.environ.get("GATEDLM_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(own or f"{shared}/gatedlm"))


def digest(*parts: object) -> str:
    """A key of 32 hex digits for what the parts say."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def _rows_folder(spec: DataSpec, source: str, tokenizer: Tokenizer) -> Path:
    key = digest(FORMAT, source, tokenizer.to_str(), spec.context, spec.holdout, spec.max_tokens)
    return cache_root(spec) / "rows" / key


def _tokenizer_folder(spec: DataSpec, source: str) -> Path:
    key = digest(FORMAT, source, spec.vocab, spec.holdout, spec.max_tokens)
    return cache_root(spec) / "tokenizers" / key


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """``folder``, which ``build`` fills under another name first: half of one is never seen, and the first stays."""
    if folder.exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent, prefix=".unfinished-") as temporary:
            unfinished = Path(temporary, "rows")
            unfinished.mkdir()
            build(unfinished)
            unfinished.rename(folder)
    except OSError as error:
        if not folder.exists():  # else another process was first, and its rows are these
            raise ValueError(
                f"{folder.parent}: cannot keep prepared corpora there; set data.cache=FOLDER ({brief(error)})"
            ) from error
    return folder


def _trained(spec: DataSpec, source: str, say: Say) -> Tokenizer:
    def build(folder: Path) -> None:
        say(f"preparing {spec.corpus}: tokenizer ({spec.vocab} tokens)")
        texts = (document.text for document, held in split(_kept(documents(spec), Counter()), spec.holdout) if not held)
        reach = min(REACH, 4 * spec.max_tokens or REACH)
        tokenizer = tokens.train(tokens.sample(texts, reach, SAMPLE), spec.vocab)
        (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")

    return tokens.load(str(build_once(_tokenizer_folder(spec, source), build)))


# Split ------------------------------------------------------------------------------------------------------------


def split(documents: Iterable[Document], holdout: float) -> Iterator[tuple[Document, bool]]:
    """Each document and whether it is held out: of every domain the 2nd, and then each (1/holdout)-th.

    So every domain with two documents is in both splits. A corpus of one document is cut into 1/holdout parts.
    """
    share = round(1 / holdout)
    seen: Counter[str] = Counter()
    for document in _several(documents, share):
        yield document, seen[document.domain] % share == 1
        seen[document.domain] += 1


def _several(documents: Iterable[Document], parts: int) -> Iterator[Document]:
    rest = iter(documents)
    head = list(islice(rest, 2))
    if len(head) == 1:
        ((text, domain),) = head
        head = [Document(piece, domain) for piece in pieces(text, len(text) // parts + 1)]
    return chain(head, rest)


def _kept(documents: Iterable[Document], skipped: Counter[str]) -> Iterator[Document]:
    """The documents that have text; the others are counted by domain."""
    for document in documents:
        if not document.text or document.text.isspace():
            skipped[document.domain] += 1
        else:
            yield document


# Rows -------------------------------------------------------------------------------------------------------------


def _pack(spec: DataSpec, tokenizer: Tokenizer, say: Say, share: tuple[int, int], folder: Path) -> None:
    """Write train.arrow, validation.arrow and corpus.json of a share of the documents into ``folder``."""
    say(f"preparing {spec.corpus}: rows of {spec.context} tokens")
    dtype = np.uint16 if tokens.size(tokenizer) <= 65_536 else np.uint32
    skipped, domains, content, count = Counter[str](), Counter[str](), hashlib.sha256(), 0
    told, room = time.monotonic(), spec.max_tokens or float("inf")
    with (
        RowWriter(folder / "train.arrow", spec.context, dtype) as train,
        RowWriter(folder / "validation.arrow", spec.context, dtype) as validation,
    ):
        for document, held, ids in _tokenized(split(_kept(documents(spec, share), skipped), spec.holdout), tokenizer):
            ids = ids[: int(min(room, len(ids)))]
            (validation if held else train).add(ids)
            domains[document.domain] += len(ids)
            content.update(f"{document.domain}\0{document.text}\0".encode())
            count, room = count + 1, room - len(ids)
            if time.monotonic() > told + 10:
                told = time.monotonic()
                say(f"preparing {spec.corpus}: {domains.total() / 1e6:.1f} million tokens so far")
            if room == 0:
                break
    corpus = Corpus(spec.corpus, content.hexdigest()[:16], domains.total(), count, skipped.total(), dict(domains))
    _refuse_small(spec, corpus, train.rows, validation.rows)
    (folder / "corpus.json").write_text(json.dumps(asdict(corpus)))
    empty = f", {corpus.skipped} empty ones skipped" if corpus.skipped else ""
    say(f"prepared {spec.corpus}: {corpus.tokens} tokens, {count} documents{empty}, fingerprint {corpus.fingerprint}")


def _join(parts: list[Path], folder: Path) -> None:
    """The parts as one corpus: their files under numbered names, without a copy, and the sums of what they hold."""
    found = [_facts(part) for part in parts]
    for number, part in enumerate(parts):
        for name in SPLITS:
            os.link(part / f"{name}.arrow", folder / f"{name}-{number:05}.arrow")
    domains = sum((Counter(corpus.domains) for corpus in found), Counter())
    whole = Corpus(
        found[0].name,
        digest(*(corpus.fingerprint for corpus in found))[:16],
        sum(corpus.tokens for corpus in found),
        sum(corpus.documents for corpus in found),
        sum(corpus.skipped for corpus in found),
        dict(domains),
    )
    (folder / "corpus.json").write_text(json.dumps(asdict(whole)))


def _facts(folder: Path) -> Corpus:
    return Corpus(**json.loads((folder / "corpus.json").read_text()))


def _refuse_small(spec: DataSpec, corpus: Corpus, train: int, validation: int) -> None:
    if not corpus.documents:
        raise ValueError(f"{spec.path or spec.corpus}: no text in it ({corpus.skipped} empty documents); give another")
    if not train or not validation:
        lacking = "validation" if train else "training"
        raise ValueError(
            f"{spec.path or spec.corpus}: {corpus.tokens} tokens in {corpus.documents} documents give no {lacking} row "
            f"of data.context={spec.context} tokens; lower it, give more text, or raise data.holdout or data.max_tokens"
        )


def _tokenized(
    documents: Iterable[tuple[Document, bool]], tokenizer: Tokenizer
) -> Iterator[tuple[Document, bool, np.ndarray]]:
    for several in _chunks(documents):
        encoded = tokens.encode(tokenizer, [document.text for document, _ in several])
        yield from ((document, held, ids) for (document, held), ids in zip(several, encoded, strict=True))


def _chunks(documents: Iterable[tuple[Document, bool]]) -> Iterator[list[tuple[Document, bool]]]:
    several, size = [], 0
    for document, held in documents:
        several.append((document, held))
        size += len(document.text)
        if size >= CHUNK:
            yield several
            several, size = [], 0
    yield several


class RowWriter:
    """Cuts one stream of tokens into rows of T+1 with stride T: row i ends with the token that row i+1 begins with.

    Up to T tokens at the stream's end that fill no row are left out. The file is a ``datasets`` Arrow table.
    """

    def __init__(self, path: Path, context: int, dtype: type[np.unsignedinteger]) -> None:
        self.context, self.rows, self.pending, self.size = context, 0, [np.array([], dtype)], 0
        self.schema = pa.schema([("tokens", pa.list_(pa.from_numpy_dtype(dtype), context + 1))])
        self.file = pa.ipc.new_stream(path, self.schema)

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._write()
        self.file.close()

    def add(self, ids: np.ndarray) -> None:
        self.pending.append(ids.astype(self.pending[0].dtype))
        self.size += len(ids)
        if self.size >= CHUNK:
            self._write()

    def _write(self) -> None:
        stream, width = np.concatenate(self.pending), self.context + 1
        count = max(0, len(stream) - 1) // self.context
        if count:
            rows = np.lib.stride_tricks.sliding_window_view(stream, width)[:: self.context]
            values = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), width)
            self.file.write_batch(pa.record_batch([values], schema=self.schema))
        self.pending, self.size, self.rows = [stream[count * self.context :]], 0, self.rows + count


class Rows(torch.utils.data.Dataset):
    """The rows of one split, in one file or in numbered ones: ``rows[indices]`` are (B, T+1) int64.

    With ``fixed_first`` all of them start with 0.
    """

    def __init__(self, path: Path, fixed_first: bool) -> None:
        parts = [Dataset.from_file(str(file)) for file in sorted(path.parent.glob(f"{path.stem}*.arrow"))]
        # Arrow format and one flattening read five times faster than the torch format of the library.
        self.table = (concatenate_datasets(parts) if len(parts) > 1 else parts[0]).with_format("arrow")
        self.fixed_first = fixed_first

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, indices: np.ndarray) -> Tensor:
        rows = self.packed(indices)
        if self.fixed_first:
            rows[:, 0] = END_OF_TEXT
        return rows

    def packed(self, indices: np.ndarray) -> Tensor:
        """The same rows, each beginning with the token where the packing cut."""
        column = self.table[indices]["tokens"].combine_chunks()
        return torch.from_numpy(column.flatten().to_numpy().reshape(len(indices), -1).astype(np.int64))
