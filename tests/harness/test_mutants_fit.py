"""Every mutant's text is in the code, once, and the changed code compiles: else a mutant would show nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests import ROOT
from tests.mutants import MUTANTS
from tests.mutants.mutant import Mutant


@cache
def read(path: Path) -> str:
    return path.read_text()


def faults(mutant: Mutant) -> Iterator[str]:
    """Why a mutant would show nothing."""
    spec = importlib.util.find_spec(mutant.module)
    if spec is None or spec.origin is None:
        yield f"there is no {mutant.module}"
        return
    source = read(Path(spec.origin))
    if source.count(mutant.old) != 1:
        yield f"its text is {source.count(mutant.old)} times in {mutant.module}"
    if mutant.new == mutant.old:
        yield "it changes nothing"
    try:
        compile(source.replace(mutant.old, mutant.new), spec.origin, "exec")
    except SyntaxError as error:
        yield f"what it makes does not compile: {error}"
    for place in mutant.tests.split():
        path, _, test = place.partition("::")
        if not (ROOT / path).is_file() or (test and f"\ndef {test}(" not in read(ROOT / path)):
            yield f"there is no {place}"


def test_each_mutant_has_a_name_of_its_own_and_changes_one_text_into_code_that_compiles() -> None:
    assert [f"{mutant.name}: {fault}" for mutant in MUTANTS for fault in faults(mutant)] == []
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
