"""Checkpointing of activations under DeepSpeed's names.

    offload.checkpointing.configure(None, "ds_config.json")
    hidden = offload.checkpointing.checkpoint(block, hidden, mask)

A model whose code does not call `checkpoint` needs none of this: with "activations" in the "offload" block of the
config, or "activation_checkpointing", its repeated blocks are computed again as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from offload.config import Config, load_config
from offload.config.blocks import ActivationCheckpointing

__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]

_configured: ActivationCheckpointing | None = None
"""The settings of `configure`; None before it, and after `reset`."""
_divided: bool | None = None
"""The key "partition_activations" as `partition_activations_in_checkpoint` has set it since the last `configure`."""


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Sets the block "activation_checkpointing" for the engines that are initialized from now on, as DeepSpeed does.

    A key that the config of such an engine sets itself wins. Arguments that are None leave the key as it is.

    Args:
        mpu_: For compatibility: Megatron's `parallel_state`, or None. The engine has the groups from its model.
        deepspeed_config: path of a DeepSpeed JSON file, or its content as a dict, whose block is used.
        partition_activations: the key of the same name.
        contiguous_checkpointing: the key "contiguous_memory_optimization".
        num_checkpoints: the key "number_checkpoints".
        checkpoint_in_cpu: the key "cpu_checkpointing".
        synchronize: the key "synchronize_checkpoint_boundary".
        profile: the key of the same name.

    Raises:
        ConfigError: if the config, or one of the values, is wrong.
    """
    global _configured, _divided
    block = {} if deepspeed_config is None else _set_keys(load_config(deepspeed_config).activation_checkpointing)
    options = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    block |= {key: value for key, value in options.items() if value is not None}
    _configured, _divided = load_config({"activation_checkpointing": block}).activation_checkpointing, None


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Sets the key "partition_activations" for the engines that are initialized from now on, and no other key.

    Args:
        partition_activation: the value.
    """
    global _divided
    _divided = partition_activation


def is_configured() -> bool:
    """Returns True if `configure` was called, and `reset` not since."""
    return _configured is not None


def reset() -> None:
    """Forgets the settings of `configure`. Engines that exist keep theirs.

    DeepSpeed empties its buffers here; this library's belong to graphs, and go with them.
    """
    global _configured, _divided
    _configured, _divided = None, None


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns `function(*args, **kwargs)`, whose activations are computed again in backward.

    The inputs wait where "activations" of the engine's config says. Random generators and autocast are as in the
    forward when `function` runs again. Blocks that the engine would compute again by itself are left to this call.

    Args:
        function: a module or a function of tensors.
        *args: tensors and other values.
        **kwargs: tensors and other values.

    Returns:
        The output of the function; of a list a tuple, and of one item in a list or a tuple the item, as in DeepSpeed.
    """
    # torch keeps a dict of keywords as it is, so their tensors are handed over by position, and wait as the others do.
    # Nor does it hand on keywords that it takes itself, such as "debug".
    names, count = tuple(kwargs), len(args)

    def run(*values: Any) -> Any:
        return function(*values[:count], **dict(zip(names, values[count:], strict=True)))

    output = torch_checkpoint.checkpoint(run, *args, *kwargs.values(), use_reentrant=False)
    if not isinstance(output, list | tuple):
        return output
    return output[0] if len(output) == 1 else (output if isinstance(output, tuple) else tuple(output))


non_reentrant_checkpoint = checkpoint
"""DeepSpeed's other name; here `checkpoint` is never reentrant."""


def with_configured(config: Config) -> Config:
    """Returns a config with the settings of `configure`, where the config itself does not set them."""
    called = {} if _configured is None else _set_keys(_configured)
    if _divided is not None:
        called["partition_activations"] = _divided
    if not called:
        return config
    block = {**called, **_set_keys(config.activation_checkpointing)}
    return config.model_copy(update={"activation_checkpointing": ActivationCheckpointing(**block)})


def _set_keys(block: ActivationCheckpointing) -> dict[str, Any]:
    return {key: getattr(block, key) for key in block.model_fields_set}
