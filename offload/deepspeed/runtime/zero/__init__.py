"""`deepspeed.runtime.zero`, which `deepspeed.zero` is."""

from __future__ import annotations

from offload.deepspeed.submodules import submodules
from offload.deepspeed.zero import *  # noqa: F403
from offload.deepspeed.zero import __all__ as __all__

__getattr__ = submodules(
    __name__, "offload_config", "parameter_offload", "partition_parameters", "stage3", "stage_1_and_2", "tiling"
)
