"""Operations of a model's forwards, counted as they run, and the rates of a step: TFLOPS and MFU.

    operations of a step = sum of (2 + share of the module's weights that train) * operations of its forward
    TFLOPS               = operations of a step / its seconds / 1e12
    MFU                  = operations of a step / its seconds / peak of the device

These are model FLOPs as PaLM defines them (arXiv 2204.02311, appendix B): products, convolutions and attention, by the
formulas of `torch.utils.flop_counter`, attention without regard to a causal mask. A backward makes each product once
for the gradient of the input, and once more for that of weights that train. What is computed again in a backward
counts nothing. All numbers are of one rank.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from offload.config.blocks import FlopsProfiler
from offload.fileio import atomic_write
from offload.hardware.gpus import peak_products
from offload.hardware.probe import kept
from offload.layout.units import is_compiled
from offload.notices import show
from offload.sizes import format_count
from offload.torch_internals import TorchDispatchMode, inside_backward, is_fake

# -- counter -------------------------------------------------------------------------------------------

ATTENTION = "_scaled_dot_product_"
"""Start of the names of attention operations that keep no tokens * tokens matrix."""
GROUPED = "::_?grouped_mm(_fallback)?(\\.|$)"
"""Names of the products of groups of rows, each by a matrix of its own: torch's, and transformers' for other inputs."""


def flop_formula(function: Any) -> Callable[..., Any] | None:
    """Returns the formula of an operation's FLOPs, as `torch.utils.flop_counter` has it; None for one without."""
    formula: Callable[..., Any] | None = flop_registry.get(function._overloadpacket)
    if formula is None and ATTENTION in function.name():
        return _attention_flops  # torch has none for the operation on a CPU
    if formula is None and re.search(GROUPED, function.name()):
        return _grouped_flops
    return formula


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> float:
    """Returns the operations of both products of attention, without regard to a causal mask, as torch counts them."""
    *batch, tokens, features = query.shape
    return 2.0 * math.prod(batch) * tokens * key.shape[-2] * (features + value.shape[-1])


def _grouped_flops(rows: torch.Tensor, matrices: torch.Tensor, *_: Any, **__: Any) -> float:
    """Returns the operations of products of groups: a row meets one matrix, whatever the groups are."""
    return 2.0 * rows.numel() * matrices.shape[-1]


class FlopCounter(TorchDispatchMode):
    """Counts the operations of a model's forwards by module, between `install` and `remove`. Changes no result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._inside = threading.local()
        """The names of the modules whose forward runs, on each thread: micro-batches may have threads of their own."""
        self._removers: list[Callable[[], None]] = []
        self.flops: Counter[str] = Counter()
        """Operations of each module's own forwards, without those of modules inside of it."""

    def install(self) -> None:
        """Counts from zero."""
        self.flops.clear()
        for name, module in self._model.named_modules():
            self._hook(name, module)

    def remove(self) -> None:
        """Stops counting, and leaves nothing on the modules. Idempotent."""
        while self._removers:
            self._removers.pop()()

    def _hook(self, name: str, module: nn.Module) -> None:
        def before(called: nn.Module, args: Any) -> None:
            # A forward inside of a backward is a recomputation. A deep copy carries the hooks, but is another module.
            if called is module and not inside_backward():
                if not self._stack:
                    self.__enter__()  # type: ignore[no-untyped-call]
                self._stack.append(name)

        def after(called: nn.Module, args: Any, output: Any) -> None:
            if called is module and self._stack and self._stack[-1] == name:
                self._stack.pop()
                if not self._stack:
                    self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

        self._removers += [
            module.register_forward_pre_hook(before, prepend=True).remove,
            module.register_forward_hook(after, always_call=True).remove,
        ]

    @property
    def _stack(self) -> list[str]:
        if not hasattr(self._inside, "names"):
            self._inside.names = []
        names: list[str] = self._inside.names
        return names

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(is_fake, types)):
            return function(*args, **kwargs)  # nothing is computed
        if any(kind not in (torch.Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # a DTensor, say: its own operations come here, on this rank's part
        out = function(*args, **kwargs)
        formula = flop_formula(function)
        if formula is not None and self._stack:
            self.flops[self._stack[-1]] += formula(*args, **kwargs, out_val=out)
        return out


# -- profile -------------------------------------------------------------------------------------------


class Weights(NamedTuple):
    """The elements of a module's parameters, and how many of them train."""

    numel: int = 0
    trained: int = 0
    tied: int = 0
    """Elements of `numel` that an earlier module has too."""


class Profile(NamedTuple):
    """The operations of a model's forwards by module, with its weights."""

    flops: Mapping[str, float]
    """Operations of each module's own forwards; see `FlopCounter.flops`."""
    weights: Mapping[str, Weights]
    """Parameters of each module, tied ones included, without those of modules inside of it."""

    @property
    def forward(self) -> float:
        """Returns the operations of the forwards."""
        return float(sum(self.flops.values()))

    @property
    def training(self) -> float:
        """Returns the operations of the forwards and of their backwards."""

        def share(name: str) -> float:
            own = self.weights.get(name, Weights())
            # Attention has no weights: both of its factors take a gradient.
            return own.trained / own.numel if own.numel else 1.0

        return float(sum(flops * (2 + share(name)) for name, flops in self.flops.items()))

    def rows(self, depth: int = -1) -> list[tuple[str, int, float]]:
        """Returns name, parameters and forward operations of each module, the modules inside of it included.

        Args:
            depth: Names have at most so many dots plus one; 0 is the model alone, and -1 all modules.
        """
        numel, flops = defaultdict[str, int](int), defaultdict[str, float](float)
        for name in dict.fromkeys((*self.weights, *self.flops)):
            own, parts = self.weights.get(name, Weights()), name.split(".") if name else []
            for stop in range(len(parts) + 1):
                outer = ".".join(parts[:stop])
                numel[outer] += own.numel - own.tied
                flops[outer] += self.flops.get(name, 0)
        names = [name for name in flops if depth < 0 or len(name.split(".") if name else []) <= depth]
        return [(name, numel[name], flops[name]) for name in names]

    def table(self, depth: int = -1, top: int | None = None) -> str:
        """Returns `rows` as lines of text; with `top` those of the modules with the most operations alone."""
        model, *rows = self.rows(depth)
        if top is not None:
            rows = sorted(rows, key=lambda row: -row[2])[:top]
        width = max((len(row[0]) for row in rows), default=0)
        lines = [
            f"  {name:<{width}}  {format_count(numel):>6} parameters  {format_count(round(flops)):>6} flop  "
            f"{flops / (model[2] or 1):>6.1%}"
            for name, numel, flops in rows
        ]
        return "\n".join(lines)


def weights_of(model: nn.Module) -> dict[str, Weights]:
    """Returns the weights of each module by name. A tied parameter belongs to each module that has it."""
    modules: dict[str, Weights] = {}
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module = name.rpartition(".")[0]
        before, numel = modules.get(module, Weights()), parameter.numel()
        tied = numel * (id(parameter) in seen)
        seen.add(id(parameter))
        trained = numel * parameter.requires_grad
        modules[module] = Weights(before.numel + numel, before.trained + trained, before.tied + tied)
    return modules


# -- rates ---------------------------------------------------------------------------------------------


class Peak(NamedTuple):
    """The most operations of a device in a second."""

    flops: float
    source: str


def peak_of(device: torch.device, dtype: str) -> Peak | None:
    """Returns the peak of a device in products of `dtype`; None if nobody knows it.

    That of a GPU is its data sheet's. That of a CPU is what `offload probe` has measured on this machine.
    """
    if device.type == "cpu":
        probed = kept()
        if probed is None or probed.machine["gpu"] or dtype not in probed.rates.by_dtype:
            return None
        return Peak(probed.rates.by_dtype[dtype].matmul, "products that offload probe measured")
    module = torch.get_device_module(device)
    flops = peak_products(str(module.get_device_name(device))) if hasattr(module, "get_device_name") else None
    return None if flops is None or dtype not in flops else Peak(flops[dtype], "the data sheet")


def rates(flops: float, seconds: float, peak: Peak | None) -> dict[str, float]:
    """Returns `tflops` of a step, and `mfu` if the `peak` of the device is known."""
    if seconds <= 0:
        return {}
    return {"tflops": flops / seconds / 1e12} | ({} if peak is None else {"mfu": flops / seconds / peak.flops})


# -- the profile of a step -----------------------------------------------------------------------------

logger = logging.getLogger("offload")


class StepProfiler:
    """Counts one step, prints its table, and gives the rates of this step and of all later ones.

    A later step has as many operations for each of its samples as the counted one.
    """

    def __init__(self, model: nn.Module, settings: FlopsProfiler, peak: Peak | None, samples: int) -> None:
        """Prepares the count; `samples` are those of a step on all ranks."""
        self._model, self._settings, self._peak = model, settings, peak
        self._counter = FlopCounter(model)
        self._samples_a_step, self._samples, self._steps = samples, 0, 0
        self._of_a_sample: float | None = None

    def begin(self) -> None:
        self._begin_step()

    def _begin_step(self) -> None:
        if self._steps + 1 != self._settings.profile_step:
            return
        if any(is_compiled(module) for module in self._model.modules()):
            # torch runs compiled code as it was written while operations are counted, which changes bits.
            logger.warning(
                'flops_profiler counts nothing: blocks are compiled; count once without "compile", or by '
                "deepspeed.profiling.flops_profiler.get_model_profile before initialize"
            )
            self._settings = self._settings.model_copy(update={"profile_step": -1})
            return
        self._counter.install()

    def end_step(self, samples: int, seconds: float) -> dict[str, float]:
        """Ends a step; returns its rates, none before the counted one. `samples` are those of all steps and ranks."""
        self._steps += 1
        # The first step of this process may be any of the run, and a load may go back.
        since = samples - self._samples if self._steps > 1 and samples > self._samples else self._samples_a_step
        self._samples = samples
        if self._steps == self._settings.profile_step:
            self._counter.remove()
            profile = Profile(dict(self._counter.flops), weights_of(self._model))
            self._of_a_sample = profile.training / since
            self._print(profile, seconds)
        self._begin_step()
        if self._of_a_sample is None:
            return {}
        return rates(self._of_a_sample * since, seconds, self._peak)

    def close(self) -> None:
        """Ends a count that is under way. Idempotent."""
        self._counter.remove()

    def _print(self, profile: Profile, seconds: float) -> None:
        block, peak = self._settings, self._peak
        known = "not known" if peak is None else f"{peak.flops / 1e12:.4g} TFLOPS, {peak.source}"
        head = (
            f"operations of step {block.profile_step} of this process, on this rank: "
            f"{format_count(round(profile.forward))} flop in forwards, {format_count(round(profile.training))} flop "
            f"with their backwards, in {seconds:.3f} s; peak of the device: {known}"
        )
        text = f"{head}\n{profile.table(block.module_depth, None if block.detailed else block.top_modules)}"
        if block.output_file is None:
            show(text, logger)
            return
        try:
            atomic_write(Path(block.output_file), f"{text}\n", durable=False)
        except OSError as error:
            logger.warning("the table of operations could not be written to %s: %s", block.output_file, error)
