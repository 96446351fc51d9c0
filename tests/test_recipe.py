"""Recipes: every shipped file resolves and builds, keys are frozen, words mean what they say, mistakes get one line."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import torch
import yaml

from gatedlm import catalogue
from gatedlm.model.gate import GateSpec
from gatedlm.model.lm import GatedLM
from gatedlm.recipe import KEYS, Recipe, changed, from_yaml, load, to_yaml

ROOT = catalogue.shipped("recipes")
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.yaml"))

FROZEN = """
data data.batch data.cache data.context data.corpus data.documents data.domain_field data.fixed_first data.holdout
data.max_tokens data.path data.text_field data.tokenizer data.vocab data.workers
loss loss.balance loss.balance_over loss.router_z
model model.experts model.experts.count model.experts.renormalise model.experts.used model.ffn
model.gates model.gates.* model.gates.*.activation model.gates.*.combine model.gates.*.granularity
model.gates.*.position model.gates.*.sharing model.gates.*.source
model.head_dim model.heads model.kv_heads model.layers model.qk_norm model.rope model.rope.base model.rope.beta_fast
model.rope.beta_slow model.rope.factor model.rope.original model.rope.scaling model.sandwich_norm
model.switch model.switch.count model.switch.on model.switch.used
model.tied model.vocab model.width
name
optim optim.betas optim.clip optim.eps optim.floor optim.lr optim.schedule optim.state optim.warmup
optim.weight_decay
origin
out
seed
spikes spikes.merge spikes.rise spikes.sigmas spikes.skip spikes.window
trainer trainer.accelerator trainer.checkpoint_blocks trainer.checkpoint_every trainer.compile trainer.data_parallel
trainer.devices trainer.keep trainer.log_every trainer.micro_batch trainer.nodes trainer.nonfinite trainer.precision
trainer.probe_every trainer.profile trainer.steps trainer.strategy trainer.tensor_parallel trainer.threads
trainer.val_batches trainer.val_every
"""

# The paper's rows, written out by hand: position, granularity, sharing, combine, activation, source.
ROWS = {
    "sdpa-elementwise": "sdpa elementwise specific multiply sigmoid input",
    "value-elementwise": "value elementwise specific multiply sigmoid input",
    "key-elementwise": "key elementwise specific multiply sigmoid input",
    "query-elementwise": "query elementwise specific multiply sigmoid input",
    "output-elementwise": "output elementwise specific multiply sigmoid input",
    "sdpa-headwise": "sdpa headwise specific multiply sigmoid input",
    "value-headwise": "value headwise specific multiply sigmoid input",
    "sdpa-shared": "sdpa elementwise shared multiply sigmoid input",
    "value-shared": "value elementwise shared multiply sigmoid input",
    "sdpa-additive": "sdpa elementwise specific add silu input",
    "sdpa-silu": "sdpa elementwise specific multiply silu input",
    "sdpa-rmsnorm": "sdpa elementwise specific replace rmsnorm self",
    "sdpa-silu-only": "sdpa elementwise specific replace silu self",
    "sdpa-additive-identity": "sdpa elementwise specific add identity input",
    "sdpa-constant": "sdpa elementwise specific multiply sigmoid constant",
    "sdpa-ns-sigmoid": "sdpa elementwise specific multiply ns_sigmoid input",
}


def one(*words: str) -> Recipe:
    (run,) = load(["recipe=quickstart", *words])
    return run.recipe


def complaint(*words: str) -> str:
    with pytest.raises(ValueError) as caught:
        load(list(words))
    message = str(caught.value)
    assert len(message.splitlines()) == 1 and "full_key" not in message, message
    return message


@pytest.fixture
def file(tmp_path):
    def write(text: str, name: str = "mine.yaml") -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return f"recipe={path}"

    return write


# Shipped files


@pytest.mark.parametrize("name", FILES)
def test_every_file_says_what_it_is_and_resolves_alone(name):
    assert (ROOT / name).read_text().startswith("# ")
    assert load([f"recipe={name.removesuffix('.yaml')}"])[0].recipe.name.startswith(f"{Path(name).stem}-")


LAPTOP = ("quickstart", "quickstart-moe", "sink")


@pytest.mark.parametrize("recipe", catalogue.choices())
def test_every_recipe_builds_with_every_gate(recipe):
    gates = catalogue.choices("gate") if recipe in LAPTOP else ["none", "sdpa-elementwise", "value-shared"]
    runs = load([f"recipe={recipe}", f"gate={','.join(gates)}"])
    with torch.device("meta"):
        built = [sum(p.numel() for p in GatedLM(run.recipe.model).parameters()) for run in runs]
    assert built == [run.recipe.model.parameters().total for run in runs]
    assert [run.label for run in runs] == [f"gate={gate}" for gate in gates]


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group in ("scale", "data", "debug") for name in catalogue.choices(group)]
)
def test_every_group_lies_over_every_recipe(group, name):
    vocab = ["data.vocab=64"] if name == "backcopy" else []
    assert len(load([f"recipe={','.join(LAPTOP)}", f"{group}={name}", *vocab])) == len(LAPTOP)


@pytest.mark.parametrize("name", catalogue.choices("gate"))
def test_gate_files_are_the_papers_rows(name):
    (gates,) = yaml.safe_load((ROOT / "gate" / f"{name}.yaml").read_text()).values()
    assert list(gates) == ["gates"]
    assert [str(gate) for gate in one(f"gate={name}").model.gates] == ([ROWS[name]] if name != "none" else [])
    default = {f.name: f.default for f in fields(GateSpec)}
    for gate in gates["gates"]:
        assert "position" in gate
        assert [word for word in gate if word != "position" and gate[word] == default[word]] == []


def test_every_row_of_the_paper_has_a_file():
    assert {*ROWS, "none"} == set(catalogue.choices("gate"))


@pytest.mark.parametrize("name", catalogue.choices("scale"))
def test_scale_files_name_no_gate(name):
    assert load([f"recipe=scale/{name}"])[0].recipe.model.gates == []
    assert "gate" not in (ROOT / "scale" / f"{name}.yaml").read_text()


def test_scales_are_whole():
    """A scale over another leaves nothing of it behind."""
    for over, under in itertools.permutations(("nano", "tiny"), 2):
        names = f"recipe=scale/{under}", f"scale={over}", "name=x"
        assert load(list(names))[0].recipe == load([f"recipe=scale/{over}", "name=x"])[0].recipe


def test_quickstart_and_sink_are_the_settings_they_claim():
    tiny, sink = one(), load(["recipe=sink"])[0].recipe
    assert tiny.optim.lr == 1e-2 and tiny.optim.betas == (0.9, 0.95) and tiny.data.max_tokens == 3_000_000
    assert round(tiny.model.parameters().total, -5) == 300_000
    assert (sink.model.layers, sink.model.heads, sink.model.vocab, sink.model.qk_norm) == (1, 1, 64, False)
    assert (sink.optim.lr, sink.optim.schedule, sink.optim.weight_decay) == (3e-3, "constant", 0.0)
    assert load(["recipe=quickstart-moe"])[0].recipe.model.experts.count == 8


def test_usage_names_everything():
    text = catalogue.usage()
    for name in [e.name for e in catalogue.recipes()] + [n for g in catalogue.GROUPS for n in catalogue.choices(g)]:
        assert name in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_usage_is_light_and_found_from_a_wheel(tmp_path):
    package = tmp_path / "gatedlm"
    package.mkdir()
    shutil.copy(catalogue.__file__, package)
    shutil.copytree(ROOT, package / "shipped" / "recipes")
    code = (
        "import json, sys; from gatedlm.catalogue import usage, choices; usage();"
        "heavy = {'torch', 'omegaconf', 'lightning', 'numpy', 'rich'} & set(sys.modules);"
        "print(json.dumps([choices('gate'), sorted(heavy)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == [catalogue.choices("gate"), []]


# Keys and values


def test_keys_are_frozen():
    assert set(KEYS) == set(FROZEN.split())


def test_every_key_has_a_default():
    for kind in filter(lambda kind: hasattr(kind, "__dataclass_fields__"), KEYS.values()):
        assert [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING] == []


def test_values_are_read_by_type():
    recipe = one(
        "optim.lr=1e-3", "trainer.steps=3_000", "optim.betas=[0.8,0.99]", "data.documents=true", "name=007", "seed=5",
        "data=files", "data.path=a b: c", "data.text_field='x,y'", "data.tokenizer=null", "optim.clip=2",
    )  # fmt: skip
    assert (recipe.optim.lr, recipe.trainer.steps, recipe.optim.betas) == (0.001, 3000, (0.8, 0.99))
    assert (recipe.data.documents, recipe.name, recipe.seed, recipe.optim.clip) == (True, "007", 5, 2.0)
    assert (recipe.data.path, recipe.data.text_field, recipe.data.tokenizer) == ("a b: c", "x,y", None)


def test_later_words_win_and_groups_lie_under_keys():
    assert one("optim.lr=1", "optim.lr=2").optim.lr == 2
    assert one("trainer.steps=7", "scale=nano").trainer.steps == 7
    assert one("debug=one-step", "scale=nano").trainer.steps == 1
    assert one("model={layers: 3, heads: 4}", "model.heads=2").model.layers == 3


def test_gates_stand_side_by_side():
    recipe = one("gate=sdpa-headwise+value-shared", "model.gates.1.activation=silu")
    expected = [GateSpec(granularity="headwise"), GateSpec("value", sharing="shared", activation="silu")]
    assert recipe.model.gates == expected
    assert one("model.gates=[{position: key}, {source: constant}]").model.gates[1].source == "constant"


def test_model_vocab_follows_the_data_unless_given():
    assert one("data.vocab=300").model.vocab == 300
    assert one("data=backcopy").model.vocab == 64
    assert one("model.vocab=1088").model.vocab == 1088
    assert "leave model.vocab out" in complaint("recipe=quickstart", "model.vocab=512")


# Sweeps and names


def test_a_comma_sweeps_and_the_last_word_is_fastest():
    runs = load(["recipe=quickstart", "gate=none,sdpa-headwise", "seed=4", "optim.lr=1e-3,3e-3"])
    product = ["gate=none optim.lr=1e-3", "gate=none optim.lr=3e-3"]
    product += ["gate=sdpa-headwise optim.lr=1e-3", "gate=sdpa-headwise optim.lr=3e-3"]
    assert [run.label for run in runs] == product
    assert [(len(run.recipe.model.gates), run.recipe.optim.lr) for run in runs] == [
        (0, 1e-3),
        (0, 3e-3),
        (1, 1e-3),
        (1, 3e-3),
    ]
    assert runs[1].overrides == ("recipe=quickstart", "gate=none", "seed=4", "optim.lr=3e-3")
    assert len({run.recipe.name for run in runs}) == 4


def test_commas_in_brackets_do_not_sweep():
    runs = load(["recipe=quickstart", "optim.betas=[0.9,0.99],[0.8,0.9]", "model.rope={base: 5e3}", "out='a,b'"])
    assert [run.recipe.optim.betas for run in runs] == [(0.9, 0.99), (0.8, 0.9)]
    assert runs[0].recipe.out == "a,b" and runs[0].label == "optim.betas=[0.9,0.99]"


def test_a_run_without_sweep_has_no_label_and_keeps_its_name():
    (run,) = load(["recipe=quickstart", "name=foo"])
    assert (run.label, run.recipe.name) == ("", "foo")
    assert [run.recipe.name[:4] for run in load(["recipe=quickstart", "name=foo", "seed=0,1"])] == ["foo-", "foo-"]


def test_the_same_run_twice_is_refused():
    assert "the same run as" in complaint("recipe=quickstart", "optim.lr=1e-3,0.001")


def test_a_name_is_recipe_and_hash_of_what_it_resolves_to(file):
    name = one().name
    assert name.startswith("quickstart-") and len(name) == len("quickstart-") + 8
    assert one("out=elsewhere").name == name == one("optim.lr=0.01").name
    assert one("seed=1").name != name
    forth = load([file("optim: {lr: 1, clip: 2}\nseed: 3")])[0].recipe
    back = load([file("seed: 3\noptim: {clip: 2.0, lr: 1.0}")])[0].recipe
    assert forth.name == back.name
    code = "from gatedlm.recipe import load; print(load(['recipe=quickstart'])[0].recipe.name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == name


# Files


def test_a_path_is_a_recipe_and_bases_lie_beside_it_or_among_the_shipped(file):
    file("optim.lr: 0.5\nseed: 1", "below.yaml")
    file("base: below\nseed: 2", "sub/over.yaml")
    file("seed: 1\noptim.floor: 0.3", "sub/below.yaml")
    word = file("base: [scale/nano, below.yaml, sub/over.yaml]\nabout: {shows: x}\ntrainer.keep: 7")
    recipe = load([word])[0].recipe
    assert (recipe.model.width, recipe.optim.lr, recipe.seed, recipe.trainer.keep) == (32, 0.5, 2, 7)
    assert recipe.optim.floor == 0.3
    assert recipe.name.startswith("mine-")


def test_names_and_paths_resolve_from_anywhere(file, tmp_path, monkeypatch):
    here = one()
    file("base: quickstart\nmodel.gates: [{position: value}]", "quickstart.yaml")
    monkeypatch.chdir(tmp_path)
    assert one() == here
    assert load(["recipe=quickstart.yaml"])[0].recipe.model.gates == [GateSpec("value")]
    assert one("gate=quickstart.yaml").model.gates == [GateSpec("value")]


def test_yaml_round_trip_is_equal():
    for recipe in (Recipe(), one(), one("gate=sdpa-headwise+value-shared", "name=1e3", "data.path=null", "out=on")):
        assert from_yaml(to_yaml(recipe)) == recipe


def test_a_resolved_recipe_is_a_recipe(file):
    recipe = one("gate=sdpa-silu", "optim.lr=3e-5")
    assert load([file(to_yaml(recipe), "recipe.yaml")])[0].recipe == recipe


def test_changed_names_what_differs():
    before = one()
    after = replace(before, seed=3, model=replace(before.model, gates=[], width=128))
    gates = before.model.gates
    assert changed(before, after) == {"seed": (0, 3), "model.gates": (gates, []), "model.width": (64, 128)}
    assert changed(before, before) == {}


# Mistakes

MISTAKES = {
    "model.gat=none": "unknown key 'model.gat': did you mean 'model.gates'?",
    "lr=3": "unknown key 'lr': did you mean 'optim.lr'?",
    "--trainer.steps=3": "unknown key '--trainer.steps': did you mean 'trainer.steps'?",
    "vocab=3": "unknown key 'vocab': did you mean 'model.vocab' or 'data.vocab'?",
    "gates=none": "unknown key 'gates': did you mean 'model.gates'?",
    "gaet=none": "unknown key 'gaet': did you mean 'gate'?",
    "zzz=3": "unknown key 'zzz': keys begin with name, out, seed, origin, model, data, optim, loss, trainer",
    "model={rope: {bse: 3}}": "unknown key 'model.rope.bse': did you mean 'model.rope.base'?",
    "model.gates=[{pos: key}]": "unknown key 'model.gates.0.pos': did you mean 'model.gates.0.position'?",
    "model.gates.0.shape=silu": "unknown key 'model.gates.0.shape': did you mean 'model.gates.0.sharing'?",
    "model.gates.*.position=key": "unknown key 'model.gates.*.position': did you mean 'model.gates.0.position'?",
    "model.gates.3.position=key": "model.gates.3.position: there is no model.gates.3 yet, set the whole list first",
    "trainer.accelerator=tpu": "trainer.accelerator='tpu': expected one of auto, cpu, gpu",
    "model.gates=[{position: top}]": "model.gates.0.position='top': expected one of query, key, value, sdpa, output",
    "trainer.steps=many": "trainer.steps='many': expected a whole number from 0 up",
    "trainer.steps=1.5": "trainer.steps=1.5: expected a whole number from 0 up",
    "trainer.steps=true": "trainer.steps=True: expected a whole number from 0 up",
    "optim.lr=-1": "optim.lr=-1: expected a number from 0 up",
    "optim.lr=.nan": "optim.lr=nan: expected a number from 0 up",
    "optim.lr=null": "optim.lr=None: expected a number from 0 up",
    "optim.lr=${seed}": "optim.lr='${seed}': expected a number from 0 up",
    "data.path=${oc.env:HOME}": "data.path='${oc.env:HOME}': expected text, in quotes and without ${...} or null",
    "data.documents=3": "data.documents=3: expected true or false",
    "optim.betas=[0.9]": "optim.betas=[0.9]: expected [a number from 0 up, a number from 0 up]",
    "optim.betas=[0.9,x]": "optim.betas=[0.9, 'x']: expected [a number from 0 up, a number from 0 up]",
    "optim.betas=[0.9,0.9,1]": "optim.betas=[0.9, 0.9, 1]: expected [a number from 0 up, a number from 0 up]",
    "optim=3": "optim=3: expected the keys lr, warmup, floor, schedule, betas, eps, weight_decay, clip",
    "model.gates=none": "model.gates='none': expected a list, each entry with the keys position, granularity, sharing",
    "optim.betas={a: [}": "optim.betas='{a: [}': not a YAML value, close each bracket and quote",
    "optim.lr": "'optim.lr' lacks a value: write key=value",
    "optim.lr=": "'optim.lr=' lacks a value: write key=value",
    "optim.lr=1,,2": "'optim.lr=1,,2' lacks a value: write key=value",
    "=3": "unknown key ''",
    "model..width=3": "unknown key 'model..width': did you mean 'model.width'?",
    "gate=sdpa-headwse": "gate='sdpa-headwse': did you mean 'sdpa-headwise'",
    "gate=qqq": "gate='qqq': no such name; there are key-elementwise, none",
    "scale=tinny": "scale='tinny': did you mean 'tiny'",
    "gate=none+": "gate='': no such name; there are key-elementwise, none",
    "recipe=quikstart": "recipe='quikstart': did you mean 'quickstart' or 'quickstart-moe'? there are dense-1.7b-28l",
    "recipe=nowhere/x.yaml": "recipe='nowhere/x.yaml': there is no file",
    "model.gates=[{activation: rmsnorm}]": "rmsnorm normalises Y itself: use combine=replace source=self",
    "model.kv_heads=3": "model.heads=2 is not a multiple of model.kv_heads=3",
    "gate=sdpa-silu+sdpa-headwise": "two gates at sdpa",
    "data.path=notes": "data.path=notes: data.corpus=stdlib reads no files of yours, add data=files",
}


@pytest.mark.parametrize("word", MISTAKES)
def test_a_mistake_gets_one_line_that_names_the_fix(word):
    assert MISTAKES[word] in complaint("recipe=quickstart", word)


def test_a_missing_recipe_is_asked_for():
    assert complaint("gate=none").startswith("which recipe? write recipe=NAME, one of dense-1.7b-28l, ")


FILE_MISTAKES = {
    "model: {gat: 1}": "mine.yaml: unknown key 'model.gat': did you mean 'model.gates'?",
    "name: 3": "mine.yaml: name=3: expected text, in quotes",
    "data: {path: 2024-01-01, text_field: yes}": "mine.yaml: data.text_field=True: expected text, in quotes",
    "seed: 1\noptim: {lr: 3}}": "mine.yaml, line 2: not YAML, ",
    "seed: 1\nseed: 2": "mine.yaml, line 2: not YAML, found duplicate key seed",
    "seed: 1\n\tlr: 2": "mine.yaml, line 2: not YAML, ",
    "a: !!python/object:os.system x": "mine.yaml, line 1: not YAML, could not determine a constructor",
    "- seed": "mine.yaml: not a recipe, it holds a list",
    "3": "mine.yaml: not a recipe, ",
    "~: 3": "mine.yaml: not a recipe, ",
    "data.path: ${seed": "mine.yaml: not a recipe, ",
    "\x01": "mine.yaml: not a recipe, ",
    "model: {1: 2}": "mine.yaml: unknown key 'model.1'",
    "base: scale/tinny": "mine.yaml: base='scale/tinny': did you mean 'scale/tiny'",
    "base: other.yaml": "mine.yaml: base='other.yaml': there is no file",
    "base: {a: 1}": "no such name",
}


@pytest.mark.parametrize("text", FILE_MISTAKES)
def test_a_mistake_in_a_file_names_the_file(text, file):
    assert FILE_MISTAKES[text] in complaint(file(text))


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"seed: \xff\xfe")
    assert "x.yaml: not a recipe, " in complaint(f"recipe={tmp_path / 'x.yaml'}")


def test_bases_in_a_circle_are_refused(file):
    file("base: [scale/nano, c.yaml]", "b.yaml")
    file("base: a", "c.yaml")
    assert "circle, a.yaml -> b.yaml -> c.yaml -> a.yaml" in complaint(file("base: b", "a.yaml"))


def wrong_values(kind) -> list[str]:
    if get_origin(kind) is Literal:
        return ["", "Auto", "3", "null", "[cpu]", f"{get_args(kind)[0]}x"]
    if get_origin(kind) is tuple:
        return ["3", "[]", "[a,b]", "[0.9,0.9,0.9]", "{a: 1}", "[-1,0.9]"]
    if str in (kind, *get_args(kind)):
        return ["${x}", "'${x'", ""]
    if kind in (int, float, bool):
        return ["maybe", "[1,2]", "null", "{a: 1}", "-1", "${x", "'1'"]
    return ["maybe", "3", "null"]


LEAVES = [key for key in KEYS if "*" not in key]
MUTATED = [key[:-1] for key in LEAVES] + [f"{key}x" for key in LEAVES] + [f"{key}.x" for key in LEAVES]
BAD = [f"{key}=1" for key in MUTATED if key not in KEYS and key not in catalogue.GROUPS]
BAD += [f"{key}={text}" for key in LEAVES for text in wrong_values(KEYS[key]) if key not in catalogue.GROUPS]


def test_no_wrong_word_slips_through_or_says_more_than_a_line():
    assert len(BAD) > 300
    for word in BAD:
        assert word.partition("=")[0] in complaint("recipe=gate/none", word), word
