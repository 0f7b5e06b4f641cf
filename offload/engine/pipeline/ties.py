"""Sums of the gradients of parameters that several stages of a pipeline have.

Each stage adds up the gradients of its own uses. Before a step the whole gradients are added up over the stages, so
that all of them update their copy by the same bits. The first stage counts the parameter in the norm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from offload.engine.param_access import ParamAccess
from offload.engine.pipeline.stages import Tie
from offload.states import State


class TiedGradients:
    """The parameters of one process that other stages have too. Belongs to the thread that runs the model."""

    def __init__(self, model: nn.Module, ties: Sequence[Tie], access: ParamAccess) -> None:
        """Stores them.

        Args:
            model: Stages of this process.
            ties: The parameters, in one order on all stages.
            access: Reads and sets gradients.
        """
        self._access = access
        self._tied = [(model.get_parameter(tie.name), tie.group) for tie in ties]

    def add_up(self) -> None:
        """Replaces each gradient by its sum over the stages. Collective, also of the ranks of ZeRO."""
        for parameter, group in self._tied:
            handle = self._access.handle(parameter)
            assert handle is not None, "a parameter of the engine's model"
            mine = self._access.read(handle, State.GRAD)
            # A stage whose uses gave no gradient in this step takes part with zeros, since the others wait for it.
            values = torch.zeros(parameter.shape, dtype=torch.float32, device="cpu") if mine is None else mine.cpu()
            # Of two stages the sum has the same bits in either order; gloo adds up those of more on one, and sends it.
            dist.all_reduce(values, group=group)
            self._access.write(handle, State.GRAD, values)
