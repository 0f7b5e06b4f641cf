"""The part of CUDA's driver API that starts kernels, through ctypes, in the context that torch uses.

torch calls the runtime API, which works in the primary context of a device. Memory and streams of torch belong to this
context, so kernels that are loaded into it take both as they are.
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_void_p

from offload.errors import ConfigError

ADDRESS, COUNT, FLOAT, INT, WORD = "Q", "Q", "f4x", "i4x", "I4x"
"""Types of arguments, as `struct` packs each into 8 bytes.

Pointer, unsigned long long, float, int and unsigned int of CUDA C++.
"""

_HANDLE = POINTER(c_void_p)
# Every type is declared: ctypes would pass a plain number as a C int, and handles and streams have 64 bits.
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (_HANDLE, c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (_HANDLE,),
    "cuModuleLoadData": (_HANDLE, c_char_p),
    "cuModuleGetFunction": (_HANDLE, c_void_p, c_char_p),
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, _HANDLE, _HANDLE),
}


class Signature:
    """Types of a kernel's arguments."""

    def __init__(self, *kinds: str) -> None:
        """Takes the types of the arguments, in the order in which the kernel declares them."""
        self.layout, self.count = struct.Struct("=" + "".join(kinds)), len(kinds)


class Arguments:
    """Arguments of a kernel in memory, with their addresses in the array that a launch takes.

    CUDA copies the arguments during the launch, so they may be set again as soon as the launch returns.
    """

    def __init__(self, signature: Signature) -> None:
        """Allocates memory for the arguments of a kernel with this signature."""
        self._layout, self._memory = signature.layout, ctypes.create_string_buffer(signature.layout.size)
        first = ctypes.addressof(self._memory)
        self.pointers = (c_void_p * signature.count)(*range(first, first + signature.layout.size, 8))

    def set(self, *values: float) -> None:
        """Sets all arguments; a float is rounded to fp32.

        Raises:
            struct.error: a value does not fit the type of its argument, or the number of values is wrong.
        """
        self._layout.pack_into(self._memory, 0, *values)


class Driver:
    """The loaded libcuda."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Initializes the driver API, which has no effect if torch has initialized it already.

        Raises:
            RuntimeError: the driver refuses.
        """
        self._library = library
        for name, types in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, c_int
        self.call("cuInit", 0)

    def primary_context(self, device: int) -> Context:
        """Returns the primary context of a device.

        Args:
            device: index of the device in torch.

        Raises:
            RuntimeError: the driver refuses.
        """
        number, handle = c_int(), c_void_p()
        self.call("cuDeviceGet", byref(number), device)
        # Never released: torch keeps its own use of the context for as long as the process runs.
        self.call("cuDevicePrimaryCtxRetain", byref(handle), number.value)
        return Context(self, handle)

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function of the library. Raises `RuntimeError` for a failure, as torch does for errors of CUDA."""
        result = getattr(self._library, name)(*arguments)
        if result:
            raise RuntimeError(f"{name}: {self._words(result)}")

    def _words(self, result: int) -> str:
        """Returns an error code in words."""
        name, text = c_char_p(), c_char_p()
        self._library.cuGetErrorName(result, byref(name))
        self._library.cuGetErrorString(result, byref(text))
        words = (each.value.decode() for each in (name, text) if each.value is not None)
        return f"CUDA error {result} ({': '.join(words) or 'without a name'})"


class Context:
    """A context of one device. `with` makes it current on the calling thread.

    A thread of torch's autograd, or of ours, may have no current context: torch sets a thread's device only if the
    thread has another, and a new thread has device 0 but no context.
    """

    def __init__(self, driver: Driver, handle: c_void_p) -> None:
        self._driver, self._handle = driver, handle

    def __enter__(self) -> None:
        self._driver.call("cuCtxPushCurrent_v2", self._handle)

    def __exit__(self, *_: object) -> None:
        self._driver.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def load(self, image: bytes) -> Module:
        """Loads a program, which stays loaded.

        Args:
            image: a cubin, or PTX with its final zero.

        Raises:
            RuntimeError: the driver refuses.
        """
        handle = c_void_p()
        with self:
            self._driver.call("cuModuleLoadData", byref(handle), image)
        return Module(self, self._driver, handle)


class Module:
    """A loaded program."""

    def __init__(self, context: Context, driver: Driver, handle: c_void_p) -> None:
        self._context, self._driver, self._handle = context, driver, handle

    def function(self, name: str) -> Function:
        """Returns a kernel of the program, which is declared extern "C".

        Raises:
            RuntimeError: the program has no such kernel.
        """
        handle = c_void_p()
        with self._context:
            self._driver.call("cuModuleGetFunction", byref(handle), self._handle, name.encode())
        return Function(self._driver, handle)


class Function:
    """A loaded kernel."""

    def __init__(self, driver: Driver, handle: c_void_p) -> None:
        self._driver, self._handle = driver, handle

    def launch(self, *, blocks: int, threads: int, stream: int, arguments: Arguments) -> None:
        """Queues the kernel on a stream. The kernel's context must be current.

        Args:
            blocks: number of blocks.
            threads: number of threads of a block.
            stream: `torch.cuda.Stream.cuda_stream`.
            arguments: values of all arguments, with the kernel's signature.

        Raises:
            RuntimeError: the driver refuses, or an earlier kernel has failed.
        """
        self._driver.call(
            "cuLaunchKernel", self._handle, blocks, 1, 1, threads, 1, 1, 0, stream, arguments.pointers, None
        )


def load(name: str = "libcuda.so.1") -> Driver:
    """Returns the driver API.

    Args:
        name: file name of the library, a part of NVIDIA's driver, which torch has loaded if there is a device.

    Raises:
        ConfigError: there is no such library.
        RuntimeError: the driver refuses.
    """
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise ConfigError(f"kernels on the GPU need the library of NVIDIA's driver: {error}") from error
    return Driver(library)
