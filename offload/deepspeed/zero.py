"""`deepspeed.zero`: models without weights, gathered parameters, attributes such as `ds_id`, tiled layers.

DeepSpeed scripts recognise and measure parameters by `ds_id`, `ds_shape` and other attributes. Only the parameters of
`zero.Init` and of `initialize` have these attributes: `hasattr(p, "ds_id")` is False for any other parameter.

[Note: attributes] The attributes are properties of `nn.Parameter`, so that they are always current, even when the pager
changes the parameter's class. The parameter itself stores only a number, and perhaps the dtype passed to `zero.Init`.
Both survive pickling and copying. A copy of a paged parameter is an ordinary parameter and has neither.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from offload.activations import linear
from offload.config import load_config
from offload.deepspeed.comm import get_world_group, init_distributed
from offload.deepspeed.config import content_of
from offload.deepspeed.refused import MiCS_Init
from offload.engine.access import (
    gathered,
    register_external_parameter,
    safe_get_local_fp32_param,
    unregister_external_parameter,
)
from offload.engine.keywords import refuse
from offload.engine.params import handle_of
from offload.errors import ConfigError, UsageError
from offload.layout.modes import DTYPES
from offload.model_io.deferred import building, is_deferred
from offload.model_io.load import init
from offload.planner.deepspeed_estimates import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from offload.torch_internals import swap_parameters

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "ZeroParamType",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]


_ID = "_deepspeed_id"
"""Attribute of the parameters of `zero.Init` and `initialize`."""
_ids = itertools.count()


class ZeroParamType(enum.Enum):
    """DeepSpeed's kinds of parameters. Parameters with the attributes of this module are PARTITIONED."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(enum.Enum):
    """Location of a parameter's weights: AVAILABLE while the parameter is an ordinary one with memory."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def mark(parameters: Iterable[nn.Parameter]) -> None:
    """Gives the parameters of one model their attributes, in the same order on every rank; ids that exist stay."""
    # Set up with the first model: a process that never trains under these names keeps torch's class unchanged.
    if not hasattr(nn.Parameter, "ds_id"):
        for name, read in _READ.items():
            setattr(nn.Parameter, name, _property(name, read))
        # A custom backward saves views of weights, which have memory. trl reads `ds_status` of such tensors.
        setattr(torch.Tensor, "ds_status", property(_has_memory))  # noqa: B010 - mypy knows no such attribute
    for parameter in parameters:
        if not is_zero_param(parameter):
            setattr(parameter, _ID, next(_ids))


def is_zero_param(parameter: Any) -> bool:
    """Returns True if a parameter has the attributes."""
    return isinstance(parameter, torch.Tensor) and _ID in vars(parameter)


def _property(name: str, read: Callable[[Any], Any]) -> property:

    def get(parameter: Any) -> Any:
        if not is_zero_param(parameter):
            raise AttributeError(f"{type(parameter).__name__!r} object has no attribute {name!r}")
        return read(parameter)

    return property(get, doc=f"DeepSpeed's {name}.")


def _status(parameter: Any) -> ZeroParamStatus:
    # The status follows from the current class, which the pager changes at each use.
    absent = handle_of(parameter) is not None or is_deferred(parameter)
    return ZeroParamStatus.NOT_AVAILABLE if absent else ZeroParamStatus.AVAILABLE


def _has_memory(tensor: torch.Tensor) -> ZeroParamStatus:
    """Returns AVAILABLE for any tensor that is no parameter of an engine; an unmarked parameter has no status."""
    if isinstance(tensor, nn.Parameter):
        raise AttributeError(f"{type(tensor).__name__!r} object has no attribute 'ds_status'")
    return ZeroParamStatus.AVAILABLE


def _partition(parameter: Any) -> torch.Tensor:
    """Returns a copy of this rank's partition, in the dtype of the weights."""
    try:
        values = safe_get_local_fp32_param(parameter)
    except UsageError as error:
        # An AttributeError, so that `hasattr`, and `getattr` with a default, work while the value cannot be read.
        raise AttributeError(str(error)) from error
    assert values is not None
    return values.to(parameter.dtype)


_READ: dict[str, Callable[[Any], Any]] = {
    "ds_id": lambda parameter: vars(parameter)[_ID],
    "ds_shape": lambda parameter: parameter.shape,
    "ds_numel": lambda parameter: parameter.numel(),
    "ds_status": _status,
    "ds_tensor": _partition,
    # False also for a unit that stays on the device: a script that reads the flag then gathers, which works.
    "ds_persist": lambda parameter: False,
}


_DEVICES = (None, "none", "cpu", "nvme", "cuda")
_ASKED = "_deepspeed_dtype"
"""Attribute of a parameter: the dtype that the script passed to `zero.Init` without a config."""


class Init:
    """Context for the construction of a model, whose parameters receive DeepSpeed's attributes, such as `ds_id`.

    Weights do not exist until `initialize`, so `remote_device`, `pin_memory` and `mem_efficient_linear` have no effect;
    nor has `tensor_overrides`. The parameters of `module`, an existing model, receive the attributes, and keep their
    values until `initialize`. `config` is another name of `config_dict_or_path`, the config that `initialize` will
    receive. The config sets the dtype: a different `dtype` is an error here, or in `initialize` if no config is passed.
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
        """Checks the keywords; a value that is not supported is an error."""
        refuse(mpu=mpu)
        if data_parallel_group is not None and data_parallel_group is not get_world_group():
            refuse(data_parallel_group=data_parallel_group)
        if remote_device not in _DEVICES:
            raise UsageError(
                f"remote_device={remote_device!r}: expected None, cpu or nvme; the config places the weights"
            )
        of_config, of_all = 'set it in "zero_optimization" of the config', "weights are partitioned over all ranks"
        unsupported = (
            ("zero_param_parallel_group", zero_param_parallel_group, of_all),
            ("zero_quantized_weights", zero_quantized_weights, of_config),
            ("zero_quantized_nontrainable_weights", zero_quantized_nontrainable_weights, of_config),
            ("sequence_data_parallel_group", sequence_data_parallel_group, of_all),
            ("param_swapper", param_swapper, "the engine has its own"),
        )
        for name, value, advice in unsupported:
            if value:
                raise UsageError(f"zero.Init: {name}={value!r} is not supported, {advice}; leave it out")
        chosen = config_dict_or_path if config_dict_or_path is not None else config
        self._config = None if chosen is None else content_of(chosen)
        self._enabled = enabled
        self._asked = dtype if self._config is None else None
        self._open = contextlib.ExitStack()
        # Scripts set the dtype in both places. If the two differed, training would use an unintended dtype.
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
            # Registered after the hook of `init`, so this hook receives the parameter that `init` has put in place.
            self._open.callback(register_module_parameter_registration_hook(marks).remove)

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.__exit__(*error)


def check_asked(model: nn.Module, config: dict[str, Any]) -> None:
    """Raises `ConfigError` if `zero.Init` created parameters of `model` in another dtype than the config's."""
    for parameter in model.parameters():
        if (dtype := getattr(parameter, _ASKED, None)) is not None:
            return _check_dtype(dtype, config)


def _mark(asked: torch.dtype | None, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    if parameter is not None:
        mark([parameter])
        if asked is not None:
            setattr(parameter, _ASKED, asked)


def _check_dtype(dtype: torch.dtype, config: dict[str, Any]) -> None:
    wanted = DTYPES[load_config(config).dtype]
    if dtype != wanted:
        raise ConfigError(
            f"zero.Init received dtype={dtype}, and the config asks for {wanted}, which decides: leave the argument "
            'out, or set "bf16" or "fp16" in the config'
        )


class GatheredParameters:
    """Context in which parameters of an engine or of `zero.Init` have ordinary memory.

    In a forward or a backward the context fetches an engine's weights as the modules do, and gathers nothing more.
    Parameters of `zero.Init` without values can receive values here, by `load_state_dict`, `copy_` or `torch.nn.init`;
    `initialize` initializes the others.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        """Checks the arguments.

        Args:
            params: one or several parameters. Parameters of neither an engine nor `zero.Init` are ignored.
            modifier_rank: 0 to keep the changes made on rank 0; None to read. A change with None is an error.
            fwd_module: a module whose forward uses the parameters; registered as `register_external_parameter` does.
            enabled: False to do nothing.

        Raises:
            UsageError: if `modifier_rank` is another rank.
        """
        refuse(modifier_rank=modifier_rank)
        self._enabled, self._modifier_rank = enabled, modifier_rank
        # A generator such as `model.parameters()` gives its items once; tied parameters may be given twice.
        single = isinstance(params, torch.Tensor) or not isinstance(params, Iterable)
        listed: list[Any] = [params] if single else list(params)
        self._params = list({id(item): item for item in listed if isinstance(item, nn.Parameter)}.values())
        self._open = contextlib.ExitStack()
        if enabled and fwd_module is not None:
            # The forward of `fwd_module` reads the parameter, but another module owns the parameter.
            for parameter in self._params:
                register_external_parameter(fwd_module, parameter)

    def __enter__(self) -> None:
        if self._enabled:
            self._open.enter_context(_gathered(self._params, self._modifier_rank))

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.__exit__(*error)


@contextlib.contextmanager
def _gathered(params: list[Any], modifier_rank: int | None) -> Iterator[None]:
    handles = [handle for parameter in params if (handle := handle_of(parameter)) is not None]
    # `fetch` returns True only while a forward or a backward runs.
    if handles and all([handle.fetch() for handle in handles]):
        if modifier_rank is not None:
            raise UsageError(
                "GatheredParameters with modifier_rank changes weights, which a running forward or backward uses: "
                "enter it between steps"
            )
        yield
        return
    without_values = [parameter for parameter in params if is_deferred(parameter)]
    # With a modifier rank, changes are kept. Otherwise the body only reads, and reading a missing value is an error.
    takes = (
        building(model=True, copies=True) if without_values and modifier_rank is not None else contextlib.nullcontext()
    )
    with gathered(params, modifier_rank=modifier_rank), takes:
        yield
    # After the body, as in DeepSpeed. `gathered` itself already broadcasts the engines' parameters.
    if modifier_rank is not None and dist.is_initialized() and dist.get_world_size() > 1:
        for parameter in without_values:
            _share(parameter)


def _share(parameter: nn.Parameter) -> None:
    """Copies the values of a parameter of `zero.Init` from rank 0 to every rank, if it has values on rank 0."""
    # Only rank 0 knows whether the user's code has set the parameter: it does so on rank 0 alone.
    has_values = torch.tensor([not is_deferred(parameter)])
    dist.broadcast(has_values, src=0)
    if not has_values:
        return
    values = parameter.detach() if dist.get_rank() == 0 else torch.empty(parameter.shape, dtype=parameter.dtype)
    dist.broadcast(values, src=0)
    if dist.get_rank() != 0:
        # Swapped in place, so that modules that share the parameter keep the same object.
        swap_parameters(parameter, nn.Parameter(values, parameter.requires_grad))


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Yields the engine: `generate` works unchanged, because the engine pages weights for each forward."""
    yield model


class TiledLinear(linear.TiledLinear):
    """A linear layer as a grid of smaller ones. The engine pages each of them alone. See `offload.TiledLinear`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: type[nn.Linear] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        if input_is_already_split or not combine_out_splits or linear_cls is not nn.Linear:
            raise UsageError(
                "TiledLinear takes the whole input, returns the whole output, and is made of torch.nn.Linear: leave "
                "input_is_already_split, combine_out_splits and linear_cls out"
            )
        super().__init__(in_features, out_features, bias, in_splits, out_splits, init_linear, **kwargs)


class TiledLinearReturnBias(TiledLinear):
    """A `TiledLinear` of Megatron, which returns its bias beside the output; not supported."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError(
            "TiledLinearReturnBias is for layers of Megatron, which add the bias later: use deepspeed.zero.TiledLinear"
        )


class OffloadDeviceEnum(str, enum.Enum):
    """Places of states."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):
    """Kinds of states."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class DeepSpeedZeRoOffload:
    """Stand-in for the hooks of a model, for libraries that remove hooks before a generation and register them again.

    There is nothing to remove: the engine's own hooks do nothing while all parameters are gathered.
    """

    def __init__(self) -> None:
        self.module = self
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters that are marked as used by a module: none."""
        return iter(())

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters of other modules: none."""
        return iter(())

    def _register_deepspeed_module(self, module: Any) -> None:
        """Does nothing: no hook was removed."""


# transformers wraps this constructor with the function below while it loads a model.
_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
    """Returns `fn`, since `Init` leaves torch's constructors as they are."""
    return fn
