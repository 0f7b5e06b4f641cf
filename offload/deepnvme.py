"""DeepNVMe's `aio_handle`, for scripts that were written for it. New code does better with `offload.aio.IoQueue`."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType
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
    """One read or write under way, and what is to be checked once it has ended."""

    future: IoFuture
    check: Callable[[], None] | None

    def end(self) -> None:
        self.future.wait()
        if self.check is not None:
            self.check()


class _Reopened(DirectFile):
    """The file that a descriptor of the user is open on, with the access that it has.

    The kernel finds it by the descriptor: it may have another name by now, or none.
    """

    def __init__(self, descriptor: int) -> None:
        own = f"/proc/self/fd/{descriptor}"
        try:
            self._access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
            name = os.readlink(own)
        except OSError as error:
            raise IoError(f"descriptor {descriptor}", 0, 0, error.errno or errno.EBADF, "open") from error
        super().__init__(own)
        self.path = self.descriptors.path = name  # for messages alone

    def _open(self, flags: int) -> int:
        return super()._open(self._mine(flags))

    def _open_again(self, flags: int) -> int:
        return super()._open_again(self._mine(flags))

    def _mine(self, flags: int) -> int:
        return flags & ~(os.O_NOFOLLOW | os.O_ACCMODE) | self._access


class aio_handle:
    """Reads and writes of whole buffers, over one `IoQueue`, under the names of DeepNVMe.

    `block_size` is in bytes, `queue_depth` in blocks for each of the `intra_op_parallelism` threads. `single_submit`
    and `overlap_events` are kept for their getters and mean nothing: the queue always submits what it has at once, and
    takes ends as they come.

    A buffer is a contiguous tensor of the CPU, a numpy array, or anything with the buffer protocol, of any size and
    address; `file_offset`, in bytes, is any too. A buffer is the handle's until `wait` has returned, and is kept alive
    until then. What is under way runs in no certain order: `wait` between a write and a read of the same bytes.

    `filename` is a path or a descriptor. A write makes a missing file, with mode 0600, and never truncates one. The
    file of a descriptor is opened a second time for the request, whatever its name is by now; the descriptor stays the
    caller's, and may be closed at once. A file that cannot be opened is an `IoError` of the call. Any other failure is
    an `IoError` of the synchronous call or of `wait`. `validate` reads the file again, by ordinary reads, once the
    request has ended, and bytes that differ are an `IoError` too (EBADMSG).

    For one thread at a time. A handle that is dropped lets what is under way end, in silence; `close` reports.
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

    # -- as they were given -------------------------------------------------------------------------

    def get_block_size(self) -> int:
        """Bytes."""
        return self._block_size

    def get_queue_depth(self) -> int:
        """Blocks."""
        return self._queue_depth

    def get_single_submit(self) -> bool:
        """As it was given."""
        return self._single_submit

    def get_overlap_events(self) -> bool:
        """As it was given."""
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Threads."""
        return self._threads

    def get_alignment(self) -> int:
        """Bytes. Buffers of a multiple of it go past the page cache as a whole; all others work too."""
        return PAGE

    # -- reads and writes ---------------------------------------------------------------------------

    def async_pread(self, buffer: Memory, filename: Filename, file_offset: int = 0) -> int:
        """Start to fill `buffer`. 0."""
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(self, buffer: Memory, filename: Filename, file_offset: int = 0) -> int:
        """Start to write `buffer`. 0."""
        return self.pwrite(buffer, filename, False, True, file_offset)

    def sync_pread(self, buffer: Memory, filename: Filename, file_offset: int = 0) -> int:
        """Wait as `wait` does, then fill `buffer`. How many requests have ended: 1 if nothing was under way."""
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: Memory, filename: Filename, file_offset: int = 0) -> int:
        """Wait as `wait` does, then write `buffer`. How many requests have ended: 1 if nothing was under way."""
        return self.pwrite(buffer, filename, False, False, file_offset)

    def pread(self, buffer: Memory, filename: Filename, validate: bool, async_: bool, file_offset: int = 0) -> int:
        """`async_pread` or `sync_pread`."""
        return self._do("read", buffer, filename, validate, async_, file_offset)

    def pwrite(self, buffer: Memory, filename: Filename, validate: bool, async_: bool, file_offset: int = 0) -> int:
        """`async_pwrite` or `sync_pwrite`."""
        return self._do("write", buffer, filename, validate, async_, file_offset)

    def read(self, buffer: Memory, filename: Filename, validate: bool = False, file_offset: int = 0) -> int:
        """Fill `buffer`, beside what is under way. 0."""
        self._start("read", buffer, filename, validate, file_offset).end()
        return 0

    def write(self, buffer: Memory, filename: Filename, validate: bool = False, file_offset: int = 0) -> int:
        """Write `buffer`, beside what is under way. 0."""
        self._start("write", buffer, filename, validate, file_offset).end()
        return 0

    def wait(self) -> int:
        """Wait for all that is under way: how many requests that was, 0 for none.

        Where some have failed, raises the error of the first, after all have ended; nothing is under way then.
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
        """`wait`, and raise what it raises; then join the threads. Idempotent."""
        try:
            self.wait()
        finally:
            self._queue.close()

    def __enter__(self) -> aio_handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._queue.close()

    # -- memory -------------------------------------------------------------------------------------

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """(num_elem,) zeros of the dtype of `example_tensor`, in 2 MiB pages at a multiple of 2 MiB.

        Where CUDA is available the memory is registered with it, so that copies to and from the GPU go at full speed;
        `BudgetError` where CUDA refuses. It lives as long as the tensor or a view of it, whatever becomes of the
        handle. A forked child does not have it.
        """
        if num_elem == 0:
            return torch.empty(0, dtype=example_tensor.dtype)
        memory = aligned_empty(num_elem * example_tensor.element_size())
        torchs = memory[:]  # dies with the tensor; `memory` lives until CUDA has let go of it
        tensor = torch.frombuffer(torchs, dtype=example_tensor.dtype)
        registered = torch.cuda.is_available()
        if registered:
            _register(tensor.data_ptr(), memory.nbytes)
        end = weakref.finalize(torchs, _forget, tensor.data_ptr(), memory, os.getpid() if registered else None)
        end.atexit = False
        _locked[tensor.data_ptr()] = end
        return tensor

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` came from `new_cpu_locked_tensor`, of any handle, and was not freed before.

        CUDA lets go of the memory now, which goes back to the system with the last reference to it.
        """
        end = _locked.get(tensor.data_ptr())
        if end is None:
            return False
        end()
        return True

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether `buffer` lies in a tensor of `new_cpu_locked_tensor` or in memory that torch has pinned."""
        return buffer.untyped_storage().data_ptr() in _locked or buffer.is_pinned()

    # -----------------------------------------------------------------------------------------------

    def _do(
        self, operation: str, buffer: Memory, filename: Filename, validate: bool, asynchronous: bool, offset: int
    ) -> int:
        if asynchronous:
            self._pending.append(self._start(operation, buffer, filename, validate, offset))
            return 0
        before = self.wait()
        self._start(operation, buffer, filename, validate, offset).end()
        return before + 1

    def _start(self, operation: str, buffer: Memory, filename: Filename, validate: bool, offset: int) -> _Request:
        view = _bytes(buffer)
        file = self._open(filename, operation == "write")
        future = (self._queue.write if operation == "write" else self._queue.read)(file, offset, view)
        if not validate:
            file.close()  # the request keeps it open
            return _Request(future, None)
        return _Request(future, lambda: _compare(file, offset, np.frombuffer(view, np.uint8)))

    def _open(self, filename: Filename, write: bool) -> DirectFile:
        """Where this process has no descriptor left, requests under way end first: each holds two."""
        ended = 0
        while True:
            try:
                return _open(filename, write)
            except IoError as error:
                if error.errno != errno.EMFILE or ended == len(self._pending):
                    raise
            with contextlib.suppress(IoError):  # `wait` raises it
                self._pending[ended].future.wait()
            ended += 1


def _open(filename: Filename, write: bool) -> DirectFile:
    if isinstance(filename, int):
        return _Reopened(filename)
    path = os.path.realpath(os.fsdecode(filename))  # a link may be what the caller means; `DirectFile` refuses one
    return DirectFile(path, create=write, writable=write)


def _bytes(buffer: Memory) -> memoryview:
    """The bytes of `buffer`, which they keep alive.

    Not by `Tensor.numpy`: that forbids for ever to resize the storage, which is how some give memory back.
    """
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
    memory = (ctypes.c_ubyte * buffer.nbytes).from_address(buffer.data_ptr())
    vars(memory)["owner"] = buffer
    return memoryview(memory)


def _compare(file: DirectFile, offset: int, expected: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Raise `IoError` where `file` differs from `expected`, (nbytes,) uint8, from byte `offset` on. Closes `file`."""
    found = np.empty(min(expected.nbytes, _VALIDATE_BYTES), np.uint8)
    at = 0
    with file:
        while at < expected.nbytes:
            part = expected[at : at + found.nbytes]
            try:
                count = os.preadv(file.descriptors.buffered, [found.data[: part.nbytes]], offset + at)
            except OSError as error:
                code = error.errno or errno.EIO
                raise IoError(file.path, offset, expected.nbytes, code, "validate") from error
            if count == 0 or not np.array_equal(found[:count], part[:count]):
                raise IoError(file.path, offset, expected.nbytes, errno.EBADMSG, "validate")
            at += count


_locked: dict[int, weakref.finalize[..., memoryview]] = {}
"""By its address, what ends each tensor of `new_cpu_locked_tensor`."""


def _register(address: int, nbytes: int) -> None:
    cudart: Any = torch.cuda.cudart()
    try:
        torch.cuda.check_error(int(cudart.cudaHostRegister(address, nbytes, 0)))
    except RuntimeError as error:
        raise BudgetError(
            f"CUDA cannot pin {format_size(nbytes)} of host memory: {error}; free tensors with "
            f"free_cpu_locked_tensor(), or raise the limit of locked memory (ulimit -l)"
        ) from error


def _forget(address: int, memory: memoryview, registered_by: int | None) -> None:
    """`memory` is an argument so that it is mapped until here."""
    _locked.pop(address, None)
    if registered_by == os.getpid():  # a forked child has neither the memory nor CUDA
        torch.cuda.synchronize()  # a copy that nobody waits for may still be under way
        cudart: Any = torch.cuda.cudart()
        torch.cuda.check_error(int(cudart.cudaHostUnregister(address)))
