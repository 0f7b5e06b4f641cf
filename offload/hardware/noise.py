"""Bytes that no drive can compress."""

from __future__ import annotations

import numpy as np

_NOISE = 1 << 24


def fill_with_noise(buffer: memoryview) -> None:
    """Bytes that no drive can compress."""
    words, noise = np.frombuffer(buffer, dtype=np.uint8), np.random.default_rng(0)
    for start in range(0, len(words), _NOISE):  # no call takes long, so that a signal is obeyed between them
        part = words[start : start + _NOISE]
        part[:] = noise.integers(0, 256, len(part), dtype=np.uint8)
