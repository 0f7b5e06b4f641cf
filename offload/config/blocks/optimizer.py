"""The block of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pydantic
from pydantic import Field

from offload.config.blocks.block import CHANGES_TRAINING, Block, missing
from offload.config.blocks.values import Beta, Number, OptimizerType
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
    "Lion": {"betas": (0.9, 0.99), "weight_decay": 0.0},
    "SGD": {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
}
"""Default hyperparameters of each optimizer type, except for the learning rate."""

_OF_EVERY_TYPE = ("lr", "fp32_optimizer_states")
"""Params that no type lists: the learning rate is passed on its own, and the moments of every type are fp32."""


class OptimizerParams(Block):
    """Hyperparameters, named as in torch.optim; one that belongs to other types of optimizers only is an error."""

    TUNING = ("torch_adam", "fused", "foreach", "capturable", "differentiable")
    REFUSED: ClassVar[dict[str, str]] = {
        "max_grad_norm": 'has another name in DeepSpeed files: "gradient_clipping", at top level',
        "amsgrad": CHANGES_TRAINING,
        "maximize": CHANGES_TRAINING,
    }
    SUGGESTION: ClassVar[Mapping[str, Any]] = {"lr": 3e-4}

    lr: Number | None = Field(None, description="learning rate; required unless optimizer= is passed")
    betas: tuple[Beta, Beta] | None = Field(
        None,
        description="Adam, AdamW, Lamb, Lion: decay of the moments, each at least 0 and below 1; default [0.9, 0.999], "
        "of Lion [0.9, 0.99]",
    )
    eps: Number | None = Field(
        None,
        description="Adam, AdamW, Lamb, Adagrad: added to the root of the second moment; default 1e-8, Adagrad's 1e-10",
    )
    weight_decay: Number | None = Field(
        None, description="default 0; decoupled for AdamW, Lamb, Lion, and for Adam with adam_w_mode"
    )
    adam_w_mode: bool | None = Field(None, description="Adam: true by default; false adds the decay to the gradient")
    bias_correction: Literal[True] | None = Field(None, description="Adam, AdamW, Lamb: only true")
    fp32_optimizer_states: Literal[True] | None = Field(
        None, description='only true: moments are fp32; for bf16 leave it out, and set "moments" in the block offload'
    )
    max_coeff: Number | None = Field(None, description="Lamb: bound of the trust ratio, default 10")
    min_coeff: Number | None = Field(None, description="Lamb: bound of the trust ratio, default 0.01")
    lr_decay: Number | None = Field(None, description="Adagrad: default 0")
    momentum: Number | None = Field(None, description="SGD: default 0, which keeps no moment")
    dampening: Number | None = Field(None, description="SGD: default 0")
    nesterov: bool | None = Field(None, description="SGD: default false; needs a momentum, and no dampening")


_COMPRESSED = ("onebitadam", "onebitlamb", "zerooneadam")
_OTHERS = ("muon", "muadam", "muadamw", "musgd")
_ADAMW = "use AdamW or Lamb, without the keys of the compression (freeze_step, cuda_aware, comm_backend_name)"
_PASS = "use AdamW, or pass an optimizer of torch as optimizer= to offload.initialize"


class OptimizerBlock(Block):
    """The optimizer: Adam, AdamW, Lamb, Adagrad, Lion or SGD."""

    TUNING = ("legacy_fusion",)
    SUGGESTION: ClassVar[Mapping[str, Any]] = {"type": "AdamW", "params": {"lr": 3e-4}}

    type: OptimizerType = Field("AdamW", description="Adam, AdamW, Lamb, Adagrad, Lion or SGD, in any case of letters")
    params: OptimizerParams = Field(OptimizerParams(), description="see below")

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
        defaults = OPTIMIZER_DEFAULTS[self.type]
        for name in self.params.model_fields_set:
            if name not in (*_OF_EVERY_TYPE, *defaults) and getattr(self.params, name) is not None:
                raise ValueError(f"contains params.{name}, and {self.type} takes {', '.join(('lr', *defaults))}")
        settings = self.settings
        if settings.get("nesterov") and (not settings["momentum"] or settings["dampening"]):
            raise ValueError("contains params.nesterov, which needs a momentum above 0 and a dampening of 0")
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """Hyperparameters of the type, except for the learning rate."""
        given = {name: getattr(self.params, name) for name in OPTIMIZER_DEFAULTS[self.type]}
        return {
            name: value if given[name] is None else given[name] for name, value in OPTIMIZER_DEFAULTS[self.type].items()
        }
