"""Every mutant's text is in the code, once: else `python -m tests.mutants` would show nothing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.mutation import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits(mutant: Mutant) -> None:
    spec = importlib.util.find_spec(mutant.module)
    assert spec is not None and spec.origin is not None
    assert Path(spec.origin).read_text().count(mutant.old) == 1
    assert mutant.new not in (mutant.old, None)
    for path in mutant.tests.split():
        assert (Path(__file__).parents[1] / path.partition("::")[0]).is_file()
