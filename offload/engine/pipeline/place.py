"""The place of a process in a pipeline, and what a pipeline does not go together with, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from offload.config import Config
from offload.engine.distributed.tensor_parallel import PipelinePlace
from offload.engine.pipeline.stages import PipelineStages
from offload.errors import ConfigError
from offload.layout.pass_order import LAYER_MAJOR


def pipeline_place(model: nn.Module) -> PipelinePlace:
    """Returns the stages of this process; empty ones for a model that is none, and for a pipeline of one process."""
    if not isinstance(model, PipelineStages) or not model.processes:
        return PipelinePlace()
    # The first stage with a tied parameter counts it, as all have the same sum of its gradients.
    elsewhere = tuple(tie.name for tie in model.ties if not tie.counts)
    return PipelinePlace(model.processes, model.num_stages, model.indices, elsewhere)


def stage_sites(model: nn.Module) -> Mapping[str, tuple[int, ...]]:
    """Returns the module of each stage by its name, as modules that are called on their own and need no unit."""
    return {str(index): () for index in model.indices} if isinstance(model, PipelineStages) else {}


def check_pipeline(model: nn.Module, config: Config) -> None:
    """Raises `ConfigError` for what does not go together with stages of a pipeline. Local to this process.

    Args:
        model: The model as the user gives it.
        config: The config.
    """
    if not isinstance(model, PipelineStages):
        return
    refused = (
        (
            config.offload.schedule == LAYER_MAJOR,
            '"schedule": "layer_major", since the schedule of torch orders micro-batches',
            "leave it out",
        ),
        (
            config.torch_autocast.enabled,
            "torch_autocast, since torch infers what stages send each other outside of it",
            'take "bf16", or enter torch.autocast in the forward of each stage',
        ),
        (
            bool(model.ties) and (config.moments != "fp32" or config.offload.master != "fp32"),
            "tied parameters in several stages whose states are rounded stochastically, each stage by its own noise",
            'leave "moments", "master" and bf16_optimizer_states out, or have all uses of a key in one stage',
        ),
        (
            # Blocks of the stages begin at different values, so the codes of copies would differ.
            bool(model.ties) and config.zero_optimization.sends_codes,
            "tied parameters in several stages whose weights or gradients are sent as codes",
            'leave the keys "zero_quantized_..." out, or have all uses of a key in one stage',
        ),
        (
            not any(parameter.requires_grad for parameter in model.parameters()),
            f"a process none of whose parameters train: {_stages(model)}",
            "divide the layers so that each process has some that train",
        ),
    )
    for holds, what, cure in refused:
        if holds:
            raise ConfigError(f"stages of a pipeline do not go together with {what}: {cure}")


def _stages(model: PipelineStages) -> str:
    """Returns the stages of this process as text."""
    return f"it has {'stage' if len(model.indices) == 1 else 'stages'} {', '.join(map(str, model.indices))}"
