"""Adapters of peft on stacked experts themselves (`target_parameters`) train as in the stock Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import offload
from offload.errors import UsageError
from tests.experts.stacked_experts import MEMORY
from tests.support.modules.mixtures import mixtral
from tests.support.trainer_runs import Texts, assert_close, config, offloaded, seeded, stock

pytestmark = pytest.mark.usefixtures("engines_end")


def adapted() -> Any:
    """Adapters of attention, and of both stacks of each layer, one around the other."""
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return peft.get_peft_model(mixtral(4), peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=stacks))


@pytest.mark.works("Training", "LoRA on stacked experts themselves (peft's `target_parameters`)", "right")
@pytest.mark.numeric
def test_adapters_of_stacks_train_as_in_the_stock_trainer(tmp_path: Path) -> None:
    assert_close(offloaded(tmp_path / "mine", model=adapted), stock(tmp_path / "stock", model=adapted), adapted)


def test_a_stack_that_is_changed_while_its_experts_run_is_still_refused(tmp_path: Path) -> None:
    model = seeded(adapted)
    blocks = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "train_micro_batch_size_per_gpu": 2}
    engine, *_ = offload.initialize(model=model, config=config(tmp_path, MEMORY[0], **blocks))
    experts = next(module for name, module in model.named_modules() if type(module).__name__ == "MixtralExperts")

    def change(module: Any, *_: Any) -> None:
        with torch.no_grad():
            module.parametrizations.down_proj.original.add_(1)

    experts.register_forward_hook(change)
    ids = Texts()[0]["input_ids"][None]
    with pytest.raises(UsageError, match="down_proj was changed in place while its module ran"):
        engine(input_ids=ids, labels=ids)
    engine.destroy(remove=True)
