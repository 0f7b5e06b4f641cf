"""A model whose blocks are computed again, with their inputs in any tier, has the bits of the model without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offload import testing
from tests.models.test_module_kinds import AREAS, DISK, MEMORY, Case
from tests.support.oracle import assert_same, room_for, run

TIERS = ("device", "cpu", "nvme", "auto")


@pytest.fixture(autouse=True)
def _tiny_inputs_move(monkeypatch: pytest.MonkeyPatch) -> None:
    testing.replace(monkeypatch, "size.least_kept_input", 1)


ROWS = [
    pytest.param(case, dtype, tier, id=f"{name}-{dtype}-{tier}")
    for cases in AREAS.values()
    for name, case in cases.items()
    for dtype in case.dtypes
    for tier in TIERS
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("case", "dtype", "tier"), ROWS)
def test_every_kind_of_module_keeps_its_bits(case: Case, dtype: str, tier: str, tmp_path: Path) -> None:
    job = case.job._replace(dtype=dtype)
    whole = run(job, MEMORY, tmp_path / "whole", **case.options)
    options: dict[str, Any] = {"device_memory": room_for(job, case.units), **case.options, "activations": tier}
    assert_same(whole, run(job, DISK, tmp_path / tier, **options))
