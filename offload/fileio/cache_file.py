"""Paths of cached measurements and compiled kernels of this machine."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def cache_folder() -> Path:
    """Returns the user's cache folder of this library; it needs not exist."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # the XDG specification says to ignore a relative path
        cache = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "offload"


def cache_file(name: str) -> Path:
    """Returns the path of a JSON file of this machine in the user's cache folder; file and folder need not exist."""
    return cache_folder() / f"{name}-{platform.node() or 'machine'}.json"
