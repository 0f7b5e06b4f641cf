"""`inference`: an engine over a folder of safetensors or a model, which runs the model and does not train it.

    folder ─► headers ─► deferred parameters ─► plan: is each unit's memory a copy of bytes in a file?
                                                  yes: read there at each use          no: kept in host memory

Nothing is written, unless the config asks for swap files. A process may be killed at any moment.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from offload.aio.protocols import Queue
from offload.config import Batch, Config, load_config, read_json
from offload.distributed.world import World
from offload.engine import build_optimizer
from offload.engine.assembly import STARTING, assemble
from offload.engine.engine import EngineCore, ModelEngine
from offload.engine.plan import Plan, check_model, decide
from offload.errors import ConfigError, UsageError
from offload.fileio.cache_file import Stamp
from offload.layout.flat_layout import ParameterSegment, UnitLayout
from offload.layout.frozen import OWN, inner_starts, inner_tensors_of, quantized_by_other_library
from offload.layout.modes import DTYPES, Mode, dtype_name
from offload.layout.pass_order import LAYER_MAJOR, MICRO_BATCH_MAJOR
from offload.layout.peak_memory import BesideBudgets
from offload.layout.units import blocks_of
from offload.metrics.meter import cause_of
from offload.model_io.deferred import is_deferred, origin_of
from offload.model_io.folder import CONFIG, FileBytes, Stored, StoredRun, stored_tensors
from offload.model_io.load import ConvertedParameter, load_pretrained
from offload.notices import Remark, announce
from offload.presets import read_config
from offload.quantized.paged_tensor import PagedTensor
from offload.quantized.tensors import with_adopted_buffers
from offload.sizes import count_of, format_size
from offload.states import State, Tier
from offload.swapper.memory.device import compute_device, let_segments_grow, open_device
from offload.swapper.store.model_files import FileRange, InPlaceLayout, ModelFiles, arrange_in_place
from offload.swapper.store.requests import DriveSpans
from offload.swapper.table import WeightSource
from offload.timeline import Phase, Row, now

# -- pass meter ----------------------------------------------------------------------------------------
#
# Seconds of the forwards of an engine, and of their waits.


class PassSeconds(NamedTuple):
    """Seconds of forwards."""

    total: float
    """All forwards, from the first module to the last."""
    drive: float
    """Waits for reads of weights. If a unit is larger than a host buffer, this includes its copies."""
    copies: float
    """Copies of weights to the device that the model's thread makes; on a CPU all copies."""

    @property
    def compute(self) -> float:
        """All else; on a GPU also waits of the device for copies, which are not measured."""
        return max(self.total - self.drive - self.copies, 0.0)

    @property
    def limit(self) -> str:
        """The largest part: "drive", "copies" or "compute"."""
        parts = {"drive": self.drive, "copies": self.copies, "compute": self.compute}
        return max(parts, key=lambda name: parts[name])

    def since(self, before: PassSeconds) -> PassSeconds:
        """Returns the seconds that came after `before`."""
        return PassSeconds(*(now - then for now, then in zip(self, before, strict=True)))


class PassMeter:
    """A listener of the timeline that adds up forwards. The model's thread reports; any thread may read."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._began: int | None = None

    @property
    def seconds(self) -> PassSeconds:
        return PassSeconds(*(self._sums[name] / 1e9 for name in PassSeconds._fields))

    def on_phase_begin(self, phase: Phase) -> None:
        self._began = now()

    def on_phase_end(self, phase: Phase) -> None:
        if self._began is not None and phase is Phase.EVALUATION:
            self._sums["total"] += now() - self._began
            self._began = None

    def on_span(self, row: Row, name: str, nanoseconds: int, nbytes: int) -> None:
        """Adds a wait or a copy of a forward. Waits and copies of prefetches between forwards do not count."""
        if self._began is None:  # also before the first forward: the filling of host memory
            return
        # A span "in chunks" covers a unit that is read and copied piece by piece, with its waits. Its copies take less
        # time than its reads, so the whole span counts as a wait.
        in_chunks = name.endswith(" in chunks")
        if row is Row.UPLOADS:
            self._sums["drive" if in_chunks else "copies"] += nanoseconds
        elif in_chunks:
            return
        elif cause_of(row, name) in ("wait_for_reads", "wait_for_memory"):
            self._sums["drive"] += nanoseconds

    def on_gradient(self, nbytes: int) -> None:
        """Ignores a gradient: nothing trains."""


# -- engine --------------------------------------------------------------------------------------------
#
# The engine that runs a model and does not train it.


_Batch = TypeVar("_Batch")
_T = TypeVar("_T")


class InferenceEngine(ModelEngine):
    """A model whose weights are paged, and that does not train. Created by `offload.inference`.

    All methods belong to the thread that runs the model; in a forked child every call raises. After an error on a
    background thread every call raises `EngineFailed`. Attributes that the engine does not define are looked up on the
    model. A `with` statement destroys the engine at its end.
    """

    def __init__(self, core: EngineCore, notices: Sequence[str], meter: PassMeter) -> None:
        super().__init__(core)
        self.notices = tuple(notices)
        """Notices of the start: where the weights are, and why some weights are not read in place."""
        self._meter = meter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model without a graph, on inputs that are moved to the engine's device.

        Args:
            *args: positional inputs of the model. Tensors are found in lists, tuples, mappings and dataclasses too.
            **kwargs: keyword inputs of the model, treated alike.

        Returns:
            The output of the model.

        Raises:
            IoError: if a file of the model cannot be read, or has changed.
            EngineFailed: if an error has stopped the engine.
        """
        with torch.no_grad():
            return super().__call__(*args, **kwargs)

    forward = __call__

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generates by the model's own `generate`, on inputs that are moved to the engine's device.

        Each token is one pass over the weights, for all prompts of the batch. The cache of keys and values is the
        model's own, and is on the engine's device.

        Args:
            *args: positional arguments of the model's `generate`.
            **kwargs: its keywords, such as `max_new_tokens` and `do_sample`.

        Returns:
            The result of the model's `generate`, on the engine's device.

        Raises:
            UsageError: if the model has no `generate`.
            IoError: if a file of the model cannot be read, or has changed.
            EngineFailed: if an error has stopped the engine.
        """
        generate = getattr(self.module, "generate", None)
        if generate is None:
            raise UsageError(
                f"{type(self.module).__name__} has no generate: give a model of transformers that generates, or call "
                "the engine once for each token"
            )
        self._core.enter()
        with torch.no_grad(), self.autocast(), self._core.device_budget.advised():
            args, kwargs = self._core.inputs((args, kwargs))
            return generate(*args, **kwargs)

    def map(self, function: Callable[[_Batch], _T], batches: Iterable[_Batch]) -> list[_T]:
        """Returns the results of `function` for all batches, in order.

        All batches pass through one block of the model before the next block is fetched: the weights are read and
        copied once for all of them. The first call with several batches runs the first one alone, which shows whether
        the model allows that. A model that is not a chain of blocks, or that keeps values between blocks, gets its
        batches one by one.

        Args:
            function: receives a batch, and calls the engine or the model; it may run on another thread.
            batches: the batches; all are taken before the first call.

        Raises:
            IoError: if a file of the model cannot be read, or has changed.
            EngineFailed: if an error has stopped the engine.
        """
        self._core.enter()
        # Each batch is bound by a default argument: every closure would see the last batch.
        works = [lambda batch=batch: function(batch) for batch in batches]
        with torch.no_grad():
            return self._core.run_micro_batches(works, len(works), trains=False) if works else []

    def pass_seconds(self) -> PassSeconds:
        """Returns the seconds of all forwards so far, and of their waits."""
        return self._meter.seconds

    def destroy(self) -> None:
        """Joins every thread, frees all memory and closes the files. Idempotent. The parameters stay placeholders."""
        # Swap files, if the config asked for them, are copies of the model's own files, so they are deleted.
        self._core.shutdown.end(remove=True)

    def __enter__(self) -> InferenceEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()


# -- tensor places -------------------------------------------------------------------------------------
#
# Tensors of a model that can be read in place: the model computes with the same bytes that its files contain.


_MOST_RUNS = 64
"""Largest number of runs in the files for a parameter that is read in place. Each run costs a copy to the device."""


class TensorPlaces:
    """Places of a model's tensors in its files. Made before an engine takes the model over."""

    def __init__(self, model: nn.Module, small_numel: int) -> None:
        """Collects the files. Units of at most `small_numel` elements stay on the device, and are read once."""
        self._model, self._small_numel = model, small_numel
        self.stamps: dict[str, Stamp] = {}
        """Stamp of each file as its header was read, by path without links."""
        all_stored = [stored for parameter in model.parameters() for stored in _tensors_of(origin_of(parameter))]
        for name in quantized_by_other_library(model):
            all_stored += _inner_tensors(model, name).values()
        for stored in all_stored:
            self.stamps[os.path.realpath(stored.path)] = stored.stamp

    def in_place_layouts(self, layouts: Sequence[UnitLayout], mode: Mode) -> tuple[InPlaceLayout | None, ...]:
        """Returns each unit's place in the files; None for a unit that is not read from them."""
        sizes = {path: stamp.nbytes for path, stamp in self.stamps.items()}
        in_place_layouts: list[InPlaceLayout | None] = []
        for layout in layouts:
            dtype, segments = layout.mode_in(mode).weight_dtype, layout.segments
            in_place_layout = None
            small = layout.device_numel <= self._small_numel
            if not small and all(self.why_not(segment, dtype) is None for segment in segments):
                tensors = [place for segment in segments for place in self._ranges(segment, dtype.itemsize)]
                in_place_layout = arrange_in_place(tensors, sizes)
            # Empty parameters need no file.
            in_place_layouts.append(in_place_layout if in_place_layout and in_place_layout.nbytes else None)
        return tuple(in_place_layouts)

    def _ranges(self, segment: ParameterSegment, itemsize: int) -> Iterator[tuple[FileRange, int]]:
        """Yields the ranges of bytes in the files that make up a parameter, each with its first byte in the unit."""
        target = segment.start * itemsize
        if segment.inner:
            starts = inner_starts(segment.inner)
            for name, stored in _inner_tensors(self._model, segment.name).items():
                if name in starts:  # another name of the same tensor has no bytes of its own
                    place = FileRange(os.path.realpath(stored.path), stored.place.offset, stored.place.tensor.nbytes)
                    yield place, target + starts[name]
            return
        for stored, start, numel in self._runs(segment):
            nbytes = numel * itemsize
            yield FileRange(os.path.realpath(stored.path), stored.place.offset + start * itemsize, nbytes), target
            target += nbytes

    def _runs(self, segment: ParameterSegment) -> list[StoredRun]:
        """Returns the runs of elements in the files that make up a parameter, or an expert's row of a parameter."""
        origin = origin_of(self._model.get_parameter(segment.parameter))
        assert isinstance(origin, Stored | ConvertedParameter)
        return origin.runs(range(segment.first, segment.first + segment.numel))

    def why_not(self, segment: ParameterSegment, dtype: torch.dtype) -> str | None:
        """Returns why a parameter cannot be read in place, as a clause after its name; None if it can."""
        if segment.form:
            return "is quantized"
        if segment.inner:
            return None if OWN in _inner_tensors(self._model, segment.name) else "is quantized, and in memory already"
        parameter = self._model.get_parameter(segment.parameter)
        origin = origin_of(parameter)
        if origin is None:
            return "is made by its module" if is_deferred(parameter) else "is in memory already"
        if not isinstance(origin, Stored | ConvertedParameter):
            return "is merged with an adapter"
        stored_dtype = next((stored.dtype for stored in _tensors_of(origin) if stored.dtype != dtype), None)
        if stored_dtype is not None:
            return f"is stored as {str(stored_dtype).removeprefix('torch.')}, not as {dtype_name(dtype)}"
        if segment.numel and not 0 < len(self._runs(segment)) <= _MOST_RUNS:
            return "is made of other tensors of the files"
        return None


def _inner_tensors(model: nn.Module, name: str) -> dict[str, Stored]:
    """Returns the inner tensors of a quantized parameter, such as codes and scales, that are in a file."""
    owner = model.get_submodule(name.rpartition(".")[0])
    sources = {
        inner: tensor.source
        for inner, tensor in inner_tensors_of(model.get_parameter(name), owner).items()
        if isinstance(tensor, PagedTensor)
    }
    return {inner: source.stored for inner, source in sources.items() if isinstance(source, FileBytes)}


def _tensors_of(origin: Any) -> Sequence[Stored]:
    """Returns the tensors of the files that are read for an origin."""
    if isinstance(origin, ConvertedParameter):
        return [stored for stored, _ in origin.conversion.parts]
    return [origin] if isinstance(origin, Stored) else []


# -- inference -----------------------------------------------------------------------------------------


logger = logging.getLogger("offload")

_OF_TRAINING = ("optimizer", "scheduler", "activation_checkpointing", "gradient_clipping", "wall_clock_breakdown")
"""Keys of a config that a forward does not use."""
_OF_RUNS = {"durability": "none", "resume": "never", "activations": None, "log": None, "speculate": False}
"""Such keys in the block "offload", with the values that replace them."""


def inference(model: Any, config: Any = None, *, model_class: Any = None, **kwargs: Any) -> InferenceEngine:
    """Returns an engine that runs a model without training it.

    Weights are read from the model's own safetensors files at each use, if the files contain the bytes that the model
    computes with. Otherwise the weights are kept in host memory, and a notice gives the reason. Nothing is copied to a
    disk, unless "offload_param" of the config asks for it. The model is set to evaluation, and its parameters are
    frozen. Each process is an engine of its own: under `torchrun` give each its own rows.

    Args:
        model: A folder with a config and safetensors, one safetensors file next to a config, or a `torch.nn.Module`.
            The parameters of a module that come from `offload.load_pretrained` are read in place; values that are in
            memory already are kept in host memory.
        config: DeepSpeed JSON, as a path or as a dict; None for the defaults. Without "bf16" and "fp16" the dtype is
            the files' dtype.
        model_class: Class of transformers to build for a folder; None for the architecture that its config names.
        **kwargs: Passed to `offload.load_pretrained`, for a folder: `attn_implementation="eager"`.

    Raises:
        ConfigError: If the config is wrong or does not fit the model, or the files lack a weight.
        StoreError: If files are missing or damaged.
        BudgetError: If a memory budget is too small. All of these come before any change.
        UsageError: If the model is under an engine already, or keywords come with a module.
    """
    if isinstance(model, nn.Module):
        if kwargs or model_class is not None:
            raise UsageError(
                f"{next(iter(kwargs), 'model_class')} configures a model that inference builds from a folder, but a "
                "module was given; leave this argument out"
            )
    elif isinstance(model, str | os.PathLike):
        model = read_model(Path(model).absolute(), model_class, kwargs)
    else:
        raise UsageError(
            f"inference expects a folder, a safetensors file or a torch.nn.Module, got {type(model).__name__}"
        )
    return start(model, config)


def start(
    model: nn.Module, config: Any = None, beside: Mapping[str, BesideBudgets] = MappingProxyType({})
) -> InferenceEngine:
    """Returns what `inference` returns, for a caller that knows what a forward takes `beside` both budgets on the CPU.

    `beside` as in `offload.engine.plan.decide`.
    """
    content = dict(config if isinstance(config, Mapping) else {} if config is None else read_json(config))
    loaded, in_place = _config_of(content, model)
    let_segments_grow(loaded.offload.device)  # before CUDA is used
    device = open_device(compute_device(loaded.offload.device))
    # Without gradients no graph is made, and no hook for gradients is installed.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        with STARTING, with_adopted_buffers(model):
            optimizer = build_optimizer.choose(None, model, None, None)
            check_model(model)
            places = TensorPlaces(model, loaded.zero_optimization.stage3_param_persistence_threshold)
            find_in_place_layouts = places.in_place_layouts if in_place else None
            check_model(model)
            plan = decide(
                loaded, Batch(1, 1, 1), model, device, World(), optimizer.rule, {}, None, find_in_place_layouts, beside
            )
            # Computed before the parameters lose their origins.
            lines = _lines(plan, places) if in_place else ()
            meter = PassMeter()

            def make(core: EngineCore, notices: tuple[str, ...]) -> InferenceEngine:
                return InferenceEngine(core, (*notices, *lines), meter)

            def open_source(queue: Queue, spans: DriveSpans, files: contextlib.ExitStack) -> WeightSource:
                return files.enter_context(
                    contextlib.closing(ModelFiles(plan.in_place_layouts, places.stamps, queue, spans))
                )

            source = open_source if plan.in_place else None
            engine = assemble(plan, model, optimizer, make, open_source=source, listener=meter)
    except BaseException:
        # The caller's model is as it was, if an error came before the engine took it over.
        for parameter in trained:
            parameter.requires_grad_(True)
        raise
    model.eval()
    for notice in engine.notices:
        announce(notice)
    return engine


def read_model(path: Path, model_class: Any, kwargs: Mapping[str, Any]) -> nn.Module:
    """Returns the model of a folder or a file, with deferred parameters.

    `model_class` None stands for the architecture that the folder's config names; `kwargs` go to `load_pretrained`.
    """
    stored = stored_tensors(path)  # a wrong folder is reported before transformers is imported
    chosen = model_class or _architecture(path if path.is_dir() else path.parent)
    dtype = _most_bytes((stored_tensor.dtype, stored_tensor.place.tensor.nbytes) for stored_tensor in stored.values())
    model, info = load_pretrained(chosen, path, output_loading_info=True, **{"dtype": DTYPES[dtype], **kwargs})
    if info.missing_keys:
        raise ConfigError(
            f"{path} lacks {count_of(len(info.missing_keys), 'weight')} of {type(model).__name__}, the first is "
            f"{info.missing_keys[0]}: its output would be that of random numbers; give the folder of a model that has "
            "been trained so, or another model_class"
        )
    assert isinstance(model, nn.Module)
    return model


def _architecture(folder: Path) -> Any:
    """Returns the class of transformers that the config of a folder names."""
    path = folder / CONFIG
    if not path.is_file():
        raise ConfigError(
            f"{folder} contains no config.json, which names the model: build a module inside of offload.init, give it "
            "and the file to offload.load_pretrained, and the module to inference"
        )
    architectures = read_config(folder).get("architectures") or []
    names = architectures if isinstance(architectures, list) else [architectures]
    import transformers

    architecture = next((getattr(transformers, name, None) for name in names if isinstance(name, str)), None)
    if architecture is None:
        raise ConfigError(
            f"{path} names {', '.join(map(str, names)) or 'no architecture'}, and transformers "
            f"{transformers.__version__} has no class of that name; pass model_class="
        )
    return architecture


def _config_of(content: dict[str, Any], model: nn.Module) -> tuple[Config, bool]:
    """Returns the config of the engine, and True if weights are read in place where they can be."""
    # The JSON of a training may be passed unchanged: its blocks about steps are dropped here.
    content = {key: value for key, value in content.items() if key not in _OF_TRAINING}
    if not any(name in content for name in ("bf16", "bfloat16", "fp16")):
        # The dtype of a parameter's values: in its file, if the parameter is not loaded yet.
        origins = ((parameter, origin_of(parameter)) for parameter in model.parameters())
        dtype = _most_bytes(
            (
                origin.dtype if isinstance(origin, Stored) else parameter.dtype,
                parameter.numel() * parameter.element_size(),
            )
            for parameter, origin in origins
        )
        if dtype != "fp32":
            content[dtype] = {"enabled": True}
    zero = content.get("zero_optimization")
    # A config that names a tier wants the weights there, even if that takes copies.
    in_place = not isinstance(zero, Mapping) or "offload_param" not in zero
    # A value that is no mapping is left to the check of the config, which reports it.
    if isinstance(zero, Mapping):
        content["zero_optimization"] = {key: value for key, value in zero.items() if key != "offload_optimizer"}
    block = content.get("offload", {})
    if isinstance(block, Mapping):
        # Another run name, since the swap files of a training with this JSON may be the only copy of its weights.
        content["offload"] = {**block, **_OF_RUNS, "run": f"{block.get('run', 'default')}-inference"}
    loaded = load_config(content)
    if in_place and loaded.offload.frozen is not None:
        raise ConfigError(
            f'"frozen": "{loaded.offload.frozen}" stores other bytes than the files have: set '
            'zero_optimization.offload_param to {"device": "nvme", "nvme_path": …} or to {"device": "cpu"}, or leave '
            '"frozen" out'
        )
    # A forward keeps no activations of its blocks, so batches can take turns wherever there are several blocks.
    if loaded.offload.schedule == "auto":
        order = LAYER_MAJOR if len(blocks_of(model, loaded.units)) > 1 else MICRO_BATCH_MAJOR
        loaded = load_config({**content, "offload": {**content["offload"], "schedule": order}})
    return loaded, in_place


def _most_bytes(tensors: Iterable[tuple[torch.dtype, int]]) -> str:
    """Returns the name of the dtype with most bytes of weights; "fp32" if there are none."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    counted: Counter[str] = Counter()
    for dtype, nbytes in tensors:
        if dtype in names:
            counted[names[dtype]] += nbytes
    return counted.most_common(1)[0][0] if counted else "fp32"


def _lines(plan: Plan, places: TensorPlaces) -> Sequence[str]:
    """Returns notices about the units that are read in place, and about the other units, with the reason."""
    units = [in_place_layout for in_place_layout in plan.in_place_layouts if in_place_layout is not None]
    lines = []
    if units:
        read = f"{count_of(len(units), 'unit')} of {len(plan.layouts)} ({format_size(sum(u.nbytes for u in units))})"
        files = len({extent.path for layout in units for extent in layout.extents})
        lines.append(f"{read} are read from {count_of(files, 'file')} of the model at each use; nothing is written")
    host_units = [unit for unit, tiers in enumerate(plan.placement.tiers) if tiers[State.WEIGHT] is Tier.HOST]
    segments = (
        (segment, plan.modes[unit].weight_dtype) for unit in host_units for segment in plan.layouts[unit].segments
    )
    reasons = ((segment.name, places.why_not(segment, dtype)) for segment, dtype in segments)
    first = next((f"{name} {reason}" for name, reason in reasons if reason is not None), "")
    if host_units:
        size = format_size(sum(plan.parts.nbytes[unit][State.WEIGHT] for unit in host_units))
        units_are = count_of(len(host_units), f"unit ({size}) is", f"units ({size}) are")
        lines.append(f"{units_are} kept in host memory: {first}")
    return tuple(map(Remark, lines))
