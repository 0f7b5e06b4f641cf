"""`deepspeed.pipe`: models as lists of layers, which a pipeline divides over processes."""

from offload.deepspeed.pipe.module import PipelineModule
from offload.deepspeed.pipe.specs import LayerSpec, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
