"""A libcuda and a libnvrtc of our own, built once for a process: kernels run as C++, at once, on memory of the CPU."""

from __future__ import annotations

import atexit
import ctypes
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from offload.kernels.cuda import driver
from offload.kernels.cuda import driver as nvrtc
from offload.kernels.cuda.kernels import Kernels

SOURCES = Path(__file__).parents[1] / "fake_cuda"
COMPILER = shutil.which("g++") or shutil.which("c++")


@dataclass(frozen=True, kw_only=True)
class FakeCuda:
    libcuda: Path
    libnvrtc: Path

    def kernels(self, *, device: int = 0, capability: tuple[int, int] = (9, 0)) -> Kernels:
        """The kernels of a device, through the real ctypes layer."""
        context = driver.load(str(self.libcuda)).primary_context(device)
        return Kernels(context=context, compiler=self.compiler(), capability=capability)

    def compiler(self) -> nvrtc.Compiler:
        return nvrtc.Compiler(ctypes.CDLL(str(self.libnvrtc)))

    def calls(self) -> list[str]:
        """The calls of the driver since the last time."""
        recorded = ctypes.CDLL(str(self.libcuda)).fake_calls
        recorded.restype = ctypes.c_char_p
        return recorded().decode().splitlines()

    def launches(self) -> list[tuple[int, int, int]]:
        """Blocks, threads and stream of each launch since the last time."""
        rows = (line.split()[1:] for line in self.calls() if line.startswith("cuLaunchKernel"))
        return [(int(blocks), int(threads), int(stream, 16)) for blocks, threads, stream in rows]

    def refuse(self, name: str, result: int) -> None:
        """Lets a function of the driver fail from now on; none, with an empty name."""
        ctypes.CDLL(str(self.libcuda)).fake_refuse(name.encode(), result)

    def compilations(self) -> list[str]:
        """The options of each compilation of this process."""
        recorded = ctypes.CDLL(str(self.libnvrtc)).fake_compilations
        recorded.restype = ctypes.c_char_p
        return recorded().decode().splitlines()


@cache
def fake_cuda() -> FakeCuda:
    """The two libraries, of a CUDA 99, so that they are never taken for real ones."""
    assert COMPILER is not None
    folder = Path(tempfile.mkdtemp(prefix="fake-cuda-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    found = FakeCuda(libcuda=folder / "libcuda.so.99", libnvrtc=folder / "libnvrtc.so.99")
    defines = f'-DCOMPILER="{COMPILER}"', f'-DHEADER="{SOURCES / "emulated.h"}"'
    for source, library in (("libcuda.cpp", found.libcuda), ("libnvrtc.cpp", found.libnvrtc)):
        flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
        subprocess.run([COMPILER, *flags, *defines, str(SOURCES / source), "-o", str(library), "-ldl"], check=True)
    return found
