"""Train PyTorch models larger than the GPU and larger than the RAM, from NVMe."""

from __future__ import annotations

__version__ = "0.1.0"
