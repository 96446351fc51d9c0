"""A recipe: every key a run understands, as nested frozen specs; how files, bases and key=value become one."""

from __future__ import annotations

import difflib
import hashlib
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gatedlm.catalogue import GROUPS, choices, expanded, shipped
from gatedlm.loss import LossSpec
from gatedlm.model.kernels import multiplies_bf16
from gatedlm.model.lm import ModelSpec
from gatedlm.probes.spikes import SpikeSpec


@dataclass(frozen=True)
class DataSpec:
    """Which text, and how it becomes rows of tokens.

    corpus       a card in data/ (stdlib, files, tinystories, fineweb_edu, backcopy) or any org/name on the Hub
    path         for corpus=files: a file, folder or glob of txt, md, py, jsonl, jsonl.gz or parquet
    text_field   the column that holds the text; domain_field the column that names its domain
    tokenizer    a tokenizer.json, a folder that has one or a Hub name; without it one is trained on the corpus
    vocab        tokens the tokenizer may have
    context      tokens a model sees at once (T)
    batch        sequences per step, over all ranks
    max_tokens   tokens kept from the corpus; 0 keeps all
    holdout      share of whole documents kept for validation
    fixed_first  every row starts with the end-of-text token instead of wherever the packing cut
    documents    attention and targets stay within a document
    cache        folder of prepared corpora; without it $GATEDLM_CACHE or the user's cache folder
    workers      processes that load batches beside the training one
    """

    corpus: str = "stdlib"
    path: str | None = None
    text_field: str = "text"
    domain_field: str | None = None
    tokenizer: str | None = None
    vocab: int = 1024
    context: int = 128
    batch: int = 16
    max_tokens: int = 0
    holdout: float = 0.05
    fixed_first: bool = True
    documents: bool = False
    cache: str | None = None
    workers: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.holdout <= 0.5:
            raise ValueError(f"data.holdout={self.holdout}: the share kept for validation, above 0 and at most 0.5")


@dataclass(frozen=True)
class OptimSpec:
    """AdamW, decay on matrices only; rate up linearly over ``warmup`` steps, then down by cosine to ``floor`` x lr.

    state  of a run that begins with another's weights: fresh averages of the gradients, or those kept from there
    """

    lr: float = 1e-2
    warmup: int = 40
    floor: float = 0.1
    schedule: Literal["cosine", "constant"] = "cosine"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    state: Literal["fresh", "kept"] = "fresh"

    def __post_init__(self) -> None:
        if max(self.betas) >= 1:
            raise ValueError(f"optim.betas={list(self.betas)}: averages over the past, both must be below 1")
        if self.floor > 1:
            raise ValueError(f"optim.floor={self.floor}: a share of optim.lr, at most 1")


@dataclass(frozen=True)
class TrainerSpec:
    """How long, where, and what is written when; every interval counts optimizer steps.

    accelerator       cpu, gpu or auto; devices are processes, one per core group or GPU
    nodes             machines that take part, each with ``devices`` processes
    strategy          auto: one process, or ddp where there are more; fsdp shards the model block by block
    data_parallel     ranks that share a batch, 0 for all; tensor_parallel ranks that share a layer, only 1 so far
    precision         fp32; bf16 computes in bfloat16 and keeps weights and optimizer state in fp32; auto becomes, as a
                      recipe is read, bf16 if this machine multiplies it in hardware and fp32 if not
    threads           cores one process computes on, at most its share of the machine's; 0 leaves the choice to torch
    micro_batch       sequences per forward pass; 0 takes a rank's whole share of the batch at once
    checkpoint_blocks keep only each block's input for the backward pass and compute the rest anew: less memory
    compile           compile each block; worth its start-up from some hundred steps on
    nonfinite         a loss or gradient that is not finite: stop the run, or skip the step and count it
    checkpoint_every  0 saves only at the end
    keep              newest checkpoints that stay, beside the best by validation loss
    log_every         steps between lines of metrics.jsonl
    val_every         steps between validations, 0 validates only at the end; val_batches 0 reads the whole split
    probe_every       steps between probes of attention, activations and scores; 0 probes only at the end
    profile           print which operations took the time
    """

    steps: int = 400
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    devices: int = 1
    nodes: int = 1
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    data_parallel: int = 0
    tensor_parallel: int = 1
    precision: Literal["fp32", "bf16", "auto"] = "fp32"
    threads: int = 0
    micro_batch: int = 0
    checkpoint_blocks: bool = False
    compile: bool = False
    nonfinite: Literal["stop", "skip"] = "stop"
    checkpoint_every: int = 100
    keep: int = 2
    log_every: int = 1
    val_every: int = 100
    val_batches: int = 20
    probe_every: int = 50
    profile: bool = False


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run.

    name    the run's folder under ``out``; without it the recipe file's name and a hash of all that follows
    seed    of the weights, the data order and every other draw
    origin  the folder of a run whose last weights this one begins with; the word from=FOLDER sets it and takes over
            that run's recipe besides, under the keys of this one's
    """

    name: str = ""
    out: str = "runs"
    seed: int = 0
    origin: str = ""
    model: ModelSpec = field(default_factory=ModelSpec)
    data: DataSpec = field(default_factory=DataSpec)
    optim: OptimSpec = field(default_factory=OptimSpec)
    loss: LossSpec = field(default_factory=LossSpec)
    trainer: TrainerSpec = field(default_factory=TrainerSpec)
    spikes: SpikeSpec = field(default_factory=SpikeSpec)

    def __post_init__(self) -> None:
        for broken, why in _refusals(self):
            if broken:
                raise ValueError(why)


MOST_HELPERS = 512  # threads or processes beside the main one: more than help, fewer than bring a machine down


def _refusals(recipe: Recipe) -> list[tuple[bool, str]]:
    """What no single spec can see: sizes that have to fit together, and counts that have to be above 0."""
    model, data, trainer = recipe.model, recipe.data, recipe.trainer
    ranks = trainer.devices * trainer.nodes
    counts = {
        "data.context": data.context,
        "data.batch": data.batch,
        "trainer.steps": trainer.steps,
        "trainer.devices": trainer.devices,
        "trainer.nodes": trainer.nodes,
        "trainer.log_every": trainer.log_every,
        "trainer.keep": trainer.keep,
        "optim.lr": recipe.optim.lr,
        "optim.eps": recipe.optim.eps,
    }
    helpers = {"trainer.threads": trainer.threads, "data.workers": data.workers}
    return [
        *((count <= 0, f"{key}={count}: must be above 0") for key, count in counts.items()),
        *((count > MOST_HELPERS, f"{key}={count}: take at most {MOST_HELPERS}") for key, count in helpers.items()),
        (
            recipe.name in (".", "..") or "/" in recipe.name,
            f"name={recipe.name}: the name of a folder, say where that lies by out=FOLDER",
        ),
        (
            data.path is not None and data.corpus != "files",
            f"data.path={data.path}: data.corpus={data.corpus} reads no files of yours, add data=files",
        ),
        (
            model.vocab < data.vocab,
            f"model.vocab={model.vocab} is less than data.vocab={data.vocab}: "
            "leave model.vocab out to let it follow, or make it larger",
        ),
        (
            ranks > 0 and data.batch % ranks != 0,
            f"data.batch={data.batch} does not divide among the {ranks} ranks of trainer.devices: take a multiple",
        ),
        (
            trainer.data_parallel not in (0, ranks),
            f"trainer.data_parallel={trainer.data_parallel}: all {ranks} ranks share the batch, leave it out",
        ),
        (
            trainer.tensor_parallel != 1,
            f"trainer.tensor_parallel={trainer.tensor_parallel}: layers are not split yet, leave it at 1",
        ),
    ]


@dataclass(frozen=True)
class Run:
    """One run of a command: its recipe, the words that made it, and those of them that a sweep varied."""

    recipe: Recipe
    overrides: tuple[str, ...]
    label: str


def load(words: list[str], auto: str | None = None) -> list[Run]:
    """The runs that ``recipe=NAME [group=NAME ...] [key=value ...]`` asks for; the last swept word varies fastest.

    Groups are laid over the recipe in the order of ``GROUPS``, then keys as given; of two equal keys the later wins.
    ``auto`` is what trainer.precision=auto becomes, without it what suits this machine.
    Raises ValueError: one line that says what to type instead.
    """
    options = [_options(word) for word in words]
    swept = [len(several) > 1 for several in options]
    runs: dict[str, Run] = {}
    for choice in itertools.product(*options):
        label = " ".join(itertools.compress(choice, swept))
        recipe = _compose(choice, any(swept), auto)
        if recipe.name in runs:
            raise ValueError(f"{label}: the same run as {runs[recipe.name].label}, drop one of them")
        runs[recipe.name] = Run(recipe, choice, label)
    return list(runs.values())


def to_yaml(recipe: Recipe) -> str:
    """Every key with its value; ``from_yaml`` gives the equal recipe."""
    return OmegaConf.to_yaml(OmegaConf.structured(recipe))


def from_yaml(text: str) -> Recipe:
    """The recipe of ``to_yaml``. Raises ValueError for a key or a value that no recipe has."""
    raw = OmegaConf.create()
    for key, value in _parse(io.StringIO(text), "recipe").items():
        _put(raw, key, value)
    return _build(raw)


def changed(before: Recipe, after: Recipe) -> dict[str, tuple[Any, Any]]:
    """{dotted key: (value before, value after)} of all keys that differ."""
    old, new = _flat(before), _flat(after)
    return {key: (old[key], new[key]) for key in old if old[key] != new[key]}


def _flat(spec: Any, key: str = "") -> dict[str, Any]:
    if not is_dataclass(spec):
        return {key: spec}
    below = [_flat(getattr(spec, f.name), f"{key}.{f.name}".lstrip(".")) for f in fields(spec)]
    return {k: v for flat in below for k, v in flat.items()}


def _options(word: str) -> list[str]:
    """``key=a,b`` as ``key=a`` and ``key=b``; commas in brackets, braces or quotes part nothing."""
    key, _, text = word.partition("=")
    parts = re.findall(r"""(?:\[.*?]|\{.*?}|"[^"]*"|'[^']*'|[^,])+""", text)
    if not parts or ",".join(parts) != text:
        raise ValueError(f"{word!r} lacks a value: write key=value, such as gate=sdpa-headwise or optim.lr=3e-3")
    return [f"{key}={part}" for part in parts]


def _compose(words: tuple[str, ...], sweeping: bool, auto: str | None) -> Recipe:
    pairs = [word.split("=", 1) for word in words]
    picks = {key: text for key, text in pairs if key in ("recipe", "from", *GROUPS)}
    if "recipe" not in picks:
        raise ValueError(f"which recipe? write recipe=NAME, one of {', '.join(choices())}, or recipe=path/to/file.yaml")
    raw = _gather(_find("recipe", picks["recipe"], choices(), shipped("recipes"), Path.cwd()))
    raw = OmegaConf.merge(_taken_over(picks["from"]), raw, {"origin": picks["from"]}) if "from" in picks else raw
    for group in (group for group in GROUPS if group in picks):
        raw = _lay(raw, group, picks[group].split("+"))
    for key, text in pairs:
        if key not in picks:
            _put(raw, key, _value(key, text))
    recipe = _build(raw, auto)
    if recipe.name and not sweeping:
        return recipe
    return named(recipe, recipe.name or re.sub(r"\.ya?ml$", "", Path(picks["recipe"]).name))


def _taken_over(run: str) -> Any:
    """What holds of a run's recipe for one that begins with its weights: all but name, place and own beginning."""
    file = recipe_file(run)
    raw = OmegaConf.create(_parse(file, str(file)))
    for key in ("name", "out", "origin"):
        raw.pop(key, None)
    return raw


def recipe_file(run: str) -> Path:
    """Where the recipe of the run from=``run`` lies; ValueError where no run does."""
    file = Path(os.path.expanduser(run), "recipe.yaml")
    if not file.is_file():
        raise ValueError(f"from={run}: no run lies there, give the folder of one, such as from=runs/NAME")
    return file


def stretched(recipe: Recipe, words: Sequence[str]) -> Recipe:
    """A trained model's recipe under other ``model.rope.KEY=VALUE`` words; its context is what yarn stretches.

    Raises ValueError for any other key, which trained weights would not bear.
    """
    if not words:
        return recipe
    raw = OmegaConf.create(to_yaml(recipe))
    for key, text in (word.split("=", 1) for word in words):
        if not key.startswith("model.rope."):
            raise ValueError(f"{key}={text}: of a trained model RoPE alone can be changed, by model.rope.KEY=VALUE")
        _put(raw, key, _value(key, text))
    if not raw.model.rope.original:
        raw.model.rope.original = recipe.data.context if raw.model.rope.scaling == "yarn" else 0
    return _build(raw)


def named(recipe: Recipe, stem: str) -> Recipe:
    """The recipe under the name stem-hash, the hash being that of all it resolves to but name and place."""
    return replace(recipe, name=f"{stem}-{_digest(recipe)}")


# Keys that came after runs were named: at their defaults they have no say in a name, so that the old names stay.
LATER = (
    "origin",
    "optim.state",
    *(f"model.rope.{key}" for key in ("scaling", "factor", "original", "beta_fast", "beta_slow")),
)


def _digest(recipe: Recipe) -> str:
    resolved = asdict(replace(recipe, name="", out="", origin=Path(recipe.origin).name))
    own, plain = _flat(recipe), _flat(Recipe())
    for *path, last in (key.split(".") for key in LATER if own[key] == plain[key]):
        reduce(getitem, path, resolved).pop(last)
    return hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest()[:8]


def _lay(raw: Any, group: str, names: list[str]) -> Any:
    """``raw`` with a group's files over it; several gates stand side by side, other keys of a later file win."""
    folders = shipped("recipes") / group, Path.cwd()
    files = [_gather(_find(group, name, choices(group), *folders)) for name in names]
    raw = OmegaConf.merge(raw, *files)
    if group == "gate":
        gates = [gate for file in files for gate in OmegaConf.select(file, "model.gates", default=[])]
        OmegaConf.update(raw, "model.gates", gates)
    return raw


def _find(word: str, name: str, known: list[str], *folders: Path) -> Path:
    """The file of a name in the first folder that has it; a name with its .yaml is a path from the last folder."""
    is_path = name.endswith((".yaml", ".yml"))
    places = [folders[-1] / os.path.expanduser(name)] if is_path else [folder / f"{name}.yaml" for folder in folders]
    for place in places:
        if os.path.isfile(place):  # unlike Path.is_file no error for a name that is too long
            return place.resolve()
    if is_path:
        raise ValueError(f"{word}={name!r}: there is no file {str(places[0])!r}")
    near = _did_you_mean(difflib.get_close_matches(name, known))
    raise ValueError(f"{word}={name!r}: {near or 'no such name;'} there are {', '.join(known)}")


def _gather(path: Path, chain: tuple[Path, ...] = ()) -> Any:
    """A file's keys over those of its bases; ``about`` speaks to the reader of the catalogue only."""
    if path in chain:
        circle = " -> ".join(file.name for file in (*chain[chain.index(path) :], path))
        raise ValueError(f"{path}: base goes round in a circle, {circle}: take one base out")
    own = _parse(path, str(path))
    bases, raw = own.pop("base", []), OmegaConf.create()
    own.pop("about", None)
    known = [*choices(), *(f"{group}/{name}" for group in GROUPS for name in choices(group))]
    for base in bases if isinstance(bases, list) else [bases]:
        found = _find(f"{path}: base", str(base), known, shipped("recipes"), path.parent)
        raw = OmegaConf.merge(raw, _gather(found, (*chain, path)))
    for key, value in own.items():
        _put(raw, key, value, f"{path}: ")
    return raw


def _parse(file: Path | io.StringIO, source: str) -> dict[str, Any]:
    """A file's top-level keys, which may be dotted, and their values."""
    try:
        own = OmegaConf.to_container(OmegaConf.load(file))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"{source}, line {line}: not YAML, {error.problem}") from None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, OSError) as error:
        raise ValueError(f"{source}: not a recipe, {str(error).splitlines()[0]}") from None
    if not isinstance(own, dict):
        raise ValueError(f"{source}: not a recipe, it holds a list instead of keys such as optim.lr: 3e-3")
    return {str(key): value for key, value in own.items()}


def _value(key: str, text: str) -> Any:
    """A word's value as YAML reads it, except that keys of text take it as it stands (name=007)."""
    kind = KEYS.get(_general(key))
    if str in (kind, *get_args(kind)) and text[0] not in "'\"":
        return None if text == "null" else text
    try:
        read: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except (yaml.YAMLError, OmegaConfBaseException):
        raise ValueError(f"{key}={text!r}: not a YAML value, close each bracket and quote") from None
    return read["value"]


def _put(raw: Any, key: str, value: Any, source: str = "") -> None:
    try:
        _check(key, value)
        entry = re.match(r".*?\.\d+(?=\.|$)", key)
        if entry and OmegaConf.select(raw, entry[0]) is None:
            raise ValueError(f"{key}: there is no {entry[0]} yet, set the whole list first")
        OmegaConf.update(raw, key, value)
    except ValueError as error:
        raise ValueError(f"{source}{error}") from None


def _check(key: str, value: Any) -> None:
    """Raise ValueError, naming the key and what it may hold, unless the key exists and the value fits it."""
    kind = KEYS.get(_general(key))
    if kind is None or "*" in key:
        raise ValueError(f"unknown key {key!r}: {_nearest(key)}")
    if is_dataclass(kind) and isinstance(value, dict):
        for name, below in value.items():
            _check(f"{key}.{name}", below)
    elif get_origin(kind) is list and isinstance(value, list):
        for place, below in enumerate(value):
            _check(f"{key}.{place}", below)
    else:
        expected, fits = _rule(kind)
        if not fits(value):
            raise ValueError(f"{key}={value!r}: expected {expected}")


def _nearest(key: str) -> str:
    """The keys that end in the same word, or else the one spelt most alike."""
    known = [*KEYS, "recipe", "from", *GROUPS]
    place = re.search(r"\.(\d+)(?=\.|$)", key)
    last = key.rsplit(".", 1)[-1].lstrip("-")
    near = [k for k in known if k.rsplit(".", 1)[-1] == last] or difflib.get_close_matches(_general(key), known, 1)
    roots = ", ".join(f.name for f in fields(Recipe))
    return _did_you_mean([k.replace("*", place[1] if place else "0") for k in near]) or f"keys begin with {roots}"


def _did_you_mean(names: list[str]) -> str:
    return f"did you mean {' or '.join(map(repr, names))}?" if names else ""


def _general(key: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", key)


def _kinds(kind: Any, key: str = "") -> dict[str, Any]:
    """{dotted key: its type} of a spec and the specs below it; the entries of a list share the key ``*``."""
    below = get_type_hints(kind) if is_dataclass(kind) else {"*": get_args(kind)[0]} if get_origin(kind) is list else {}
    deeper = [_kinds(hint, f"{key}.{name}".lstrip(".")) for name, hint in below.items()]
    return ({key: kind} if key else {}) | {k: v for kinds in deeper for k, v in kinds.items()}


KEYS = _kinds(Recipe)
Rule = tuple[str, Callable[[Any], bool]]
_UNFIT = re.compile(r"\$\{|^\?\?\?$|[\x00-\x1f\x7f\ud800-\udfff]")  # OmegaConf's words, controls, surrogates
SCALARS: dict[type, Rule] = {
    int: ("a whole number from 0 up", lambda value: type(value) is int and 0 <= value < 2**53),
    float: ("a number from 0 up", lambda value: type(value) in (int, float) and 0 <= value < 1e38),
    bool: ("true or false", lambda value: type(value) is bool),
    str: ("text, in quotes and without ${...}", lambda value: type(value) is str and not _UNFIT.search(value)),
    type(None): ("null", lambda value: value is None),
}


def _rule(kind: Any) -> Rule:
    """What a key of this type may hold, in words and as a test; what lies inside specs and lists has its own keys."""
    args = get_args(kind)
    if is_dataclass(kind):
        return f"the keys {', '.join(f.name for f in fields(kind))}", lambda value: False
    if get_origin(kind) is Literal:
        return f"one of {', '.join(args)}", args.__contains__
    if get_origin(kind) is list:
        return f"a list, each entry with {_rule(args[0])[0]}", lambda value: False
    if get_origin(kind) is tuple:
        words, tests = zip(*map(_rule, args), strict=True)
        return (
            f"[{', '.join(words)}]",
            lambda value: (
                isinstance(value, list)
                and len(value) == len(args)
                and all(test(part) for test, part in zip(tests, value, strict=True))
            ),
        )
    words, tests = zip(*(SCALARS[arg] for arg in args or (kind,)), strict=True)
    return " or ".join(words), lambda value: any(test(value) for test in tests)


@cache
def _schema() -> Any:
    return OmegaConf.structured(Recipe)


def _build(raw: Any, auto: str | None = None) -> Recipe:
    if OmegaConf.select(raw, "model.vocab") is None:
        OmegaConf.update(raw, "model.vocab", OmegaConf.select(raw, "data.vocab", default=DataSpec.vocab))
    rope = OmegaConf.select(raw, "model.rope", default={})
    if rope.get("scaling") == "yarn" and not rope.get("original"):
        context = OmegaConf.select(raw, "data.context", default=DataSpec.context)
        OmegaConf.update(raw, "model.rope.original", int(context / max(1, rope.get("factor", 1))))
    recipe: Any = OmegaConf.to_object(OmegaConf.merge(_schema(), raw))
    return replace(recipe, out=expanded(recipe.out), trainer=_resolved(recipe.trainer, auto))


def _resolved(trainer: TrainerSpec, auto: str | None) -> TrainerSpec:
    return replace(trainer, precision=auto or _suited(trainer)) if trainer.precision == "auto" else trainer


def _suited(trainer: TrainerSpec) -> str:
    found = None if trainer.accelerator == "cpu" else torch.accelerator.current_accelerator(check_available=True)
    return "bf16" if multiplies_bf16(found.type if found else "cpu") else "fp32"
