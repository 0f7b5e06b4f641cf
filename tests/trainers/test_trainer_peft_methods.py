"""Methods of peft beside LoRA, and norms or biases alone, train in a Trainer as in the stock one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest

from tests.support import models
from tests.support.trainer_runs import assert_close, offloaded, stock

pytestmark = pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")  # peft's, of every norm


def biases() -> Any:
    """A model of which biases alone train: BitFit."""
    model = models.gpt2()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.endswith("bias")
    return model


def norms() -> Any:
    return peft.get_peft_model(models.gpt2(), peft.LNTuningConfig(target_modules=["ln_1", "ln_f"]))


@pytest.mark.works("Trainers", "biases or norms alone (BitFit, peft's `LNTuningConfig`)", "right")
@pytest.mark.numeric
@pytest.mark.parametrize("model", [biases, norms])
def test_norms_or_biases_alone_train_as_in_the_stock_trainer(model: Any, tmp_path: Path) -> None:
    """None of them decays, so the first of the Trainer's groups of parameters is empty."""
    assert_close(offloaded(tmp_path / "mine", model=model), stock(tmp_path / "stock", model=model), model)
