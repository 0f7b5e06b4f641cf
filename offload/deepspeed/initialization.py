"""`deepspeed.initialize`, its options on a command line, and `init_inference` for a model that only runs."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from offload.config import load_config
from offload.deepspeed.comm import init_distributed
from offload.deepspeed.config import check_ranks, content_of, of_a_script, with_rate
from offload.deepspeed.engine import DeepSpeedEngine
from offload.deepspeed.pipe import PipelineEngine, PipelineModule
from offload.deepspeed.sequence_parallel import SequenceGroups
from offload.deepspeed.utils import z3_leaf_module
from offload.deepspeed.zero import DeepSpeedZeRoOffload, check_asked, mark
from offload.engine.setup import check_model_type, chosen_config
from offload.engine.setup import initialize as _initialize
from offload.errors import ConfigError, UsageError
from offload.inference_engine import InferenceEngine, inference
from offload.notices import announce

logger = logging.getLogger("offload")

_PORT = 29500
"""DeepSpeed's default of `distributed_port`. It has no effect here."""


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = _PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Returns an engine over `model`: (engine, optimizer, loader, lr_scheduler). See `offload.initialize`.

    Without an optimizer, here or in the config, the model is for evaluation: its parameters are frozen, and the
    returned optimizer is None. Since a DeepSpeed script saves checkpoints, nothing is committed to the swap files
    unless the "offload" block of the config sets "durability" or "resume".

    Args:
        args: namespace whose `deepspeed_config` is read if no config is given.
        model: the model.
        optimizer: an optimizer of torch or of `deepspeed.ops`, a callable that creates one from the parameters, or None
            for the config's optimizer.
        model_parameters: parameters or groups for the config's optimizer or the callable; None for all that train.
        training_data: dataset to load batches from; without it the loader is None.
        lr_scheduler: a schedule, a callable that creates one from the optimizer, or None for the config's schedule.
        distributed_port: without effect at its default; otherwise it must be the launcher's port.
        mpu: Megatron's `parallel_state` of tensor parallelism, the groups of `register_with_transformers`, or None.
        dist_init_required: as in `init_distributed`.
        collate_fn: makes a batch from samples.
        config: path of the JSON, or its content as a dict.
        mesh_param: must be None.
        config_params: another name of `config`.

    Raises:
        ConfigError: if the config is wrong or does not fit the model, or accelerate counts other ranks.
        UsageError: if a keyword has an unsupported value, or the model is already under an engine.
    """
    model, content = check_model_type(model), content_of(chosen_config(args, config, config_params))
    # After this call scripts read their rank from torch.distributed, even in a process that trains alone.
    init_distributed(dist_init_required=dist_init_required)
    check_ranks()
    trains = optimizer is not None or content.get("optimizer") is not None
    content = content if optimizer is not None else with_rate(content)
    leaves = [name for name, module in model.named_modules() if name and z3_leaf_module(module)]
    content = _with_sequences(of_a_script(content, leaves, trains), mpu)
    check_asked(model, content)
    if not trains:
        load_config(content)  # raises before the model is changed
        # An engine without an optimizer cannot store gradients.
        if any(parameter.requires_grad for parameter in model.parameters()):
            logger.info("there is no optimizer: the model is for evaluation, and its parameters are frozen")
        model.requires_grad_(False)
    engine, used, loader, schedule = _initialize(
        None,
        model,
        optimizer,
        model_parameters,
        training_data,
        lr_scheduler,
        collate_fn,
        content,
        mpu=None if isinstance(mpu, SequenceGroups) else mpu,
        dist_init_required=dist_init_required,
        distributed_port=None if distributed_port == _PORT else distributed_port,
        mesh_param=mesh_param,
    )
    # Done last: until here, parameters may be replaced by other objects.
    mark(engine.module.parameters())
    # trl reads a model's hooks from this attribute, and removes them before it generates.
    engine.optimizer.parameter_offload = DeepSpeedZeRoOffload()  # type: ignore[attr-defined]
    # A pipeline's engine has its own `train_batch` and `eval_batch`, which run a schedule.
    named_engine = DeepSpeedEngine(engine)
    if isinstance(model, PipelineModule):
        named_engine = PipelineEngine(engine, model, loader)
    return named_engine, used if trains else None, loader, schedule


def _with_sequences(content: dict[str, Any], mpu: Any) -> dict[str, Any]:
    """Returns the config with the size of the groups for sequences, if `mpu` has some."""
    if not isinstance(mpu, SequenceGroups):
        return content
    # A script sets the size twice: in `register_with_transformers` and in the config.
    size = mpu.get_sequence_parallel_world_size()
    if content.get("sequence_parallel_size") not in (None, "auto", size):
        raise ConfigError(
            f'"sequence_parallel_size" is {content["sequence_parallel_size"]}, and mpu= has groups of {size} ranks for '
            "sequences; give both the same number, or leave the key out"
        )
    return {**content, "sequence_parallel_size": size}


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds DeepSpeed's options to a parser, `--deepspeed` and `--deepspeed_config`, and returns the parser."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="use DeepSpeed, if the script asks for this option")
    group.add_argument("--deepspeed_config", default=None, help="path of DeepSpeed's JSON file")
    return parser


_DTYPES = {
    "fp32": {"bf16": {"enabled": False}},
    "float32": {"bf16": {"enabled": False}},
    "float": {"bf16": {"enabled": False}},
    "fp16": {"fp16": {"enabled": True}},
    "float16": {"fp16": {"enabled": True}},
    "half": {"fp16": {"enabled": True}},
    "bf16": {"bf16": {"enabled": True}},
    "bfloat16": {"bf16": {"enabled": True}},
}
"""Keys of a config for each dtype, by the name of torch's dtype without "torch."."""
_SPEED = frozenset(
    "kernel_inject replace_with_kernel_inject max_out_tokens max_tokens min_out_tokens min_tokens triangular_masking "
    "triton_autotune use_triton injection_policy injection_policy_tuple return_tuple set_empty_params transposed_mode "
    "replace_method".split()
)
"""Keys about DeepSpeed's own layers. The model's layers are used in their place, and no result changes."""
_OURS = frozenset(("aio", "bf16", "fp16", "offload", "zero_optimization"))
"""Keys of a config of `offload.inference`, which are passed on."""
_REFUSED = {
    "enable_cuda_graph": "CUDA graphs record addresses, and weights move: leave the key out",
    "quant": 'set "frozen": "int8" or "nf4" in the "offload" block of an offload.inference config',
    "moe": "experts are the model's own, and paged in groups or one by one: leave the key out",
    "checkpoint": "give offload.inference the folder of the model, whose files it reads in place",
    "base_dir": "give offload.inference the folder of the model, whose files it reads in place",
}
"""Keys that would change the computation or its inputs, and an alternative for each."""


def init_inference(model: Any, config: Any = None, **kwargs: Any) -> InferenceEngine:
    """Returns an engine that runs a model and does not train it. See `offload.inference`.

    Args:
        model: a `torch.nn.Module`, or the folder of a model of transformers.
        config: DeepSpeed's inference config, as a path or a dict: `dtype`, by default the dtype of the weights, and
            `zero` with the keys of "zero_optimization". Keys about DeepSpeed's own layers have no effect, but are
            logged.
        **kwargs: the same keys; a key that is in both must have one value.

    Raises:
        UsageError: if a key has an unsupported value, or two keys contradict each other.
        ConfigError: if the config is wrong.
    """
    content = {} if config is None else content_of(config)
    for name, value in kwargs.items():
        if content.setdefault(name, value) != value:
            raise UsageError(f"init_inference: {name} is {content[name]!r} in config and {value!r} as a keyword")
    ours, without_effect = _divided(content)
    # One line names all keys to delete.
    if without_effect:
        announce(f"init_inference uses the model's own layers; without effect: {', '.join(without_effect)}")
    return inference(model, ours)


def _divided(content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the config of `offload.inference` that DeepSpeed's keys ask for, and the keys that have no effect."""
    ours: dict[str, Any] = {}
    without_effect = []
    for name, value in content.items():
        # Without "dtype" the weights keep their dtype, while DeepSpeed would cast them to fp16.
        if name == "dtype":
            dtype = str(value).lower().removeprefix("torch.")
            if dtype not in _DTYPES:
                raise UsageError(
                    "init_inference: dtype is one of torch.float32, torch.float16 and torch.bfloat16, got "
                    f"{value}; for 8 bits {_REFUSED['quant']}"
                )
            ours |= _DTYPES[dtype]
        elif name == "zero":
            ours["zero_optimization"] = value
        elif name in ("tensor_parallel", "tp", "mp_size"):
            size = value.get("tp_size", 1) if isinstance(value, Mapping) else value
            if size not in (None, 1):
                raise UsageError(
                    f"init_inference: {name} is {size}, but weights are paged, and not divided within a layer; leave "
                    "it out, and give each rank rows of its own"
                )
        elif name in _REFUSED:
            # Configs turn a key off by false, or by a block with "enabled": false.
            if value and not (isinstance(value, Mapping) and not value.get("enabled", True)):
                raise UsageError(f"init_inference does not support {name}: {_REFUSED[name]}")
        elif name in _SPEED:
            if value:
                without_effect.append(name)
        elif name in _OURS:
            ours[name] = value
        else:
            raise UsageError(
                f"init_inference has no key {name!r}: expected dtype, zero, a key about DeepSpeed's layers, or one of "
                f"{', '.join(sorted(_OURS))}"
            )
    return ours, without_effect
