"""Every mutant's text is in the code, once, and the changed code compiles: else a mutant would show nothing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.mutants import MUTANTS
from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_changes_one_text_into_code_that_compiles(mutant: Mutant) -> None:
    spec = importlib.util.find_spec(mutant.module)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    assert source.count(mutant.old) == 1
    assert mutant.new != mutant.old
    compile(source.replace(mutant.old, mutant.new), spec.origin, "exec")
    for place in mutant.tests.split():
        path, _, test = place.partition("::")
        assert (ROOT / path).is_file()
        assert not test or f"\ndef {test}(" in (ROOT / path).read_text()


def test_each_mutant_has_a_name_of_its_own() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names))
