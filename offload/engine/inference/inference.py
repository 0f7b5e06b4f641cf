"""`inference`: an engine over a folder of safetensors or a model, which runs the model and does not train it.

    folder ─► headers ─► deferred parameters ─► plan: is each unit's memory a copy of bytes in a file?
                                                  yes: read there at each use          no: kept in host memory

Nothing is written, unless the config asks for swap files. A process may be killed at any moment.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload import kernels
from offload.activations.checkpoints import blocks_of
from offload.config import Batch, Config, load_config, read_json
from offload.engine.core import EngineCore
from offload.engine.inference.engine import InferenceEngine
from offload.engine.inference.pass_meter import PassMeter
from offload.engine.inference.tensor_places import TensorPlaces
from offload.engine.optim import build_optimizer as optimizer_choice
from offload.engine.optim.optimizer import Optimizer
from offload.engine.params.deferred_parameter import origin_of
from offload.engine.params.opaque.buffers import with_adopted_buffers
from offload.engine.setup.build import STARTING, build
from offload.engine.setup.gpu_allocator import let_segments_grow
from offload.engine.setup.plan import Plan, decide
from offload.errors import ConfigError, UsageError
from offload.layout.modes import DTYPES
from offload.layout.pass_order import LAYER_MAJOR, MICRO_BATCH_MAJOR
from offload.model_io.folder import CONFIG, Stored, stored_tensors
from offload.model_io.load import load_pretrained
from offload.notices import Remark, announce
from offload.sizes import count_of, format_size
from offload.states import State, Tier
from offload.swapper.memory.device import compute_device, open_device

logger = logging.getLogger("offload")

_OF_TRAINING = ("optimizer", "scheduler", "activation_checkpointing", "gradient_clipping", "wall_clock_breakdown")
"""Keys of a config that a forward has no use for."""
_OF_RUNS = {"durability": "none", "resume": "never", "activations": None, "log": None, "speculate": False}
"""The same in the block "offload", with the values that they have here."""


def inference(model: Any, config: Any = None, *, model_class: Any = None, **kwargs: Any) -> InferenceEngine:
    """Returns an engine that runs a model without training it.

    Weights are read from the model's own safetensors files at each use, where their bytes are those that the model
    computes with. Otherwise they are kept in host memory, and a line says why. Nothing is copied to a disk, unless
    "offload_param" of the config asks for it. The model is set to evaluation, and its parameters are frozen. Each
    process is an engine of its own: under `torchrun` give each its own rows.

    Args:
        model: A folder with a config and safetensors, one safetensors file beside a config, or a `torch.nn.Module`. The
            parameters of a module that come from `offload.load_pretrained` are read in place; values that are in memory
            already are kept in host memory.
        config: DeepSpeed JSON, as a path or as a dict; None for the defaults. Without "bf16" and "fp16" the dtype is
            that of the files.
        model_class: Class of transformers to build for a folder; None for the architecture that its config names.
        **kwargs: Passed to `offload.load_pretrained`, for a folder: `attn_implementation="eager"`.

    Raises:
        ConfigError: If the config is wrong or does not fit the model, or the files lack a weight.
        StoreError: If files are missing or damaged.
        BudgetError: If a memory budget is too small. All of these come before any change.
        UsageError: If the model is under an engine already, or keywords come with a module.
    """
    content = dict(config if isinstance(config, Mapping) else {} if config is None else read_json(config))
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
    loaded, in_place = _config_of(content, model)
    let_segments_grow(loaded.offload.device)  # before CUDA is used
    device = open_device(compute_device(loaded.offload.device))
    # Without gradients no graph is made, and no hook for gradients is installed.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        with STARTING, with_adopted_buffers(model):
            optimizer = optimizer_choice.choose(None, model, None, None)
            places = TensorPlaces(model, loaded.zero_optimization.stage3_param_persistence_threshold)
            find_images = places.images if in_place else None
            plan = decide(loaded, Batch(1, 1, 1), model, device, None, optimizer.rule.name, {}, None, find_images)
            # Before the parameters lose their origins.
            lines = _lines(plan, places) if in_place else ()
            if not device.host_addressable:
                kernels.leave_cores()
            engine = _build(plan, model, optimizer, places, lines)
    except BaseException:
        # The caller's model is as it was, if an error came before the engine took it over.
        for parameter in trained:
            parameter.requires_grad_(True)
        raise
    model.eval()
    for notice in engine.notices:
        announce(notice)
    return engine


def _build(
    plan: Plan, model: nn.Module, optimizer: Optimizer, places: TensorPlaces, lines: Sequence[str]
) -> InferenceEngine:
    """Carries a plan out, and returns the engine, which reports `lines` too."""
    meter = PassMeter()

    def make(core: EngineCore, notices: tuple[str, ...]) -> InferenceEngine:
        return InferenceEngine(core, (*notices, *lines), meter)

    return build(plan, model, optimizer, make, stamps=places.stamps, listener=meter)


def read_model(path: Path, model_class: Any, kwargs: Mapping[str, Any]) -> nn.Module:
    """Returns the model of a folder or a file, with deferred parameters.

    Args:
        path: The folder or the file.
        model_class: Class of transformers; None for the architecture that the folder's config names.
        kwargs: Keywords of `load_pretrained`.

    Raises:
        ConfigError: If the folder's config names no class of transformers, or the files lack a weight.
        StoreError: If files are missing or damaged.
    """
    stored = stored_tensors(path)  # a wrong folder is reported before transformers is imported
    chosen = model_class or _architecture(path if path.is_dir() else path.parent)
    dtype = _most_bytes((each.dtype, each.place.tensor.nbytes) for each in stored.values())
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
    try:
        names = json.loads(path.read_text(encoding="utf-8")).get("architectures") or []
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"cannot read {path} ({error}), so {folder} is not a model folder") from error
    import transformers

    found = next((getattr(transformers, name, None) for name in names if isinstance(name, str)), None)
    if found is None:
        raise ConfigError(
            f"{path} names {', '.join(map(str, names)) or 'no architecture'}, and transformers "
            f"{transformers.__version__} has no class of that name; pass model_class="
        )
    return found


def _config_of(content: dict[str, Any], model: nn.Module) -> tuple[Config, bool]:
    """Returns the config of the engine, and True if weights are read in place where they can be.

    Raises:
        ConfigError: If the config is wrong.
    """
    # A training's JSON serves as it is: its blocks about steps have nothing to say here.
    content = {key: value for key, value in content.items() if key not in _OF_TRAINING}
    if not any(name in content for name in ("bf16", "bfloat16", "fp16")):
        dtype = _most_bytes((_dtype_of(each), each.numel() * each.element_size()) for each in model.parameters())
        if dtype != "fp32":
            content[dtype] = {"enabled": True}
    zero = content.get("zero_optimization")
    # Whoever names a tier wants the weights there, also in copies.
    in_place = not isinstance(zero, Mapping) or "offload_param" not in zero
    # What is no mapping is left to the check of the config, which says what is wrong.
    if isinstance(zero, Mapping):
        content["zero_optimization"] = {key: value for key, value in zero.items() if key != "offload_optimizer"}
    block = content.get("offload", {})
    if isinstance(block, Mapping):
        # Swap files of a training with this JSON, which may be the only copy of its weights, are never replaced.
        content["offload"] = {**block, **_OF_RUNS, "run": f"{block.get('run', 'default')}-inference"}
    loaded = load_config(content)
    if in_place and loaded.offload.frozen is not None:
        raise ConfigError(
            f'"frozen": "{loaded.offload.frozen}" stores other bytes than the files have: set '
            'zero_optimization.offload_param to {"device": "nvme", "nvme_path": …} or to {"device": "cpu"}, or leave '
            '"frozen" out'
        )
    # A forward keeps no activations of its blocks, so nothing speaks against turns where there are blocks.
    if loaded.offload.schedule == "auto":
        order = LAYER_MAJOR if len(blocks_of(model, loaded.units)) > 1 else MICRO_BATCH_MAJOR
        loaded = load_config({**content, "offload": {**content["offload"], "schedule": order}})
    return loaded, in_place


def _dtype_of(parameter: torch.Tensor) -> torch.dtype:
    """Returns the dtype of a parameter's values, in its file if they are still there."""
    origin = origin_of(parameter)
    return origin.dtype if isinstance(origin, Stored) else parameter.dtype


def _most_bytes(tensors: Any) -> str:
    """Returns the name of the dtype in which most bytes of weights are; "fp32" if there are none.

    Args:
        tensors: pairs of dtype and bytes.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    counted: Counter[str] = Counter()
    for dtype, nbytes in tensors:
        if dtype in names:
            counted[names[dtype]] += nbytes
    return counted.most_common(1)[0][0] if counted else "fp32"


def _lines(plan: Plan, places: TensorPlaces) -> Sequence[str]:
    """Returns lines on the units that are read in place, and on those that are not and why."""
    units = [image for image in plan.images if image is not None]
    lines = []
    if units:
        read = f"{count_of(len(units), 'unit')} of {len(plan.layouts)} ({format_size(sum(u.nbytes for u in units))})"
        files = len({extent.path for image in units for extent in image.extents})
        lines.append(f"{read} are read from {count_of(files, 'file')} of the model at each use; nothing is written")
    kept = [unit for unit, tiers in enumerate(plan.placement.tiers) if tiers[State.WEIGHT] is Tier.HOST]
    segments = (segment for unit in kept for segment in plan.layouts[unit].segments)
    reasons = ((segment.name, places.why_not(segment, plan.mode.weight_dtype)) for segment in segments)
    first = next((f"{name} {reason}" for name, reason in reasons if reason is not None), "")
    if kept:
        size = format_size(sum(plan.parts.nbytes[unit][State.WEIGHT] for unit in kept))
        units_are = count_of(len(kept), f"unit ({size}) is", f"units ({size}) are")
        lines.append(f"{units_are} kept in host memory: {first}")
    return tuple(map(Remark, lines))
