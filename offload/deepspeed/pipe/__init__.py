"""`deepspeed.pipe`: names of pipelines, whose use is an error."""

from offload.deepspeed.refused import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
