"""Machine code of kernels in the user's cache folder, so that only the first run on a machine waits for NVRTC."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from offload.fileio import cache_folder, read_cache, write_cache
from offload.kernels.cuda.nvrtc import Compiler
from offload.records import fields, read, text


def machine_code(compiler: Compiler, name: str, source: str, options: Sequence[str]) -> bytes:
    """Returns a compiled program from the cache. A program that is missing there, or damaged, is compiled and cached.

    Args:
        compiler: NVRTC.
        name: name of the program; part of the cache file's name.
        source: CUDA C++.
        options: options of NVRTC, including the architecture.

    Raises:
        ConfigError: NVRTC refuses the program.
    """
    path = cache_path(compiler.version, name, source, options)
    image = _cached(path)
    if image is None:
        image = compiler.compile(name, source, options)
        _cache(path, image)
    return image


def cache_path(version: str, name: str, source: str, options: Sequence[str]) -> Path:
    """Returns the path of a program's cache file, which depends on NVRTC's version, the source and the options."""
    key = hashlib.sha256(json.dumps([version, source, *options]).encode()).hexdigest()
    return cache_folder() / "kernels" / f"{name}-{key[:32]}.json"


def _cached(path: Path) -> bytes | None:
    """Returns the content of a cache file; None without one, or if it is damaged, or another may have written it."""
    try:
        content = read(read_cache(path), fields({"image": text(), "sha256": text()}))
        image = base64.b64decode(content["image"], validate=True)
        whole = hashlib.sha256(image).hexdigest() == content["sha256"]
    except (OSError, ValueError):
        return None
    return image if whole else None


def _cache(path: Path, image: bytes) -> None:
    """Writes a cache file; does nothing if the folder is not writable or full."""
    content = {"sha256": hashlib.sha256(image).hexdigest(), "image": base64.b64encode(image).decode()}
    try:
        write_cache(path, json.dumps(content))
    except OSError:
        # The home folder is full or read-only. Each run then compiles again, which costs seconds and nothing else.
        return
