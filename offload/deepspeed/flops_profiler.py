"""`deepspeed.profiling.flops_profiler`: operations of a model's forward by module, by `offload.metrics.flops`.

Operations are those of products, convolutions and attention, as `torch.utils.flop_counter` counts them; DeepSpeed adds
those of norms and activations.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.engine.engine import ModelEngine
from offload.errors import UsageError
from offload.fileio import atomic_write
from offload.metrics.flops import FlopCounter, Profile, weights_of
from offload.sizes import format_count

__all__ = ["FlopsProfiler", "get_model_profile"]


class FlopsProfiler:
    """Counts the forwards of a model between `start_profile` and `stop_profile`."""

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        """Prepares the count; `ds_engine` and `recompute_fwd_factor` have no effect."""
        self.model: nn.Module = model.module if isinstance(model, ModelEngine) else model
        self._counter = FlopCounter(self.model)
        self._since = self._seconds = 0.0

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Counts from zero.

        Raises:
            UsageError: if `ignore_list` names classes: every module is counted.
        """
        if ignore_list:
            raise UsageError(
                "start_profile(ignore_list=...) is not supported: every module is counted; leave it out, and read the "
                "modules that you want in the table"
            )
        self.end_profile()
        self._counter.install()
        self._since = time.perf_counter()

    def stop_profile(self) -> None:
        """Stops counting; the counts stay."""
        self._seconds = self.get_total_duration()
        self._since = 0.0
        self._counter.remove()

    def reset_profile(self) -> None:
        """Counts from zero, if a count is under way."""
        self._counter.flops.clear()
        self._seconds = 0.0
        self._since = time.perf_counter() if self._since else 0.0

    def end_profile(self) -> None:
        """Stops counting, and drops the counts."""
        self.stop_profile()
        self.reset_profile()

    @property
    def profile(self) -> Profile:
        return Profile(dict(self._counter.flops), weights_of(self.model))

    def get_total_flops(self, as_string: bool = False) -> float | str:
        """Returns the operations of the forwards so far."""
        return _shown(self.profile.forward, "FLOPs") if as_string else self.profile.forward

    def get_total_macs(self, as_string: bool = False) -> float | str:
        """Returns the multiply-accumulate operations of the forwards so far: half of all."""
        macs = self.profile.forward / 2
        return _shown(macs, "MACs") if as_string else macs

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Returns the parameters of the model; a tied one counts once."""
        numel = sum(weights.numel for weights in self.profile.weights.values())
        return _shown(numel, "") if as_string else numel

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Returns the seconds since `start_profile`, up to `stop_profile`; work of the user in between included."""
        seconds = self._seconds + (time.perf_counter() - self._since if self._since else 0.0)
        return f"{seconds:.2f} s" if as_string else seconds

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Prints the counts by module, to stdout or into `output_file`.

        Args:
            profile_step: number of the step in the heading.
            module_depth: depth of the modules in the table; -1 for all.
            top_modules: with `detailed` False the modules in the table, those with the most operations.
            detailed: whether the table has each module.
            output_file: file to write; None for stdout.
        """
        text = (
            f"operations of step {profile_step}: {self.get_total_flops(True)} in forwards, "
            f"{self.get_total_params(True)} parameters, {self.get_total_duration(True)}\n"
            f"{self.profile.table(module_depth, None if detailed else top_modules)}"
        )
        if output_file:
            atomic_write(Path(output_file), f"{text}\n", durable=False)
        else:
            print(text, flush=True)


def _shown(number: float, unit: str) -> str:
    return f"{format_count(round(number))} {unit}".rstrip()


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Returns the operations, the multiply-accumulate operations and the parameters of a model's forward.

    The model stays in evaluation mode, as with DeepSpeed.

    Args:
        model: the model, under an engine or not.
        input_shape: shape of one positional argument of ones, in place of `args`.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        print_profile: whether the table is printed; the next three and `output_file` are of `print_model_profile`.
        detailed: as there.
        module_depth: as there.
        top_modules: as there.
        warm_up: forwards before the one that is counted.
        as_string: whether the numbers are texts such as "14.2M FLOPs".
        output_file: as there.
        ignore_modules: must be None: every module is counted.
        mode: "forward", or "generate" for `model.generate`.

    Raises:
        UsageError: if there are no arguments, or `mode` or `ignore_modules` is not supported.
    """
    if mode not in ("forward", "generate"):
        raise UsageError(f'get_model_profile expects mode "forward" or "generate", got {mode!r}; give one of them')
    if input_shape is not None:
        like = next(model.parameters(), torch.empty(0))
        args = [torch.ones(input_shape, dtype=like.dtype, device=like.device)]
    if not args and not kwargs:
        raise UsageError("get_model_profile expects input_shape, args or kwargs; give the input of one forward")
    profiler = FlopsProfiler(model)
    model.eval()
    call: Any = model if mode == "forward" else model.generate
    for _ in range(warm_up):
        call(*args, **(kwargs or {}))
    profiler.start_profile(ignore_modules)
    try:
        call(*args, **(kwargs or {}))
        if print_profile:
            profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
        numbers = (profiler.get_total_flops, profiler.get_total_macs, profiler.get_total_params)
        flops, macs, params = (number(as_string) for number in numbers)
    finally:
        profiler.end_profile()
    return flops, macs, params
