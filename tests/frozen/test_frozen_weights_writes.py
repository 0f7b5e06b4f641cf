"""Under adapters no byte of frozen weights is written, and no disk is reserved for their states."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from offload.states import State
from offload.swapper.store.inspection import look
from tests.support import models
from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.oracle import DTYPES, assert_same_tensors, room_for, start, train_step, weights_of


class Recorded(LateQueue):
    """Notes where it writes."""

    def __init__(self) -> None:
        super().__init__(0, 0.0)
        self.writes: list[tuple[str, int, int]] = []

    def write(self, file: Any, offset: int, buffer: Any, *args: Any, **kwargs: Any) -> Any:
        self.writes.append((Path(file.path).name, offset, memoryview(buffer).nbytes))
        return super().write(file, offset, buffer, *args, **kwargs)


class Extent(NamedTuple):
    """Bytes of a slot of a unit's weights."""

    unit: str
    slot: int
    start: int
    stop: int

    def sha(self, rank: Path) -> str:
        with (rank / "states").open("rb") as file:
            file.seek(self.start)
            return hashlib.sha256(file.read(self.stop - self.start)).hexdigest()


def extents_of(rank: Path, itemsize: int) -> tuple[list[Extent], list[Extent]]:
    """The frozen and the trainable ones; and no state has room for an element that is frozen."""
    manifest = look(rank).manifest
    assert manifest is not None
    frozen, trained = [], []
    for unit, row in zip(manifest.spec.fingerprint["units"], manifest.spec.places(), strict=True):
        middle = unit["trainable"] * itemsize
        for slot, place in enumerate(row[State.WEIGHT]):
            trained += [Extent(unit["name"], slot, at, at + n) for at, n in place.extents_of(0, middle)]
        frozen += [Extent(unit["name"], 0, at, at + n) for at, n in place.extents_of(middle, place.nbytes - middle)]
        assert len({tuple(each.extents_of(middle, place.nbytes)) for each in row[State.WEIGHT]}) == 1, "they lie once"
        for state in (State.EXP_AVG, State.EXP_AVG_SQ):
            assert (state in row) is bool(unit["trainable"]), f"{unit['name']} has {state}"
            assert all(place.nbytes == 4 * unit["trainable"] for place in row.get(state, ()))
    return frozen, trained


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", ["cpu", "nvme"])
def test_frozen_weights_are_read_and_never_written(
    weights: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No states, no byte that is written after the start, and the same bytes in the end; the adapters train."""
    queues: list[Recorded] = []

    def made() -> Recorded:
        queues.append(Recorded())
        return queues[-1]

    use_queue(monkeypatch, made)
    job = models.LORA._replace(dtype=dtype, steps=3, clip=0.1)
    engine = start(job, (weights, "nvme"), tmp_path, durability="step", device_memory=room_for(job, 2))
    rank = tmp_path / "default" / "rank0"
    frozen, trained = extents_of(rank, DTYPES[dtype].itemsize)
    assert any(each.unit not in {other.unit for other in trained} for each in frozen), "a unit that is all frozen"
    assert {each.unit for each in frozen} & {each.unit for each in trained}, "and one with adapters"
    before = {each: each.sha(rank) for each in frozen}
    first = weights_of(engine)
    for queue in queues:
        queue.writes.clear()
    for step in range(job.steps):
        train_step(engine, job, step)
    last = weights_of(engine)
    engine.destroy()
    written = [(at, at + nbytes) for queue in queues for name, at, nbytes in queue.writes if name == "states"]
    assert all(any(a < each.stop and each.start < b for a, b in written) for each in trained), "both slots of each"
    assert not [each for each in frozen if any(a < each.stop and each.start < b for a, b in written)]
    assert before == {each: each.sha(rank) for each in frozen}
    for name, value in last.items():
        assert torch.equal(value, first[name]) is ("lora_" not in name), name
    again = start(job, (weights, "nvme"), tmp_path, durability="step", resume="must")
    assert_same_tensors(last, again.module.state_dict())
    again.destroy(remove=True)
