"""`inference`: an engine over a folder of safetensors or a model, which runs the model and does not train it.

    folder ─► headers ─► deferred parameters ─► plan: is each unit's memory a copy of bytes in a file?
                                                  yes: read there at each use          no: kept in host memory

Nothing is written, unless the config asks for swap files. A process may be killed at any moment.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from offload.config import Batch, Config, load_config, read_json
from offload.distributed.world import World
from offload.engine import build_optimizer
from offload.engine.assembly import STARTING, assemble
from offload.engine.engine import EngineCore, ModelEngine
from offload.engine.plan import check_model, decide
from offload.errors import ConfigError, UsageError
from offload.layout.modes import DTYPES
from offload.layout.pass_order import LAYER_MAJOR, MICRO_BATCH_MAJOR
from offload.layout.peak_memory import BesideBudgets
from offload.layout.units import blocks_of
from offload.metrics.meter import cause_of
from offload.model_io.deferred import origin_of
from offload.model_io.folder import CONFIG, Stored, stored_tensors
from offload.model_io.load import load_pretrained
from offload.model_io.places import TensorPlaces
from offload.notices import announce
from offload.presets import read_config
from offload.quantized.tensors import with_adopted_buffers
from offload.sizes import count_of
from offload.swapper.memory.device import compute_device, let_segments_grow, open_device
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


# -- inference -----------------------------------------------------------------------------------------


logger = logging.getLogger("offload")

_OF_TRAINING = ("optimizer", "scheduler", "activation_checkpointing", "gradient_clipping", "wall_clock_breakdown")
"""Keys of a config that a forward does not use."""
_OF_RUNS = {
    "durability": "none",
    "resume": "never",
    "activations": None,
    "log": None,
    "speculate": False,
    "drive_budget": None,
}
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
            plan = decide(
                *(loaded, Batch(1, 1, 1), model, device, World(), optimizer.rule, {}, None),
                places if in_place else None,
                beside,
            )
            meter = PassMeter()

            def make(core: EngineCore, notices: tuple[str, ...]) -> InferenceEngine:
                return InferenceEngine(core, notices, meter)

            engine = assemble(plan, model, optimizer, make, listener=meter)
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
        if in_place:  # weights that are not read from the files stay in host memory
            content["offload"]["nvme_path"] = []
            content["zero_optimization"] = {**content.get("zero_optimization", {}), "offload_param": {"device": "cpu"}}
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
