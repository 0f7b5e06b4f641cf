"""The package keeps the numbers of CONTRIBUTING.md: sizes of folders, files and functions, and the style of its text.

Files of tests, benchmarks, scripts and examples keep the limit of lines too, and so do files of C++ and CUDA.

`TODAY` lists what does not keep them yet, with its number. The list is a ratchet: it fails too where the package has
become better than it says, so that it shrinks until it is empty. A failure prints the line to write.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.repository.docstring_sections import lacks, public_functions, source_of
from tests.repository.lines_by_room import lines_by_room

PACKAGE = ROOT / "offload"
BESIDE = ("tests", "bench", "examples", "scripts")
"""Folders beside the package whose files keep the limit of lines."""
NATIVE = (".cpp", ".h", ".cu")
"""Endings of files of C++ and CUDA, which keep the limit of lines in the package and beside it."""

FILES_OF_A_FOLDER = 12
FILES_OF_A_TEST_FOLDER = 30
LINES_OF_A_FILE = 400
LINES_OF_A_FUNCTION = 70
OPENINGS_OF_100_DOCSTRINGS = 2
COMMENTED_OF_100_LINES = 3

TODAY: dict[str, dict[str, float]] = {
    "folders": {},
    "files": {},
    "functions": {},
    "queues without a bound": {},
    "openings of 100 docstrings": {},
    "commented of 100 lines": {},
    "public functions without a section": {},
}
"""What breaks a rule today, by rule: the folder, file or function, or `offload` for a number of the whole package."""

_OPENING = re.compile(r"\W*(What|Whether|Which|Of|How|Who)\b")


@pytest.fixture(scope="module")
def files() -> list[Any]:
    """All files of the package, counted."""
    return lines_by_room.count_tree(PACKAGE)


def disagree(found: Mapping[str, float], known: Mapping[str, float]) -> list[str]:
    """Returns a line for each name that breaks a rule and is not listed so, and for each that is listed otherwise.

    Args:
        found: what breaks the rule, with its number.
        known: what `TODAY` lists.
    """
    messages = []
    for name in sorted({*found, *known}):
        if name not in found:
            messages.append(f"{name} keeps the rule: take it out of TODAY")
        elif name not in known:
            messages.append(f"{name!r}: {found[name]},  breaks the rule: divide or rewrite it")
        elif found[name] != known[name]:
            messages.append(f"{name!r}: {found[name]},  is listed with {known[name]}")
    return messages


def crowded(paths: Sequence[str]) -> dict[str, float]:
    """Returns the folders with too many Python files beside `__init__.py`; "." is the package itself."""
    counts = Counter(Path(path).parent.as_posix() for path in paths if Path(path).name != "__init__.py")
    return {folder: count for folder, count in counts.items() if count > FILES_OF_A_FOLDER}


def long_files(files: Sequence) -> dict[str, float]:
    return {file.path: file.lines for file in files if file.lines > LINES_OF_A_FILE}


def native_files(root: Path) -> list[Path]:
    """Returns the files of C++ and CUDA in the package and in `BESIDE`."""
    return [path for folder in (PACKAGE.name, *BESIDE) for path in (root / folder).rglob("*") if path.suffix in NATIVE]


def long_files_beside(root: Path) -> dict[str, float]:
    """Returns the files of `BESIDE` in `root` that are too long, and those of C++ and CUDA in the package too."""
    python = [path for folder in BESIDE for path in (root / folder).rglob("*.py") if "__pycache__" not in path.parts]
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (*python, *native_files(root))}
    return {path.relative_to(root).as_posix(): count for path, count in lines.items() if count > LINES_OF_A_FILE}


def crowded_tests(root: Path) -> dict[str, int]:
    """Returns the folders of tests in `root` with too many files; "." is `root`, in which none may be."""
    counts = Counter(path.parent.relative_to(root).as_posix() for path in root.rglob("test_*.py"))
    return {room: count for room, count in counts.items() if count > (FILES_OF_A_TEST_FOLDER if room != "." else 0)}


def long_functions(files: Sequence) -> dict[str, float]:
    every = [(f"{file.path}::{function.name}", function.lines) for file in files for function in file.functions]
    return {name: lines for name, lines in every if lines > LINES_OF_A_FUNCTION}


def unbounded_queues(sources: Mapping[str, str]) -> dict[str, float]:
    """Returns how many of Python's queues each file makes without a bound. `SimpleQueue` cannot have one."""
    found: Counter[str] = Counter()
    for path, source in sources.items():
        if "Queue" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            name = ast.unparse(node.func).removeprefix("queue.") if isinstance(node, ast.Call) else ""
            bounded = isinstance(node, ast.Call) and (node.args or node.keywords)
            found[path] += name == "SimpleQueue" or (name in ("Queue", "LifoQueue", "PriorityQueue") and not bounded)
    return dict(+found)


def openings(files: Sequence) -> dict[str, float]:
    """Returns how many of 100 docstrings open with What, Whether, Which, Of, How or Who, rounded up, if too many."""
    texts = [text for file in files for text in file.docstrings]
    share = math.ceil(100 * sum(bool(_OPENING.match(text)) for text in texts) / max(1, len(texts)))
    return {"offload": share} if share > OPENINGS_OF_100_DOCSTRINGS else {}


def few_comments(files: Sequence) -> dict[str, float]:
    """Returns how many of 100 lines have a comment, rounded down to a tenth, if too few."""
    lines = sum(file.lines for file in files)
    tenths = 1000 * sum(file.commented for file in files) // lines
    return {"offload": tenths / 10} if tenths < 10 * COMMENTED_OF_100_LINES else {}


def without_sections(sources: Mapping[str, str]) -> dict[str, float]:
    """Returns how many functions of `sources` lack a section of their docstring, if any do."""
    lacking = [name for name, source in sources.items() if lacks(source)]
    return {"offload": len(lacking)} if lacking else {}


def test_no_folder_is_crowded(files: list[Any]) -> None:
    assert disagree(crowded([file.path for file in files]), TODAY["folders"]) == []


def test_files_keep_the_limit_of_lines(files: list[Any]) -> None:
    assert disagree(long_files(files), TODAY["files"]) == []


def test_files_beside_the_package_keep_the_limit_of_lines() -> None:
    assert long_files_beside(PACKAGE.parent) == {}, "divide it by what it promises, not by length"


def test_no_folder_of_tests_is_crowded() -> None:
    assert crowded_tests(ROOT / "tests") == {}


def test_the_page_of_tests_has_each_folder_of_tests() -> None:
    rooms = {path.parent for path in (ROOT / "tests").glob("*/test_*.py")}
    titles = {room.name: ast.get_docstring(ast.parse((room / "__init__.py").read_text("utf-8"))) for room in rooms}
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", page, re.MULTILINE))
    assert {room: f"Tests of {what}." for room, what in rows.items() if room in titles} == titles


def test_no_function_is_long(files: list[Any]) -> None:
    assert disagree(long_functions(files), TODAY["functions"]) == []


def test_every_queue_is_bounded(files: list[Any]) -> None:
    sources = {file.path: (PACKAGE / file.path).read_text(encoding="utf-8") for file in files}
    assert disagree(unbounded_queues(sources), TODAY["queues without a bound"]) == []


def test_docstrings_open_with_a_verb_or_a_noun(files: list[Any]) -> None:
    assert disagree(openings(files), TODAY["openings of 100 docstrings"]) == []


def test_comments_give_a_reason(files: list[Any]) -> None:
    assert disagree(few_comments(files), TODAY["commented of 100 lines"]) == []


def test_public_functions_say_what_they_take_and_give() -> None:
    sources = {name: source_of(function) for name, function in public_functions().items()}
    assert disagree(without_sections(sources), TODAY["public functions without a section"]) == [], "\n".join(
        f"{name}: {', '.join(lacks(source))}" for name, source in sorted(sources.items()) if lacks(source)
    )


def test_the_page_for_contributors_has_the_same_numbers() -> None:
    page = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = {row[0].strip(): row[1].strip() for row in re.findall(r"^\|([^|]+)\|([^|]+)\|$", page, re.MULTILINE)}
    assert rows["a function"].startswith(f"{LINES_OF_A_FUNCTION} lines")
    assert (
        rows["a file, of tests, benchmarks, scripts and examples too, and of C++ and CUDA"]
        == f"{LINES_OF_A_FILE} lines"
    )
    assert rows["a folder"].startswith(f"{FILES_OF_A_FOLDER} Python files")
    assert rows["a folder of tests"] == f"{FILES_OF_A_TEST_FOLDER} files"
    assert (
        rows["docstrings that open with What, Whether, Which, Of, How or Who"] == f"{OPENINGS_OF_100_DOCSTRINGS} of 100"
    )
    assert rows["comments"] == f"at least {COMMENTED_OF_100_LINES} of 100 lines"


# -- each of them can fail ------------------------------------------------------------------------


def counted(source: str) -> list:
    return [lines_by_room.count_file("a.py", source)]


def test_a_crowded_folder_is_found() -> None:
    twelve = [f"room/{at}.py" for at in range(12)]
    assert crowded([*twelve, "room/__init__.py", "room/sub/a.py"]) == {}
    assert crowded([*twelve, "room/one_more.py"]) == {"room": 13}
    assert crowded([f"{at}.py" for at in range(13)]) == {".": 13}


def test_a_long_file_is_found() -> None:
    assert long_files(counted("a = 1\n" * 400)) == {}
    assert long_files(counted("a = 1\n" * 401)) == {"a.py": 401}


def test_a_long_file_beside_the_package_is_found(tmp_path: Path) -> None:
    for name, lines in (("tests/test_a.py", 401), ("tests/support/b.py", 401), ("bench/c.py", 400)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a = 1\n" * lines)
    assert long_files_beside(tmp_path) == {"tests/test_a.py": 401, "tests/support/b.py": 401}


@pytest.mark.parametrize("ending", NATIVE)
@pytest.mark.parametrize("folder", ["tests/native", "offload/aio/native"])
def test_a_long_native_file_is_found(tmp_path: Path, folder: str, ending: str) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / f"short{ending}").write_text("int a;\n" * 400)
    assert long_files_beside(tmp_path) == {}
    (tmp_path / folder / f"long{ending}").write_text("int a;\n" * 401)
    assert long_files_beside(tmp_path) == {f"{folder}/long{ending}": 401}


def test_the_limit_of_native_files_sees_those_of_the_package_and_of_the_tests() -> None:
    seen = {path.parent.relative_to(ROOT).as_posix() for path in native_files(ROOT)}
    assert {"offload/aio/native", "offload/kernels/cuda", "tests/native", "tests/device/native"} <= seen


def test_a_crowded_folder_of_tests_is_found(tmp_path: Path) -> None:
    for name in [*(f"room/test_{at}.py" for at in range(30)), *(f"full/test_{at}.py" for at in range(31)), "test_a.py"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert crowded_tests(tmp_path) == {"full": 31, ".": 1}


def test_a_long_function_is_found() -> None:
    decorated = '@cache\ndef f():\n    """Returns."""\n' + "    a = 1\n" * 67
    assert long_functions(counted(decorated)) == {}
    assert long_functions(counted(decorated + "    a = 1\n")) == {"a.py::f": 71}
    method = "class A:\n    async def f(self):\n" + "        a = 1\n" * 70
    assert long_functions(counted(method)) == {"a.py::A.f": 71}


def test_a_queue_without_a_bound_is_found() -> None:
    bounded = "a = queue.Queue(8)\nb = Queue(maxsize=DEPTH)\nc = _native.Queue()\nd = IoQueue()\n"
    assert unbounded_queues({"a.py": bounded}) == {}
    assert unbounded_queues({"a.py": bounded + "queue.Queue()\n", "b.py": "SimpleQueue()\nLifoQueue()"}) == {
        "a.py": 1,
        "b.py": 2,
    }


@pytest.mark.parametrize("word", ["What", "Whether", "Which", "Of", "How", "Who"])
def test_an_opening_is_found(word: str) -> None:
    functions = [f'def f{at}():\n    """Returns {at}."""\n' for at in range(98)]
    two = [f'def g{at}():\n    """{word} it is."""\n' for at in range(2)]
    assert openings(counted("".join([*functions, *two]))) == {}
    assert openings(counted("".join([*functions, *two, f'class A:\n    """`{word}` it is."""\n']))) == {"offload": 3}
    assert openings(counted('"""Whatever, Offers and Howls open with other words."""\n')) == {}


def test_too_few_comments_are_found() -> None:
    assert few_comments(counted("a = 1\n" * 97 + "# why\n" * 2 + "a = 1  # why\n")) == {}
    assert few_comments(counted("a = 1\n" * 97 + "# why\n" * 2 + "a = 1  # type: ignore\n")) == {"offload": 2.0}


FULL = '''
def f(self, a: int) -> int:
    """Doubles.

    Args:
        a: a number.

    Returns:
        Its double.

    Raises:
        ValueError: if it is negative.
    """
    if a < 0:
        raise ValueError(a)
    return 2 * a
'''.strip()


@pytest.mark.parametrize(
    ("source", "lacking"),
    [
        (FULL, []),
        (FULL.replace("Args:", "Takes:"), ["Args"]),
        (FULL.replace("Returns:", "Gives:"), ["Returns"]),
        (FULL.replace("Raises:", "Fails:"), ["Raises"]),
        (FULL.replace('"""Doubles', '"""Returns the double').replace("Returns:", "Gives:"), []),
        ("def f(a: int) -> int:\n    return a", ["Args", "Returns"]),
        ("def f(*, a):\n    pass", ["Args"]),
        ("def f(**of_torch) -> None:\n    pass", ["Args"]),
        ("def f(self) -> None:\n    try:\n        pass\n    except OSError:\n        raise", []),
        ("def f(self) -> None:\n    def g():\n        raise ValueError", []),
        (
            "@contextmanager\ndef f(self) -> Iterator[None]:\n    '''Holds.\n\n    Yields:\n        Nothing.\n    '''",
            [],
        ),
    ],
)
def test_a_section_that_lacks_is_found(source: str, lacking: list[str]) -> None:
    assert lacks(source) == lacking
    assert without_sections({"f": source}) == ({"offload": 1} if lacking else {})


def test_public_functions_are_found() -> None:
    found = public_functions()
    names = ("offload.initialize", "offload.Engine.step", "offload.Engine.__call__", "offload.Engine.get_lr")
    others = ("offload.hf.Accelerator.backward", "offload.deepnvme.aio_handle.sync_pread", "offload.aio.IoQueue.read")
    assert {*names, *others, "offload.Engine.optimizer.step", "offload.aio.crc32c"} <= {*found}
    assert not [name for name in found if name.rpartition(".")[2].startswith("_") and not name.endswith(".__call__")]


def test_the_ratchet_holds_both_ways() -> None:
    known = {"a": 5.0, "b": 7.0}
    assert disagree({"a": 5, "b": 7}, known) == []
    assert disagree({"a": 6, "b": 7}, known) == ["'a': 6,  is listed with 5.0"]
    assert disagree({"a": 4, "b": 7}, known) == ["'a': 4,  is listed with 5.0"]
    assert disagree({"a": 5}, known) == ["b keeps the rule: take it out of TODAY"]
    assert disagree({"a": 5, "b": 7, "c": 9}, known) == ["'c': 9,  breaks the rule: divide or rewrite it"]
