"""``python -m gatedlm.plan recipe=NAME [devices=N] [device=NAME] [key=value ...]``: what a run needs, on paper."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from gatedlm.command import command

USAGE = """\
usage: python -m gatedlm.plan recipe=NAME [devices=N] [device=NAME] [group=NAME ...] [key=value ...]

parameters, FLOPs, memory of a rank, seconds of a step, hours and cost of a run sharded by FSDP, by arithmetic alone

  devices=N    ranks; without it those of the recipe
  device=NAME  h100, h200, b200, a100, l40s, 4090 or cpu; without it h100, and cpu for a recipe that asks for no GPU

for example: python -m gatedlm.plan recipe=moe-15a2b gate=sdpa-elementwise devices=64 device=h100"""


def main(words: list[str]) -> None:
    """Print the plan; exit status 2 with one line for words that no recipe or device bears."""
    command(words, USAGE, _plan)


def _plan(words: list[str]) -> None:
    from rich.console import Console

    from gatedlm.planning.page import lines, settings

    console = Console(markup=False, highlight=False)
    for line in [line for setting in settings(words) for line in lines(setting)]:
        console.print(line, soft_wrap=isinstance(line, str))


class _Nothing(ModuleType):
    """What it is asked for, what a call and an index of it gives is itself; a class derived from it has no base."""

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> _Nothing:
        return self

    __getitem__ = __call__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[()]:
        return ()


class _WithoutTorch(MetaPathFinder, Loader):
    """Specs stand above the modules they describe; a plan reads the former, and torch would take seconds to load."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] == "torch" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Nothing(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


if __name__ == "__main__":
    sys.meta_path.insert(0, _WithoutTorch())
    main(sys.argv[1:])
