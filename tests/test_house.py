"""The plan of the house: imports go down only, functions stay short, whatever is public says what it is."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "gatedlm").rglob("*.py"))
FLOORS = [
    {"gatedlm", "gatedlm.model", "gatedlm.shapes", "gatedlm.catalogue", "gatedlm.command"},
    {
        "gatedlm.model.cache",
        "gatedlm.model.kernels",
        "gatedlm.model.norm",
        "gatedlm.model.rope",
        "gatedlm.model.switch",
    },
    {"gatedlm.model.gate"},
    {"gatedlm.model.attention", "gatedlm.model.feedforward"},
    {"gatedlm.model.lm"},
    {"gatedlm.loss", "gatedlm.model.sampling"},
    {"gatedlm.probes"},
    {"gatedlm.recipe", "gatedlm.report"},
    {"gatedlm.data"},
    {"gatedlm.training", "gatedlm.planning"},
    {"gatedlm.hub"},
    {"gatedlm.studies"},
    {"gatedlm.evaluation", "gatedlm.findings"},
]
COMMANDS = len(FLOORS)
UNDER_LIGHTNING = FLOORS.index({"gatedlm.data"})


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    """The room a module belongs to: model/ has a room for each file, other folders are one room."""
    parts = module.split(".")
    return ".".join(parts[: 3 if parts[1:2] == ["model"] else 2])


def floor_of(room: str) -> int:
    """What no floor names is a command, above all others."""
    return next((floor for floor, rooms in enumerate(FLOORS) if room in rooms), COMMANDS)


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker reads."""
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield child
            yield from nodes(child)


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports, wherever in the file; ``from a import b`` counts as a.b where that is a module."""
    known = {module_of(file) for file in FILES}
    for node in nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: write imports from the root: from gatedlm..."
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else node.module for name in inner)


def definitions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node


def each_file() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])


def test_every_floor_is_inhabited():
    rooms = {room_of(module_of(path)) for path in FILES}
    assert set().union(*FLOORS) <= rooms


@each_file()
def test_imports_go_down_only(path: Path):
    room = room_of(module_of(path))
    for name in imports(path):
        other = room_of(name)
        if name.split(".")[0] == "gatedlm" and other != room:
            assert floor_of(other) < floor_of(room), f"{room} imports {other}, which stands no lower"


@each_file()
def test_lightning_is_kept_to_data_training_and_commands(path: Path):
    light = [name for name in imports(path) if name.split(".")[0] in ("lightning", "pytorch_lightning")]
    assert not light or floor_of(room_of(module_of(path))) >= UNDER_LIGHTNING
    assert all(name == "lightning" or name.startswith("lightning.") for name in light), "never pytorch_lightning"


@each_file()
def test_functions_are_short(path: Path):
    lengths = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in definitions(ast.parse(path.read_text()))
        if not isinstance(node, ast.ClassDef)
    }
    assert not {name: lines for name, lines in lengths.items() if lines > 45}


@each_file()
def test_what_is_public_has_a_docstring(path: Path):
    tree = ast.parse(path.read_text())
    public = [node for node in definitions(tree) if node in tree.body and not node.name.startswith("_")]
    assert [node.name for node in public if not ast.get_docstring(node)] == []
    assert ast.get_docstring(tree) or not tree.body, "the module has none"


def test_the_model_needs_torch_alone():
    """Model, loss and probes run without Lightning, without the recipes, and without the shape checkers."""
    script = """
        import sys
        absent = "lightning pytorch_lightning jaxtyping beartype omegaconf datasets tokenizers transformers"
        sys.modules.update(dict.fromkeys(absent.split()))
        import torch, gatedlm.loss, gatedlm.probes
        from gatedlm.model.lm import GatedLM, GateSpec, ModelSpec, initialise
        model = GatedLM(ModelSpec(gates=[GateSpec()]))
        initialise(model, seed=0)
        assert model(torch.arange(7)[None]).logits.shape == (1, 7, 1024)
        assert "gatedlm.recipe" not in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", dedent(script)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
