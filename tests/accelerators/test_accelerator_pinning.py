"""torch pins host memory for an accelerator that cannot register any, within what is free."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload import testing
from offload.swapper.memory.device import bytes_taken_by_torch
from offload.swapper.memory.host_arena import HostArena, HostBudget, PinnedRegions
from tests.accelerators.accelerator_modules import PAGE, opened


def pinning(monkeypatch: pytest.MonkeyPatch, works: bool = True) -> list[tuple[int, int]]:
    """Makes torch allocate pinned memory, or refuse it; returns the list of its (first, last) addresses."""
    blocks: list[tuple[int, int]] = []
    plain = torch.empty

    def empty(*size: int, **named: Any) -> torch.Tensor:
        if not named.pop("pin_memory", False):
            return plain(*size, **named)
        if not works:
            raise RuntimeError("Cannot pin\nTraceback of C++")
        block = plain(*size, **named)
        blocks.append((block.data_ptr(), block.data_ptr() + block.nbytes))
        return block

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(
        torch.Tensor, "is_pinned", lambda self: any(first <= self.data_ptr() < last for first, last in blocks)
    )
    return blocks


CLASSES = HostBudget(tiles=2 * PAGE, weights=PAGE, gradients=PAGE, resident=2 * PAGE, staging=PAGE)
COPIED = PinnedRegions(resident=PAGE, promoted=0, tiles=False)


def test_torch_pins_the_memory_of_an_accelerator_that_cannot_register_any(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = pinning(monkeypatch)
    device, _ = opened(monkeypatch)
    arena = HostArena(CLASSES, device, copied=COPIED)
    (block,) = blocks
    assert arena.address % PAGE == 0 and block[0] <= arena.address and arena.address + arena.nbytes <= block[1]
    assert arena.pinned_bytes == 4 * PAGE and not caplog.records
    buffer = arena.take_copied(PAGE)
    assert buffer is not None
    buffer.tensor(torch.uint8).fill_(3)
    arena.close()
    assert bytes(buffer.buffer[:2]) == b"\x03\x03", "the memory lives as long as a buffer of it"


def test_where_torch_refuses_the_memory_stays_ordinary(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pinning(monkeypatch, works=False)
    device, _ = opened(monkeypatch)
    arena = HostArena(CLASSES, device, copied=COPIED)
    assert arena.pinned_bytes == 0
    (record,) = caplog.records
    assert "XPU pins 0 B of 16.0 KiB" in record.getMessage() and ": Cannot pin." in record.getMessage()
    arena.close()


def test_torch_takes_a_power_of_two_and_is_not_asked_for_more_than_is_free(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert [bytes_taken_by_torch(n) for n in (0, 1, 2, 3, 4096, 4097)] == [1, 1, 2, 4, 4096, 8192]
    blocks = pinning(monkeypatch)
    testing.replace(monkeypatch, "memory.free", lambda: 12 * PAGE)
    device, _ = opened(monkeypatch)
    HostArena(CLASSES, device, copied=COPIED).close()
    assert len(blocks) == 1, "7 pages and one to align them"
    HostArena(CLASSES._replace(tiles=4 * PAGE), device, copied=COPIED).close()
    assert len(blocks) == 1 and "torch would take 64.0 KiB for 36.0 KiB" in caplog.text
