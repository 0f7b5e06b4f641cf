"""`deepspeed.runtime.sequence_parallel`: names by which scripts share each sequence among ranks."""

from __future__ import annotations

from offload.deepspeed.submodules import submodules

__getattr__ = submodules(__name__, "parallel_state_sp", "ulysses_sp")
