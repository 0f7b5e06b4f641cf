"""How a mutant comes into a process: its module's source is changed while it is imported; no file is."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType

from tests.mutants import MUTANTS
from tests.mutants.mutant import Mutant

VARIABLE = "OFFLOAD_MUTANT"
"""Of the environment: the name of the mutant that a process runs with."""


def install() -> None:
    """In a process that runs mutated tests (and in those that it spawns): put the mutant in."""
    name = os.environ.get(VARIABLE)
    if name:
        sys.meta_path.insert(0, _Mutator(next(mutant for mutant in MUTANTS if mutant.name == name)))


class _Mutator(importlib.abc.MetaPathFinder):
    """Loads the mutant's module from changed source."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._mutant.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.origin is not None
        return importlib.util.spec_from_file_location(
            name, spec.origin, loader=_Loader(name, spec.origin, self._mutant)
        )


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, mutant: Mutant) -> None:
        super().__init__(name, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        source = Path(self.path).read_text()
        assert source.count(self._mutant.old) >= 1, f"the text of the mutant {self._mutant.name!r} is gone"
        code: CodeType = compile(source.replace(self._mutant.old, self._mutant.new), self.path, "exec")
        return code
