"""`import deepspeed` as another name of `offload.deepspeed`, for scripts and libraries that are not modified.

A finder at the front of `sys.meta_path` provides three things. The modules `deepspeed` and `deepspeed.x.y` are
`offload.deepspeed` and `offload.deepspeed.x.y` themselves, not copies. `importlib.util.find_spec` finds the package.
`importlib.metadata` finds its version, for transformers and accelerate. Nothing happens before `install`.

Processes that this one starts have no such finder, but inherit the path with the folder `STAND_IN`. Python itself finds
a package `deepspeed` with metadata in that folder. When imported, this package installs a finder.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import cast

from offload.errors import UsageError

VERSION = "0.19.8"
"""The version of DeepSpeed whose names and signatures this package has."""

_NAME, _OURS = "deepspeed", "offload.deepspeed"
_ASK_ONCE = ("accelerate", "transformers.integrations.deepspeed")
"""Modules that look for DeepSpeed only once, when they are imported."""
STAND_IN = Path(__file__).parent / "stand_in"
"""Folder for Python's path, with metadata and a package `deepspeed` that is replaced by this package on import."""


def install() -> None:
    """Makes `import deepspeed` import `offload.deepspeed` from now on, in this process and in workers that it spawns.

    A second call changes nothing. Call it before any import of accelerate or of transformers' Trainer: both look for
    DeepSpeed when imported.

    Raises:
        UsageError: if DeepSpeed itself, or a library that has looked for it in vain, is imported already.
    """
    # Libraries and the command may both call it.
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    # Libraries that already looked for DeepSpeed found the stand-in on the path, or nothing.
    if str(STAND_IN) in sys.path:
        put_in_front()
        return
    if _NAME in sys.modules:
        raise UsageError(
            "DeepSpeed itself is imported already, so its name cannot mean offload.deepspeed: call install() before "
            "anything imports deepspeed, or start the script by `offload run`"
        )
    for name in _ASK_ONCE:
        if name in sys.modules:
            raise UsageError(
                f"{name} is imported already and has looked for deepspeed: call offload.deepspeed.install() before "
                "anything imports it, or start the script by `offload run`"
            )
    # After the script's folder, like a folder of PYTHONPATH. multiprocessing passes the path to spawned processes.
    sys.path.insert(1, str(STAND_IN))
    put_in_front()


def put_in_front() -> None:
    """Puts the finder before all others, so that an installed real package is not found."""
    sys.meta_path.insert(0, _Finder())


class _Finder(DistributionFinder, MetaPathFinder):
    """Finder of the modules and of the metadata of `deepspeed`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a module of `deepspeed`; None for any other. One without a counterpart is an error."""
        if fullname.partition(".")[0] != _NAME:
            return None
        # An alias of the same module: a copy would have classes and states of its own.
        ours = _OURS + fullname.removeprefix(_NAME)
        spec = find_spec(ours)
        assert spec is not None, "the finder of the table raises"
        return ModuleSpec(
            fullname, _Alias(spec), origin=spec.origin, is_package=spec.submodule_search_locations is not None
        )

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        """Returns the distribution `deepspeed`, if the context asks for it or for all."""
        name = None if context is None else context.name
        if name is not None and name.lower() != _NAME:
            return []
        # An .egg-info file, since wheel builders leave out a .dist-info folder inside a package.
        return [Distribution.at(STAND_IN / f"{_NAME}-{VERSION}.egg-info")]


class _Alias(InspectLoader):
    """Loader that gives a module of this package a second name.

    Python requests code from it only to run the module as a program: `python -m deepspeed.utils.zero_to_fp32`.
    """

    def __init__(self, ours: ModuleSpec) -> None:
        # The loader of a Python file is an `InspectLoader`. An editable install's wrapper has its methods, but another
        # class.
        self._ours, self._loader = ours.name, cast(InspectLoader, ours.loader)

    def create_module(self, spec: ModuleSpec) -> None:
        return  # Python creates a module, which `exec_module` replaces

    def exec_module(self, module: ModuleType) -> None:
        # The import system then returns the module that `sys.modules` contains under the name.
        sys.modules[module.__name__] = import_module(self._ours)

    def get_code(self, fullname: str) -> CodeType | None:
        return self._loader.get_code(self._ours)

    def get_source(self, fullname: str) -> str | None:
        return self._loader.get_source(self._ours)

    def is_package(self, fullname: str) -> bool:
        return self._loader.is_package(self._ours)
