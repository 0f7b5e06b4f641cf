"""Blocks that `torch.compile` compiles, each by itself. Hooks that page weights stay outside of the graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from offload.config import Config
from offload.errors import ConfigError
from offload.layout.experts import find_stacks
from offload.layout.frozen import quantized_by_other_library
from offload.layout.units import blocks_of, is_compiled

_RECORDS_ADDRESSES = ("reduce-overhead", "max-autotune")
"""Values of `mode` with which torch records CUDA graphs."""


def reason_against(model: nn.Module, config: Config) -> str | None:
    """Returns as a clause why the blocks of a model are not compiled; None if they can be."""
    untried = {
        "keep_attention": config.offload.keep_attention,
        "weights in 4 or 8 bits": config.offload.frozen is not None or bool(quantized_by_other_library(model)),
        "experts that are units": bool(find_stacks(model)),
    }
    return next((f"compiled blocks were not tried with {what}" for what, there in untried.items() if there), None)


def compile_blocks(model: nn.Module, config: Config, options: Mapping[str, Any]) -> tuple[nn.Module, ...]:
    """Compiles each block of a model that is not compiled yet, and returns these blocks.

    A graph is one of its shapes alone, unless `options` contains "dynamic". By default torch makes a graph for all
    shapes once it has seen two, which then takes the place of the first. A run that is resumed in between would
    continue with another graph than the unbroken one, and so with other bits.

    Args:
        model: The model; an engine may have it already.
        config: Names further blocks by "units".
        options: Keywords of `torch.compile`.

    Raises:
        ConfigError: If blocks of this model were not tried, or torch would record CUDA graphs. Nothing is compiled.
    """
    reason = reason_against(model, config)
    if reason is not None:
        raise ConfigError(f"{reason}: leave compile out")
    graphs = options.get("mode") in _RECORDS_ADDRESSES or (options.get("options") or {}).get("triton.cudagraphs")
    if graphs:
        raise ConfigError(
            f"compile with mode {options.get('mode')!r} records CUDA graphs, which contain addresses, and weights are "
            'paged; leave "mode" out, or use "max-autotune-no-cudagraphs"'
        )
    blocks = tuple(model.get_submodule(name) for name in blocks_of(model, config.units))
    chosen = tuple(block for block in blocks if not is_compiled(block))
    for block in chosen:
        block.compile(**{"dynamic": False, **options})
    return chosen


@contextmanager
def compiled_blocks(model: nn.Module, config: Config) -> Iterator[None]:
    """Compiles the blocks of a model if the config asks for it, and takes that back if the body raises an error."""
    block = config.compile
    blocks = compile_blocks(model, config, {"backend": block.backend, **block.kwargs}) if block.enabled else ()
    try:
        yield
    except BaseException:
        for module in blocks:
            module._compiled_call_impl = None  # torch has no public way back
        raise
