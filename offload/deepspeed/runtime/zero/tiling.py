"""`deepspeed.runtime.zero.tiling`: tiled layers."""

from offload.deepspeed.zero import TiledLinear, TiledLinearReturnBias

__all__ = ["TiledLinear", "TiledLinearReturnBias"]
