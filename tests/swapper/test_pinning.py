"""Host memory is pinned where the device copies, within limits, and released."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload import testing
from offload.aio import aligned_empty
from offload.swapper.memory.device import (
    PIN_CHUNK,
    PIN_LEAST,
    AcceleratorDevice,
    CudaHostSide,
    Device,
    DeviceRoom,
    memory_node,
)
from offload.swapper.memory.host_arena import HostArena, HostBudget, HostBuffer, HostMemory, PinnedRegions
from tests.support import models
from tests.support.devices.late_device import use_device
from tests.support.oracle import assert_same, run

PAGE = 4096
SMALL = 4 * PAGE
WORDS = {1: "invalid argument", 2: "out of memory", 713: "memory is not registered"}


class FakeCuda:
    """CUDA's runtime, and what of `torch.cuda` needs it, on a machine without a GPU.

    `refuse` has the numbers of the calls of cudaHostRegister that are refused, the first is 0.
    """

    def __init__(self, refuse: Callable[[int], bool] = lambda call: False) -> None:
        self._refuse = refuse
        self.calls: list[tuple[str, int]] = []
        self.pinned: dict[int, int] = {}
        """Address and bytes of each registration."""
        self.asked = 0
        self.left_error = 0
        self.limit = 1 << 60
        """Bytes that may be pinned in all."""
        self.sizes: list[int] = []
        """Bytes of each call of cudaHostRegister."""
        self.faults: set[int] = set()
        """Registrations that CUDA does not give back."""
        self.synchronize: Callable[..., None] = lambda *_: None

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert address % PAGE == 0 and nbytes % PAGE == 0 and nbytes > 0 and flags == 0
        assert all(address >= first + size or address + nbytes <= first for first, size in self.pinned.items())
        self.calls.append(("register", address))
        self.asked += 1
        self.sizes.append(nbytes)
        if self._refuse(self.asked - 1) or sum(self.pinned.values()) + nbytes > self.limit:
            self.left_error = 2
            return 2
        self.pinned[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        if address in self.faults or address not in self.pinned:
            self.left_error = 713
            return 713
        del self.pinned[address]
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return WORDS[code]

    def ones(self, *size: int, device: torch.device) -> torch.Tensor:
        """As torch does after each of its kernels: whose error that is it cannot know."""
        if self.left_error:
            self.left_error = 0
            raise RuntimeError("CUDA error")
        return torch.empty(size).fill_(1.0)

    def copy_(self, destination: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Refuses what lies in more than one registration, or in one and beside it."""
        if non_blocking:
            assert destination.nbytes == source.nbytes
            for tensor in (destination, source):
                start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
                for first, last in self.touched(tensor):
                    if not first <= start <= stop <= last:
                        raise RuntimeError("CUDA error: invalid argument")
        return torch._C.TensorBase.copy_(destination, source)

    def touched(self, tensor: torch.Tensor) -> list[tuple[int, int]]:
        """The registrations, (first, last) address, that `tensor` lies in, or in part."""
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return [
            (first, first + nbytes) for first, nbytes in self.pinned.items() if start < first + nbytes and first < stop
        ]


class FakeStream:
    def __init__(self, *_: Any) -> None: ...

    def record_event(self) -> FakeEvent:
        return FakeEvent()

    def wait_event(self, event: Any) -> None: ...


class FakeEvent:
    def query(self) -> bool:
        return True


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[AcceleratorDevice, FakeCuda]]:
    """Gives a device over a fake CUDA, which pins `chunk` bytes at a time, and `least` after refusals."""

    def make(
        refuse: Callable[[int], bool] = lambda call: False, chunk: int = SMALL, least: int = SMALL
    ) -> tuple[AcceleratorDevice, FakeCuda]:
        cuda, stream = FakeCuda(refuse), FakeStream()
        testing.replace(monkeypatch, "size.pin_chunk", chunk)
        testing.replace(monkeypatch, "size.pin_least", least)
        monkeypatch.setattr(torch, "ones", cuda.ones)
        monkeypatch.setattr(torch.Tensor, "copy_", lambda *given, **named: cuda.copy_(*given, **named))
        monkeypatch.setattr(torch, "Stream", FakeStream)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace())
        for name, value in {
            "current_stream": lambda *_: stream,
            "set_stream": lambda *_: None,
            "synchronize": lambda *given: cuda.synchronize(*given),
            "current_device_index": lambda: 0,
            "set_device_index": lambda *_: None,
        }.items():
            monkeypatch.setattr(torch.accelerator, name, value)

        def copy(device: AcceleratorDevice, destination: torch.Tensor, source: torch.Tensor) -> None:
            """The real one goes by the kind of device, and here both are the CPU."""
            (device.download if cuda.touched(destination) else device.upload)(destination, source).wait()

        testing.replace(monkeypatch, "device.copy", copy)
        testing.replace(monkeypatch, "device.room", lambda self: DeviceRoom(0, 0))
        return AcceleratorDevice(torch.device("cpu"), CudaHostSide(torch.device("cpu"))), cuda

    return make


Install = Callable[..., tuple[AcceleratorDevice, FakeCuda]]


def host_memory(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(aligned_empty(max(nbytes, 1)), dtype=torch.uint8)[:nbytes]


def pinned(device: AcceleratorDevice, memory: torch.Tensor) -> int:
    """Registers `memory` as one part and returns its pinned bytes."""
    return sum(device.register([memory]))


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


__all__ = ["install"]  # fixtures

SIZES = [1, SMALL - 1, SMALL, 3 * SMALL + PAGE + 1]


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_part_is_pinned_in_chunks_and_released(
    nbytes: int, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    device, cuda = install()
    memory = host_memory(nbytes)
    assert pinned(device, memory) == nbytes
    assert list(cuda.pinned) == list(range(memory.data_ptr(), memory.data_ptr() + nbytes, SMALL))
    assert sum(cuda.pinned.values()) == pages(nbytes) and max(cuda.pinned.values()) <= SMALL
    registered = list(cuda.pinned)
    device.unregister([memory])
    assert not cuda.pinned and not cuda.left_error
    assert sorted(address for name, address in cuda.calls if name == "unregister") == registered, "each piece once"
    device.unregister([memory])
    assert len(cuda.calls) == 2 * len(registered)
    assert pinned(device, memory) == nbytes, "and once more"
    assert not caplog.records


@pytest.mark.parametrize(("granted", "nbytes"), [(0, SMALL - 1), (1, 4 * SMALL - PAGE), (3, 4 * SMALL)])
def test_what_is_refused_stays_ordinary_memory(
    granted: int, nbytes: int, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    device, cuda = install(lambda call: call >= granted)
    memory = host_memory(nbytes)
    expected = min(granted * SMALL, nbytes)
    assert pinned(device, memory) == expected == min(sum(cuda.pinned.values()), nbytes)
    assert cuda.asked == min(granted + 1, -(-nbytes // SMALL)), "nothing is asked for after a refusal"
    assert not cuda.left_error, "the next kernel of torch does not find an error that is none of its own"
    assert len(caplog.records) == (expected < nbytes)
    device.unregister([memory])
    assert not cuda.pinned and not cuda.left_error
    assert sum(name == "unregister" for name, _ in cuda.calls) == min(granted, -(-nbytes // SMALL))


def test_the_warning_contains_the_amount_the_reason_the_cost_and_the_fix(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    device, _ = install(lambda call: call == 2)
    pinned(device, host_memory(5 * SMALL))
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("offload", logging.WARNING)
    message = record.getMessage()
    for word in ("pins 32.0 KiB of 80.0 KiB", "other 48.0 KiB: out of memory (CUDA error 2)", "a third to a half"):
        assert word in message
    for word in ("overlap with compute", "WSL", "limit of the container", '"host_memory"'):
        assert word in message
    assert "ulimit" not in message, "the driver of CUDA does not look at that limit"


def test_a_chunk_that_stays_pinned_does_not_keep_the_others(install: Install) -> None:
    device, cuda = install()
    memory = host_memory(4 * SMALL)
    pinned(device, memory)
    cuda.faults = {memory.data_ptr(), memory.data_ptr() + 2 * SMALL}
    with pytest.raises(RuntimeError, match=r"cannot unpin 2 ranges.*memory is not registered"):
        device.unregister([memory])
    assert set(cuda.pinned) == cuda.faults and not cuda.left_error
    device.unregister([memory])
    assert sum(name == "unregister" for name, _ in cuda.calls) == 4, "each piece is tried once"


@pytest.mark.parametrize("after", [False, True], ids=["before it is pinned", "after"])
def test_ctrl_c_while_pinning_leaves_nothing_pinned(after: bool, install: Install) -> None:
    device, cuda = install()
    plain, memory = cuda.cudaHostRegister, host_memory(4 * SMALL)

    def interrupted(address: int, nbytes: int, flags: int) -> int:
        if cuda.asked == 2 and not after:
            raise KeyboardInterrupt
        result = plain(address, nbytes, flags)
        if cuda.asked == 3:
            raise KeyboardInterrupt
        return result

    cuda.cudaHostRegister = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        pinned(device, memory)
    assert not cuda.pinned and not cuda.left_error


# -- copies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granted", [2, 5])
def test_a_copy_over_borders_is_complete(granted: int, install: Install) -> None:
    device, _ = install(lambda call: call >= granted)
    memory, away = host_memory(4 * SMALL), torch.zeros(4 * SMALL, dtype=torch.uint8)
    pinned(device, memory)
    ends = [0, 1, PAGE, SMALL - 1, SMALL, SMALL + 1, 2 * SMALL, 3 * SMALL + 5, 4 * SMALL]
    for start in ends:
        for stop in (end for end in ends if end >= start):
            memory.random_(0, 256)
            device.upload(away[start:stop], memory[start:stop])
            assert torch.equal(away[start:stop], memory[start:stop])
            away.random_(0, 256)
            device.download(memory[start:stop], away[start:stop])
            assert torch.equal(away[start:stop], memory[start:stop])


@pytest.mark.sample(1)
@pytest.mark.parametrize("granted", [0, 7, 10**6])
@pytest.mark.parametrize("placement", [("cpu", "cpu"), ("nvme", "nvme"), ("nvme", "none")])
def test_training_does_not_see_what_is_pinned(
    granted: int, placement: tuple[str, str], install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = models.GPT2._replace(steps=2, dtype="bf16")
    use_device(monkeypatch, Device(torch.device("cpu")))
    expected = run(job, ("none", "none"), tmp_path / "plain")
    device, cuda = install(lambda call: call >= granted)
    use_device(monkeypatch, device)
    assert_same(expected, run(job, placement, tmp_path / "pieces"))
    assert not cuda.pinned and cuda.asked > (8 if granted > 8 else granted)


def test_pieces_are_halved_down_to_the_least(install: Install) -> None:
    device, cuda = install(chunk=16 * SMALL, least=2 * SMALL)
    cuda.limit = 13 * SMALL
    memory = host_memory(40 * SMALL)
    assert pinned(device, memory) == 12 * SMALL, "the last piece of the least size exceeds the limit"
    assert list(cuda.pinned.values()) == [8 * SMALL, 4 * SMALL]
    assert cuda.sizes == [each * SMALL for each in (16, 8, 8, 4, 4, 2)]
    device.unregister([memory])
    assert not cuda.pinned
    assert PIN_LEAST == 16 << 20 and PIN_CHUNK == 1 << 30


GPU = SimpleNamespace(pci_domain_id=0x10000, pci_bus_id=0xDC, pci_device_id=3)


@pytest.mark.parametrize(("message", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), ("", None), (None, None)])
def test_the_node_of_a_gpu(message: str | None, node: int | None, tmp_path: Path) -> None:
    if message is not None:
        (tmp_path / "10000:dc:03.0").mkdir()
        (tmp_path / "10000:dc:03.0" / "numa_node").write_text(message)
    assert memory_node(GPU, tmp_path) == node
    assert memory_node(SimpleNamespace(), tmp_path) is None, "an older torch"


def test_memory_is_laid_on_the_node_before_it_is_pinned(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    device, cuda = install()
    seen: list[tuple[int, int, int, int]] = []

    def prefer_node(buffer: memoryview, node: int) -> bool:
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        seen.append((address, len(buffer), node, cuda.asked))
        return False

    testing.replace(monkeypatch, "device.prefer_node", prefer_node)
    nbytes = 3 * SMALL + 1
    device.allocate_host(nbytes)
    assert seen == [], "nobody says which node"
    testing.replace(monkeypatch, "device.memory_node", lambda _: 1)
    memory = torch.frombuffer(device.allocate_host(nbytes).buffer, dtype=torch.uint8)
    assert pinned(device, memory) == nbytes, "and a kernel that refuses is no reason not to pin"
    assert seen == [(memory.data_ptr(), nbytes, 1, 0)]


# -- a GPU --------------------------------------------------------------------------------------------

REAL = 2 << 20


def real_device() -> AcceleratorDevice:
    device = torch.device("cuda", torch.cuda.current_device())
    return AcceleratorDevice(device, CudaHostSide(device))


@pytest.mark.gpu
def test_pinned_chunks_work_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    testing.replace(monkeypatch, "size.pin_chunk", REAL)
    device = real_device()
    memory = host_memory(3 * REAL + PAGE + 1)
    assert pinned(device, memory) == len(memory)
    for first in range(0, len(memory), REAL):
        assert memory[first:].is_pinned()
    away = torch.zeros(len(memory), dtype=torch.uint8, device=device.torch)
    device.upload(away, memory.random_(0, 256)).wait()
    assert torch.equal(away.cpu(), memory)
    away.copy_(memory.flip(0))
    device.download(memory[1:], away[1:], (device.record_event(),)).wait()
    assert torch.equal(away.cpu()[1:], memory[1:])
    device.unregister([memory])
    assert not memory.is_pinned() and not memory[REAL:].is_pinned()


@pytest.mark.gpu
def test_a_refusal_of_a_gpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """CUDA does not pin twice what somebody else has pinned."""
    testing.replace(monkeypatch, "size.pin_chunk", REAL)
    device = real_device()
    memory = host_memory(4 * REAL)
    cudart = torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(memory.data_ptr() + 2 * REAL, REAL, 0)) == 0
    assert pinned(device, memory) == 2 * REAL
    assert "(CUDA error 712)" in caplog.text and len(caplog.records) == 1
    assert torch.full((3,), 2.0, device=device.torch).sum().item() == 6.0, "no kernel finds an error of ours"
    assert int(cudart.cudaHostUnregister(memory.data_ptr() + 2 * REAL)) == 0
    away = torch.zeros(len(memory), dtype=torch.uint8, device=device.torch)
    device.upload(away, memory.random_(0, 256)).wait()
    assert torch.equal(away.cpu(), memory)
    device.download(memory, away.flip(0), (device.record_event(),)).wait()
    assert torch.equal(away.cpu().flip(0), memory)
    device.unregister([memory])
    assert not memory.is_pinned()


@pytest.mark.gpu
def test_the_node_of_a_real_gpu() -> None:
    node = memory_node(torch.cuda.get_device_properties(torch.cuda.current_device()))
    assert node is None or Path(f"/sys/devices/system/node/node{node}").exists()


CLASSES = HostBudget(
    tiles=8 * SMALL, weights=2 * SMALL, gradients=SMALL, resident=6 * SMALL, staging=SMALL, cache=4 * SMALL
)
COPIED = PinnedRegions(resident=2 * SMALL, promoted=SMALL, tiles=False)
PINNED = {"staging": SMALL, "weights": 2 * SMALL, "gradients": SMALL, "cache": 3 * SMALL, "copied": 2 * SMALL}


def arena_over(device: Device, copied: PinnedRegions | None = COPIED) -> HostArena:
    return HostArena(CLASSES, device, copied=copied)


def lies_in(cuda: FakeCuda, buffer: HostBuffer | None) -> bool:
    """Returns True if the buffer is pinned, False if none of it is."""
    assert buffer is not None
    memory = buffer.tensor(torch.uint8)
    inside = sum(
        min(last, memory.data_ptr() + len(memory)) - max(first, memory.data_ptr())
        for first, last in cuda.touched(memory)
    )
    assert inside in (0, len(memory)), "all of a buffer is pinned, or none"
    return inside > 0


def test_what_the_device_copies_is_pinned_and_nothing_else(install: Install) -> None:
    device, cuda = install()
    arena = arena_over(device)
    assert arena.pinned == PINNED | {"tiles": 0} and arena.pinned_bytes == sum(cuda.pinned.values()) == 9 * SMALL
    for region in (arena.staging, arena.gradients):
        assert lies_in(cuda, region.take(SMALL))
    assert all(lies_in(cuda, arena.take_copied(SMALL)) for _ in range(2)), "weights and gradients of the HOST tier"
    assert not lies_in(cuda, arena.resident.take(4 * SMALL)), "moments of the HOST tier"
    assert not lies_in(cuda, arena.weights.take_last(SMALL)), "moments in memory of the cache"
    assert all(lies_in(cuda, arena.weights.take(SMALL)) for _ in range(5)), "weights and their cache"
    assert not lies_in(cuda, arena.tiles.take(8 * SMALL)), "tiles that the CPU alone reads"
    arena.close()
    assert not cuda.pinned


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (0, {}),
        (4 * SMALL + PAGE, {"staging": SMALL, "weights": 2 * SMALL, "gradients": SMALL, "cache": PAGE}),
        (8 * SMALL, PINNED | {"copied": SMALL}),
        (100 * SMALL, PINNED),
    ],
)
def test_under_a_limit_of_all_pinned_memory_what_is_copied_most_is_pinned(
    limit: int, expected: dict[str, int], install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    """As under WSL, where CUDA refuses a piece that exceeds the limit as a whole."""
    device, cuda = install(chunk=64 * SMALL, least=PAGE)
    cuda.limit = limit
    arena = arena_over(device)
    assert {name: nbytes for name, nbytes in arena.pinned.items() if nbytes} == expected
    assert arena.pinned_bytes == sum(cuda.pinned.values()) <= limit
    assert len(caplog.records) == (arena.pinned_bytes < sum(PINNED.values())), "one warning for all of the parts"
    arena.close()
    assert not cuda.pinned and not cuda.left_error


def test_the_cache_that_another_engine_takes_is_unpinned_and_pinned_for_that_engine(install: Install) -> None:
    device, cuda = install()
    memory = HostMemory()
    first: list[HostArena] = []
    first.append(HostArena(CLASSES, device, memory, 22 * SMALL, lambda: first[0].drop_cache(), COPIED))
    small = HostBudget(tiles=SMALL, weights=SMALL, gradients=0, resident=SMALL)
    other_arena = HostArena(
        small, device, memory, 22 * SMALL, copied=PinnedRegions(resident=SMALL, promoted=0, tiles=False)
    )
    assert first[0].pinned == {name: PINNED.get(name, 0) for name in first[0].pinned} and "cache" not in first[0].pinned
    assert other_arena.pinned["weights"] == other_arena.pinned["copied"] == SMALL
    assert lies_in(cuda, other_arena.take_copied(SMALL)) and not lies_in(cuda, other_arena.tiles.take(SMALL))
    first[0].close()
    assert sum(cuda.pinned.values()) == other_arena.pinned_bytes
    other_arena.close()
    assert not cuda.pinned and not cuda.left_error


@pytest.mark.parametrize("interrupted_at", [0, 3])
def test_ctrl_c_while_an_arena_is_pinned_leaves_no_arena(interrupted_at: int, install: Install) -> None:
    device, cuda = install()
    plain, memory = cuda.cudaHostRegister, HostMemory()

    def interrupted(address: int, nbytes: int, flags: int) -> int:
        if cuda.asked == interrupted_at:
            raise KeyboardInterrupt
        return plain(address, nbytes, flags)

    cuda.cudaHostRegister = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        HostArena(CLASSES, device, memory, copied=COPIED)
    assert not cuda.pinned and memory.arenas == ()
    cuda.cudaHostRegister = plain  # type: ignore[method-assign]
    HostArena(CLASSES, device, memory, 22 * SMALL, copied=COPIED).close()
    assert not cuda.pinned
