"""NVRTC, NVIDIA's compiler as a library, through ctypes: from CUDA source to machine code of one architecture.

torch's wheels for CUDA bring NVRTC as a package of its own, whose folder the system's loader does not search.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path

from offload.errors import ConfigError

_FOLDERS = (("nvidia", "cuda_nvrtc/lib"), ("nvidia", "cu{major}/lib"), ("torch", "lib"))
"""Packages and the library's folder in each: up to CUDA 12, from CUDA 13, and in torch wheels that bring it."""

_TEXT, _SIZE = c_char_p, POINTER(c_size_t)
_SIGNATURES: dict[str, tuple[type, ...]] = {
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
        """Declares the functions that are used, and asks the library for its version and architectures.

        Args:
            library: NVRTC of CUDA 12 or later.

        Raises:
            ConfigError: the library lacks a function, or refuses.
        """
        self._library = library
        for name, types in _SIGNATURES.items():
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
        """Version of CUDA to which the library belongs, such as "12.8"."""
        self.architectures = tuple(architectures)
        """Architectures for which the library compiles, such as 90 for compute capability 9.0."""

    def compile(self, name: str, source: str, options: Sequence[str]) -> bytes:
        """Returns a program that the driver can load: a cubin if the architecture in the options is `sm_…`, else PTX.

        Args:
            name: name of the program, for messages.
            source: CUDA C++.
            options: options of NVRTC, with exactly one --gpu-architecture.

        Raises:
            ConfigError: NVRTC refuses the program; the message contains the compiler's log.
        """
        program = c_void_p()
        self._call("nvrtcCreateProgram", byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None)
        try:
            given = (c_char_p * len(options))(*(option.encode() for option in options))
            refused = self._library.nvrtcCompileProgram(program, len(options), given)
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
        """Returns one result of a program: log, cubin or PTX."""
        size = c_size_t()
        self._call(f"{getter}Size", program, byref(size))
        content = ctypes.create_string_buffer(size.value)
        self._call(getter, program, content)
        return content.raw

    def _call(self, name: str, *arguments: object) -> None:
        """Calls a function of the library. Raises `ConfigError` if the function fails."""
        refused = getattr(self._library, name)(*arguments)
        if refused:
            raise ConfigError(f"NVRTC refuses {name}: {self._words(refused)}")

    def _words(self, result: int) -> str:
        """Returns an error code in words."""
        return f"{self._library.nvrtcGetErrorString(result).decode()} (NVRTC error {result})"


def load(cuda: str) -> Compiler:
    """Returns the NVRTC of the CUDA that torch was built for.

    Args:
        cuda: `torch.version.cuda`, such as "12.8".

    Raises:
        ConfigError: the library is not found, or is too old.
    """
    major = cuda.partition(".")[0]
    name = f"libnvrtc.so.{major}"
    for candidate in (*_packaged(major, name), name):
        try:
            # If torch or another package has loaded this library already, the loader returns that one.
            return Compiler(ctypes.CDLL(candidate))
        except OSError:
            continue
    package = f"nvidia-cuda-nvrtc-cu{major}" if int(major) < 13 else f"'nvidia-cuda-nvrtc>={major},<{int(major) + 1}'"
    raise ConfigError(f"kernels on the GPU need {name}, which torch's own wheels bring: pip install {package}")


def target(capability: tuple[int, int], architectures: Sequence[int]) -> str:
    """Returns the architecture to compile for: the device's own, or the nearest lower one, which the driver translates.

    Args:
        capability: compute capability of the device, such as (9, 0).
        architectures: architectures that NVRTC supports, such as 90.

    Raises:
        ConfigError: NVRTC supports only later architectures.
    """
    wanted = capability[0] * 10 + capability[1]
    if wanted in architectures:
        return f"sm_{wanted}"
    below = [each for each in architectures if each <= wanted]
    if not below:
        raise ConfigError(
            f"the GPU has compute capability {capability[0]}.{capability[1]}, and torch's NVRTC compiles for "
            f"{min(architectures) / 10:.1f} or later"
        )
    return f"compute_{max(below)}"


def _packaged(major: str, name: str) -> list[str]:
    """Returns the paths of the library in the packages from which torch's wheels load it too."""
    found = []
    for package, folder in _FOLDERS:
        spec = importlib.util.find_spec(package)
        roots = [] if spec is None else spec.submodule_search_locations or []
        found += [Path(root, folder.format(major=major), name) for root in roots]
    return [str(path) for path in found if path.is_file()]
