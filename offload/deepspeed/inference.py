"""`deepspeed.init_inference`: a model that only runs, as an engine of `offload.inference`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload.deepspeed.config import content_of
from offload.errors import UsageError
from offload.inference_engine import InferenceEngine, inference
from offload.notices import announce

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
"""Keys of a config for each name of a dtype, that of torch's dtypes without "torch."."""
_SPEED = frozenset(
    "kernel_inject replace_with_kernel_inject max_out_tokens max_tokens min_out_tokens min_tokens triangular_masking "
    "triton_autotune use_triton injection_policy injection_policy_tuple return_tuple set_empty_params transposed_mode "
    "replace_method".split()
)
"""Keys about DeepSpeed's own layers, in whose place the model's are used. They change no result."""
_OURS = frozenset(("aio", "bf16", "fp16", "offload", "zero_optimization"))
"""Keys of a config of `offload.inference`, which are passed on."""
_REFUSED = {
    "enable_cuda_graph": "CUDA graphs record addresses, and weights move: leave the key out",
    "quant": 'set "frozen": "int8" or "nf4" in the "offload" block of an offload.inference config',
    "moe": "experts are the model's own, and paged one by one: leave the key out",
    "checkpoint": "give offload.inference the folder of the model, whose files it reads in place",
    "base_dir": "give offload.inference the folder of the model, whose files it reads in place",
}
"""Keys that would change what is computed or from which values, each with what to do."""


def init_inference(model: Any, config: Any = None, **kwargs: Any) -> InferenceEngine:
    """Returns an engine that runs a model and does not train it. See `offload.inference`.

    Args:
        model: a `torch.nn.Module`, or the folder of a model of transformers.
        config: DeepSpeed's inference config, as a path or a dict: `dtype`, that of the weights by default, and `zero`
            with the keys of "zero_optimization". Keys about DeepSpeed's own layers have no effect, which a line says.
        **kwargs: the same keys; a key that is in both must have one value.

    Raises:
        UsageError: if a key asks for what is not supported, or two of them contradict each other.
        ConfigError: if the config is wrong.
    """
    content = {} if config is None else content_of(config)
    for name, value in kwargs.items():
        if content.setdefault(name, value) != value:
            raise UsageError(f"init_inference: {name} is {content[name]!r} in config and {value!r} as a keyword")
    ours, without_effect = _divided(content)
    # Once for all, so that one line says what to delete.
    if without_effect:
        announce(f"init_inference uses the model's own layers; without effect: {', '.join(without_effect)}")
    return inference(model, ours)


def _divided(content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the config of `offload.inference` that DeepSpeed's keys ask for, and the keys that have no effect.

    Raises:
        UsageError: if a key asks for what is not supported, or is unknown.
    """
    ours: dict[str, Any] = {}
    without_effect = []
    for name, value in content.items():
        # Without it the weights keep their dtype, where DeepSpeed would cast them to fp16.
        if name == "dtype":
            ours |= _dtype_block(value)
        elif name == "zero":
            ours["zero_optimization"] = value
        elif name in ("tensor_parallel", "tp", "mp_size"):
            _check_one_rank(name, value)
        elif name in _REFUSED:
            # Configs turn a key off by false, or by a block that says so.
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


def _dtype_block(value: Any) -> dict[str, Any]:
    """Returns the keys of a config that set a dtype, given as one of torch or as a name."""
    name = str(value).lower().removeprefix("torch.")
    if name not in _DTYPES:
        raise UsageError(
            f"init_inference: dtype is one of torch.float32, torch.float16 and torch.bfloat16, got {value}; for 8 bits "
            f"{_REFUSED['quant']}"
        )
    return _DTYPES[name]


def _check_one_rank(name: str, value: Any) -> None:
    """Raises `UsageError` if layers are to be divided over ranks."""
    size = value.get("tp_size", 1) if isinstance(value, Mapping) else value
    if size not in (None, 1):
        raise UsageError(
            f"init_inference: {name} is {size}, but weights are paged, and not divided within a layer; leave it out, "
            "and give each rank rows of its own"
        )
