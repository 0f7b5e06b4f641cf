"""DeepNVMe's names read and write tensors and files as DeepSpeed's do."""

from __future__ import annotations

import array
import errno
import gc
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offload import testing
from offload.deepnvme import aio_handle
from offload.errors import IoError, UsageError
from tests.support.processes import warm_process

DTYPES = [
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
]


@pytest.fixture
def handle() -> Iterator[aio_handle]:
    with aio_handle(block_size=64 << 10) as handle:
        yield handle


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Returns `nbytes` reproducible random bytes as a uint8 tensor."""
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def content(path: str | Path) -> torch.Tensor:
    return torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)


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
    path, other_path, descriptor_path = str(folder / "a"), str(folder / "b"), str(folder / "c")
    tensor = handle.new_cpu_locked_tensor(1 << 20, torch.empty(0, dtype=torch.uint8))
    tensor.fill_(3)
    Path(descriptor_path).touch()
    descriptor = os.open(descriptor_path, os.O_RDWR | os.O_DIRECT)
    calls: list[Callable[[], int]] = [
        lambda: handle.sync_pwrite(tensor, path),
        lambda: handle.sync_pread(tensor, path, 0),
        lambda: handle.async_pwrite(tensor, other_path, 1 << 20),
        lambda: handle.async_pread(tensor, path),
        handle.wait,
        lambda: handle.async_pwrite(tensor, descriptor, 4096),
        handle.wait,
        lambda: handle.pwrite(tensor, path, True, False),
        lambda: handle.pread(tensor, path, True, True, 0),
        lambda: handle.pwrite(tensor, other_path, False, True, 1 << 20),
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
    returned = [call() for call in calls]
    os.close(descriptor)
    return returned


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


@pytest.mark.sample(7)
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
    expected = [noise(1 << 18, seed) for seed in range(6)]
    for seed in range(6):
        handle.async_pwrite(noise(1 << 18, seed), tmp_path / str(seed))
        gc.collect()
    assert handle.wait() == 6
    assert all(torch.equal(content(tmp_path / str(seed)), expected[seed]) for seed in range(6))


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


# -- errors -------------------------------------------------------------------------------------------


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

    for point in ("io.read", "io.write"):
        testing.intercept(monkeypatch, point, lambda real, *args: Lying(real(*args)))
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


# -- files --------------------------------------------------------------------------------------------


def test_a_write_makes_a_private_file_and_truncates_none(handle: aio_handle, tmp_path: Path) -> None:
    handle.sync_pwrite(torch.zeros(5), tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600
    (tmp_path / "old").write_bytes(b"x" * 100)
    handle.sync_pwrite(torch.zeros(5), tmp_path / "old")
    assert (tmp_path / "old").read_bytes() == bytes(20) + b"x" * 80


def test_a_write_that_is_refused_makes_no_file(handle: aio_handle, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        handle.write(np.zeros((4, 6)).T, tmp_path / "new")
    with pytest.raises(ValueError, match="offset"):
        handle.async_pwrite(torch.zeros(5), tmp_path / "new", -1)
    handle.close()
    with pytest.raises(UsageError, match="closed"):
        handle.write(torch.zeros(5), tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_a_link_is_followed(handle: aio_handle, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    handle.sync_pwrite(noise(100), tmp_path / "link")
    back = torch.zeros(100, dtype=torch.uint8)
    handle.sync_pread(back, str(tmp_path / "link"))
    assert torch.equal(back, noise(100)) and (tmp_path / "link").is_symlink()
    assert torch.equal(content(tmp_path / "file"), noise(100))


@pytest.mark.parametrize("flags", [0, os.O_DIRECT, os.O_APPEND], ids=["buffered", "direct", "append"])
def test_a_descriptor_is_used_in_place_of_a_path(handle: aio_handle, tmp_path: Path, flags: int) -> None:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | flags)
    os.posix_fallocate(descriptor, 0, 50)
    handle.async_pwrite(noise(70_001), descriptor, 3)
    handle.wait()
    back = torch.zeros(70_001, dtype=torch.uint8)
    handle.sync_pread(back, descriptor, 3)
    assert torch.equal(back, noise(70_001)) and os.fstat(descriptor).st_size == 70_004
    assert os.lseek(descriptor, 0, os.SEEK_CUR) == 0, "it stays where it was"
    handle.async_pwrite(noise(70_001, 1), descriptor, 0)
    os.close(descriptor)
    handle.wait()
    assert torch.equal(content(tmp_path / "file")[:70_001], noise(70_001, 1))


def test_a_descriptor_is_not_given_more_than_it_may(handle: aio_handle, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 5000)
    for flags, call in ((os.O_RDONLY, handle.sync_pwrite), (os.O_WRONLY, handle.sync_pread)):
        descriptor = os.open(tmp_path / "file", flags)
        with pytest.raises(IoError) as caught:
            call(torch.zeros(1000), descriptor)
        assert caught.value.errno == errno.EBADF
        os.close(descriptor)
    assert (tmp_path / "file").read_bytes() == b"x" * 5000
    with pytest.raises(IoError, match=f"descriptor {descriptor}") as caught:
        handle.async_pread(torch.zeros(1000), descriptor)
    assert caught.value.errno == errno.EBADF


def test_more_files_than_there_are_descriptors(tmp_path: Path) -> None:
    code = f"""
import os, resource, torch
from offload.deepnvme import aio_handle
resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
handle = aio_handle()
tensor = torch.arange(2_000)
for index in range(100):
    assert handle.async_pwrite(tensor, {str(tmp_path)!r} + f"/{{index}}") == 0
assert handle.wait() == 100
"""
    done = warm_process.python(code)
    assert done.returncode == 0, done.stderr
    assert all((tmp_path / str(index)).stat().st_size == 16_000 for index in range(100))


def test_a_handle_that_is_dropped_drains(tmp_path: Path) -> None:
    for index in range(1, 5):
        handle = aio_handle()
        handle.async_pwrite(torch.full((4 << 20,), index, dtype=torch.uint8), tmp_path / str(index))
        del handle
        gc.collect()
        assert content(tmp_path / str(index)).numpy().tobytes() == bytes([index]) * (4 << 20)


def test_a_program_that_ends_drains(tmp_path: Path) -> None:
    code = f"""
import torch
from offload.deepnvme import aio_handle
handle = aio_handle()
handle.async_pwrite(torch.ones(32 << 20, dtype=torch.uint8), {str(tmp_path / "file")!r})
"""
    done = warm_process.python(code)
    assert (done.stdout, done.stderr) == ("", "")
    assert content(tmp_path / "file").sum() == 32 << 20


# -- locked memory ------------------------------------------------------------------------------------


def test_a_locked_tensor_is_written_and_read(handle: aio_handle) -> None:
    tensor = handle.new_cpu_locked_tensor(1_000_001, torch.empty(3, 3, dtype=torch.bfloat16))
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.bfloat16, (1_000_001,))
    assert tensor.data_ptr() % (2 << 20) == 0 and not tensor.any()
    maps = Path("/proc/self/smaps").read_text()
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", maps):
        start, end = (int(word, 16) for word in mapping.split(maxsplit=1)[0].split("-"))
        if start <= tensor.data_ptr() < end:
            flags = re.search(r"VmFlags: (.*)", mapping)
            if flags is None or not Path("/sys/kernel/mm/transparent_hugepage").exists():
                pytest.skip("this kernel has no 2 MiB pages, or does not tell")
            assert {"hg", "dc"} <= set(flags[1].split()), "2 MiB pages, and none for a child"


def test_a_locked_tensor_is_known_until_it_is_freed(handle: aio_handle) -> None:
    tensor = handle.new_cpu_locked_tensor(100, torch.empty(0))
    tensor.fill_(5)
    with aio_handle() as other_handle:
        assert other_handle.is_pinned(tensor[50:]) and not other_handle.is_pinned(torch.empty(100))
        assert not other_handle.free_cpu_locked_tensor(torch.empty(100))
        assert other_handle.free_cpu_locked_tensor(tensor)
    assert not handle.free_cpu_locked_tensor(tensor) and not handle.is_pinned(tensor)
    assert tensor.sum() == 500, "the memory stays as long as the tensor"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_locked_memory_is_pinned_for_cuda(handle: aio_handle) -> None:
    tensor = handle.new_cpu_locked_tensor(1 << 20, torch.empty(0))
    assert tensor.is_pinned()
    copied = tensor.fill_(3).to("cuda", non_blocking=True)
    assert handle.free_cpu_locked_tensor(tensor) and not tensor.is_pinned()
    assert copied.sum().item() == 3 << 20
    dropped = handle.new_cpu_locked_tensor(1 << 20, torch.empty(0))
    del dropped
    gc.collect()
    with pytest.raises(ValueError, match="new_cpu_locked_tensor"):
        handle.sync_pwrite(copied, "/dev/null")
