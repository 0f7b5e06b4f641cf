"""The workers of one run collect all files, each another part first, and run them in one order."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.workers import order, rotated

FILES = [f"test_{name}.py" for name in "abcdefghij"]


def test_each_worker_collects_all_files_and_an_equal_part_of_its_own_first() -> None:
    for count in (1, 2, 4, 7, 12):
        lists = [rotated(FILES, number, count) for number in range(count)]
        assert [sorted(each) for each in lists] == [FILES] * count
        begins = [FILES.index(each[0]) for each in lists]
        parts = [after - begin for begin, after in zip(begins, [*begins[1:], len(FILES)], strict=True)]
        assert begins[0] == 0 and max(parts) - min(parts) <= 1


def test_a_worker_that_replaces_another_has_a_part_too() -> None:
    assert rotated(FILES, number=5, count=4) == rotated(FILES, number=1, count=4)


def test_the_order_of_the_tests_does_not_depend_on_that_of_the_files() -> None:
    tests = {file: len(FILES) - index // 2 for index, file in enumerate(FILES)}
    orders = []
    for number in range(3):
        items: list[Any] = [
            SimpleNamespace(path=Path(file), number=each)
            for file in rotated(FILES, number, 3)
            for each in range(tests[file])
        ]
        order(items)
        orders.append([(item.path.name, item.number) for item in items])
    assert orders[0] == orders[1] == orders[2]
    assert [tests[file] for file, number in orders[0] if number == 0] == sorted(tests.values())
