"""`deepspeed.checkpoint`: what scripts import of it."""

from __future__ import annotations

from offload.deepspeed.refused import DeepSpeedCheckpoint as DeepSpeedCheckpoint
from offload.deepspeed.submodules import submodules

__getattr__ = submodules(__name__, "utils")
