"""Rules whose one fused kernel steps element by element in one pass: Adam and AdamW, Adagrad, Lion, SGD.

A unit whose gradient waits on the device is updated by the device's own kernel; all others are updated on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from offload import kernels
from offload.config import OptimizerBlock
from offload.engine.gradients import GradientAccumulator
from offload.engine.optimizer import Rule
from offload.engine.update_strategy import ParameterStep, TileContent, UnitSteps, UnitUpdate, UpdateSetting
from offload.kernels import cuda
from offload.kernels.update import RULES as KERNELS
from offload.layout import optimizer_states
from offload.layout.modes import ADAM, Mode
from offload.states import State
from offload.swapper.memory.device import Device

# -- rules ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FusedRule(Rule):
    """A rule that steps by one kernel."""

    kernel_step: Callable[[Mapping[str, Any], int, float], kernels.Step]
    """Makes the kernel's arguments from a group, the count of the parameter's steps and the gradient's factor."""

    def step(self, parameter: nn.Parameter, group: Mapping[str, Any], count: int, grad_scale: float) -> kernels.Step:
        return self.kernel_step(group, count, grad_scale)

    def strategy(self, setting: UpdateSetting) -> FusedUpdates:
        return FusedUpdates(mode=setting.mode, device=setting.device, gradients=setting.gradients)


class AdamRule(FusedRule):
    """AdamW, and Adam whose decay is added to the gradient."""

    def title(self, group: Mapping[str, Any]) -> str:
        return "AdamW" if group["decoupled"] else "Adam"

    def refused(self, group: Mapping[str, Any]) -> str | None:
        # The kernel's kind of decay was chosen at `initialize`; torch's own key may have been changed since.
        changed = bool(group.get("decoupled_weight_decay", group["decoupled"])) != group["decoupled"]
        return super().refused(group) or ("decoupled_weight_decay" if changed else None)

    def settings(self, block: OptimizerBlock) -> dict[str, Any]:
        """Returns the numbers of a block. DeepSpeed's "Adam" is AdamW too, unless adam_w_mode is false."""
        settings = block.settings
        return {**settings, "decoupled": block.type == "AdamW" or settings["adam_w_mode"]}

    def beside(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
        return {"decoupled": type(optimizer) is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))}


class SGDRule(FusedRule):
    """SGD, with or without momentum."""

    def title(self, group: Mapping[str, Any]) -> str:
        return "SGD"

    def refused(self, group: Mapping[str, Any]) -> str | None:
        lacking = "momentum" not in self.scheduled and group.get("momentum")  # the rule has no state for momentum
        return super().refused(group) or ("momentum" if lacking else None)


def floats(group: Mapping[str, Any], *names: str) -> dict[str, float]:
    """Returns numbers of a group, which may be tensors there, as floats."""
    return {name: float(group[name]) for name in names}


def betas(group: Mapping[str, Any]) -> dict[str, float]:
    """Returns the two betas of a group as the kernels name them."""
    return {name: float(beta) for name, beta in zip(("beta1", "beta2"), group["betas"], strict=True)}


def _adam(group: Mapping[str, Any], count: int, grad_scale: float) -> kernels.Step:
    return kernels.AdamWStep(
        **floats(group, "lr", "eps", "weight_decay"),
        **betas(group),
        step=count,
        grad_scale=grad_scale,
        decoupled=bool(group["decoupled"]),
    )


def _adagrad(group: Mapping[str, Any], count: int, grad_scale: float) -> kernels.Step:
    numbers = floats(group, "lr", "lr_decay", "eps", "weight_decay")
    return kernels.AdagradStep(**numbers, step=count, grad_scale=grad_scale)


def _lion(group: Mapping[str, Any], count: int, grad_scale: float) -> kernels.Step:
    return kernels.LionStep(**floats(group, "lr", "weight_decay"), **betas(group), grad_scale=grad_scale)


def _momentum(group: Mapping[str, Any], count: int, grad_scale: float) -> kernels.Step:
    return kernels.SGDStep(
        **floats(group, "lr", "momentum", "dampening", "weight_decay"),
        nesterov=bool(group["nesterov"]),
        # torch starts the buffer with the first gradient undamped, so the kernel must know the first step.
        first=count == 1,
        grad_scale=grad_scale,
    )


def _sgd(group: Mapping[str, Any], count: int, grad_scale: float) -> kernels.Step:
    return kernels.PlainSGDStep(**floats(group, "lr", "weight_decay"), grad_scale=grad_scale)


FUSED = (
    AdamRule(name=ADAM, scheduled=("lr", "betas", "eps", "weight_decay"), flags=("decoupled",), kernel_step=_adam),
    FusedRule(name="adagrad", scheduled=("lr", "eps", "weight_decay"), fixed=("lr_decay",), kernel_step=_adagrad),
    FusedRule(name="lion", scheduled=("lr", "betas", "weight_decay"), kernel_step=_lion),
    SGDRule(
        name="momentum",
        scheduled=("lr", "momentum", "weight_decay"),
        fixed=("dampening",),
        flags=("nesterov",),
        kernel_step=_momentum,
    ),
    SGDRule(name="sgd", scheduled=("lr", "weight_decay"), kernel_step=_sgd),
)
"""Rules of one kernel."""

# -- tiles ---------------------------------------------------------------------------------------------


def partition_of(mode: Mode, states: Mapping[State, torch.Tensor], gradient: torch.Tensor) -> kernels.Partition:
    """Returns states and gradient of some elements, (n,) each, in the form that the kernels take."""
    # Both forms of a master may be absent: in fp32 the weight is the master.
    scales = states.get(State.SCALES)
    return kernels.Partition(
        states[State.WEIGHT],
        gradient,
        tuple(states[moment] for moment in mode.moments),
        states.get(State.MASTER_LOW_BITS),
        states.get(State.MASTER),
        # The scales of a tile fill whole pages.
        None if scales is None else optimizer_states.scales_of(mode, scales, len(gradient)),
    )


def segments_in(update: UnitUpdate, tile: TileContent) -> list[tuple[int, ParameterStep]]:
    """Returns the segments of the update that overlap the tile: number in the update, and elements in the tile."""
    return [
        (number, segment.within(tile.start, tile.stop))
        for number, segment in enumerate(update.segments)
        if segment.start < tile.stop and segment.stop > tile.start
    ]


def with_steps(update: UnitUpdate, step: Callable[[ParameterStep], Any]) -> UnitUpdate:
    """Returns the update with other arguments of the step of each segment."""
    return replace(update, segments=tuple(segment._replace(step=step(segment)) for segment in update.segments))


def kernel_segments(update: UnitUpdate, tile: TileContent) -> list[kernels.Segment]:
    """Returns the segments of the update that overlap the tile and that a kernel steps, in its form."""
    return [
        kernels.Segment(segment.start, segment.stop, segment.step, segment.noise, tile.kept.get(segment.parameter))
        for _, segment in segments_in(update, tile)
        if type(segment.step) in KERNELS
    ]


class InOnePass:
    """Steps of one unit in one pass, over copies of the states in tiles that the update worker chooses."""

    passes = 1
    in_place = False
    cuts: Sequence[range] = ()
    drafts: Sequence[State] = ()


class Undivided:
    """A strategy whose updates write weights and moments at once."""

    def begin_part(self, update: UnitUpdate, writes: kernels.Writes) -> UnitSteps | None:
        return None


class FusedUpdates:
    """Strategy of every rule whose kernel needs one pass."""

    def __init__(self, *, mode: Mode, device: Device, gradients: GradientAccumulator) -> None:
        self._mode, self._device, self._gradients = mode, device, gradients

    def part(self, unit: int, state: State, start: int, stop: int) -> range:
        return self._mode.padded_part(state, start, stop)

    def begin(self, update: UnitUpdate, tile_numel: int) -> UnitSteps:
        return _FusedSteps(update, self._mode, self._device if self._gradients.stays(update.unit) else None)

    def begin_part(self, update: UnitUpdate, writes: kernels.Writes) -> UnitSteps | None:
        divides = all(kernels.has_two_passes(segment.step) for segment in update.segments)
        return _FusedSteps(update, self._mode, None, writes) if divides else None


class _FusedSteps(InOnePass):
    """Steps of one unit by a kernel: on the host, or with a `device` there, in the memory of the unit's states."""

    def __init__(
        self, update: UnitUpdate, mode: Mode, device: Device | None, writes: kernels.Writes = kernels.Writes.ALL
    ) -> None:
        self._update, self._mode, self._device, self._writes = update, mode, device, writes
        self.in_place = device is not None

    def run(self, tile: TileContent, last: bool) -> None:
        segments = kernel_segments(self._update, tile)
        if not segments:
            return
        assert tile.gradient is not None
        partition = partition_of(self._mode, tile.states, tile.gradient)
        if self._device is None:
            kernels.update(partition, segments, self._writes)
            return
        # No event has to precede the kernel. The norm is known, so the gradient is complete; every reader of the unit
        # waits for its update. The update stream is not the one of compute, so the next forward overlaps with the
        # update. The CPU as a compute device has no such stream and runs the host's kernel.
        with self._device.updating():
            (cuda.update if partition.weight.is_cuda else kernels.update)(partition, segments)
            done = self._device.updated()
        done.wait()  # blocks this thread alone
