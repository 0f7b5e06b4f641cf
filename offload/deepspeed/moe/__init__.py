"""`deepspeed.moe`: experts that are divided over ranks, which are not supported."""

from __future__ import annotations

from offload.deepspeed.submodules import submodules

__getattr__ = submodules(__name__, "layer")
