"""What a model really computes in on this machine: its own forward and backward, timed, in place of the probe's rates.

    the model, or as many of its layers as fit ─► seconds of a micro-batch ─► rates by which a prediction has them

A probe's rates are those of products and sums of one size each. What a model does between its products differs up to
twofold from one to another.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import torch

from offload.errors import ConfigError
from offload.planner.hardware import Hardware
from offload.planner.shape import Shape, config_of, from_name, model_of
from offload.planner.timing import Load, activations, backward, forward
from offload.presets import said
from offload.sizes import format_size

_SHARE = 0.5
"""Of what is free, for the layers that are run and all that they make."""
_PASS_SECONDS = 20.0
"""Of a forward and backward at most, as the probe's rates have it: fewer layers where all would take longer."""
_ENOUGH_SECONDS = 10.0
_PASSES = range(3, 16)
"""The least that are counted, and the most."""


class Run(NamedTuple):
    """What was timed."""

    layers: int
    of: int
    seconds: float
    """Of a forward and backward of one micro-batch: the mean, since a training has slow moments too."""


def measured(hardware: Hardware, shape: Shape, load: Load, dtype: torch.dtype) -> Hardware:
    """The same machine, its rates of compute such that they come to what the model takes on it.

    `shape` is that of a preset or a folder, in `dtype`. Takes up to some minutes, and half of the memory that is free.
    Raises `ConfigError` where not even one layer has room, or the model cannot be run.
    """
    part, run = measure(hardware, shape, load, dtype)
    predicted = compute_seconds(part, hardware, load.batch)
    slower = run.seconds / predicted
    return hardware._replace(
        matmul=hardware.matmul / slower,
        weights=hardware.weights / slower,
        fresh=hardware.fresh / slower,
        elementwise=hardware.elementwise / slower,
        measured=f"forward and backward of a micro-batch with {run.layers} of {run.of} layers, {run.seconds:.3g} s; by "
        f"the probe's rates {predicted:.3g} s",
    )


def compute_seconds(shape: Shape, hardware: Hardware, batch: int) -> float:
    """A forward and backward of the model alone, as rates have it: no gradient is on its way to anywhere."""
    alone = hardware._replace(handed_seconds=0.0)
    first = forward(shape, alone, batch)
    second = backward(first, [0] * len(shape.layouts), alone, recompute=False)
    return sum(each.seconds for each in (*first, *second))


def measure(hardware: Hardware, shape: Shape, load: Load, dtype: torch.dtype) -> tuple[Shape, Run]:
    """Run the model, or so many of its layers as fit: what was run, and what it took."""
    config = config_of(shape.name)
    layers = int(config.get_text_config().num_hidden_layers)
    room = int(_SHARE * (hardware.ram if hardware.on_cpu else hardware.gpu_memory))
    one = shape if layers == 1 else _of(shape, 1, dtype)
    least, most = (
        (_nbytes(each, load.batch, dtype), compute_seconds(each, hardware, load.batch)) for each in (one, shape)
    )
    if least[0] > room:
        raise ConfigError(
            f"one layer of {shape.name} takes {format_size(least[0])} to run, and {format_size(room)} may be taken: "
            f"give a smaller --batch-size or --seq-len, or leave out --measure"
        )
    taken = min(_that_fit(layers, *ends) for ends in zip(least, most, (room, _PASS_SECONDS), strict=True))
    part = shape if taken == layers else _of(shape, taken, dtype)
    device = torch.device("cpu" if hardware.on_cpu else "cuda")
    try:
        seconds = _seconds(config_of(shape.name, taken), load.batch, shape.sequence, dtype, device)
    except Exception as error:  # whatever a model's own code raises
        raise ConfigError(
            f"cannot run {shape.name} to measure it ({type(error).__name__}: {said(error)}); leave out --measure"
        ) from error
    return part, Run(taken, layers, seconds)


def _of(shape: Shape, layers: int, dtype: torch.dtype) -> Shape:
    return from_name(shape.name, shape.sequence, dtype, layers=layers)


def _that_fit(layers: int, one: float, all_of_them: float, room: float) -> int:
    """Of so many equal layers, how many come to at most `room`; one at least."""
    each = (all_of_them - one) / max(layers - 1, 1)
    return layers if all_of_them <= room else max(1, min(layers, 1 + int((room - one) / each)))


def _nbytes(shape: Shape, batch: int, dtype: torch.dtype) -> int:
    """Weights, what a micro-batch keeps and makes, and gradients until they are dropped."""
    largest = max(layout.numel for layout in shape.layouts)
    return (shape.parameters + 2 * largest) * dtype.itemsize + activations(shape, Load(batch))


def _seconds(config: Any, batch: int, sequence: int, dtype: torch.dtype, device: torch.device) -> float:
    """The mean of some passes, after the first one. Gradients are dropped as they come, as paging takes them away."""
    with torch.random.fork_rng():
        with device:
            model = model_of(config, dtype)
        ids = torch.randint(0, config.get_text_config().vocab_size, (batch, sequence), device=device)
        model.train()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_drop)
        taken: list[float] = []
        while len(taken) <= _PASSES[0] or (len(taken) <= _PASSES[-1] and sum(taken) < _ENOUGH_SECONDS):
            start = time.perf_counter()
            model(input_ids=ids, labels=ids).loss.backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # it is what is measured
            taken.append(time.perf_counter() - start)
    return statistics.fmean(taken[1:])


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None
