"""Rates of compute from the model itself: a timed forward and backward replaces the probe's rates.

    the model, or as many of its layers as fit ─► seconds of a micro-batch ─► rates that predict these seconds

A probe measures products and sums of one size each. The work between a model's products differs up to twofold from one
model to another.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from offload.aio import aligned_empty
from offload.errors import ConfigError
from offload.hardware.probe.measure import Tell
from offload.layout.memory_plan import Division
from offload.planner.activations.budgets import activations
from offload.planner.activations.load import Load
from offload.planner.hardware import Hardware, Measured
from offload.planner.model_shape import Shape, config_of, drawn, from_name, model_of
from offload.planner.step_time.passes import forward
from offload.planner.step_time.step_order import backward
from offload.presets import error_message
from offload.sizes import format_size
from offload.swapper.memory.limits import free_host_memory

_SHARE = 0.5
"""Fraction of free memory for the layers that are run and all tensors that they allocate."""
_PASS_SECONDS = 20.0
"""Upper limit of one forward and backward, predicted by the probe's rates. Fewer layers are run if all take longer."""
_ENOUGH_SECONDS = 10.0
"""Measured time after which no further pass starts, once the least number of passes is done."""
_PASSES = range(3, 16)
"""Passes that are counted: the first and the last element are the least and the most."""


def measured(
    hardware: Hardware,
    shape: Shape,
    load: Load,
    dtype: torch.dtype,
    units: Division | Sequence[str] = (),
    tell: Tell = lambda *_: None,
) -> Hardware:
    """Returns `hardware` with rates of compute scaled to the timed model. Takes up to a few minutes.

    Args:
        hardware: this machine, with the probe's rates.
        shape: the shape of a preset or a model folder, in `dtype` and divided into `units`.
        load: the micro-batch to run.
        dtype: dtype of the weights.
        units: the division into units, or names of units; none for the default.
        tell: receives the progress.

    Raises:
        ConfigError: half of the free memory has no room for one layer, or the model cannot be run.
    """
    layers = int(config_of(shape.name).get_text_config().num_hidden_layers)
    part, taken = _that_fits(hardware, shape, layers, load, dtype, units)
    config = config_of(shape.name) if part is shape else config_of(shape.name, taken)
    tell(f"{taken} of {layers} layers of {shape.name}: building them", 0.0)
    try:
        seconds = _seconds(config, load.batch, shape.sequence, dtype, _device(hardware), tell)
    except Exception as error:  # a model's own code may raise any error
        raise ConfigError(
            f"cannot run {shape.name} to measure it ({type(error).__name__}: {error_message(error)}); leave out "
            f"--measure"
        ) from error
    predicted = compute_seconds(part, hardware, load.batch)
    # One factor for all rates of compute: a single time cannot tell products from other work.
    slower = seconds / predicted
    return replace(
        hardware,
        matmul=hardware.matmul / slower,
        weights=hardware.weights / slower,
        fresh=hardware.fresh / slower,
        elementwise=hardware.elementwise / slower,
        measured=Measured(taken, layers, seconds, predicted),
    )


def compute_seconds(shape: Shape, hardware: Hardware, batch: int) -> float:
    """Returns the predicted seconds of a forward and backward of the model alone, without any copy of gradients."""
    alone = replace(hardware, handed_seconds=0.0)
    first = forward(drawn(shape, batch * shape.sequence, 0), alone, Load(batch))
    second = backward(first, [0] * len(shape.layouts), alone, recompute=False)
    return sum(each.seconds for each in first) + sum(use.seconds for use in second)


def _that_fits(
    hardware: Hardware, shape: Shape, layers: int, load: Load, dtype: torch.dtype, units: Division | Sequence[str]
) -> tuple[Shape, int]:
    """Returns the shape to run and its number of layers: `shape` itself if all of it fits, else one of fewer layers."""
    most = (int(_SHARE * _free(hardware)), _PASS_SECONDS)

    def takes(each: Shape) -> tuple[float, float]:
        """Returns the bytes and seconds that a shape needs."""
        return _nbytes(each, load.batch, dtype), compute_seconds(each, hardware, load.batch)

    whole = takes(shape)
    if whole[0] <= most[0] and (whole[1] <= most[1] or layers == 1):
        return shape, layers
    one = _of(shape, 1, dtype, units)
    least = takes(one)
    # A config whose number of layers has no effect cannot be reduced either.
    if one.parameters >= shape.parameters or least[0] > most[0]:
        raise ConfigError(
            f"the smallest part of {shape.name} that can run takes {format_size(int(least[0]))}, and "
            f"{format_size(most[0])} may be used: give a smaller --batch-size or --seq-len, or leave out --measure"
        )
    # Both limits apply, bytes and seconds, each interpolated linearly between one layer and all layers.
    taken = min(_layers_within(layers, *each) for each in zip(least, whole, most, strict=True))
    return (shape, layers) if taken == layers else (_of(shape, taken, dtype, units), taken)


def _of(shape: Shape, layers: int, dtype: torch.dtype, units: Division | Sequence[str]) -> Shape:
    """Returns the shape of the same model reduced to `layers` layers."""
    try:
        return from_name(shape.name, shape.sequence, dtype, units, layers)
    except ConfigError as error:
        raise ConfigError(
            f"{shape.name} is too large to run, and cannot be cut to fewer layers: {error}; leave out --measure"
        ) from error


def _layers_within(layers: int, one: float, all_of_them: float, room: float) -> int:
    """Returns the number of equal layers that need at most `room`, at least one.

    Args:
        layers: layers of the model.
        one: need of the model with one layer, in bytes or seconds.
        all_of_them: need of the model with all layers.
        room: the limit, in the same unit.
    """
    # The difference between the two needs is that of `layers - 1` layers: embedding and head are part of both.
    each = (all_of_them - one) / max(layers - 1, 1)
    if all_of_them <= room or each <= 0:
        return layers
    return max(1, min(layers, 1 + int((room - one) / each)))


def _free(hardware: Hardware) -> int:
    """Returns the free bytes of this machine's device, which may be fewer than those of the planned machine."""
    if hardware.on_cpu:
        return min(hardware.ram, free_host_memory())
    return min(hardware.gpu_memory, torch.cuda.mem_get_info()[0])


def _device(hardware: Hardware) -> torch.device:
    return torch.device("cpu" if hardware.on_cpu else "cuda")


def _nbytes(shape: Shape, batch: int, dtype: torch.dtype) -> int:
    """Returns the bytes of weights, of a micro-batch's activations, and of gradients until they are freed."""
    largest = max(layout.used_numel for layout in shape.layouts)
    return (shape.parameters + 2 * largest) * dtype.itemsize + activations(shape, Load(batch))


def _seconds(
    config: Any, batch: int, sequence: int, dtype: torch.dtype, device: torch.device, tell: Tell = lambda *_: None
) -> float:
    """Returns the mean seconds of several forwards and backwards, after a first one that is not counted.

    Each gradient is freed as soon as autograd has accumulated the gradient, as paging would move the gradient away.

    Args:
        config: the transformers config of the model, which gets random weights.
        batch: sequences of a micro-batch.
        sequence: tokens of a sequence.
        dtype: dtype of the weights.
        device: device that computes.
        tell: receives the progress.
    """
    # The caller may be a test or a notebook: its random state must stay as it is.
    with torch.random.fork_rng():
        with device:
            model = model_of(config, dtype)
        ids = torch.randint(0, config.get_text_config().vocab_size, (batch, sequence), device=device)
        model.train()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_drop)
            if device.type == "cpu":
                parameter.data = _as_in_training(parameter.data)
        taken: list[float] = []
        while len(taken) <= _PASSES[0] or (len(taken) <= _PASSES[-1] and sum(taken) < _ENOUGH_SECONDS):
            tell(f"forward and backward, pass {len(taken) + 1}", _done(taken))
            start = time.perf_counter()
            model(input_ids=ids, labels=ids).loss.backward()
            if device.type == "cuda":
                # Kernels run asynchronously, and their end is measured.
                torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - start)
    # The first pass allocates memory and chooses kernels.
    return statistics.fmean(taken[1:])


def _done(taken: Sequence[float]) -> float:
    """Returns the fraction of all passes that is done, by the limit that is reached first."""
    least = len(taken) / (_PASSES[0] + 1)
    return min(least, max(sum(taken) / _ENOUGH_SECONDS, len(taken) / (_PASSES[-1] + 1)))


def _as_in_training(values: torch.Tensor) -> torch.Tensor:
    """Returns a copy of `values` on 2 MiB pages, as in training: large products run faster from such pages."""
    memory = torch.frombuffer(aligned_empty(values.nbytes), dtype=values.dtype) if values.numel() else values
    return memory.view(values.shape).copy_(values)


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None
