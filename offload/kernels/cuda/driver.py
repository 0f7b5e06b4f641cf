"""The part of CUDA's driver API that starts kernels, through ctypes, in the context that torch uses.

torch calls the runtime API, which works in the primary context of a device. Memory and streams of torch belong to this
context, so kernels that are loaded into it can use both directly.
"""

from __future__ import annotations

import ctypes
import importlib.util
import struct
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path

from offload.errors import ConfigError

# -- driver --------------------------------------------------------------------------------------------


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
        """Takes the types of the arguments, in the order of the kernel's declaration."""
        self.layout, self.count = struct.Struct("=" + "".join(kinds)), len(kinds)


class Arguments:
    """Arguments of a kernel in memory, with their addresses in the array that a launch takes.

    CUDA copies the arguments during the launch, so they may be set again as soon as the launch returns.
    """

    def __init__(self, signature: Signature) -> None:
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
        """Returns the primary context of a device of torch. Raises `RuntimeError` if the driver refuses."""
        number, handle = c_int(), c_void_p()
        self.call("cuDeviceGet", byref(number), device)
        # Never released: torch keeps its own use of the context for as long as the process runs.
        self.call("cuDevicePrimaryCtxRetain", byref(handle), number.value)
        return Context(self, handle)

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function of the library. Raises `RuntimeError` for a failure, as torch does."""
        result = getattr(self._library, name)(*arguments)
        if result:
            raise RuntimeError(f"{name}: {self._words(result)}")

    def _words(self, result: int) -> str:
        name, text = c_char_p(), c_char_p()
        self._library.cuGetErrorName(result, byref(name))
        self._library.cuGetErrorString(result, byref(text))
        words = (word.value.decode() for word in (name, text) if word.value is not None)
        return f"CUDA error {result} ({': '.join(words) or 'without a name'})"


class Context:
    """A context of one device. `with` makes it current on the calling thread.

    A thread of torch's autograd, or of ours, may have no current context. A new thread reports device 0 without a
    context, and torch does not set device 0 on it, because the device matches already.
    """

    def __init__(self, driver: Driver, handle: c_void_p) -> None:
        self._driver, self._handle = driver, handle

    def __enter__(self) -> None:
        self._driver.call("cuCtxPushCurrent_v2", self._handle)

    def __exit__(self, *_: object) -> None:
        self._driver.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def load(self, image: bytes) -> Module:
        """Loads a cubin, or PTX with its final zero; it stays loaded. Raises `RuntimeError` if the driver refuses."""
        handle = c_void_p()
        with self:
            self._driver.call("cuModuleLoadData", byref(handle), image)
        return Module(self, self._driver, handle)


class Module:
    """A loaded program."""

    def __init__(self, context: Context, driver: Driver, handle: c_void_p) -> None:
        self._context, self._driver, self._handle = context, driver, handle

    def function(self, name: str) -> Function:
        """Returns a kernel of the program, which is declared extern "C"."""
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

        Raises:
            RuntimeError: the driver refuses, or an earlier kernel has failed.
        """
        self._driver.call(
            "cuLaunchKernel", self._handle, blocks, 1, 1, threads, 1, 1, 0, stream, arguments.pointers, None
        )


def load(name: str = "libcuda.so.1") -> Driver:
    """Returns the driver API of libcuda, which NVIDIA's driver installs. Torch has loaded it if there is a device.

    Raises:
        ConfigError: there is no such library.
        RuntimeError: the driver refuses.
    """
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise ConfigError(f"kernels on the GPU need the library of NVIDIA's driver: {error}") from error
    return Driver(library)


# -- nvrtc ---------------------------------------------------------------------------------------------
#
# NVRTC, NVIDIA's compiler as a library, through ctypes: from CUDA source to machine code of one architecture.
#
# torch's wheels for CUDA bring NVRTC as a package of its own, whose folder the system's loader does not search.


_FOLDERS = (("nvidia", "cuda_nvrtc/lib"), ("nvidia", "cu{major}/lib"), ("torch", "lib"))
"""Packages and the library's folder in each: up to CUDA 12, from CUDA 13, and in torch wheels that bring it."""

_TEXT, _SIZE = c_char_p, POINTER(c_size_t)
_NVRTC_SIGNATURES: dict[str, tuple[type, ...]] = {
    "nvrtcVersion": (POINTER(c_int), POINTER(c_int)),
    "nvrtcGetNumSupportedArchs": (POINTER(c_int),),
    "nvrtcGetSupportedArchs": (POINTER(c_int),),
    "nvrtcCreateProgram": (POINTER(c_void_p), _TEXT, _TEXT, c_int, c_void_p, c_void_p),
    "nvrtcDestroyProgram": (POINTER(c_void_p),),
    "nvrtcCompileProgram": (c_void_p, c_int, POINTER(_TEXT)),
    "nvrtcGetProgramLogSize": (c_void_p, _SIZE),
    "nvrtcGetProgramLog": (c_void_p, c_void_p),
    "nvrtcGetCUBINSize": (c_void_p, _SIZE),
    "nvrtcGetCUBIN": (c_void_p, c_void_p),
    "nvrtcGetPTXSize": (c_void_p, _SIZE),
    "nvrtcGetPTX": (c_void_p, c_void_p),
}


class Compiler:
    """One loaded NVRTC."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Declares the functions of NVRTC (CUDA 12 or later), and reads its version and architectures."""
        self._library = library
        for name, types in _NVRTC_SIGNATURES.items():
            function = getattr(library, name, None)
            if function is None:
                raise ConfigError(f"{library._name} has no {name}: kernels on the GPU need NVRTC of CUDA 12 or later")
            function.argtypes, function.restype = types, c_int
        library.nvrtcGetErrorString.argtypes, library.nvrtcGetErrorString.restype = (c_int,), c_char_p
        major, minor, count = c_int(), c_int(), c_int()
        self._call("nvrtcVersion", byref(major), byref(minor))
        self._call("nvrtcGetNumSupportedArchs", byref(count))
        architectures = (c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", architectures)
        self.version = f"{major.value}.{minor.value}"
        """The library's version of CUDA, such as "12.8"."""
        self.architectures = tuple(architectures)
        """Architectures for which the library compiles, such as 90 for compute capability 9.0."""

    def compile(self, name: str, source: str, options: Sequence[str]) -> bytes:
        """Returns a program that the driver loads: a cubin if the architecture in the options is `sm_…`, else PTX."""
        program = c_void_p()
        self._call("nvrtcCreateProgram", byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None)
        try:
            arguments = (c_char_p * len(options))(*(option.encode() for option in options))
            refused = self._library.nvrtcCompileProgram(program, len(options), arguments)
            if refused:
                log = self._result("nvrtcGetProgramLog", program).rstrip(b"\0").decode(errors="replace").strip()
                raise ConfigError(
                    f"NVRTC {self.version} does not compile the kernel {name} ({' '.join(options)}): "
                    f"{self._words(refused)}\n{log}"
                )
            kind = "CUBIN" if any("=sm_" in option for option in options) else "PTX"
            return self._result(f"nvrtcGet{kind}", program)
        finally:
            self._call("nvrtcDestroyProgram", byref(program))

    def _result(self, getter: str, program: c_void_p) -> bytes:
        size = c_size_t()
        self._call(f"{getter}Size", program, byref(size))
        content = ctypes.create_string_buffer(size.value)
        self._call(getter, program, content)
        return content.raw

    def _call(self, name: str, *arguments: object) -> None:
        refused = getattr(self._library, name)(*arguments)
        if refused:
            raise ConfigError(f"NVRTC refuses {name}: {self._words(refused)}")

    def _words(self, result: int) -> str:
        return f"{self._library.nvrtcGetErrorString(result).decode()} (NVRTC error {result})"


def load_nvrtc(cuda: str) -> Compiler:
    """Returns the NVRTC of the CUDA that torch was built for, such as "12.8"."""
    major = cuda.partition(".")[0]
    name = f"libnvrtc.so.{major}"
    for candidate in (*_packaged(major, name), name):
        try:
            # If torch or another package has loaded this library already, the loader returns the loaded library.
            return Compiler(ctypes.CDLL(candidate))
        except OSError:
            continue
    package = f"nvidia-cuda-nvrtc-cu{major}" if int(major) < 13 else f"'nvidia-cuda-nvrtc>={major},<{int(major) + 1}'"
    raise ConfigError(f"kernels on the GPU need {name}, which torch's own wheels bring: pip install {package}")


def target(capability: tuple[int, int], architectures: Sequence[int]) -> str:
    """Returns the architecture to compile for: the device's own, or the nearest lower one."""
    version = capability[0] * 10 + capability[1]
    if version in architectures:
        return f"sm_{version}"
    below = [architecture for architecture in architectures if architecture <= version]
    if not below:
        raise ConfigError(
            f"the GPU has compute capability {capability[0]}.{capability[1]}, and torch's NVRTC compiles for "
            f"{min(architectures) / 10:.1f} or later"
        )
    return f"compute_{max(below)}"


def _packaged(major: str, name: str) -> list[str]:
    paths = []
    for package, folder in _FOLDERS:
        spec = importlib.util.find_spec(package)
        roots = [] if spec is None else spec.submodule_search_locations or []
        paths += [Path(root, folder.format(major=major), name) for root in roots]
    return [str(path) for path in paths if path.is_file()]
