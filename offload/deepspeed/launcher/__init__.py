"""`deepspeed.launcher`: what libraries import of it; `offload run` and torchrun launch."""

from __future__ import annotations

from offload.deepspeed.submodules import submodules

__getattr__ = submodules(__name__, "runner")
