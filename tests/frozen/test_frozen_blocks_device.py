"""On a device with streams of its own, values are made of blocks that are there, and before compute reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import device
from tests.accelerators.test_device_engine import on_device
from tests.frozen.test_frozen_blocks import AREA, DISK, FORMS, JOB
from tests.support.frozen_blocks import dequantized
from tests.support.oracle import assert_same, room_for, run, small_pieces

pytestmark = pytest.mark.test_device

SHORT = JOB._replace(steps=3, accumulation=2)


@pytest.mark.sample(2)
@pytest.mark.works(AREA, "a device with streams of its own (that of the tests)", "right")
@pytest.mark.parametrize("placement", [("none", "cpu"), ("cpu", "cpu"), DISK], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_late_streams_keep_every_bit(form: str, placement: tuple[str, str], tmp_path: Path) -> None:
    expected = run(dequantized(SHORT, form), ("none", "none"), tmp_path / "values", device="cpu")
    for seed, lateness in enumerate((0.5, 0.95, 1.0)):
        device.seed(seed, lateness)
        options = {"device_memory": 2 * room_for(SHORT, 2 + seed)}
        assert_same(expected, on_device(SHORT, placement, tmp_path / str(seed), frozen=form, **options))


def test_units_are_streamed_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(dequantized(SHORT, "nf4"), ("none", "none"), tmp_path / "values", device="cpu")
    small_pieces(monkeypatch)
    device.seed(3, 0.95)
    assert_same(expected, on_device(SHORT, DISK, tmp_path / "late", frozen="nf4", host_memory="3MiB"))
