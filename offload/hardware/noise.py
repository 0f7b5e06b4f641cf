"""Random bytes for measurements of drives."""

from __future__ import annotations

import numpy as np

_NOISE = 1 << 24


def fill_with_noise(buffer: memoryview) -> None:
    """Fills `buffer` with random bytes, which no drive can compress. The bytes are the same in every call."""
    words, noise = np.frombuffer(buffer, dtype=np.uint8), np.random.default_rng(0)
    # In chunks: a call that takes long would delay signals such as Ctrl-C.
    for start in range(0, len(words), _NOISE):
        part = words[start : start + _NOISE]
        part[:] = noise.integers(0, 256, len(part), dtype=np.uint8)
