"""`deepspeed.ops`: optimizers, and DeepNVMe's builder."""

from __future__ import annotations

from offload.deepspeed.submodules import submodules

__getattr__ = submodules(__name__, "adagrad", "adam", "lamb", "lion", "op_builder")
