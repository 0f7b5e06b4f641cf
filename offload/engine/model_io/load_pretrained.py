"""`load_pretrained`: a model whose weights lie in a folder's safetensors files until `initialize` reads them.

    folder ──► heads of the files ──► names, shapes, dtypes are compared ──► absent parameters, each with its origin

Everything is compared before anything of the model changes. `initialize` then reads one parameter after the other
straight into its unit, a few megabytes at a time, so that no more than a unit is ever in memory; what the folder has
not is initialized by the model's own modules, from the config's seed. Buffers are read at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.config import load_config
from offload.engine.keywords import refuse
from offload.engine.model_io.from_pretrained import streaming
from offload.engine.model_io.name_mapping import Named, Source, name_tensors
from offload.engine.model_io.safetensors_folder import CONFIG, GENERATION, stored_tensors
from offload.engine.params.deferred_parameter import make_absent
from offload.engine.params.meta_init import deferring_weights
from offload.engine.params.paged_parameter import Paged
from offload.engine.training.snapshot import persistent_buffers
from offload.errors import ConfigError, OffloadError, StoreError, UsageError
from offload.sizes import count_of
from offload.swapper.modes import DTYPES

logger = logging.getLogger("offload")

_SHOWN = 5
_NOT_HERE = ("device_map", "low_cpu_mem_usage", "subfolder", "revision", "quantization_config", "state_dict")
_READABLE = (*DTYPES.values(), torch.float64)


class LoadingInfo(NamedTuple):
    """What of a model and a folder did not fit, by the names of transformers."""

    missing_keys: tuple[str, ...]
    """Of the model, and not in the folder: initialized by the model's modules."""
    unexpected_keys: tuple[str, ...]
    """In the folder, and not of the model: left out."""
    mismatched_keys: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """Of another shape: (name, the folder's shape, the model's); left out, with `ignore_mismatched_sizes`."""


@contextlib.contextmanager
def init(
    config: Any = None,
    *,
    enabled: bool = True,
    config_dict_or_path: Any = None,
    remote_device: Any = None,
    dtype: Any = None,
    data_parallel_group: Any = None,
    mpu: Any = None,
) -> Iterator[None]:
    """Build a model inside without memory for its parameters; `initialize` makes them, unit by unit.

    `config` (or `config_dict_or_path`) is accepted as by `deepspeed.zero.Init` and is read by `initialize`. Where it is
    not `enabled`, nothing is done. The other keywords are DeepSpeed's: None is taken, else `UsageError`. Modules whose
    class has no `reset_parameters` keep the values that their constructor gave them; those of transformers are
    initialized by the model's `_init_weights`. Values that a parameter is given otherwise are kept, in memory: by
    `nn.init`, `load_state_dict`, `module.weight = ...`, or as an argument of its module. `from_pretrained` of
    transformers reads a local folder of safetensors as `load_pretrained` does. Buffers and other tensors are real. It
    may be nested, and counts for its thread. Raises `ConfigError` where a constructor needs values that are not there,
    or changes them.
    """
    refuse(remote_device=remote_device, dtype=dtype, data_parallel_group=data_parallel_group, mpu=mpu)
    if not enabled:
        yield
        return
    given = config if config is not None else config_dict_or_path
    with streaming(lambda cls, folder, **more: load_pretrained(cls, folder, given, **more)), deferring_weights():
        yield


def load_pretrained(
    model_or_class: Any,
    folder: str | os.PathLike[str],
    config: Any = None,
    *,
    model_config: Any = None,
    ignore_mismatched_sizes: bool = False,
    output_loading_info: bool = False,
    **kwargs: Any,
) -> Any:
    """A model with the weights of `folder`, which `initialize` reads, one unit at a time; until then they are absent.

    `model_or_class` is a class of transformers (`AutoModelForCausalLM`, `LlamaForCausalLM`), which is built by the
    folder's config, on meta and in evaluation mode, as `from_pretrained` gives it; or a module, whose own weights are
    let go of where the folder has them. `config` is the one for `initialize`; `model_config` is one of transformers, in
    place of the folder's. `kwargs` go to the config of the model: `attn_implementation="eager"`, `num_labels=3`. With
    `output_loading_info` it returns (model, `LoadingInfo`).

    The folder holds safetensors, one file or several with their index, as `save_pretrained` writes them. What is
    missing is initialized by the model's modules, and named in a warning, as is what the model has not. Raises
    `StoreError` for files and `ConfigError` for what does not fit, before anything of the model is changed.
    """
    path = Path(folder).absolute()
    stored = stored_tensors(path)
    if isinstance(model_or_class, nn.Module):
        if kwargs or model_config is not None:
            raise UsageError(
                f"{next(iter(kwargs), 'model_config')} is for a class that is to be built, and a module was given"
            )
        model = model_or_class
    else:
        model = _build(model_or_class, path, config, model_config, kwargs)
    _check_quantized(model, path)
    if any(isinstance(parameter, Paged) for parameter in model.parameters()):
        raise UsageError("this model is under an engine already; call load_pretrained before initialize")
    names = _names(model)
    named = name_tensors(model, names, stored)
    found, info = _compare(model, names, named, ignore_mismatched_sizes, path)
    _take(model, found)
    _tell(info, path)
    return (model, info) if output_loading_info else model


# -- building -----------------------------------------------------------------------------------------


def _build(model_class: Any, folder: Path, config: Any, theirs: Any, kwargs: dict[str, Any]) -> nn.Module:
    """A model of transformers on meta, by the folder's config."""
    if not (isinstance(model_class, type) and hasattr(model_class, "from_pretrained")):
        raise UsageError(f"load_pretrained expects a class of transformers or a torch.nn.Module, got {model_class!r}")
    if not (folder / CONFIG).is_file():
        raise StoreError(
            f"{folder} holds no config.json, so it does not say what model to build: build it inside of offload.init, "
            f"and give the model"
        )
    if unfit := [name for name in _NOT_HERE if name in kwargs]:
        raise UsageError(
            f"{unfit[0]} is for from_pretrained: load_pretrained reads the files of one folder, and the config of the "
            f"engine says where weights go; leave it out"
        )
    from transformers import AutoConfig, GenerationConfig, PretrainedConfig

    dtype = _dtype(kwargs.pop("dtype", kwargs.pop("torch_dtype", None)))
    if config is not None and dtype is None:
        dtype = DTYPES[load_config(config).dtype]  # what its buffers are made in, as with from_pretrained
    try:
        unused = kwargs
        if not isinstance(theirs, PretrainedConfig):  # a folder or a name, as from_pretrained takes it
            theirs, unused = AutoConfig.from_pretrained(theirs or folder, return_unused_kwargs=True, **kwargs)
        _check_type(model_class, theirs, folder)
        theirs.name_or_path = str(folder)
        make: Any = getattr(model_class, "from_config", None) or getattr(model_class, "_from_config")  # noqa: B009
        with init(config):
            model: Any = make(theirs, **unused, **({} if dtype is None else {"dtype": dtype}))
        if (folder / GENERATION).is_file() and hasattr(model, "generation_config"):
            model.generation_config = GenerationConfig.from_pretrained(folder)
    except OffloadError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        name = getattr(model_class, "__name__", model_class)
        raise ConfigError(f"{name} cannot be built by {folder / CONFIG}: {error}") from error
    built: nn.Module = model.eval()
    return built


def _dtype(given: Any) -> torch.dtype | None:
    """As from_pretrained takes it; "auto" is that of the engine's config here. Raises `UsageError`."""
    if given is None or given == "auto" or isinstance(given, torch.dtype):
        return None if given == "auto" else given
    found = getattr(torch, given, None) if isinstance(given, str) else None
    if not isinstance(found, torch.dtype):
        raise UsageError(f'dtype expects a torch.dtype, its name or "auto", got {given!r}')
    return found


def _check_type(model_class: Any, config: Any, folder: Path) -> None:
    wanted = getattr(getattr(model_class, "config_class", None), "model_type", None)
    if wanted is not None and wanted != config.model_type:
        raise ConfigError(
            f"{folder / CONFIG} is of a {config.model_type} model, and {model_class.__name__} is of {wanted}; "
            f"give the class of the folder's model, or AutoModelForCausalLM and the like"
        )


def _check_quantized(model: nn.Module, folder: Path) -> None:
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        raise ConfigError(
            f"{folder} holds quantized weights, which cannot be trained here; give a folder in bf16, fp16 or fp32"
        )


# -- comparing ----------------------------------------------------------------------------------------


def _names(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, by all their names, and persistent buffers."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **persistent_buffers(model)}


def _compare(
    model: nn.Module, names: Mapping[str, torch.Tensor], named: Named, ignore_sizes: bool, folder: Path
) -> tuple[dict[str, Source], LoadingInfo]:
    """What will be read, one source for each parameter and buffer; raises `ConfigError`."""
    if names and not named.sources:
        raise ConfigError(
            f"no tensor of {folder} has a name of this {type(model).__name__}: it holds "
            f"{', '.join(list(named.unexpected)[:_SHOWN])}, the model has {', '.join(list(names)[:_SHOWN])}"
        )
    mismatched = [
        (name, source.origin.shape, tuple(names[name].shape))
        for name, source in named.sources.items()
        if source.origin.shape != tuple(names[name].shape)
    ]
    if mismatched and not ignore_sizes:
        name, theirs, mine = mismatched[0]
        raise ConfigError(
            f"in {folder} {count_of(len(mismatched), 'tensor has another shape', 'tensors have other shapes')} than in "
            f"the model, the first is {name}: {list(theirs)}, not {list(mine)}; give the config that the folder was "
            f"written with, or say ignore_mismatched_sizes=True to have them initialized anew"
        )
    wrong = {name for name, *_ in mismatched}
    sources: dict[int, tuple[str, Source]] = {}
    for name, source in named.sources.items():
        if name in wrong:
            continue
        _check_dtype(name, names[name], source)
        if id(names[name]) in sources:
            _check_tied(sources[id(names[name])], (name, source))
        else:
            sources[id(names[name])] = (name, source)
    missing = [name for name, tensor in names.items() if id(tensor) not in sources and name not in wrong]
    return dict(sources.values()), LoadingInfo(
        tuple(_without(missing, getattr(model, "_keys_to_ignore_on_load_missing", None))),
        tuple(_without(named.unexpected, _ignored(model))),
        tuple(mismatched),
    )


def _check_dtype(name: str, tensor: torch.Tensor, source: Source) -> None:
    wrong = [dtype for dtype in source.dtypes if tensor.is_floating_point() and dtype not in _READABLE]
    if wrong:
        raise ConfigError(
            f"{name} lies in the folder as {wrong[0]} (quantized?); weights of bf16, fp16, fp32 or fp64 can be read"
        )


def _check_tied(one: tuple[str, Source], other: tuple[str, Source]) -> None:
    """Raise where two tensors of a folder are for one parameter, and differ."""
    for (_, mine), (_, theirs) in zip(one[1].origin.pieces(), other[1].origin.pieces(), strict=True):
        if not torch.equal(mine, theirs):
            raise ConfigError(
                f"{one[0]} and {other[0]} are one parameter of the model, and the folder has other values for the one "
                f"than for the other; build the model untied: tie_word_embeddings=False"
            )


def _ignored(model: nn.Module) -> set[str]:
    """Patterns of names that a folder may have to no effect, as transformers has them."""
    patterns = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()] if hasattr(model, "base_model_prefix") else []
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return patterns


def _without(names: Sequence[str], patterns: Any) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())]


# -- taking over --------------------------------------------------------------------------------------


def _take(model: nn.Module, found: Mapping[str, Source]) -> None:
    """Give each parameter its origin, and each buffer its values."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = persistent_buffers(model)
    values = {name: _whole(found[name], buffer) for name, buffer in buffers.items() if name in found}
    with torch.no_grad():
        for name, value in values.items():
            buffers[name].copy_(value)
    for name, source in found.items():
        if name in parameters:
            make_absent(parameters[name], source.origin)


def _whole(source: Source, like: torch.Tensor) -> torch.Tensor:
    pieces = [values.clone() for _, values in source.origin.pieces()]
    return torch.cat(pieces).view(like.shape) if pieces else torch.empty_like(like)


def _tell(info: LoadingInfo, folder: Path) -> None:
    if info.missing_keys:
        logger.warning(
            "%s not in %s and will be initialized anew: %s",
            count_of(len(info.missing_keys), "weight of the model is", "weights of the model are"),
            folder,
            _brief(info.missing_keys),
        )
    if info.unexpected_keys:
        logger.warning(
            "%s has %s of the model: left out: %s",
            folder,
            count_of(len(info.unexpected_keys), "tensor that is not", "tensors that are not"),
            _brief(info.unexpected_keys),
        )
    if info.mismatched_keys:
        logger.warning(
            "%s has %s than in the model, whose weights will be initialized anew: %s",
            folder,
            count_of(len(info.mismatched_keys), "tensor of another shape", "tensors of other shapes"),
            _brief([f"{name} {list(theirs)} for {list(mine)}" for name, theirs, mine in info.mismatched_keys]),
        )


def _brief(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
