"""On a device with streams nothing is read before it is there, nor written or freed before its last reader is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.engine.gradients import Gradients
from offload.engine.layout import lay_out
from offload.engine.units import find_units
from offload.errors import EngineFailed
from offload.swapper.leases import Leases
from tests import models
from tests.late_device import LateDevice, Ticks, use_device
from tests.oracle import (
    PLACEMENTS,
    Job,
    Result,
    assert_same,
    least_host_memory,
    room_for,
    small_pieces,
    start,
    train_step,
    weights_of,
)

JOB = models.GPT2._replace(steps=3, accumulation=2, dtype="bf16")


def train(job: Job, placement: tuple[str, str], folder: Path, device: LateDevice, **options: Any) -> Result:
    """Run `job` with a tick of the device's clock for every operation."""
    engine = start(job, placement, folder, **options)
    losses, norms = [], []
    try:
        with Ticks(device):
            for step in range(job.steps):
                losses.append(train_step(engine, job, step))
                norms.append(engine.get_global_grad_norm() or 0.0)
        weights = weights_of(engine)
    finally:
        engine.destroy(remove=True)
    return Result(losses, norms, weights)


def homes_on_device(placement: tuple[str, str]) -> int:
    """Bytes of residuals and moments where they live on the device."""
    model = JOB.model()
    units = [[(name, model.get_parameter(name)) for name in unit.parameters] for unit in find_units(model).units]
    return 0 if placement[1] != "none" else sum(10 * lay_out("", unit, 1).numel for unit in units)


def runs(
    patch: pytest.MonkeyPatch, folder: Path, seed: int, lateness: float, placement: tuple[str, str], **options: Any
) -> tuple[Result, LateDevice]:
    device = LateDevice(seed, lateness)
    use_device(patch, lambda: device)
    return train(JOB, placement, folder, device, **options), device


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_random_lateness_changes_no_bit(
    placement: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = runs(monkeypatch, tmp_path / "at once", 0, 0.0, ("none", "none"))
    for seed, lateness in enumerate((0.5, 0.95, 1.0)):
        options: dict[str, Any] = {}
        if placement[0] != "none":
            options["device_memory"] = room_for(JOB, 1 + seed) + homes_on_device(placement)
        result, device = runs(monkeypatch, tmp_path / f"{seed}-{lateness}", seed, lateness, placement, **options)
        assert_same(expected, result)
        assert device.broken == [] and device.copies > 100


@pytest.mark.parametrize("seed", range(3))
def test_with_the_least_host_memory(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients spill, and units come in pieces that are copied while the next are read."""
    small_pieces(monkeypatch)
    expected, _ = runs(monkeypatch, tmp_path / "memory", 0, 0.0, ("none", "none"))
    use_device(monkeypatch, lambda: LateDevice(0, 0.0))
    least = least_host_memory(JOB, tmp_path / "least")
    result, device = runs(monkeypatch, tmp_path / "disk", seed, 0.9, ("nvme", "nvme"), host_memory=least)
    assert_same(expected, result)
    assert device.broken == [] and device.copies > 100


def hold_nothing(self: LateDevice, event: Any) -> None:
    """Compute does not wait for uploads."""


def write_at_once(self: LateDevice, *given: Any) -> Any:
    """Uploads do not wait for compute."""
    return self._give("upload", given[0], given[1], ())


def take_lease_at_once(self: Leases, entry: Any) -> None:
    """Leases are used again while an upload reads them."""
    from offload.swapper.device import DONE

    entry.copied, before = DONE, entry.copied
    REAL_TAKE_LEASE(self, entry)
    entry.copied = before


REAL_TAKE_LEASE = Leases._take_lease


def free_at_once(self: Gradients, *given: Any) -> None:
    """Gradients are freed while a download reads them."""
    REAL_PUT(self, *given)
    for position, arriving in enumerate(self._arriving):
        source = torch.empty(0, dtype=arriving.source.dtype).new_empty(len(arriving.source))
        self._arriving[position] = arriving._replace(source=source)


REAL_PUT = Gradients.put

FAULTS = {
    "read early": (LateDevice, "hold", hold_nothing),
    "written early": (LateDevice, "upload", write_at_once),
    "changed early": (Gradients, "put", free_at_once),
    "changed early, a lease": (Leases, "_take_lease", take_lease_at_once),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_record_shows_a_missing_wait(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    device = LateDevice(0, 0.95)
    use_device(monkeypatch, lambda: device)
    try:
        train(JOB, ("nvme", "nvme"), tmp_path, device, device_memory=room_for(JOB, 4))
    except (offload.OffloadError, AssertionError):
        pass  # wrong weights may well become a NaN
    assert fault.partition(",")[0] in device.broken


def test_a_copy_that_fails_stops_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a fault of the GPU does: no later call waits for what will never be there."""
    device = LateDevice(0, 0.0)
    use_device(monkeypatch, lambda: device)
    engine = start(JOB, ("cpu", "cpu"), tmp_path)

    def broken(*_: Any) -> Any:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(LateDevice, "upload", broken)
    with pytest.raises(RuntimeError, match="CUDA error"):
        train_step(engine, JOB, 0)
    with pytest.raises(EngineFailed, match="CUDA error"):
        train_step(engine, JOB, 0)
    engine.destroy()
