"""AdamW on the CPU with these kernels, for any loop that takes a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from offload.errors import ConfigError
from offload.kernels.steps import AdamWStep, Segment
from offload.kernels.update import Partition, update

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CPUAdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW` (or Adam, with `decoupled=False`) in one fused pass over CPU parameters.

    A 16-bit parameter has an exact fp32 master: of bf16 in two halves (2 bytes more each, state "residual"), of fp16
    beside it (state "master"). Moments are fp32, or bf16 with `moment_dtype` (each new value is rounded to it).
    `grad_scale`, which each group may change, multiplies gradients: a clip coefficient, or one over the loss scale.
    Gradients may be fp32, bf16 or fp16, and are only read. The bits do not depend on threads or instruction set. For
    one thread at a time.

    A 16-bit parameter that is changed between steps, in place or by `.data =`, gets a new master: what it was changed
    to. (`parameter.data.copy_` goes unnoticed, as it does in autograd.)
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
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ConfigError(f"{name}: expected at least 0, got {value}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"betas: expected numbers from 0 to below 1, got {betas}")
        if moment_dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(f"moment_dtype: expected torch.float32 or torch.bfloat16, got {moment_dtype}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled}
        self._seen: dict[torch.Tensor, tuple[int, int]] = {}
        super().__init__(params, defaults | {"moment_dtype": moment_dtype, "grad_scale": 1.0})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As torch's, of a pickle too."""
        super().__setstate__(state)
        self._seen = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; `ConfigError` for parameters that the kernels have no form for."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.device.type != "cpu" or parameter.dtype not in _DTYPES:
                self.param_groups.pop()
                raise ConfigError(
                    f"expected parameters on the CPU in fp32, bf16 or fp16, got {parameter.dtype} on {parameter.device}"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but states keep their dtypes: torch gives them that of the parameter."""
        super().load_state_dict(state_dict)
        self._seen = {}
        saved = (index for group in state_dict["param_groups"] for index in group["params"])
        mine = (parameter for group in self.param_groups for parameter in group["params"])
        for index, parameter in zip(saved, mine, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                self.state[parameter][key] = value.clone() if isinstance(value, torch.Tensor) else value

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise ConfigError(f"expected a dense gradient, got one of layout {gradient.layout}")
        state = self.state[parameter]
        if not state:
            self._begin(parameter, group["moment_dtype"], state)
        elif self._seen.get(parameter, _mark(parameter)) != _mark(parameter):
            _follow(parameter, state)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        step = AdamWStep(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=int(state["step"]),
            grad_scale=float(group["grad_scale"]),
            decoupled=bool(group["decoupled"]),
        )
        # States are flat, in the order of a contiguous parameter; of another one the kernel gets a copy.
        flat = parameter.detach().reshape(-1)
        partition = Partition(
            flat,
            gradient.reshape(-1),
            (state["exp_avg"], state["exp_avg_sq"]),
            residual=state.get("residual"),
            master=state.get("master"),
        )
        update(partition, [Segment(0, flat.numel(), step)])
        if flat.data_ptr() != parameter.data_ptr():
            parameter.copy_(flat.view(parameter.shape))
        self._seen[parameter] = _mark(parameter)

    @staticmethod
    def _begin(parameter: torch.Tensor, moment_dtype: torch.dtype, state: dict[str, Any]) -> None:
        numel = parameter.numel()
        state["step"] = 0
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros(numel, dtype=moment_dtype)
        if parameter.dtype is torch.bfloat16:
            state["residual"] = torch.zeros(numel, dtype=torch.int16)
        elif parameter.dtype is torch.float16:
            state["master"] = parameter.detach().reshape(-1).float()


def _mark(parameter: torch.Tensor) -> tuple[int, int]:
    """What changes when somebody else writes a parameter."""
    return parameter._version, parameter.data_ptr()


def _follow(parameter: torch.Tensor, state: dict[str, Any]) -> None:
    """Give a 16-bit parameter that was changed a master that is it."""
    if parameter.dtype is torch.bfloat16:
        state["residual"].zero_()
    elif parameter.dtype is torch.float16:
        flat, master = parameter.detach().reshape(-1), state["master"]
        torch.where(master.half() == flat, master, flat.float(), out=master)
