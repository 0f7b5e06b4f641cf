"""A helper that one room of tests alone imports stands in that room; `tests/support` has what several share."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests import ROOT

HELPERS_OF_A_FOLDER = 13
"""Files of a folder of `tests/support`, as many as a folder of the package has, and `__init__.py`."""


def sources(tests: Path) -> dict[str, str]:
    """Returns the text of each module, by its name."""
    paths = sorted(tests.rglob("*.py"))
    names = [path.relative_to(tests.parent).with_suffix("").as_posix().replace("/", ".") for path in paths]
    return {name.removesuffix(".__init__"): path.read_text("utf-8") for name, path in zip(names, paths, strict=True)}


def imported(source: str) -> Iterator[str]:
    """Yields the modules that a source imports, and the names that it takes from them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{each.name}" for each in node.names))


def misplaced(modules: Mapping[str, str]) -> dict[str, str]:
    """Returns the helpers in `tests/support` that only one other folder imports, with that folder."""
    users: dict[str, set[str]] = defaultdict(set)
    for module, source in modules.items():
        for name in imported(source):
            users[name].add(module.partition(".")[2].partition(".")[0])
    packages = {name.rpartition(".")[0] for name in modules}
    helpers = [name for name in modules if name.startswith("tests.support.") and name not in packages]
    return {name: user for name in helpers for user in users[name] if users[name] == {user} and user != "support"}


def test_helpers_of_one_room_stand_in_it() -> None:
    assert misplaced(sources(ROOT / "tests")) == {}


def test_no_folder_of_helpers_is_crowded() -> None:
    folders = Counter(path.parent for path in (ROOT / "tests" / "support").rglob("*.py"))
    assert {folder for folder, count in folders.items() if count > HELPERS_OF_A_FOLDER} == set()


def test_a_helper_of_one_room_is_found(tmp_path: Path) -> None:
    texts = {
        "support/shared.py": "",
        "support/alone.py": "",
        "support/within.py": "",
        "support/room/deep.py": "from tests.support import within",
        "store/test_a.py": "from tests.support import alone, shared\nfrom tests.support.room.deep import name",
        "store/test_b.py": "from tests.support.alone import name",
        "swapper/test_c.py": "import tests.support.shared",
    }
    for name, text in texts.items():
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).write_text(text)
    assert misplaced(sources(tmp_path / "tests")) == {
        "tests.support.alone": "store",
        "tests.support.room.deep": "store",
    }
