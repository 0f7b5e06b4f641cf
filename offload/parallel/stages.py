"""The stages of a pipeline that one process has, as the model of its engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist
from torch import nn

from offload.config import Config
from offload.errors import ConfigError, UsageError
from offload.layout.pass_order import LAYER_MAJOR
from offload.parallel.tensor import PipelinePlace
from offload.sizes import count_of


class Tie(NamedTuple):
    """A parameter of one process that other stages of its pipeline have too."""

    name: str
    """The parameter's name in `PipelineStages`."""
    group: Any
    """Group of the processes of the pipeline that have the parameter, for tensors on the CPU."""
    counts: bool
    """True on the process that counts the parameter in the norm of the gradient."""


class PipelineStages(nn.Module):
    """This process's stages of a pipeline, to give to `offload.initialize` as the model.

    The engine pages the layers of these stages alone. `engine.pipeline_stages()` returns them for a schedule of
    `torch.distributed.pipelining`, and `engine.step()` follows the schedule.

    Attributes:
        num_stages: Number of stages of the whole pipeline.
        group: The process group of the pipeline; None for all processes.
    """

    def __init__(
        self, stages: Mapping[int, nn.Module], num_stages: int, group: Any = None, ties: Sequence[Tie] = ()
    ) -> None:
        """Takes over the modules of the stages.

        Args:
            stages: The module of each stage that this process has, by the number of the stage, from 0. Some schedules
                need one stage per process, and interleaved schedules need several.
            num_stages: Number of stages of the whole pipeline.
            group: The process group of this pipeline, such as `mesh["pp"].get_group()`; None for all processes.
            ties: The parameters that other stages have too, in one order on all processes. Their values must be equal.

        Raises:
            ConfigError: If a number is no stage of the pipeline, or a stage is no module.
        """
        super().__init__()
        if not isinstance(stages, Mapping) or not stages:
            what = f"an empty {type(stages).__name__}" if isinstance(stages, Mapping) else type(stages).__name__
            raise ConfigError(f"PipelineStages expects a dict of modules by the number of their stage, got {what}")
        for index, module in stages.items():
            if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < num_stages:
                raise ConfigError(
                    f"PipelineStages got stage {index!r} of {count_of(num_stages, 'stage')}; expected a number from 0 "
                    f"to {num_stages - 1}"
                )
            if not isinstance(module, nn.Module):
                raise ConfigError(f"stage {index} must be a torch.nn.Module, got {type(module).__name__}")
        self.num_stages, self.group, self.ties = num_stages, group, tuple(ties)
        # By number, so that all processes of a column have their units in one order.
        for index in sorted(stages):
            self.add_module(str(index), stages[index])

    def __getitem__(self, index: int) -> nn.Module:
        """Returns the module of a stage.

        Args:
            index: Number of the stage in the pipeline.

        Raises:
            KeyError: If another process has the stage.
        """
        module = self._modules[str(index)]
        assert module is not None, "added as a module"
        return module

    @property
    def indices(self) -> tuple[int, ...]:
        """Numbers of the stages that this process has, in their order."""
        return tuple(int(name) for name in self._modules)

    @property
    def processes(self) -> tuple[int, ...]:
        """The processes of the pipeline, by their rank among all, in the order of its group; () for one process."""
        if not dist.is_available() or not dist.is_initialized():
            return ()
        group = dist.group.WORLD if self.group is None else self.group
        ranks = tuple(dist.get_process_group_ranks(group))
        return ranks if len(ranks) > 1 else ()

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises `UsageError`: a schedule calls the stages.

        Args:
            *args: Ignored.
            **kwargs: Ignored.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "the stages of a pipeline are called by a schedule, which sends activations on: make one of "
            "torch.distributed.pipelining over engine.pipeline_stages(), and call its step(...), or eval(...)"
        )


# -- place ---------------------------------------------------------------------------------------------
# The place of a process in a pipeline, and a check for settings that pipelines do not support. Nothing is changed.


def pipeline_place(model: nn.Module) -> PipelinePlace:
    """Returns this process's place; an empty one without `PipelineStages`, and for a pipeline of one process."""
    if not isinstance(model, PipelineStages) or not model.processes:
        return PipelinePlace()
    # The first stage with a tied parameter counts it, as all stages have the same sum of its gradients.
    elsewhere = tuple(tie.name for tie in model.ties if not tie.counts)
    return PipelinePlace(model.processes, model.num_stages, model.indices, elsewhere)


def stage_sites(model: nn.Module) -> Mapping[str, tuple[int, ...]]:
    """Returns the module of each stage by its name, as modules that are called on their own and need no unit."""
    return {str(index): () for index in model.indices} if isinstance(model, PipelineStages) else {}


def check_pipeline(model: nn.Module, config: Config) -> None:
    """Raises `ConfigError` for settings that stages of a pipeline do not support. Local to this process."""
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
    return f"it has {'stage' if len(model.indices) == 1 else 'stages'} {', '.join(map(str, model.indices))}"
