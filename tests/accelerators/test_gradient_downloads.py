"""Gradients leave a device beside the backward that makes them: it goes on, within a bound, and nothing is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.engine.gradient_transfer import DeviceToHost
from offload.errors import EngineFailed
from offload.swapper.memory.device import Device, Event
from offload.swapper.memory.host_arena import HostArena, HostBudget
from offload.timeline import Row, Timeline

STAGING = 4096


class Held:
    """The event of a copy that is carried out when the test says so, or at once where nobody holds it."""

    def __init__(self, device: HeldDevice, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._device, self._copy = device, lambda: destination.copy_(source)

    def done(self) -> bool:
        return self._device.go.is_set()

    def wait(self) -> None:
        assert self._device.go.wait(60)
        self._copy()


class HeldDevice(Device):
    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.go = threading.Event()
        self.host_addressable = False
        self.begun = 0

    def download(self, destination: torch.Tensor, source: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        self.begun += 1
        return Held(self, destination, source)


class Engine:
    """What `DeviceToHost` knows of the engine."""

    error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        self.error = error

    def check(self) -> None:
        if self.error is not None:
            raise EngineFailed(str(self.error)) from self.error


@pytest.fixture
def made(tmp_path: Path) -> Iterator[tuple[DeviceToHost, HeldDevice, Engine]]:
    device, engine = HeldDevice(), Engine()
    arena = HostArena(HostBudget(0, 0, 0, 0, 3 * STAGING), device)
    leases = [arena.staging.take(STAGING) for _ in range(3)]
    timeline = Timeline(tmp_path / "trace.json")
    free = [each for each in leases if each]
    downloads = DeviceToHost(device, free, 16384, True, engine.fail, engine.check, timeline=timeline)
    yield downloads, device, engine
    device.go.set()
    downloads.close()
    arena.close()


Made = tuple[DeviceToHost, HeldDevice, Engine]


def numbers(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def test_who_sends_goes_on_until_so_much_is_on_its_way(made: Made) -> None:
    """Although no copy ends, and although it is more than all staging buffers together."""
    downloads, device, _ = made
    sources = [numbers(1024, seed) for seed in range(5)]
    kept = [torch.zeros(1024) for _ in sources]
    for number in range(4):
        staged = number % 2

        def receive(position: int, some: torch.Tensor, number: int = number) -> None:
            kept[number][position : position + len(some)] = some

        downloads.send("one", sources[number], None if staged else kept[number], receive if staged else None)
    sent = threading.Event()

    def fifth() -> None:
        downloads.send("one too many", sources[4], kept[4], None)
        sent.set()

    thread = threading.Thread(target=fifth)
    thread.start()
    while device.begun < 4:  # by the thread that copies, whenever a busy machine lets it run
        time.sleep(0.001)
    assert not sent.wait(0.2) and device.begun == 4
    device.go.set()
    assert sent.wait(60)
    thread.join()
    downloads.drain()
    assert all(torch.equal(source, got) for source, got in zip(sources, kept, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 1023, 1024, 1025, 2048, 9000])
def test_a_gradient_larger_than_a_staging_buffer_arrives_in_ordered_chunks(
    numel: int, dtype: torch.dtype, made: Made
) -> None:
    downloads, device, _ = made
    device.go.set()
    source, pieces = numbers(numel, 0).to(dtype), list[tuple[int, torch.Tensor]]()
    downloads.send("it", source, None, lambda position, some: pieces.append((position, some.clone())))
    downloads.drain()
    assert [position for position, _ in pieces] == list(range(0, numel, STAGING // dtype.itemsize))
    assert torch.equal(torch.cat([some for _, some in pieces]), source)


def test_the_last_of_many_is_received_before_it_is_closed(made: Made) -> None:
    downloads, device, _ = made
    device.go.set()
    sources = [numbers(100, seed) for seed in range(200)]
    kept = [torch.zeros(100) for _ in sources]
    for source, target in zip(sources, kept, strict=True):
        downloads.send("one", source, target, None)
    downloads.close()
    assert all(torch.equal(source, got) for source, got in zip(sources, kept, strict=True))
    assert torch.equal(torch.stack(kept), torch.stack(sources))


def test_fetch_comes_behind_all_that_was_sent(made: Made) -> None:
    downloads, device, _ = made
    device.go.set()
    order: list[str] = []
    downloads.send("one", numbers(5000, 0), None, lambda *_: order.append("one"))
    found = downloads.fetch(numbers(3, 1))
    assert order == ["one"] * 5 and torch.equal(found, numbers(3, 1)) and found.device.type == "cpu"


def test_an_error_is_raised_by_every_later_call(made: Made) -> None:
    downloads, device, engine = made
    device.go.set()

    def receive(*_: Any) -> None:
        raise OSError("the drive is gone")

    downloads.send("one", numbers(10, 0), None, receive)
    for call in (downloads.drain, lambda: downloads.send("two", numbers(10, 0), torch.zeros(10), None)):
        with pytest.raises(EngineFailed, match="the drive is gone"):
            call()
    assert isinstance(engine.error, OSError)
    downloads.close()


def test_a_time_line_has_what_came(made: Made) -> None:
    downloads, device, _ = made
    device.go.set()
    downloads.send("gradient of a", numbers(4096, 0), torch.zeros(4096), None)
    downloads.send("gradient of b", numbers(1500, 1), None, lambda *_: None)
    downloads.drain()
    spans = [(span.row, span.name, span.nbytes) for span in downloads._timeline._spans]
    assert spans == [
        (Row.DOWNLOADS, f"gradient of {name}", size) for name, size in (("a", 16384), ("b", 4096), ("b", 1904))
    ]
