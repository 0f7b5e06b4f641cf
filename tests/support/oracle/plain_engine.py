"""The calls of an engine in ordinary PyTorch."""

from __future__ import annotations

import math
from typing import Any

import torch

from offload.engine.data import to_device
from tests.support.oracle.job import DTYPES, Job
from tests.support.processes.device_process import plain_device


class PlainOptimizer(torch.optim.Optimizer):
    """An optimizer that updates one parameter after the other, those with a gradient alone."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group, self.state[p])

    def update(self, p: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        raise NotImplementedError


class PlainLion(PlainOptimizer):
    """Lion: Chen et al. 2023, algorithm 2."""

    def __init__(self, params: Any, lr: float, weight_decay: float, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self, p: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        m = state.setdefault("exp_avg", torch.zeros_like(p))
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(group["lr"] * (beta1 * m + (1 - beta1) * p.grad).sign())
        m.mul_(beta2).add_((1 - beta2) * p.grad)


class PlainLamb(PlainOptimizer):
    """LAMB: You et al. 2020, algorithm 2, with a bounded ratio; the bias is corrected in the step, as in DeepSpeed."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def update(self, p: Any, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state |= {"step": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
        state["step"] += 1
        state["m"].mul_(0.9).add_(0.1 * p.grad)
        state["v"].mul_(0.999).add_(0.001 * p.grad.square())
        direction = state["m"] / (state["v"].sqrt() + 1e-8) + group["weight_decay"] * p
        weight, length = p.norm(), direction.norm()
        ratio = 1.0 if weight == 0 or length == 0 else float(min(max(weight / length, 0.01), 10.0))
        correction = math.sqrt(1 - 0.999 ** state["step"]) / (1 - 0.9 ** state["step"])
        p.sub_(group["lr"] * correction * ratio * direction)


PLAIN: dict[str, Any] = {"Lion": PlainLion, "Lamb": PlainLamb}


def rounded(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the weights of an fp32 master; in bf16 ties round away from zero, as a split master rounds them."""
    if dtype is not torch.bfloat16:
        return master.to(dtype)
    return ((master.detach().view(torch.int32).to(torch.int64) + 0x8000) >> 16).to(torch.int16).view(dtype)


class PlainEngine:
    """The engine's calls in ordinary PyTorch: torch's optimizer, on fp32 masters where the model has 16 bits."""

    def __init__(self, job: Job) -> None:
        torch.manual_seed(job.seed)
        self.module = job.model().to(plain_device())
        if job.dtype == "fp32":
            self.module.float()
        self.global_steps = 0
        self._job, self._norm, self._micro = job, 0.0, 0
        parameters = list(self.module.parameters())
        self._masters = parameters
        if job.dtype != "fp32":
            self._masters = [p.detach().float().clone().requires_grad_(p.requires_grad) for p in parameters]
            self.module.to(DTYPES[job.dtype])
            for name, parameter in self.module.named_parameters():
                if any(f".{part}." in f".{name}." for part in job.keep_in_fp32):
                    parameter.data = parameter.data.float()
            self._round()
        self._scale = job.loss_scale if job.dtype == "fp16" else 1.0
        trainable = [m for m in self._masters if m.requires_grad]
        if job.optimizer in PLAIN:
            self.optimizer = PLAIN[job.optimizer](trainable, job.lr, job.weight_decay, **dict(job.params))
        else:
            kind = getattr(torch.optim, job.optimizer)
            self.optimizer = kind(
                trainable, lr=job.lr, weight_decay=job.weight_decay, foreach=False, **dict(job.params)
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = to_device((args, kwargs), plain_device())
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        (loss / self._job.accumulation * self._scale).backward(retain_graph=retain_graph)
        self._micro += 1
        if self._job.dtype != "fp32":
            for parameter, master in zip(self.module.parameters(), self._masters, strict=True):
                if parameter.grad is not None:
                    gradient = parameter.grad.float() / self._scale
                    master.grad = gradient if master.grad is None else master.grad + gradient
                    parameter.grad = None

    def step(self) -> None:
        if self._micro < self._job.accumulation:
            return
        self._norm = float(torch.nn.utils.clip_grad_norm_(self._masters, self._job.clip or float("inf")))
        self.optimizer.step()
        self.zero_grad()
        self.global_steps += 1
        if self._job.dtype != "fp32":
            self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for parameter, master in zip(self.module.parameters(), self._masters, strict=True):
            parameter.copy_(rounded(master, parameter.dtype))

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self._micro = 0

    def get_global_grad_norm(self) -> float:
        return self._norm
