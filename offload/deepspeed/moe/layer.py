"""`deepspeed.moe.layer`: its name, whose use is an error."""

from offload.deepspeed.refused import MoE

__all__ = ["MoE"]
