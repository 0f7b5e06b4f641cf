"""Blocks of dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from offload.config.blocks.block import Block, missing, split_names
from offload.config.blocks.values import DTYPE_NAMES, Count, Elements, Number, SumDtype, spelling

_AUTO_CAST = "whether `engine(...)` casts floating-point inputs to the weights' dtype; default: yes, with a log line"


class Bf16(Block):
    """bf16 weights with split fp32 masters."""

    TUNING = split_names("immediate_grad_update check_grad_overflow")
    REFUSED: ClassVar[dict[str, str]] = {
        "bf16_master_weights_and_grads": missing("has no fp32 masters"),
    }
    SUGGESTION: ClassVar[Mapping[str, Any]] = {"enabled": True}

    enabled: bool = Field(
        False, description='whether the mode is on; "auto": off, except in `offload train` and `offload.auto_dtype`'
    )
    auto_cast: bool | None = Field(None, description=_AUTO_CAST)
    bf16_optimizer_states: bool = Field(
        False, description='whether the moments are bf16, as with "moments": "bf16" in the block offload'
    )


class Fp16(Block):
    """fp16 weights with fp32 masters, and a scaled loss."""

    TUNING = ("fused_mode",)
    REFUSED: ClassVar[dict[str, str]] = {"fp16_master_weights_and_grads": missing("has no fp32 masters")}
    SUGGESTION: ClassVar[Mapping[str, Any]] = {"enabled": True}

    enabled: bool = Field(False, description="whether the mode is on")
    auto_cast: bool | None = Field(None, description=_AUTO_CAST)
    loss_scale: Number = Field(0.0, description="factor of the loss; 0: dynamic, adjusted while training")
    initial_scale_power: Annotated[Elements, Field(le=32)] = Field(
        16, description="a dynamic scale begins with 2 to that power"
    )
    loss_scale_window: Count = Field(1000, description="steps without an overflow after which the scale doubles")
    hysteresis: Count = Field(2, description="number of overflows of which the last halves the scale")
    consecutive_hysteresis: bool = Field(
        False, description="whether each step without an overflow resets the hysteresis; false: only a window of them"
    )
    min_loss_scale: Annotated[Number, Field(gt=0)] = Field(1.0, description="lower bound of a dynamic scale")

    @model_validator(mode="after")
    def _fits(self) -> Fp16:
        """Raises `ValueError` if a dynamic scale would begin below its lower bound."""
        first = 2.0**self.initial_scale_power
        if self.enabled and not self.loss_scale and first < self.min_loss_scale:
            raise ValueError(
                f"contains min_loss_scale {self.min_loss_scale:g}, and initial_scale_power {self.initial_scale_power}, "
                f"whose scale of {first:g} is below it: raise the power or lower the bound"
            )
        return self


class TorchAutocast(Block):
    """fp32 weights, and torch's autocast round each forward of the engine."""

    TUNING = ("lower_precision_safe_modules",)
    SUGGESTION: ClassVar[Mapping[str, Any]] = {"enabled": True}

    enabled: bool = Field(False, description="whether `engine(...)` runs the model under torch.autocast")
    dtype: Annotated[Literal["bf16", "fp16"], spelling(DTYPE_NAMES)] = Field(
        "bf16", description="dtype of autocast; fp16 is refused: it needs a loss scale, which the fp16 block has"
    )


class DataTypes(Block):
    """Dtypes beside that of the mode."""

    SUGGESTION: ClassVar[Mapping[str, Any]] = {"grad_accum_dtype": "fp32"}

    param_dtype: SumDtype | None = Field(
        None, description="dtype of the weights; an error if it is not that of the blocks bf16 and fp16"
    )
    grad_accum_dtype: SumDtype | None = Field(
        None,
        description="dtype in which micro-batches are added: fp32 by default, that of the weights for one micro-batch",
    )
    buffer_dtype: SumDtype | None = Field(
        None, description="dtype of floating-point buffers (BatchNorm's statistics): unchanged by default"
    )
