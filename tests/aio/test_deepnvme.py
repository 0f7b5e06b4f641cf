"""A script that was written for DeepNVMe runs, and receives errors that DeepNVMe does not raise."""

from __future__ import annotations

import array
import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offload.aio import IoQueue
from offload.deepnvme import aio_handle
from offload.errors import IoError, UsageError
from tests.aio.nvme_handles import DTYPES, content, handle, noise

__all__ = ["handle"]  # fixtures

# -- scripts ------------------------------------------------------------------------------------------


def test_a_script_as_in_the_tutorial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    h = aio_handle(1024**2, 128, False, True, 2)
    count = 3 << 18
    tensors = [h.new_cpu_locked_tensor(count, torch.empty(0, dtype=torch.bfloat16)) for _ in range(4)]
    for i, tensor in enumerate(tensors):
        tensor.normal_()
        assert h.async_pwrite(tensor, f"state_{i}.pt") == 0
    assert h.wait() == 4
    assert os.path.getsize("state_0.pt") == 2 * count

    back = h.new_cpu_locked_tensor(count, tensors[0])
    for i, tensor in enumerate(tensors):
        assert h.sync_pread(back, f"state_{i}.pt") == 1
        assert torch.equal(back, tensor)
    for tensor in [*tensors, back]:
        assert h.free_cpu_locked_tensor(tensor)
    assert capfd.readouterr() == ("", "")


def test_the_getters_return_the_arguments() -> None:
    names = ["block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism"]
    for given in ([1 << 20, 128, False, False, 1], [1 << 16, 8, True, True, 2]):
        handle = aio_handle(*given) if given[0] == 1 << 16 else aio_handle()  # type: ignore[arg-type]
        assert [getattr(handle, f"get_{name}")() for name in names] == given
        assert handle.get_alignment() == 4096
        handle.close()


def returns(handle: Any, folder: Path) -> list[int]:
    """What the calls of a script return; with a locked tensor of whole blocks, which DeepNVMe can do too."""
    path, other, descriptor_path = str(folder / "a"), str(folder / "b"), str(folder / "c")
    tensor = handle.new_cpu_locked_tensor(1 << 20, torch.empty(0, dtype=torch.uint8))
    tensor.fill_(3)
    Path(descriptor_path).touch()
    descriptor = os.open(descriptor_path, os.O_RDWR | os.O_DIRECT)
    calls: list[Callable[[], int]] = [
        lambda: handle.sync_pwrite(tensor, path),
        lambda: handle.sync_pread(tensor, path, 0),
        lambda: handle.async_pwrite(tensor, other, 1 << 20),
        lambda: handle.async_pread(tensor, path),
        handle.wait,
        lambda: handle.async_pwrite(tensor, descriptor, 4096),
        handle.wait,
        lambda: handle.pwrite(tensor, path, True, False),
        lambda: handle.pread(tensor, path, True, True, 0),
        lambda: handle.pwrite(tensor, other, False, True, 1 << 20),
        lambda: handle.sync_pread(tensor, path),  # of all three
        lambda: handle.write(tensor, path, False),
        lambda: handle.read(tensor, path, False, 0),
        lambda: handle.is_pinned(tensor),
        lambda: handle.is_pinned(tensor[4096:]),
        lambda: handle.is_pinned(torch.empty(4)),
        lambda: handle.free_cpu_locked_tensor(torch.empty(4)),
        lambda: handle.free_cpu_locked_tensor(tensor[4096:]),
        lambda: handle.free_cpu_locked_tensor(tensor),
        lambda: handle.new_cpu_locked_tensor(0, torch.empty(0)).numel(),
    ]
    found = [call() for call in calls]
    os.close(descriptor)
    return found


RETURNED = [1, 1, 0, 0, 2, 0, 1, 1, 0, 0, 3, 0, 0, True, True, False, False, False, True, 0]


def test_calls_return_what_deepnvme_returns(handle: aio_handle, tmp_path: Path) -> None:
    assert returns(handle, tmp_path) == RETURNED


def test_deepnvme_returns_that(tmp_path: Path) -> None:
    builder = pytest.importorskip("deepspeed.ops.op_builder", reason="DeepSpeed is not installed")
    assert returns(builder.AsyncIOBuilder().load(verbose=False).aio_handle(), tmp_path) == RETURNED


# -- buffers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_written_and_read(handle: aio_handle, tmp_path: Path, dtype: torch.dtype) -> None:
    raw = noise(16 * 999) % 2 if dtype is torch.bool else noise(16 * 999)
    tensor = raw.view(dtype).reshape(9, -1)
    back = torch.zeros_like(tensor)
    handle.sync_pwrite(tensor, tmp_path / "file")
    handle.sync_pread(back, tmp_path / "file")
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))
    assert torch.equal(content(tmp_path / "file"), raw)


@pytest.mark.parametrize("nbytes", [0, 1, 511, 4095, 4097, 70_001, (1 << 20) + 1])
@pytest.mark.parametrize("file_offset", [0, 1, 4096, 5000])
def test_odd_sizes_offsets_and_addresses(handle: aio_handle, tmp_path: Path, nbytes: int, file_offset: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10_000)
    view = noise(nbytes + 100)[77 : 77 + nbytes]
    assert handle.pwrite(view, path, True, False, file_offset) == 1
    old = b"x" * 10_000
    assert path.read_bytes() == old[:file_offset] + view.numpy().tobytes() + old[file_offset + nbytes :]
    storage = torch.zeros(nbytes + 100, dtype=torch.uint8)
    assert handle.pread(storage[33 : 33 + nbytes], path, True, False, file_offset) == 1
    assert torch.equal(storage[33 : 33 + nbytes], view)
    assert not storage[:33].any() and not storage[33 + nbytes :].any(), "and nothing beside it"


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 3, 5)])
def test_every_shape_is_written_and_read(handle: aio_handle, tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensor, back = torch.nn.Parameter(torch.randn(shape)), torch.zeros(shape)
    handle.sync_pwrite(tensor, tmp_path / "file")
    handle.sync_pread(back, tmp_path / "file")
    assert torch.equal(back, tensor)


def test_what_is_not_a_tensor(handle: aio_handle, tmp_path: Path) -> None:
    given = [np.arange(7.0), np.arange(6, dtype=np.int16).reshape(2, 3), array.array("d", [1.5, 2.5]), b"bytes"]
    for index, buffer in enumerate(given):
        handle.async_pwrite(buffer, tmp_path / str(index))
    assert handle.wait() == len(given)
    for index, buffer in enumerate(given):
        back = bytearray(memoryview(buffer).nbytes)
        handle.pread(back, tmp_path / str(index), True, False)
        assert back == memoryview(buffer).tobytes()


def test_a_tensor_lives_while_it_is_in_flight(handle: aio_handle, tmp_path: Path) -> None:
    expected = [noise(1 << 20, seed) for seed in range(16)]
    for seed in range(16):
        handle.async_pwrite(noise(1 << 20, seed), tmp_path / str(seed))
        gc.collect()
    assert handle.wait() == 16
    assert all(torch.equal(content(tmp_path / str(seed)), expected[seed]) for seed in range(16))


def test_memory_can_be_given_back_after_a_write(handle: aio_handle, tmp_path: Path) -> None:
    tensor = noise(5000)
    handle.sync_pwrite(tensor, tmp_path / "file")
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(5000)
    handle.sync_pread(tensor, tmp_path / "file")
    assert torch.equal(tensor, noise(5000))


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.zeros(4, 6).t(), "contiguous"),
        (torch.zeros(8)[::2], "contiguous"),
        (torch.zeros(3, dtype=torch.complex64).conj(), "resolve_conj"),
        (torch.zeros(3).to_sparse(), "contiguous"),
        (torch.zeros(3, device="meta"), "new_cpu_locked_tensor"),
        (np.zeros((4, 6)).T, "contiguous"),
    ],
    ids=["transposed", "strided", "conjugate", "sparse", "of another device", "numpy"],
)
def test_what_is_not_a_row_of_bytes_is_refused(handle: aio_handle, tmp_path: Path, buffer: Any, message: str) -> None:
    (tmp_path / "file").write_bytes(bytes(1000))
    for call in (handle.sync_pwrite, handle.async_pread):
        with pytest.raises(ValueError, match=message):
            call(buffer, tmp_path / "file")
    assert handle.wait() == 0 and (tmp_path / "file").read_bytes() == bytes(1000)


def test_what_cannot_be_written_to_is_not_read_into(handle: aio_handle, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(10))
    with pytest.raises(ValueError, match="writable"):
        handle.sync_pread(b"0123456789", tmp_path / "file")


# -- errors -------------------------------------------------------------------------------------------


def test_wait_with_nothing_under_way(handle: aio_handle) -> None:
    assert handle.wait() == 0 and handle.wait() == 0


def test_a_missing_file_is_an_error(handle: aio_handle, tmp_path: Path) -> None:
    for call in (handle.sync_pread, handle.async_pread, handle.read):
        with pytest.raises(IoError) as caught:
            call(torch.zeros(8), tmp_path / "none")
        assert caught.value.errno == errno.ENOENT and "none" in str(caught.value)
    with pytest.raises(IoError):
        handle.async_pwrite(torch.zeros(8), tmp_path / "no folder" / "file")
    assert handle.wait() == 0 and not (tmp_path / "none").exists()


def test_the_first_error_after_all_have_ended(handle: aio_handle, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(bytes(100))
    handle.async_pread(torch.zeros(101, dtype=torch.uint8), tmp_path / "a")
    handle.async_pread(torch.zeros(200, dtype=torch.uint8), tmp_path / "b")
    handle.async_pwrite(noise(8 << 20), tmp_path / "c")
    with pytest.raises(IoError, match="a:") as caught:
        handle.wait()
    assert (caught.value.errno, caught.value.nbytes) == (errno.ENODATA, 101)
    assert torch.equal(content(tmp_path / "c"), noise(8 << 20))
    assert handle.wait() == 0, "what has failed is told once"


@pytest.mark.parametrize("offset", [96, 100, 1 << 40])
def test_a_read_past_the_end_is_an_error(handle: aio_handle, tmp_path: Path, offset: int) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    for call in (handle.sync_pread, handle.read):
        with pytest.raises(IoError) as caught:
            call(torch.zeros(8, dtype=torch.uint8), tmp_path / "file", file_offset=offset)
        assert (caught.value.errno, caught.value.offset) == (errno.ENODATA, offset)


def test_a_full_device_is_an_error(handle: aio_handle) -> None:
    handle.async_pwrite(torch.zeros(1 << 20), "/dev/full")
    with pytest.raises(IoError) as caught:
        handle.wait()
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(IoError):
        handle.sync_pwrite(torch.zeros(3), "/dev/full")


def test_a_synchronous_call_tells_of_earlier_ones(handle: aio_handle, tmp_path: Path) -> None:
    handle.async_pwrite(torch.zeros(1), "/dev/full")
    with pytest.raises(IoError, match="/dev/full"):
        handle.sync_pwrite(torch.zeros(1), tmp_path / "file")
    handle.async_pwrite(torch.zeros(1), "/dev/full")
    handle.write(torch.zeros(1), tmp_path / "file")
    with pytest.raises(IoError, match="/dev/full"):
        handle.close()
    handle.close()
    with pytest.raises(UsageError, match="closed"):
        handle.sync_pwrite(torch.zeros(1), tmp_path / "file")


def test_leaving_for_an_error_does_not_hide_it(tmp_path: Path) -> None:
    with pytest.raises(KeyError), aio_handle() as handle:
        handle.async_pwrite(torch.zeros(1), "/dev/full")
        raise KeyError


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("operation", ["pread", "pwrite"])
def test_validate_finds_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, asynchronous: bool
) -> None:
    """A drive that loses one bit of the last of 17 MiB; without `validate` nobody sees it."""
    nbytes, path = 17 << 20, tmp_path / "file"
    path.write_bytes(bytes(nbytes))

    class Lying:
        def __init__(self, future: Any) -> None:
            self.future = future

        def wait(self) -> int:
            moved = self.future.wait()
            with path.open("r+b") as file:
                file.seek(nbytes - 1)
                file.write(b"\1")
            return moved

    for name in ("read", "write"):
        real = getattr(IoQueue, name)
        monkeypatch.setattr(IoQueue, name, lambda *args, real=real: Lying(real(*args)))
    handle = aio_handle()
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    call = getattr(handle, operation)
    call(tensor, path, False, False)
    path.write_bytes(bytes(nbytes))
    with pytest.raises(IoError, match="validate") as caught:
        call(tensor, path, True, asynchronous)
        handle.wait()
    assert caught.value.errno == errno.EBADMSG
    monkeypatch.undo()
    handle.close()
