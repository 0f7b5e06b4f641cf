"""`scripts/lines_by_room.py` as a module: what counts lines for the log of CI counts them for the tests too."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPT = Path(__file__).parents[2] / "scripts" / "lines_by_room.py"


def _load() -> ModuleType:
    """Returns the script as a module. By its path: `scripts` is no package, and another one may have that name."""
    spec = importlib.util.spec_from_file_location("lines_by_room", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks for its annotations
    spec.loader.exec_module(module)
    return module


lines_by_room = _load()
