"""`init` and `load_pretrained`: models without weights in memory, which `initialize` fills unit by unit.

    folder ──► headers of the files ──► names, shapes, dtypes are compared ──► deferred parameters, each with its origin

All comparisons come before any change of the model. `initialize` then reads one parameter after the other directly into
its unit, a megabyte at a time, so that at most one unit is in memory. (The tensors of a conversion are read whole.)
Parameters that the folder does not contain are initialized by the model's own modules, from the config's seed. Buffers
are read immediately.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.config import load_config
from offload.engine.keywords import refuse
from offload.engine.params import PagedParameter
from offload.engine.snapshot import persistent_buffers
from offload.errors import ConfigError, OffloadError, StoreError, UsageError
from offload.layout.modes import DTYPES
from offload.layout.units import listed_in_fp32
from offload.model_io.deferred import Origin, deferring_weights, make_deferred
from offload.model_io.folder import CONFIG, GENERATION, Stored, StoredRun, build_layers, stored_tensors
from offload.presets import read_config
from offload.sizes import count_of

# -- from pretrained -----------------------------------------------------------------------------------
#
# Replacement of transformers' `from_pretrained` inside `offload.init`, which streams a folder unit by unit.
#
# The original loads the complete model into memory at once. Calls that `load_pretrained` cannot serve still reach the
# original: a name of the hub, weights in another format, keywords about how to read. A model from such a call has the
# same values, but all of them are in memory.


_NO_VALUES = frozenset(
    "low_cpu_mem_usage use_safetensors local_files_only cache_dir force_download token proxies trust_remote_code "
    "revision code_revision adapter_kwargs _commit_hash _from_auto _fast_init weights_only disable_mmap".split()
)
"""Keywords that do not change the values that are read from a folder; `load_pretrained` does not receive them."""
_THEIRS = ("state_dict", "subfolder", "variant", "from_tf", "from_flax", "gguf_file", "key_mapping", "fusion_config")
"""Keywords that, if set, send a call to the original. All others except `_NO_VALUES` go to `load_pretrained`."""
_LEFT_OUT_IF_NONE = frozenset(
    "device_map quantization_config max_memory offload_folder generation_config distributed_config device_mesh tp_plan "
    "tp_size kernel_config tqdm_class".split()
)
"""Keywords of the original that are left out if None. Any other None is a value for the model's config."""


class _Loading(threading.local):
    """Flag of each thread: true while the replaced `from_pretrained` loads a model, whose code may load others."""

    inside = False


_loading = _Loading()


@contextlib.contextmanager
def streaming(load: Callable[..., Any]) -> Iterator[None]:
    """Lets `from_pretrained` of transformers stream local folders, in this thread, while the context is open.

    Args:
        load: Called as `load(model_class, folder, output_loading_info=True, **keywords)` in place of `from_pretrained`;
            returns the model and its `LoadingInfo`.
    """
    if "transformers" not in sys.modules:  # an import inside the context is not patched
        yield
        return
    from transformers import PreTrainedModel

    patched: Any = PreTrainedModel
    original = patched.__dict__["from_pretrained"]
    thread = threading.get_ident()

    def from_pretrained(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        original_method: Any = original.__get__(None, cls)
        # The patch is visible to all threads, and a model that is built below may call `from_pretrained` in its
        # constructor.
        if (
            threading.get_ident() != thread
            or _loading.inside
            or args
            or any(kwargs.get(key_name) for key_name in _THEIRS)
        ):
            return original_method(name, *args, **kwargs)
        if name is None or not (Path(name).is_dir() and any(Path(name).glob("*.safetensors"))):
            return original_method(name, **kwargs)
        # An adapter is loaded by the original, which adds it to the model that it has loaded.
        if (kwargs.get("adapter_kwargs") or {}).get("_adapter_model_path") or Path(
            name, "adapter_config.json"
        ).exists():
            return original_method(name, **kwargs)
        wants_info = kwargs.pop("output_loading_info", False)
        fit = {
            key: value
            for key, value in kwargs.items()
            if key not in (*_NO_VALUES, *_THEIRS) and not (value is None and key in _LEFT_OUT_IF_NONE)
        }
        fit["model_config"] = fit.pop("config", None)
        _loading.inside = True
        try:
            model, info = load(cls, name, output_loading_info=True, **fit)
        finally:
            _loading.inside = False
        return (model, info._asdict()) if wants_info else model

    patched.from_pretrained = classmethod(from_pretrained)  # AutoModel classes call this method too
    try:
        yield
    finally:
        patched.from_pretrained = original


# -- name mapping --------------------------------------------------------------------------------------
#
# Mapping from tensors of a folder to a model, by name or by the renamings and conversions of `transformers`.
#
# Models of transformers 5 have some weights in another form than the files: each expert of a Mixtral is a tensor of its
# own in a file, and all experts of a layer are one parameter of three dimensions in the model. This module applies the
# renamings of transformers name by name, and runs its conversions one parameter at a time. The conversions first run on
# meta tensors, so that a misfit is noticed before any read.


class NamedSource(NamedTuple):
    """Origin, in a folder, of the values for one name of a model."""

    origin: Origin
    dtypes: tuple[torch.dtype, ...]
    """Dtypes of the tensors that are read."""


class TensorConversion:
    """Tensors of a folder that an operation of transformers converts into one or several parameters of a model.

    One run of the operation makes all results. `initialize` reads one parameter after the other, so results that will
    be requested later stay in memory until then.

    Args:
        converter: Converter of transformers; copied before each use, because it collects tensors.
    """

    def __init__(self, model: nn.Module, converter: Any, first: str, parts: Sequence[tuple[Stored, str]]) -> None:
        self._model, self._converter, self._first, self.parts = model, converter, first, parts
        self._made: dict[str, torch.Tensor] = {}
        self.wanted: set[str] = set()
        """Names that will be requested."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the results, by name. Raises `ConfigError` if the tensors do not fit together."""
        try:
            # On the meta device the conversion computes shapes only, without reading a byte.
            made = self._convert(lambda stored: torch.empty(stored.shape, dtype=stored.dtype, device="meta"))
        # The converters are transformers' own code and raise errors of any kind.
        except Exception as error:
            names = ", ".join(stored.name for stored, _ in self.parts[:3])
            raise ConfigError(
                f"transformers cannot make {self._first} of {names} and {max(len(self.parts) - 3, 0)} more: {error}; "
                "the folder belongs to another model or another version"
            ) from error
        return {name: tuple(value.shape) for name, value in made.items()}

    def take(self, name: str, keep: bool = False) -> torch.Tensor:
        """Returns one parameter. The first request reads the tensors and makes the parameters of later requests too."""
        if name not in self._made:
            made = self._convert(Stored.whole)
            # Results that nobody will request must not stay in memory.
            self._made = {result: made[result] for result in made if result in self.wanted}
        return self._made[name] if keep else self._made.pop(name)

    @functools.cached_property
    def rows(self) -> dict[str, torch.Tensor]:
        """The row numbers, (rows,) int64, of each result that consists of unchanged rows of the tensors.

        Rows are counted through all tensors. A conversion of row numbers in place of rows finds the result.
        """
        row_numbers: dict[str, torch.Tensor] = {}
        try:
            # Twice, with different numbers: this shows whether the conversion computes with values or only selects
            # rows.
            made, again = (self._convert(self._numbered(factor)) for factor in (1, 3))
        except Exception:  # code that does not run on numbers does more than select rows
            return row_numbers
        for name, shape in self.shapes().items():
            once, twice = made[name], again[name]
            moved = once.dtype == torch.int64 and once.shape == (*shape[:-1], 1) and torch.equal(3 * once, twice)
            if moved and all(part.shape[-1:] == shape[-1:] for part, _ in self.parts):
                row_numbers[name] = once.reshape(-1)
        return row_numbers

    def _numbered(self, factor: int) -> Callable[[Stored], torch.Tensor]:
        """Returns a function that replaces each row of a tensor by the row's number, times `factor`."""
        counts = [math.prod(part.shape[:-1]) for part, _ in self.parts]
        firsts = dict(zip((part.name for part, _ in self.parts), itertools.accumulate([0, *counts]), strict=False))

        def numbers(stored: Stored) -> torch.Tensor:
            shape = (*stored.shape[:-1], 1)
            return (torch.arange(math.prod(shape), device="cpu").view(shape) + firsts[stored.name] + 1) * factor

        return numbers

    def _convert(self, read: Callable[[Stored], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Runs the conversion on the tensors that `read` returns, and returns the results by name."""
        # `add_tensor` stores its tensors in the converter, which other conversions use too; hence a copy.
        mapping: Any = copy.deepcopy(self._converter)
        for stored, pattern in self.parts:
            mapping.add_tensor(self._first, stored.name, pattern, lambda stored=stored: read(stored))
        made = mapping.convert(self._first, model=self._model, config=getattr(self._model, "config", None))
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class ConvertedParameter(NamedTuple):
    """One parameter of a conversion; implements `Origin`."""

    conversion: TensorConversion
    name: str
    shape: tuple[int, ...]

    def pieces(self, part: range | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields all values at once, or those of `part`; parts are requested in order."""
        more = part is not None and part.stop < math.prod(self.shape)
        values = self.conversion.take(self.name, keep=more).contiguous().view(-1)
        yield 0, values if part is None else values[part.start : part.stop]

    def runs(self, part: range) -> list[StoredRun]:
        """Returns the elements of the files that make up `part` of the values, in order; [] for computed values."""
        numbers, width = self.conversion.rows.get(self.name), self.shape[-1]
        if numbers is None or not part or part.start % width or part.stop % width:
            return []
        joined: list[StoredRun] = []
        rows = numbers[part.start // width : part.stop // width]
        # A run ends where the next row is not the next one of the files, or begins another tensor.
        firsts = [0, *itertools.accumulate(math.prod(stored.shape[:-1]) for stored, _ in self.conversion.parts)]
        tensor = torch.bucketize(rows - 1, torch.tensor(firsts, device="cpu"), right=True) - 1
        breaks = ((rows.diff() != 1) | (tensor.diff() != 0)).nonzero().flatten() + 1
        for start, stop in itertools.pairwise([0, *breaks.tolist(), len(rows)]):
            which = int(tensor[start])
            first = int(rows[start]) - 1 - firsts[which]
            joined.append(StoredRun(self.conversion.parts[which][0], first * width, (stop - start) * width))
        return joined


def name_tensors(
    model: nn.Module, expected: Mapping[str, Any], stored: Mapping[str, Stored]
) -> tuple[dict[str, NamedSource], list[str]]:
    """Maps the tensors of a folder to the names of a model.

    Returns:
        The sources by the model's names, and the names of tensors, after renaming, that the model does not contain.
    """
    rules = _rules_of_transformers(model)
    if rules is None:
        own = {name: NamedSource(stored[name], (stored[name].dtype,)) for name in expected if name in stored}
        return own, [name for name in stored if name not in expected]
    sources: dict[str, NamedSource] = {}
    unexpected: list[str] = []
    groups: dict[str, TensorConversion] = {}
    # The order of transformers: experts are stacked in the order that they are added, 2 before 10.
    for key in sorted(stored, key=rules.order):
        name, converter, pattern = rules.rename(key, expected)
        if name not in expected:
            unexpected.append(name)
        elif converter is not None:
            # All tensors that map to one name are inputs of one conversion.
            group = groups.setdefault(name, TensorConversion(model, converter, name, []))
            group.parts = [*group.parts, (stored[key], pattern)]
        else:
            _add(sources, name, NamedSource(stored[key], (stored[key].dtype,)))
    for group in groups.values():
        dtypes = tuple(part.dtype for part, _ in group.parts)
        for name, shape in group.shapes().items():
            if name in expected:
                group.wanted.add(name)
                _add(sources, name, NamedSource(ConvertedParameter(group, name, shape), dtypes))
            else:
                unexpected.append(name)
    return sources, unexpected


def _add(sources: dict[str, NamedSource], name: str, source: NamedSource) -> None:
    """Adds a source to `sources`; raises `ConfigError` if the name already has one."""
    if name in sources:
        raise ConfigError(
            f"the folder contains {name} twice, under two names that transformers recognizes; keep one of them"
        )
    sources[name] = source


class _Rules:
    def __init__(self, model: nn.Module, transformers_loading: Any, mapping: Sequence[Any]) -> None:
        self.order: Callable[[str], Any] = transformers_loading.dot_natural_key
        self._rename = transformers_loading.rename_source_key
        self._prefix: str = getattr(model, "base_model_prefix", "")
        self._renamings = [rule for rule in mapping if isinstance(rule, transformers_loading.WeightRenaming)]
        self._converters = [rule for rule in mapping if isinstance(rule, transformers_loading.WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}

    def rename(self, key: str, expected: Mapping[str, Any]) -> tuple[str, Any, str]:
        """Returns a tensor's name in the model, its converter or None, and the pattern that it matched."""
        name, pattern = self._rename(key, self._renamings, self._converters, self._prefix, expected)
        if name not in expected and key in expected:  # the tensor has the model's own name already
            name, pattern = self._rename(key, [], [], self._prefix, expected)
        return name, self._by_pattern.get(pattern), pattern or ""


def _rules_of_transformers(model: Any) -> _Rules | None:
    """Returns the renaming rules for a model; None for a model that is not of transformers."""
    if not hasattr(model, "base_model_prefix") or not hasattr(model, "config"):
        return None
    try:
        # Internal modules of transformers, which may change with each version: a missing name raises the error below.
        from transformers import core_model_loading
        from transformers.conversion_mapping import get_model_conversion_mapping

        return _Rules(model, core_model_loading, get_model_conversion_mapping(model))
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            "offload.load_pretrained reads from transformers how weights are named and converted, which the installed "
            f"version does not tell ({error}); install a supported version: pip install 'transformers>=5.3,<6'"
        ) from error


def same_values(first: Origin, second: Origin) -> bool:
    """Returns True if two sources of one shape have equal values, whatever their dtypes are."""
    # Compared chunk by chunk, to save memory. The chunks of two dtypes have different numbers of elements.
    sides = [(values for _, values in origin.pieces() if len(values)) for origin in (first, second)]
    left, right = (next(side, None) for side in sides)
    while left is not None and right is not None:
        numel, dtype = min(len(left), len(right)), torch.promote_types(left.dtype, right.dtype)
        if not torch.equal(left[:numel].to(dtype), right[:numel].to(dtype)):
            return False
        left = left[numel:] if numel < len(left) else next(sides[0], None)
        right = right[numel:] if numel < len(right) else next(sides[1], None)
    return left is right


# -- load pretrained -----------------------------------------------------------------------------------


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
    chosen = config if config is not None else config_dict_or_path
    with streaming(lambda cls, folder, **more: load_pretrained(cls, folder, chosen, **more)), deferring_weights():
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
        folder: Local folder of the weights, or one safetensors file; a class needs a config next to the file.
        config: Config that `initialize` will receive; the buffers of a model that is built here get its dtype.
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
    named, unexpected = name_tensors(model, names, {name: stored[name] for name in stored if name not in taken})
    sources, info = _compare(model, names, named, unexpected, ignore_mismatched_sizes, path)
    _take(model, sources)
    _warn(info, path)
    return (model, info) if output_loading_info else model


# -- building -----------------------------------------------------------------------------------------


def _build(model_class: Any, folder: Path, config: Any, model_config: Any, kwargs: dict[str, Any]) -> nn.Module:
    """Builds a model of transformers on the meta device.

    Args:
        config: Config for `initialize`; None if it is not known yet.
        model_config: Config of transformers in place of the folder's, or None.
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
        if not isinstance(model_config, PretrainedConfig):  # a folder or a name, as from_pretrained takes it
            if (named := Path(model_config or folder)).is_dir():
                read_config(named)  # raises for settings that are not allowed
            model_config, unused = AutoConfig.from_pretrained(
                model_config or folder, return_unused_kwargs=True, **kwargs
            )
        wanted = getattr(getattr(model_class, "config_class", None), "model_type", None)
        if wanted is not None and wanted != model_config.model_type:
            raise ConfigError(
                f"{folder / CONFIG} describes a {model_config.model_type} model, but {model_class.__name__} takes "
                f"{wanted}; give the class of the folder's model, or AutoModelForCausalLM and the like"
            )
        # As from_pretrained sets it.
        model_config.name_or_path = str(folder)
        # Classes such as AutoModelForCausalLM have the public method, model classes the private one.
        make: Any = getattr(model_class, "from_config", None) or getattr(model_class, "_from_config")  # noqa: B009
        with init(config):
            model: Any = make(model_config, **unused, **({} if dtype is None else {"dtype": dtype}))
        if (folder / GENERATION).is_file() and hasattr(model, "generation_config"):
            model.generation_config = GenerationConfig.from_pretrained(folder)
    # Errors of this library carry their own advice and are not wrapped below.
    except OffloadError:
        raise
    except Exception as error:  # code of transformers, with values from a file of unknown origin
        name = getattr(model_class, "__name__", model_class)
        raise ConfigError(f"{name} cannot be built from {folder / CONFIG}: {error}") from error
    built: nn.Module = model.eval()
    if dtype in (torch.bfloat16, torch.float16):
        # Nothing has values yet, so a change of the dtype converts none.
        in_fp32 = listed_in_fp32(built, strict=dtype is torch.bfloat16, buffers=True)
        for name, tensor in _names(built).items():
            if name in in_fp32 and tensor.is_floating_point():
                path, _, own = name.rpartition(".")
                if isinstance(tensor, nn.Parameter):
                    tensor.data = tensor.data.float()
                else:
                    built.get_submodule(path)._buffers[own] = tensor.float()
    return built


def _dtype(dtype: Any) -> torch.dtype | None:
    """Returns the torch dtype for a `dtype` of `from_pretrained`; None for None and "auto". Raises `UsageError`."""
    if dtype is None or dtype == "auto" or isinstance(dtype, torch.dtype):
        # With None `_build` takes the dtype of the engine's config, if that was given.
        return None if dtype == "auto" else dtype
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else None
    if not isinstance(named, torch.dtype):
        raise UsageError(f'dtype expects a torch.dtype, its name or "auto", got {dtype!r}')
    return named


# -- comparing ----------------------------------------------------------------------------------------


def _names(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **persistent_buffers(model)}


def _compare(
    model: nn.Module,
    names: Mapping[str, torch.Tensor],
    named: Mapping[str, NamedSource],
    unexpected: Sequence[str],
    ignore_sizes: bool,
    folder: Path,
) -> tuple[dict[str, NamedSource], LoadingInfo]:
    """Matches the tensors of a folder with the tensors of a model.

    Returns:
        One source for each parameter and buffer that will be read, by the first of its names that the folder contains,
        and the names that did not match.

    Raises:
        ConfigError: If nothing matches, or shapes, dtypes or tied values differ.
    """
    if names and not named:
        raise ConfigError(
            f"no tensor of {folder} belongs to this {type(model).__name__}: the folder contains "
            f"{', '.join(unexpected[:_SHOWN])}, the model has {', '.join(list(names)[:_SHOWN])}"
        )
    mismatched = [
        (name, source.origin.shape, tuple(names[name].shape))
        for name, source in named.items()
        if source.origin.shape != tuple(names[name].shape)
    ]
    if mismatched and not ignore_sizes:
        name, stored_shape, shape = mismatched[0]
        raise ConfigError(
            f"in {folder} {count_of(len(mismatched), 'tensor has another shape', 'tensors have other shapes')} than "
            f"in the model, the first is {name}: {list(stored_shape)}, not {list(shape)}; give the config that the "
            "folder was written with, or pass ignore_mismatched_sizes=True to initialize them anew"
        )
    # With `ignore_sizes` such parameters get no source, so that they are initialized like missing ones.
    wrong = {name for name, *_ in mismatched}
    sources: dict[int, tuple[str, NamedSource]] = {}
    for name, source in named.items():
        if name in wrong:
            continue
        unread = [dtype for dtype in source.dtypes if names[name].is_floating_point() and dtype not in _READABLE]
        if unread:
            raise ConfigError(
                f"{name} is stored as {unread[0]} (quantized?), but only bf16, fp16, fp32 and fp64 can be read; give a "
                "folder in one of them"
            )
        # A tied parameter is one object with several names, and the folder may contain more than one of them.
        first, own = sources.setdefault(id(names[name]), (name, source))
        if own is not source and not same_values(own.origin, source.origin):
            raise ConfigError(
                f"{first} and {name} are one parameter of the model, but the folder contains different values for "
                "them; build the model untied: tie_word_embeddings=False"
            )
    missing = [name for name, tensor in names.items() if id(tensor) not in sources and name not in wrong]
    return dict(sources.values()), LoadingInfo(
        tuple(_without(missing, getattr(model, "_keys_to_ignore_on_load_missing", None))),
        tuple(_without(unexpected, _ignored(model))),
        tuple(mismatched),
    )


def _ignored(model: nn.Module) -> set[str]:
    """Returns patterns of names of a folder's tensors that transformers ignores if a model lacks them."""
    patterns = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()] if hasattr(model, "base_model_prefix") else []
    # transformers adds these two patterns while it loads, for buffers of its older versions.
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return patterns


def _without(names: Sequence[str], patterns: Any) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())]


# -- taking over --------------------------------------------------------------------------------------


def _take(model: nn.Module, sources: Mapping[str, NamedSource]) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = persistent_buffers(model)
    # All buffers are read before one changes: an unreadable file leaves the model as it was.
    values: dict[str, torch.Tensor] = {}
    for name, buffer in buffers.items():
        if name in sources:
            pieces = [piece.clone() for _, piece in sources[name].origin.pieces()]
            values[name] = torch.cat(pieces).view(buffer.shape) if pieces else torch.empty_like(buffer)
    with torch.no_grad():
        for name, value in values.items():
            buffers[name].copy_(value)
    for name, source in sources.items():
        if name in parameters:
            # The parameter stays the same object, and thus tied; the origin only replaces its values.
            make_deferred(parameters[name], source.origin)


def _warn(info: LoadingInfo, folder: Path) -> None:
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
            _brief(
                [f"{name} {list(stored_shape)} for {list(shape)}" for name, stored_shape, shape in info.mismatched_keys]
            ),
        )


def _brief(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
