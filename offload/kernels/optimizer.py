"""A torch optimizer that runs AdamW on the CPU with these kernels, for any training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from offload.errors import ConfigError
from offload.kernels.update import AdamWStep, Noise, Partition, Segment, noise_stream, update

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CPUAdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW` (or Adam, with `decoupled=False`) in one fused pass over CPU parameters.

    A 16-bit parameter has an exact fp32 master. The master of a bf16 parameter consists of the parameter and 2 more
    bytes for each element (state "residual"). The master of an fp16 parameter is stored in full (state "master").
    Moments are fp32, or bf16 with `moment_dtype`: each new value is rounded to bf16 stochastically. The random bits
    depend only on the numbers of the parameter, the element and the step. Gradients may be fp32, bf16 or fp16, and are
    only read. The bits do not depend on threads or instruction set. One thread at a time may use an optimizer.

    Each group's `grad_scale`, which may change between steps, multiplies its gradients: a clip coefficient, or one over
    the loss scale.

    A 16-bit parameter that is changed between steps, in place or by `.data =`, gets a new master equal to its new
    value; unchanged elements of an fp16 parameter keep their master. (`parameter.data.copy_` goes unnoticed, as it does
    in autograd.)

    Args:
        params: parameters on the CPU in fp32, bf16 or fp16, or groups of them.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        weight_decay: decay of the weights.
        decoupled: False adds the decay to the gradient, as `torch.optim.Adam` does.
        moment_dtype: torch.float32 or torch.bfloat16.

    Raises:
        ConfigError: a setting is out of range, or a parameter has another device or dtype.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        decoupled: bool = True,
        moment_dtype: torch.dtype = torch.float32,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled}
        self._seen: dict[torch.Tensor, tuple[int, int]] = {}
        super().__init__(params, defaults | {"moment_dtype": moment_dtype, "grad_scale": 1.0})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Marks are versions and addresses of tensors in this process. They mean nothing for loaded tensors.
        self._seen = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in torch.

        Args:
            param_group: the parameters and their settings.

        Raises:
            ConfigError: a setting is out of range, or the kernels do not support a parameter. The group is then not
                added.
        """
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except ConfigError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient.

        Args:
            closure: reevaluates the model and returns the loss; called once, with gradients enabled.

        Returns:
            The result of `closure`, or None without one.

        Raises:
            ConfigError: a gradient is sparse or has another device or dtype. No parameter has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Parameters are numbered as in a state dict, so that a resumed run continues with the same roundings.
        numbered = enumerate((p, group) for group in self.param_groups for p in group["params"])
        # All or none: every gradient is checked before the first parameter changes.
        ready = [(number, p, _gradient(p), group) for number, (p, group) in numbered if p.grad is not None]
        for number, parameter, gradient, group in ready:
            self._update(number, parameter, gradient, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state as in torch, also of a `torch.optim.AdamW` or `Adam`, and of parameters in another dtype.

        A master that `state_dict` does not contain starts as a copy of the parameter.

        Args:
            state_dict: a result of `state_dict()`; its tensors are copied.

        Raises:
            ConfigError: shapes differ, or an option is set that the kernel does not support (amsgrad, maximize).
        """
        received: list[dict[str, Any]] = []  # the content after the user's own hooks have run

        def take(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
            for group in loaded["param_groups"]:
                for option in ("amsgrad", "maximize"):
                    if group.get(option, False):
                        raise ConfigError(f"the state has {option}=True, which the kernel does not support")
            received.append(loaded)

        # It runs after the user's own hooks and before torch loads anything, so that a refused state changes nothing.
        hook = self.register_load_state_dict_pre_hook(take)
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        saved = (index for group in received[0]["param_groups"] for index in group["params"])
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for index, parameter in zip(saved, parameters, strict=True):
            # torch has cast the states to the parameter's dtype, which loses fp32 moments: take the originals.
            for key, value in received[0]["state"].get(index, {}).items():
                self.state[parameter][key] = value
        self._seen = {}
        for group in self.param_groups:
            for option in ("amsgrad", "maximize"):
                group.pop(option, None)
            if "decoupled_weight_decay" in group:
                group["decoupled"] = group.pop("decoupled_weight_decay")
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            for parameter in group["params"]:
                if self.state.get(parameter):
                    _adopt(parameter, self.state[parameter])

    def _update(self, number: int, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Performs the step of parameter `number`. `gradient` is (numel,), contiguous."""
        state = self.state[parameter]
        if not state:
            _begin(parameter, group["moment_dtype"], state)
        elif state["exp_avg"].shape != parameter.shape or _beside(parameter) != {"residual", "master"} & set(state):
            _adopt(parameter, state)  # the parameter's dtype or shape was changed
        elif self._seen.get(parameter, _mark(parameter)) != _mark(parameter):
            _follow(parameter, state)
        beta1, beta2 = group["betas"]
        step = AdamWStep(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=int(state["step"]) + 1,
            grad_scale=float(group["grad_scale"]),
            decoupled=bool(group["decoupled"]),
        )
        # States are contiguous. If the parameter is not, the kernel updates a copy, which is written back below.
        flat = parameter.detach().contiguous().view(-1)
        partition = Partition(
            flat,
            gradient,
            (state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)),
            residual=state["residual"].view(-1) if "residual" in state else None,
            master=state["master"].view(-1) if "master" in state else None,
        )
        noise = Noise(noise_stream(0, number, step.step), 0)
        update(partition, [Segment(0, flat.numel(), step, noise)])
        state["step"] += 1
        if flat.data_ptr() != parameter.data_ptr():
            parameter.copy_(flat.view(parameter.shape))
        else:
            # Autograd does not see the kernel's write; a graph that saved the old values must detect it.
            torch.autograd.graph.increment_version(parameter)
        self._seen[parameter] = _mark(parameter)


def _check_group(group: dict[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        if not 0 <= float(group[name]) < float("inf"):
            raise ConfigError(f"{name}: expected a number from 0, got {group[name]}")
    betas = group["betas"]
    if len(betas) != 2 or not all(0 <= float(beta) < 1 for beta in betas):
        raise ConfigError(f"betas: expected two numbers from 0 to below 1, got {betas}")
    if group["moment_dtype"] not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"moment_dtype: expected torch.float32 or torch.bfloat16, got {group['moment_dtype']}")
    for parameter in group["params"]:
        if parameter.device.type != "cpu" or parameter.dtype not in _DTYPES:
            raise ConfigError(
                f"expected parameters on the CPU in fp32, bf16 or fp16, got {parameter.dtype} on {parameter.device}"
            )


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Returns the parameter's gradient as the kernel takes it: (numel,), contiguous.

    Raises `ConfigError` if the gradient is sparse or has another device or dtype.
    """
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout is not torch.strided or gradient.dtype not in _DTYPES or gradient.device.type != "cpu":
        raise ConfigError(
            f"expected dense gradients on the CPU in fp32, bf16 or fp16, got {gradient.layout}, {gradient.dtype} on "
            f"{gradient.device}"
        )
    return gradient.detach().resolve_neg().contiguous().view(-1)


def _beside(parameter: torch.Tensor) -> set[str]:
    """Returns the names of the states that complete the parameter's master."""
    return {torch.bfloat16: {"residual"}, torch.float16: {"master"}}.get(parameter.dtype, set())


def _begin(parameter: torch.Tensor, moment_dtype: torch.dtype, state: dict[str, Any]) -> None:
    state["step"] = 0
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = torch.zeros(parameter.shape, dtype=moment_dtype, device="cpu")
    _begin_master(parameter, state)


def _begin_master(parameter: torch.Tensor, state: dict[str, Any]) -> None:
    if parameter.dtype is torch.bfloat16:
        # Zero low bits: the master is the bf16 value itself.
        state["residual"] = torch.zeros(parameter.shape, dtype=torch.int16, device="cpu")
    elif parameter.dtype is torch.float16:
        state["master"] = parameter.detach().float().contiguous()


def _adopt(parameter: torch.Tensor, state: dict[str, Any]) -> None:
    """Converts a state that was loaded, or belongs to another dtype, to a state of this parameter.

    Raises `ConfigError` if a moment is missing or has another number of elements.
    """
    state["step"] = int(state.get("step", 0))
    for name in ("exp_avg", "exp_avg_sq"):
        if name not in state or state[name].numel() != parameter.numel():
            shape = tuple(state[name].shape) if name in state else "none"
            raise ConfigError(f"{name}: expected shape {tuple(parameter.shape)} as the parameter has, got {shape}")
        # The moments keep the precision that they were saved in; fp16 moments, which kernels do not support, widen.
        dtype = torch.bfloat16 if state[name].dtype is torch.bfloat16 else torch.float32
        state[name] = state[name].to(dtype).contiguous().clone().view(parameter.shape)
    wanted = _beside(parameter)
    for name in ("residual", "master"):
        if name in wanted and name in state and state[name].numel() == parameter.numel():
            state[name] = state[name].contiguous().clone().view(parameter.shape)
        else:
            state.pop(name, None)
    if not wanted <= set(state):
        _begin_master(parameter, state)


def _mark(parameter: torch.Tensor) -> tuple[int, int]:
    """Returns a value that changes when other code writes to the parameter or replaces its data."""
    return parameter._version, parameter.data_ptr()


def _follow(parameter: torch.Tensor, state: dict[str, Any]) -> None:
    """Resets the master of a 16-bit parameter that was changed between steps."""
    if parameter.dtype is torch.bfloat16:
        state["residual"].zero_()
    elif parameter.dtype is torch.float16:
        weight, master = parameter.detach(), state["master"]
        # Elements that still round to their weight keep the precision of their master.
        state["master"] = torch.where(master.half() == weight, master, weight.float()).contiguous()
