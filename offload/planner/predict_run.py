"""The prediction for a run that is about to start, from the rates that `offload probe` stored for this machine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.config import Config, load_config, resolve_batch
from offload.errors import BudgetError, ConfigError
from offload.hardware.probe import Probed
from offload.layout.memory_plan import division_of
from offload.layout.modes import DTYPES
from offload.layout.pass_order import LAYER_MAJOR, MICRO_BATCH_MAJOR, makes_early_updates, takes_turns
from offload.layout.peak_memory import BesideBudgets
from offload.model_io.places import TensorPlaces
from offload.planner import recommend
from offload.planner.activations import Load, Need, beside, placed, wish_of
from offload.planner.hardware import Hardware, probed
from offload.planner.memory import Room, settle
from offload.planner.model_shape import Shape, from_training, tied_in_pieces
from offload.planner.recommend import Planned
from offload.planner.step_time import chain
from offload.planner.sustained import SustainedSteps
from offload.swapper.memory.device import compute_device
from offload.swapper.memory.limits import free_host_memory


class Step(NamedTuple):
    """A step of a run that is about to start."""

    shape: Shape
    load: Load
    content: Mapping[str, Any]
    """The config."""
    on_cpu: bool
    """True if the CPU computes."""

    @property
    def beside(self) -> dict[str, BesideBudgets]:
        """Returns what the step takes beside both budgets where the CPU computes, with "whole" tables and in "pieces".

        It is empty on a GPU, and does not contain a division for which an explicit budget is too small.
        """
        shapes = {"whole": self.shape, "pieces": self.shape.in_pieces() if self.shape.tables else self.shape}
        work = {}
        for vocabulary, shape in shapes.items() if self.on_cpu else ():
            with suppress(BudgetError):  # the start raises it
                work[vocabulary] = self._beside(shape)
        return work

    @property
    def operations(self) -> float:
        """Returns the operations of the model in the step, as `offload.metrics.flops` counts them."""
        # A use of a layer's first expert has all tokens, each of which visits several experts.
        visits = {unit: layer_experts.per_token for layer_experts in self.shape.experts for unit in layer_experts.units}
        total = 0.0
        for use in self.shape.uses:
            layout = self.shape.layouts[use.unit]
            learning = layout.trainable_stop / layout.used_numel
            total += use.attention * 3 + (use.flops - use.attention) * visits.get(use.unit, 1) * (2 + learning)
        return total * self.load.batch * self.load.accumulation

    def _beside(self, shape: Shape) -> BesideBudgets:
        # The sizes of gradients and layers do not depend on the memory that is free.
        load, weights = self.load, load_config(self.content).zero_optimization.offload_param
        # Where weights move, "auto" is left only if blocks keep their inputs alone.
        known = load.whole_steps and load.schedule == "auto" and weights.device != "none"
        in_turns = takes_turns(LAYER_MAJOR if known else load.schedule, load.accumulation, chain(shape))
        content, count = self.content, load.accumulation
        memory = settle(shape.layouts, content, _UNLIMITED, count, matrices=shape.matrices, in_turns=in_turns)
        wish = wish_of(memory.config)
        if wish.tier not in (None, "device"):
            # Inputs of blocks go to files before memory ends.
            wish = wish._replace(tier="nvme" if memory.config.drives else "device")
        elif load.schedule == "auto" and load.accumulation > 1 and not tied_in_pieces(shape):
            load = load._replace(schedule=LAYER_MAJOR)  # the engine may take it, with the inputs of all micro-batches
        return beside(memory, shape, placed(shape, load, wish, Need(0), bool(memory.config.drives)))


_UNLIMITED = Room(1 << 50, 0, None)


def step_of(
    model: nn.Module,
    content: Mapping[str, Any],
    sequence: int,
    always: Mapping[str, Any],
    recompute: bool = False,
    chunked_loss: bool = False,
) -> Step:
    """Returns the step of a run on one rank. The model must not be under an engine yet, and stays as it is."""
    config = load_config(content)
    batch, on_cpu = resolve_batch(config, 1), compute_device(config.offload.device).type == "cpu"
    division = division_of(config)
    shape = from_training(model, sequence, DTYPES[config.dtype], division, always, config.offload.frozen)
    filed = TensorPlaces(model, quantized=False).frozen(DTYPES[config.dtype], (), ())
    shape = shape._replace(filed=filed)
    schedule = config.offload.schedule
    # Without recomputation, the engine takes "auto" for micro-batch-major. Where all weights stay on the device it
    # learns in the first step whether all activations fit, which the plan knows now.
    moves = config.zero_optimization.offload_param.device != "none"
    if schedule == "auto" and config.activation_tier is None and not recompute and moves:
        schedule = MICRO_BATCH_MAJOR
    load = Load(
        batch.micro,
        batch.accumulation,
        recompute,
        chunked_loss,
        schedule=schedule,
        speculate=makes_early_updates(config.offload.speculate, on_cpu),
    )
    return Step(shape, load, content, on_cpu)


def predict(rates: Probed, step: Step, has_files: bool = False) -> Planned:
    """Returns the plan of a run on one rank.

    A run with existing swap files reuses their space, so that free disk space does not matter.
    """
    machine = _machine(rates, load_config(step.content), has_files)
    return recommend.plan(step.shape, machine, step.load, step.content)


def _machine(rates: Probed, config: Config, has_files: bool) -> Hardware:
    device = compute_device(config.offload.device)
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"the run computes on {device.type}, and runs on cpu and cuda alone are predicted")
    if bool(rates.machine["gpu"]) != (device.type == "cuda"):
        raise ConfigError(
            f"the run computes on {device.type}, and the probe measured another device: run `offload probe --device "
            f"{device.type}`"
        )
    drives = config.drives if config.wants_store else ()
    machine = probed(rates, free_host_memory(), drives, config.dtype, config.torch_autocast.enabled)
    if device.type == "cuda":
        machine = replace(machine, gpu_memory=int(torch.cuda.mem_get_info(device)[0]))
    if has_files:
        machine = replace(machine, drives=tuple(drive._replace(free=None) for drive in machine.drives))
    return machine


def as_step(planned: Planned, resident: int, sustained: SustainedSteps | None = None) -> dict[str, Any]:
    """Returns the prediction of a steady step, under the keys that the log uses.

    `resident` are the bytes of RAM that the process uses now. `sustained` is the step at the rates that drives sustain;
    None if nothing is written.
    """
    timing = planned.timing
    step: dict[str, Any] = {
        "seconds": timing.seconds,
        "tokens": timing.tokens,
        "read_bytes": timing.moved.read,
        "written_bytes": timing.moved.written,
        "host_peak_bytes": resident + planned.host_peak,
    }
    if not planned.hardware.on_cpu:
        step["device_peak_bytes"] = planned.memory.device + planned.activations
    if sustained is not None:
        step["sustained"] = sustained._asdict()
    return {**step, "parts_seconds": timing.parts, "doubts": list(planned.hardware.doubts)}
