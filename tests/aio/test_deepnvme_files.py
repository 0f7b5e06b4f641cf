"""Files, descriptors and locked memory of DeepNVMe scripts: nothing leaks, nothing is written that may not be."""

from __future__ import annotations

import errno
import gc
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from offload.deepnvme import aio_handle
from offload.errors import IoError, UsageError
from tests.aio.nvme_handles import content, handle, noise
from tests.support.processes import warm_process
from tests.support.processes.process_measures import resident

__all__ = ["handle"]  # fixtures

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


def test_a_descriptor_of_a_file_that_was_renamed_and_replaced(handle: aio_handle, tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    (tmp_path / "file").rename(tmp_path / "moved")
    (tmp_path / "file").write_bytes(b"another")
    handle.sync_pwrite(noise(5000), descriptor)
    assert torch.equal(content(tmp_path / "moved"), noise(5000))
    assert (tmp_path / "file").read_bytes() == b"another"
    with pytest.raises(IoError, match="moved"):
        handle.sync_pread(torch.zeros(5001), descriptor)
    os.close(descriptor)


def test_a_descriptor_of_a_file_that_was_deleted(handle: aio_handle, tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    (tmp_path / "file").unlink()
    handle.sync_pwrite(noise(5000), descriptor)
    assert os.pread(descriptor, 6000, 0) == noise(5000).numpy().tobytes()
    back = torch.zeros(5000, dtype=torch.uint8)
    handle.pread(back, descriptor, True, False)
    assert torch.equal(back, noise(5000)) and not (tmp_path / "file").exists()
    os.close(descriptor)


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


def test_no_descriptor_is_left_behind(handle: aio_handle, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for index in range(20):
        handle.pwrite(noise(5000), tmp_path / str(index), index % 2 == 0, True)
        with pytest.raises(IoError):
            handle.async_pread(noise(5000), tmp_path / "none")
    handle.wait()
    assert len(os.listdir("/proc/self/fd")) == before


def test_more_files_than_there_are_descriptors(tmp_path: Path) -> None:
    code = f"""
import os, resource, torch
from offload.deepnvme import aio_handle
resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
handle = aio_handle()
tensor = torch.arange(2_000)
for index in range(300):
    assert handle.async_pwrite(tensor, {str(tmp_path)!r} + f"/{{index}}") == 0
assert handle.wait() == 300
"""
    done = warm_process.python(code)
    assert done.returncode == 0, done.stderr
    assert all((tmp_path / str(index)).stat().st_size == 16_000 for index in range(300))


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
    with aio_handle() as other:
        assert other.is_pinned(tensor[50:]) and not other.is_pinned(torch.empty(100))
        assert not other.free_cpu_locked_tensor(torch.empty(100))
        assert other.free_cpu_locked_tensor(tensor)
    assert not handle.free_cpu_locked_tensor(tensor) and not handle.is_pinned(tensor)
    assert tensor.sum() == 500, "the memory stays as long as the tensor"


def test_locked_memory_goes_with_its_last_view(handle: aio_handle) -> None:
    tensor = handle.new_cpu_locked_tensor(64 << 20, torch.empty(0, dtype=torch.uint8))
    mapped = resident()
    tensor.fill_(1)
    view = tensor[1 << 20 :]
    del tensor
    gc.collect()
    assert resident() - mapped > 60 << 20 and view.sum() == 63 << 20 and handle.is_pinned(view)
    del view
    gc.collect()
    assert resident() - mapped < 16 << 20


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
