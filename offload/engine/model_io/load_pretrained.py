"""`init` and `load_pretrained`: models without weights in memory, which `initialize` fills unit by unit.

    folder ──► headers of the files ──► names, shapes, dtypes are compared ──► deferred parameters, each with its origin

Everything is compared before anything of the model changes. `initialize` then reads one parameter after the other
directly into its unit, a megabyte at a time, so that never more than a unit is in memory. (The tensors of a conversion,
see `name_mapping`, are read whole.) Parameters that the folder does not contain are initialized by the model's own
modules, from the config's seed. Buffers are read immediately.
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
from offload.engine.model_io.name_mapping import Named, Source, name_tensors, same_values
from offload.engine.model_io.quantized.of_bitsandbytes import build_layers
from offload.engine.model_io.safetensors_folder import CONFIG, GENERATION, stored_tensors
from offload.engine.params.deferred_parameter import make_deferred
from offload.engine.params.meta_init import deferring_weights
from offload.engine.params.paged_parameter import PagedParameter
from offload.engine.training.snapshot import persistent_buffers
from offload.errors import ConfigError, OffloadError, StoreError, UsageError
from offload.layout.modes import DTYPES
from offload.sizes import count_of

logger = logging.getLogger("offload")

_SHOWN = 5
_NOT_HERE = ("device_map", "low_cpu_mem_usage", "subfolder", "revision", "quantization_config", "state_dict")
_READABLE = (*DTYPES.values(), torch.float64)


class LoadingInfo(NamedTuple):
    """Names that did not match between a model and a folder, under the keys of transformers."""

    missing_keys: tuple[str, ...]
    """Names of the model that the folder does not contain; initialized by the model's modules."""
    unexpected_keys: tuple[str, ...]
    """Names in the folder that the model does not contain; ignored."""
    mismatched_keys: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """(name, shape in the folder, shape in the model) of ignored tensors; only with `ignore_mismatched_sizes`."""


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
    """Builds a model whose parameters have no memory until `initialize` makes them real, unit by unit.

    Use as a context around the model's constructor. Affects the calling thread only, and may be nested. Buffers and
    other tensors are real.

    Modules whose class has no `reset_parameters` keep the values from their constructor. Modules of transformers are
    initialized by the model's `_init_weights`. Such a method may also write parameters of modules below its own, and is
    called once more for each unit that it writes. A parameter keeps its values, in memory, if other code sets them: by
    `nn.init`, `load_state_dict`, `module.weight = ...`, `model.apply(function)`, or as an argument of its module.
    `from_pretrained` of
    transformers reads a local folder of safetensors as `load_pretrained` does.

    Args:
        config: Config that `initialize` will receive, as `deepspeed.zero.Init` accepts it; optional. Only
            `from_pretrained` uses it, for the dtype of buffers.
        enabled: False to do nothing.
        config_dict_or_path: Another name of `config`.
        remote_device: For compatibility; must be None.
        dtype: For compatibility; must be None.
        data_parallel_group: For compatibility; must be None.
        mpu: For compatibility; must be None.

    Returns:
        A context for a `with` statement.

    Raises:
        ConfigError: If a constructor needs values that do not exist yet, or changes them.
        UsageError: If one of the compatibility keywords is not None.
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
    """Returns a model whose weights `initialize` will read from `folder`, one unit at a time.

    Until `initialize` the parameters have no values and no memory. The folder contains safetensors as `save_pretrained`
    writes them, in one file or in several with an index. Parameters that are missing in the folder are initialized by
    the model's modules. A warning names them, and names tensors of the folder that the model does not contain.

    Args:
        model_or_class: A class of transformers (`AutoModelForCausalLM`, `LlamaForCausalLM`) or a module. A model of the
            class is built from the folder's config, on the meta device and, as by `from_pretrained`, in evaluation
            mode. A module drops those of its weights that the folder contains.
        folder: Local folder of the weights, or one safetensors file; a class needs a config beside the file.
        config: Config that `initialize` will receive; its dtype becomes that of the buffers of a model built here.
        model_config: Config of transformers, in place of the folder's.
        ignore_mismatched_sizes: True to initialize parameters whose shape differs in the folder.
        output_loading_info: True to return (model, `LoadingInfo`).
        **kwargs: Passed to the config of the model: `attn_implementation="eager"`, `num_labels=3`.

    Raises:
        StoreError: If files are missing or damaged.
        IoError: If a file cannot be read.
        ConfigError: If model and folder do not fit each other.
        UsageError: If an argument is not valid. All errors are raised before anything of the model changes.
    """
    path = Path(folder).absolute()
    # The headers are read first: a wrong folder is reported before a model is built.
    stored = stored_tensors(path)
    if isinstance(model_or_class, nn.Module):
        if kwargs or model_config is not None:
            raise UsageError(
                f"{next(iter(kwargs), 'model_config')} configures a class that load_pretrained builds, but a module "
                "was given; leave this argument out"
            )
        model = model_or_class
    else:
        model = _build(model_or_class, path if path.is_dir() else path.parent, config, model_config, kwargs)
    taken = build_layers(model, path, stored, built=model is not model_or_class)
    if any(isinstance(parameter, PagedParameter) for parameter in model.parameters()):
        raise UsageError("this model is under an engine already; call load_pretrained before initialize")
    # From here to `_take` the model is only read.
    names = {name: tensor for name, tensor in _names(model).items() if name not in taken}
    named = name_tensors(model, names, {name: stored[name] for name in stored if name not in taken})
    found, info = _compare(model, names, named, ignore_mismatched_sizes, path)
    _take(model, found)
    _tell(info, path)
    return (model, info) if output_loading_info else model


# -- building -----------------------------------------------------------------------------------------


def _build(model_class: Any, folder: Path, config: Any, theirs: Any, kwargs: dict[str, Any]) -> nn.Module:
    """Builds a model of transformers on the meta device.

    Args:
        model_class: A class of transformers.
        folder: Contains the config.
        config: Config for `initialize`; None if it is not known yet.
        theirs: Config of transformers in place of the folder's, or None.
        kwargs: Passed to the config of the model.
    """
    if not (isinstance(model_class, type) and hasattr(model_class, "from_pretrained")):
        raise UsageError(f"load_pretrained expects a class of transformers or a torch.nn.Module, got {model_class!r}")
    if not (folder / CONFIG).is_file():
        raise StoreError(
            f"{folder} contains no config.json, which names the model to build: build the model inside of "
            "offload.init, and give the module"
        )
    if unfit := [name for name in _NOT_HERE if name in kwargs]:
        raise UsageError(
            f"{unfit[0]} is for from_pretrained: load_pretrained reads the files of one folder, and the config of the "
            "engine places the weights; leave this argument out"
        )
    from transformers import AutoConfig, GenerationConfig, PretrainedConfig

    dtype = _dtype(kwargs.pop("dtype", kwargs.pop("torch_dtype", None)))
    if config is not None and dtype is None:
        dtype = DTYPES[load_config(config).dtype]  # for the model's buffers, as with from_pretrained
    try:
        unused = kwargs
        if not isinstance(theirs, PretrainedConfig):  # a folder or a name, as from_pretrained takes it
            theirs, unused = AutoConfig.from_pretrained(theirs or folder, return_unused_kwargs=True, **kwargs)
        _check_type(model_class, theirs, folder)
        # As from_pretrained sets it.
        theirs.name_or_path = str(folder)
        # Classes such as AutoModelForCausalLM have the public method, model classes the private one.
        make: Any = getattr(model_class, "from_config", None) or getattr(model_class, "_from_config")  # noqa: B009
        with init(config):
            model: Any = make(theirs, **unused, **({} if dtype is None else {"dtype": dtype}))
        if (folder / GENERATION).is_file() and hasattr(model, "generation_config"):
            model.generation_config = GenerationConfig.from_pretrained(folder)
    # Errors of this library carry their own advice and are not wrapped below.
    except OffloadError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        name = getattr(model_class, "__name__", model_class)
        raise ConfigError(f"{name} cannot be built from {folder / CONFIG}: {error}") from error
    built: nn.Module = model.eval()
    return built


def _dtype(given: Any) -> torch.dtype | None:
    """Returns the dtype that a user gives as for `from_pretrained`; None for None and "auto". Raises `UsageError`."""
    if given is None or given == "auto" or isinstance(given, torch.dtype):
        # With None `_build` takes the dtype of the engine's config, if that was given.
        return None if given == "auto" else given
    found = getattr(torch, given, None) if isinstance(given, str) else None
    if not isinstance(found, torch.dtype):
        raise UsageError(f'dtype expects a torch.dtype, its name or "auto", got {given!r}')
    return found


def _check_type(model_class: Any, config: Any, folder: Path) -> None:
    """Raises `ConfigError` if the config describes another kind of model than the class builds."""
    wanted = getattr(getattr(model_class, "config_class", None), "model_type", None)
    if wanted is not None and wanted != config.model_type:
        raise ConfigError(
            f"{folder / CONFIG} describes a {config.model_type} model, but {model_class.__name__} takes {wanted}; "
            "give the class of the folder's model, or AutoModelForCausalLM and the like"
        )


# -- comparing ----------------------------------------------------------------------------------------


def _names(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters, by all their names, and persistent buffers."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **persistent_buffers(model)}


def _compare(
    model: nn.Module, names: Mapping[str, torch.Tensor], named: Named, ignore_sizes: bool, folder: Path
) -> tuple[dict[str, Source], LoadingInfo]:
    """Matches the tensors of a folder with those of a model.

    Args:
        model: The model.
        names: Its parameters and buffers by all their names.
        named: Tensors of the folder by the model's names.
        ignore_sizes: True to leave out tensors of another shape.
        folder: Folder of the tensors, for messages.

    Returns:
        One source for each parameter and buffer that will be read, by the first of its names that the folder contains,
        and the names that did not match.

    Raises:
        ConfigError: If nothing matches, or shapes, dtypes or tied values differ.
    """
    if names and not named.sources:
        raise ConfigError(
            f"no tensor of {folder} belongs to this {type(model).__name__}: the folder contains "
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
            f"in {folder} {count_of(len(mismatched), 'tensor has another shape', 'tensors have other shapes')} than "
            f"in the model, the first is {name}: {list(theirs)}, not {list(mine)}; give the config that the folder "
            "was written with, or pass ignore_mismatched_sizes=True to initialize them anew"
        )
    # With `ignore_sizes` such parameters get no source, so that they are initialized like missing ones.
    wrong = {name for name, *_ in mismatched}
    sources: dict[int, tuple[str, Source]] = {}
    for name, source in named.sources.items():
        if name in wrong:
            continue
        _check_dtype(name, names[name], source)
        # A tied parameter is one object with several names, and the folder may contain more than one of them.
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
    """Raises `ConfigError` if a weight is stored in a dtype that cannot be read."""
    wrong = [dtype for dtype in source.dtypes if tensor.is_floating_point() and dtype not in _READABLE]
    if wrong:
        raise ConfigError(
            f"{name} is stored as {wrong[0]} (quantized?), but only bf16, fp16, fp32 and fp64 can be read; give a "
            "folder in one of them"
        )


def _check_tied(one: tuple[str, Source], other: tuple[str, Source]) -> None:
    """Raises `ConfigError` if the folder contains different values for two names of one parameter."""
    if not same_values(one[1].origin, other[1].origin):
        raise ConfigError(
            f"{one[0]} and {other[0]} are one parameter of the model, but the folder contains different values "
            "for them; build the model untied: tie_word_embeddings=False"
        )


def _ignored(model: nn.Module) -> set[str]:
    """Returns patterns: transformers ignores tensors of a folder whose names match one of them."""
    patterns = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()] if hasattr(model, "base_model_prefix") else []
    # transformers adds these two patterns while it loads, for buffers of its older versions.
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return patterns


def _without(names: Sequence[str], patterns: Any) -> list[str]:
    """Returns the names that match none of the patterns."""
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())]


# -- taking over --------------------------------------------------------------------------------------


def _take(model: nn.Module, found: Mapping[str, Source]) -> None:
    """Gives each parameter its origin and each buffer its values."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = persistent_buffers(model)
    # All buffers are read before one changes: an unreadable file leaves the model as it was.
    values = {name: _whole(found[name], buffer) for name, buffer in buffers.items() if name in found}
    with torch.no_grad():
        for name, value in values.items():
            buffers[name].copy_(value)
    for name, source in found.items():
        if name in parameters:
            # The parameter stays the same object, and thus tied; the origin only replaces its values.
            make_deferred(parameters[name], source.origin)


def _whole(source: Source, like: torch.Tensor) -> torch.Tensor:
    """Returns all values of a source, in the shape of `like`."""
    pieces = [values.clone() for _, values in source.origin.pieces()]
    return torch.cat(pieces).view(like.shape) if pieces else torch.empty_like(like)


def _tell(info: LoadingInfo, folder: Path) -> None:
    """Logs the names that did not match."""
    if info.missing_keys:
        logger.warning(
            "%s not in %s and will be initialized anew: %s",
            count_of(len(info.missing_keys), "weight of the model is", "weights of the model are"),
            folder,
            _brief(info.missing_keys),
        )
    if info.unexpected_keys:
        logger.warning(
            "%s contains %s of the model: left out: %s",
            folder,
            count_of(len(info.unexpected_keys), "tensor that is not", "tensors that are not"),
            _brief(info.unexpected_keys),
        )
    if info.mismatched_keys:
        logger.warning(
            "%s contains %s than in the model; these weights will be initialized anew: %s",
            folder,
            count_of(len(info.mismatched_keys), "tensor of another shape", "tensors of other shapes"),
            _brief([f"{name} {list(theirs)} for {list(mine)}" for name, theirs, mine in info.mismatched_keys]),
        )


def _brief(names: Sequence[str]) -> str:
    """Returns the first few names for a message."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
