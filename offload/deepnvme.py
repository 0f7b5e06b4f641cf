"""DeepNVMe's `aio_handle`, for scripts that were written for it. New code should use `offload.aio.IoQueue`."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

from offload.aio import DirectFile, IoFuture, IoQueue, aligned_empty
from offload.errors import BudgetError, IoError
from offload.sizes import MIB, PAGE, format_size

if TYPE_CHECKING:
    from typing_extensions import Buffer

    Memory: TypeAlias = torch.Tensor | Buffer

__all__ = ["aio_handle"]

Filename: TypeAlias = str | os.PathLike[str] | int

_VALIDATE_BYTES = 16 * MIB


class _Request(NamedTuple):
    """A read or write in flight, with the check that follows its end."""

    future: IoFuture
    check: Callable[[], None] | None

    def end(self) -> None:
        self.future.wait()
        if self.check is not None:
            self.check()


class _Reopened(DirectFile):
    """The file of a user's descriptor, opened again through /proc with the descriptor's own access mode."""

    def __init__(self, descriptor: int) -> None:
        # The file may have another name by now, or none.
        own = f"/proc/self/fd/{descriptor}"
        try:
            self._access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
            name = os.readlink(own)
        except OSError as error:
            raise IoError(f"descriptor {descriptor}", 0, 0, error.errno or errno.EBADF, "open") from error
        super().__init__(own)
        self.path = self.descriptors.path = name  # for messages alone

    def _open(self, flags: int) -> int:
        return super()._open(self._reopen_flags(flags))

    def _open_again(self, flags: int) -> int:
        return super()._open_again(self._reopen_flags(flags))

    def _reopen_flags(self, flags: int) -> int:
        return flags & ~(os.O_NOFOLLOW | os.O_ACCMODE) | self._access


class aio_handle:
    """Reads and writes of whole buffers over one `IoQueue`, under the names of DeepNVMe.

    `block_size` is in bytes, `queue_depth` in blocks for each of the `intra_op_parallelism` threads. `single_submit`
    and `overlap_events` have no effect: the queue submits all requests at once, and takes completions as they come. A
    buffer is a contiguous CPU tensor, a numpy array, or an object with the buffer protocol, of any size and address.
    `file_offset` is in bytes, and may have any value. The handle owns the buffer, and keeps it alive, until `wait` has
    returned. Requests in flight complete in any order: call `wait` between a write and a read of the same bytes.

    `filename` is a path or a descriptor. A write creates a missing file with mode 0600, and never truncates one. The
    file of a descriptor is opened a second time for the request; the descriptor stays the caller's, and may be closed
    at once. A file that cannot be opened raises `IoError` in the call. Any other failure raises `IoError` in the
    synchronous call or in `wait`. With `validate` the file is read again by ordinary reads after the request, and bytes
    that differ raise `IoError` (EBADMSG).

    One thread at a time may use a handle. Dropping it lets requests in flight end without a report; `close` reports.
    """

    def __init__(
        self,
        block_size: int = MIB,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._block_size, self._queue_depth, self._threads = block_size, queue_depth, intra_op_parallelism
        self._single_submit, self._overlap_events = single_submit, overlap_events
        self._pending: deque[_Request] = deque()
        self._queue = IoQueue(block_bytes=block_size, depth=queue_depth, threads=intra_op_parallelism)

    # -- the constructor's arguments ----------------------------------------------------------------

    def get_block_size(self) -> int:
        """Returns the size of a block in bytes."""
        return self._block_size

    def get_queue_depth(self) -> int:
        """Returns the depth of the queue in blocks."""
        return self._queue_depth

    def get_single_submit(self) -> bool:
        """Returns the constructor's argument."""
        return self._single_submit

    def get_overlap_events(self) -> bool:
        """Returns the constructor's argument."""
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Returns the number of threads."""
        return self._threads

    def get_alignment(self) -> int:
        """Returns the alignment in bytes that lets buffers bypass the page cache. Unaligned buffers work too."""
        return PAGE

    # -- reads and writes ---------------------------------------------------------------------------

    def async_pread(self, buffer: Memory, filename: Filename, file_offset: int = 0) -> int:
        """Starts a read into `buffer` and returns 0."""
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(self, buffer: Memory, filename: Filename, file_offset: int = 0) -> int:
        """Starts a write of `buffer` and returns 0."""
        return self.pwrite(buffer, filename, False, True, file_offset)

    def sync_pread(self, buffer: Memory, filename: Filename, file_offset: int = 0) -> int:
        """Waits as `wait` does, then fills `buffer`. Returns the number of requests that ended, this one included."""
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: Memory, filename: Filename, file_offset: int = 0) -> int:
        """Waits as `wait` does, then writes `buffer`. Returns the number of requests that ended, this one included."""
        return self.pwrite(buffer, filename, False, False, file_offset)

    def pread(self, buffer: Memory, filename: Filename, validate: bool, async_: bool, file_offset: int = 0) -> int:
        """Reads as `async_pread` or `sync_pread` does, with the same result."""
        return self._submit("read", buffer, filename, validate, async_, file_offset)

    def pwrite(self, buffer: Memory, filename: Filename, validate: bool, async_: bool, file_offset: int = 0) -> int:
        """Writes as `async_pwrite` or `sync_pwrite` does, with the same result."""
        return self._submit("write", buffer, filename, validate, async_, file_offset)

    def read(self, buffer: Memory, filename: Filename, validate: bool = False, file_offset: int = 0) -> int:
        """Fills `buffer`, then returns 0. Other requests stay in flight."""
        self._start("read", buffer, filename, validate, file_offset).end()
        return 0

    def write(self, buffer: Memory, filename: Filename, validate: bool = False, file_offset: int = 0) -> int:
        """Writes `buffer`, then returns 0. Other requests stay in flight."""
        self._start("write", buffer, filename, validate, file_offset).end()
        return 0

    def wait(self) -> int:
        """Waits for all requests in flight, and returns their number.

        Raises:
            IoError: the first failure, after all requests have ended.
        """
        ended, first = 0, None
        while self._pending:
            try:
                self._pending[0].end()
            except IoError as error:
                first = first or error
            self._pending.popleft()
            ended += 1
        if first is not None:
            raise first
        return ended

    def close(self) -> None:
        """Waits as `wait` does, raises what `wait` raises, and joins the threads in any case. Idempotent."""
        try:
            self.wait()
        finally:
            self._queue.close()

    def __enter__(self) -> aio_handle:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an exception of the caller, a failure of `wait` would hide it.
        if kind is None:
            self.close()
        else:
            self._queue.close()

    # -- memory -------------------------------------------------------------------------------------

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Returns (num_elem,) zeros in 2 MiB pages at a multiple of 2 MiB, pinned by CUDA if available.

        The memory lives as long as the tensor or a view; a forked child lacks it. `BudgetError` if CUDA refuses.
        """
        if num_elem == 0:
            return torch.empty(0, dtype=example_tensor.dtype, device="cpu")
        memory = aligned_empty(num_elem * example_tensor.element_size())
        tensor_view = memory[:]  # dies with the tensor; `memory` stays mapped until CUDA has unregistered it
        tensor = torch.frombuffer(tensor_view, dtype=example_tensor.dtype)
        registered = torch.cuda.is_available()
        if registered:
            _register(tensor.data_ptr(), memory.nbytes)
        end = weakref.finalize(tensor_view, _forget, tensor.data_ptr(), memory, os.getpid() if registered else None)
        # At exit CUDA may be gone already, and the process gives all memory back.
        end.atexit = False
        _locked[tensor.data_ptr()] = end
        return tensor

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Unpins a tensor of any handle's `new_cpu_locked_tensor`; returns False for another or a freed tensor."""
        # The finalizer runs once. CUDA unregisters the memory now; the memory is unmapped with its last reference.
        end = _locked.get(tensor.data_ptr())
        if end is None:
            return False
        end()
        return True

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Returns True if `buffer` is in memory of `new_cpu_locked_tensor`, or in memory that torch has pinned."""
        return buffer.untyped_storage().data_ptr() in _locked or buffer.is_pinned()

    def _submit(
        self, operation: str, buffer: Memory, filename: Filename, validate: bool, asynchronous: bool, offset: int
    ) -> int:
        if asynchronous:
            self._pending.append(self._start(operation, buffer, filename, validate, offset))
            return 0
        before = self.wait()  # the result counts the requests that were in flight before, too
        self._start(operation, buffer, filename, validate, offset).end()
        return before + 1

    def _start(self, operation: str, buffer: Memory, filename: Filename, validate: bool, offset: int) -> _Request:
        # Checked before the file is opened, since opening makes a missing one.
        view, offset = self._queue.check(operation, offset, _bytes(buffer))
        file = self._open(filename, operation == "write")
        future = (self._queue.write if operation == "write" else self._queue.read)(file, offset, view)
        if not validate:
            file.close()  # the request keeps it open
            return _Request(future, None)
        return _Request(future, lambda: _compare(file, offset, np.frombuffer(view, np.uint8)))

    def _open(self, filename: Filename, write: bool) -> DirectFile:
        """Opens a file. If no descriptor is free, requests in flight end first, since each holds two."""
        ended = 0
        while True:
            try:
                return _open(filename, write)
            except IoError as error:
                if error.errno != errno.EMFILE or ended == len(self._pending):
                    raise
            with contextlib.suppress(IoError):  # `wait` raises it later
                self._pending[ended].future.wait()
            ended += 1


def _open(filename: Filename, write: bool) -> DirectFile:
    if isinstance(filename, int):
        return _Reopened(filename)
    path = os.path.realpath(os.fsdecode(filename))  # may be a link on purpose; `DirectFile` refuses links
    return DirectFile(path, create=write, writable=write)


def _bytes(buffer: Memory) -> memoryview:
    """Returns the bytes of `buffer` as a view that keeps it alive."""
    if not isinstance(buffer, torch.Tensor):
        return memoryview(buffer)
    if buffer.device.type != "cpu":
        raise ValueError(
            f"expected a tensor of the CPU, got one on {buffer.device}: copy it to or from a tensor of "
            f"new_cpu_locked_tensor()"
        )
    if buffer.layout != torch.strided or not buffer.is_contiguous() or buffer.is_conj() or buffer.is_neg():
        raise ValueError(
            f"expected a contiguous tensor, got a view or layout whose bytes are not its values in order (shape "
            f"{tuple(buffer.shape)}, {buffer.layout}): call .contiguous(), or .resolve_conj() or .resolve_neg()"
        )
    # `Tensor.numpy` would make the storage unresizable for ever, and some callers free memory by a resize.
    memory = (ctypes.c_ubyte * buffer.nbytes).from_address(buffer.data_ptr())
    vars(memory)["owner"] = buffer
    return memoryview(memory)


def _compare(file: DirectFile, offset: int, expected: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Raises `IoError` if `file` differs from `expected`, (nbytes,) uint8, from byte `offset` on. Closes `file`."""
    buffer = np.empty(min(expected.nbytes, _VALIDATE_BYTES), np.uint8)
    at = 0
    with file:
        while at < expected.nbytes:
            part = expected[at : at + buffer.nbytes]
            try:
                count = os.preadv(file.descriptors.buffered, [buffer.data[: part.nbytes]], offset + at)
            except OSError as error:
                code = error.errno or errno.EIO
                raise IoError(file.path, offset, expected.nbytes, code, "validate") from error
            if count == 0 or not np.array_equal(buffer[:count], part[:count]):
                raise IoError(file.path, offset, expected.nbytes, errno.EBADMSG, "validate")
            at += count


_locked: dict[int, weakref.finalize[..., memoryview]] = {}
"""Finalizer of each live tensor of `new_cpu_locked_tensor`, by address."""


def _register(address: int, nbytes: int) -> None:
    cudart: Any = torch.cuda.cudart()
    try:
        torch.cuda.check_error(int(cudart.cudaHostRegister(address, nbytes, 0)))
    except RuntimeError as error:
        raise BudgetError(
            f"CUDA cannot pin {format_size(nbytes)} of host memory: {error}; free tensors with "
            f"free_cpu_locked_tensor(), or make fewer: WSL pins 0.5 to 1 GiB in all, a container its memory limit"
        ) from error


def _forget(address: int, memory: memoryview, registered_by: int | None) -> None:
    """Unregisters memory from CUDA. `memory` is an argument so that it stays mapped until then."""
    _locked.pop(address, None)
    if registered_by == os.getpid():  # a forked child has neither the memory nor CUDA
        torch.cuda.synchronize()  # an asynchronous copy from or to this memory may still be in flight
        cudart: Any = torch.cuda.cudart()
        torch.cuda.check_error(int(cudart.cudaHostUnregister(address)))
