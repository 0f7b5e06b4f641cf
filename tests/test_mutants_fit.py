"""Every mutant's text is in the code, once: else `python -m tests.mutants` would show nothing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.mutants import MUTANTS
from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_text_of_each_mutant_occurs_once(mutant: Mutant) -> None:
    spec = importlib.util.find_spec(mutant.module)
    assert spec is not None and spec.origin is not None
    assert Path(spec.origin).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old
    for place in mutant.tests.split():
        path, _, test = place.partition("::")
        assert (ROOT / path).is_file()
        assert not test or f"\ndef {test}(" in (ROOT / path).read_text()


def test_a_name_is_that_of_one() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names))
