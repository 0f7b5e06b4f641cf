"""`zero.Init`: a model whose parameters have no memory until `initialize` fills them, unit by unit."""

from __future__ import annotations

import contextlib
import functools
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from offload.config import load_config
from offload.deepspeed.comm import get_world_group, init_distributed
from offload.deepspeed.content import content_of
from offload.deepspeed.parameters import mark
from offload.engine.keywords import refuse
from offload.errors import ConfigError, UsageError
from offload.layout.modes import DTYPES
from offload.model_io.load import init

_DEVICES = (None, "none", "cpu", "nvme", "cuda")
_UNSUPPORTED = {
    "zero_quantized_weights": 'set it in "zero_optimization" of the config',
    "zero_quantized_nontrainable_weights": 'set it in "zero_optimization" of the config',
    "zero_param_parallel_group": "weights are partitioned over all ranks",
    "sequence_data_parallel_group": "weights are partitioned over all ranks",
    "param_swapper": "the engine has its own",
}
_ASKED = "_deepspeed_dtype"
"""Attribute of a parameter: the dtype that the script has asked for, without a config."""


class Init:
    """Context for the construction of a model. Parameters that are made in it have DeepSpeed's attributes, as `ds_id`.

    The keywords about where weights wait until `initialize`, `remote_device` and `pin_memory`, have no effect: weights
    do not exist until then.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        """Checks the keywords.

        Args:
            module: a model that exists already; its parameters get the attributes, and keep their values until
                `initialize`.
            data_parallel_group: None or the group of all ranks.
            mem_efficient_linear: without effect.
            remote_device: without effect.
            pin_memory: without effect.
            config_dict_or_path: the config that `initialize` will receive.
            config: another name of `config_dict_or_path`.
            enabled: False to do nothing.
            dtype: must be that of the config, which decides: of this one, or else of that of `initialize`.
            mpu: must be None.
            zero_param_parallel_group: must be None.
            zero_quantized_weights: must be False.
            zero_quantized_nontrainable_weights: must be False.
            sequence_data_parallel_group: must be None.
            param_swapper: must be None.
            tensor_overrides: without effect: buffers are made as the model's code says.

        Raises:
            UsageError: if a keyword asks for something that is not supported.
            ConfigError: if the config is wrong, or `dtype` is not that of the config.
        """
        refuse(mpu=mpu)
        if data_parallel_group is not None and data_parallel_group is not get_world_group():
            refuse(data_parallel_group=data_parallel_group)
        if remote_device not in _DEVICES:
            raise UsageError(
                f"remote_device={remote_device!r}: expected None, cpu or nvme; the config places the weights"
            )
        _refuse(
            zero_param_parallel_group=zero_param_parallel_group,
            zero_quantized_weights=zero_quantized_weights,
            zero_quantized_nontrainable_weights=zero_quantized_nontrainable_weights,
            sequence_data_parallel_group=sequence_data_parallel_group,
            param_swapper=param_swapper,
        )
        chosen = config_dict_or_path if config_dict_or_path is not None else config
        self._config = None if chosen is None else content_of(chosen)
        self._enabled = enabled
        self._asked = dtype if self._config is None else None
        self._open = contextlib.ExitStack()
        # Scripts name the dtype in both places; two answers would train in one that somebody did not mean.
        if enabled and dtype is not None and self._config is not None:
            _check_dtype(dtype, self._config)
        if enabled and module is not None:
            mark(module.parameters())

    def __enter__(self) -> None:
        if self._enabled:
            # DeepSpeed does so too, and transformers asks torch.distributed for the rank while it loads weights.
            init_distributed()
            self._open.enter_context(init(self._config))
            marks = functools.partial(_mark, self._asked)
            # Registered behind the hook of `init`, and so called with the parameter that this one has put in place.
            self._open.callback(register_module_parameter_registration_hook(marks).remove)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._open.__exit__(kind, error, trace)


def check_asked(model: nn.Module, config: dict[str, Any]) -> None:
    """Raises `ConfigError` if `zero.Init` made parameters of `model` with another dtype than the config's."""
    asked = next((dtype for each in model.parameters() if (dtype := getattr(each, _ASKED, None)) is not None), None)
    if asked is not None:
        _check_dtype(asked, config)


def _mark(asked: torch.dtype | None, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Gives a parameter that is being registered its attributes, and notes the dtype that was asked for."""
    if parameter is not None:
        mark([parameter])
        if asked is not None:
            setattr(parameter, _ASKED, asked)


def _refuse(**given: Any) -> None:
    """Raises `UsageError` for the first keyword that has a value."""
    for name, value in given.items():
        if value:
            raise UsageError(f"zero.Init: {name}={value!r} is not supported, {_UNSUPPORTED[name]}; leave it out")


def _check_dtype(dtype: torch.dtype, config: dict[str, Any]) -> None:
    """Raises `ConfigError` if `dtype` is not that of the config's weights."""
    wanted = DTYPES[load_config(config).dtype]
    if dtype != wanted:
        raise ConfigError(
            f"zero.Init received dtype={dtype}, and the config asks for {wanted}, which decides: leave the argument "
            'out, or set "bf16" or "fp16" in the config'
        )
