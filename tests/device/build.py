"""Builds the test device's library: once for each torch and each state of its sources, for all processes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "native"
BUILDS = Path(__file__).parents[2] / "build" / "test-device"

_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-parameter")


def library() -> Path:
    """Returns the library, which the first process to ask for it builds in half a minute."""
    folder = BUILDS / _key()
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / "libtestdevice.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            _build(folder, made)
    return made


def _key() -> str:
    parts = [torch.__version__.encode(), " ".join(_FLAGS).encode()]
    for source in sorted(SOURCES.iterdir()):
        parts += [source.name.encode(), source.read_bytes()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _build(folder: Path, made: Path) -> None:
    home = Path(torch.__file__).parent
    compiler = os.environ.get("CXX", "c++")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    include = [f"-isystem{home}/include", f"-isystem{home}/include/torch/csrc/api/include"]

    # One file, since most of the time goes to torch's headers.
    whole = folder / "all.cpp"
    whole.write_text("".join(f'#include "{source}"\n' for source in sorted(SOURCES.glob("*.cpp"))))
    part = made.with_suffix(".part")
    libraries = [f"-L{home}/lib", f"-Wl,-rpath,{home}/lib", "-lc10", "-ltorch", "-ltorch_cpu"]
    _run([compiler, *_FLAGS, abi, *include, "-shared", "-o", str(part), str(whole), *libraries])
    part.rename(made)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    print(library())
