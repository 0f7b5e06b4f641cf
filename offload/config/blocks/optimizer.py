"""The block of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from offload.config.blocks.block import CHANGES_TRAINING, Block, missing
from offload.config.blocks.values import OF_TORCH_ALONE, TORCH_OPTIMIZERS, Beta, Count, Number, OptimizerType
from offload.errors import ConfigError

OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "Adam": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "adam_w_mode": True, "bias_correction": True},
    "AdamW": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "adam_w_mode": True, "bias_correction": True},
    "Lamb": {
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "max_coeff": 10.0,
        "min_coeff": 0.01,
        "bias_correction": True,
    },
    "Adagrad": {"eps": 1e-10, "weight_decay": 0.0, "lr_decay": 0.0},
    "Lion": {"betas": (0.9, 0.999), "weight_decay": 0.0},
    "SGD": {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
    # Those of DeepSpeed, and of torch.optim.Muon for what DeepSpeed has no key for.
    "Muon": {
        "muon_lr": None,
        "adam_lr": None,
        "momentum": 0.95,
        "nesterov": True,
        "ns_steps": 5,
        "ns_coefficients": (3.4445, -4.7750, 2.0315),
        "ns_method": "standard",
        "adjust_lr_fn": "original",
        "weight_decay": 0.0,
        "betas": (0.9, 0.95),
        "eps": 1e-10,
    },
    "SinkGD": {
        "sinkgd_lr": None,
        "adam_lr": None,
        "iterations": 5,
        "weight_decay": 0.0,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
    },
}
"""Default hyperparameters of each optimizer type, except for the learning rate."""

_OF_EVERY_TYPE = ("lr", "fp32_optimizer_states", "torch_adam")
"""Params that no type lists: the learning rate is passed on its own, and the others are no hyperparameters."""


class OptimizerParams(Block):
    """Hyperparameters, named as in torch.optim; one that belongs to other types of optimizers only is an error."""

    TUNING = ("fused", "foreach", "capturable", "differentiable")
    REFUSED: ClassVar[dict[str, str]] = {
        "max_grad_norm": 'has another name in DeepSpeed files: "gradient_clipping", at top level',
        "amsgrad": CHANGES_TRAINING,
        "maximize": CHANGES_TRAINING,
    }
    SUGGESTION: ClassVar[Mapping[str, Any]] = {"lr": 3e-4}

    lr: Number | None = Field(
        None,
        description="learning rate; required unless optimizer= is passed. deepspeed.initialize takes DeepSpeed's "
        "default where it is absent, and says so",
    )
    betas: tuple[Beta, Beta] | None = Field(
        None,
        description="Adam, AdamW, Lamb, Lion, and of Muon and SinkGD what AdamW trains: decay of the moments, each at "
        "least 0 and below 1; default [0.9, 0.999], of Muon [0.9, 0.95]",
    )
    eps: Number | None = Field(
        None,
        description="Adam, AdamW, Lamb, Adagrad, and of Muon and SinkGD what AdamW trains: added to the root of the "
        "second moment; default 1e-8, of Adagrad and Muon 1e-10",
    )
    weight_decay: Number | None = Field(
        None,
        description="default 0, of AdamW with torch_adam 0.01; decoupled for AdamW, Lamb, Lion, Muon, SinkGD, and for "
        "Adam with adam_w_mode",
    )
    adam_w_mode: bool | None = Field(None, description="Adam: true by default; false adds the decay to the gradient")
    torch_adam: bool | None = Field(
        None,
        description="true: the weight_decay of AdamW is by default that of torch.optim, as in DeepSpeed; the kernel "
        "stays the same",
    )
    bias_correction: Literal[True] | None = Field(None, description="Adam, AdamW, Lamb: only true")
    fp32_optimizer_states: Literal[True] | None = Field(
        None, description='only true: moments are fp32; for bf16 leave it out, and set "moments" in the block offload'
    )
    max_coeff: Number | None = Field(None, description="Lamb: bound of the trust ratio, default 10")
    min_coeff: Number | None = Field(None, description="Lamb: bound of the trust ratio, default 0.01")
    lr_decay: Number | None = Field(None, description="Adagrad: default 0")
    momentum: Number | None = Field(
        None, description="SGD: default 0, which keeps no moment; Muon: default 0.95, below 1"
    )
    dampening: Number | None = Field(None, description="SGD: default 0")
    nesterov: bool | None = Field(
        None, description="SGD: default false; needs a momentum, and no dampening; Muon: default true"
    )
    muon_lr: Number | None = Field(None, description="Muon: learning rate of the matrices; default: lr")
    sinkgd_lr: Number | None = Field(None, description="SinkGD: learning rate of the matrices; default: lr")
    adam_lr: Number | None = Field(None, description="Muon, SinkGD: learning rate of what is no matrix; default: lr")
    ns_steps: Annotated[Count, Field(lt=100)] | None = Field(
        None, description="Muon: Newton-Schulz iterations, default 5"
    )
    ns_coefficients: tuple[float, float, float] | None = Field(
        None, description="Muon: coefficients of an iteration, default [3.4445, -4.775, 2.0315]"
    )
    ns_method: Literal["standard"] | None = Field(
        None, description='Muon: only "standard"; DeepSpeed\'s "gram" computes the same direction in fp16'
    )
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = Field(
        None,
        description='Muon: factor of the matrices\' learning rate. "original" (default): the root of rows over '
        'columns, at least 1; "match_rms_adamw": 0.2 times the root of the larger of both, for AdamW\'s lr',
    )
    iterations: Count | None = Field(
        None, description="SinkGD: normalizations of the rows and of the columns of a gradient, default 5"
    )


_COMPRESSED = ("onebitadam", "onebitlamb", "zerooneadam")
_OTHERS = ("muadam", "muadamw", "musgd")
_ADAMW = (
    "use AdamW or Lamb, without the keys of the compression (freeze_step, cuda_aware, comm_backend_name); "
    "zero_optimization.zero_quantized_gradients sends half of the bytes of bf16, "
    "and docs/reference/deepspeed-compatibility.md says why not fewer"
)
_PASS = "use AdamW, or pass an optimizer of torch as optimizer= to offload.initialize"


class OptimizerBlock(Block):
    """The optimizer: Adam, AdamW, Lamb, Adagrad, Lion, SGD, Muon or SinkGD."""

    TUNING = ("legacy_fusion",)
    SUGGESTION: ClassVar[Mapping[str, Any]] = {"type": "AdamW", "params": {"lr": 3e-4}}

    type: OptimizerType = Field(
        "AdamW",
        description="Adam, AdamW, Lamb, Adagrad, Lion, SGD, Muon or SinkGD, in any case of letters; or a class of "
        "torch, as torch.optim.NAdam or, as DeepSpeed spells it, NAdam, whose params are those of the class",
    )
    params: OptimizerParams = Field(OptimizerParams(), description="see below")
    torch_params: dict[str, Any] = Field({}, exclude=True)
    """The params of a class of torch, which stand under "params" in a file."""

    @classmethod
    def arranged(cls, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the content with the params of a class of torch under `torch_params`, without "auto"."""
        if "torch_params" in content:
            raise ConfigError('unknown key optimizer.torch_params; did you mean "params"?')
        params, kind = content.get("params"), content.get("type", "")
        of_torch = kind in OF_TORCH_ALONE or str(kind).startswith(TORCH_OPTIMIZERS)
        if not of_torch or not isinstance(params, Mapping):
            return content
        others = {key: value for key, value in content.items() if key != "params"}
        return {**others, "torch_params": {key: value for key, value in params.items() if value != "auto"}}

    @classmethod
    def check(cls, content: Mapping[str, Any], path: str) -> None:
        """Raises `ConfigError` for optimizers of DeepSpeed that are not supported."""
        name = str(content.get("type", "")).lower()
        if name in _COMPRESSED:
            raise ConfigError(
                f'"{path}type" {content["type"]} {missing("compresses what ranks send each other", _ADAMW)}'
            )
        if name in _OTHERS:
            raise ConfigError(f'"{path}type" {content["type"]} {missing("is an optimizer of DeepSpeed", _PASS)}')

    @pydantic.model_validator(mode="after")
    def _fits(self) -> OptimizerBlock:
        """Raises `ValueError` if a hyperparameter does not belong to the type, or two contradict each other."""
        if self.of_torch:
            return self
        defaults = OPTIMIZER_DEFAULTS[self.type]
        for name in self.params.model_fields_set:
            if name not in (*_OF_EVERY_TYPE, *defaults) and getattr(self.params, name) is not None:
                raise ValueError(f"contains params.{name}, and {self.type} takes {', '.join(('lr', *defaults))}")
        settings = self.settings
        if self.type == "SGD" and settings["nesterov"] and (not settings["momentum"] or settings["dampening"]):
            raise ValueError("contains params.nesterov, which needs a momentum above 0 and a dampening of 0")
        if self.type == "Muon" and settings["momentum"] >= 1:
            raise ValueError(f"contains params.momentum {settings['momentum']:g}, which Muon needs to be below 1")
        return self

    @property
    def of_torch(self) -> bool:
        """True if the type is a class of torch."""
        return self.type.startswith(TORCH_OPTIMIZERS)

    @property
    def settings(self) -> dict[str, Any]:
        """Hyperparameters of the type, except for the learning rate; of a class of torch those that are given."""
        if self.of_torch:
            return dict(self.torch_params)
        defaults = OPTIMIZER_DEFAULTS[self.type]
        given = {name: getattr(self.params, name) for name in defaults}
        found = {name: value if given[name] is None else given[name] for name, value in defaults.items()}
        decoupled = self.type == "AdamW" or found.get("adam_w_mode")
        if self.params.torch_adam and self.type in ("Adam", "AdamW") and decoupled and given["weight_decay"] is None:
            found["weight_decay"] = 0.01
        return found
