"""Methods of peft beside LoRA, and norms or biases alone, train in a Trainer as in the stock one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from offload.errors import UsageError
from tests.support import models, rounding_bounds
from tests.support.oracle import assert_same_tensors
from tests.support.trainer_runs import FEW, Texts, assert_close, ended, offloaded, seeded, stock, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning"),  # peft's, of every norm
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),  # torch's, of peft's sparse tensors
]


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
@pytest.mark.sample(1)
@pytest.mark.parametrize("model", [biases, norms])
def test_norms_or_biases_alone_train_as_in_the_stock_trainer(model: Any, tmp_path: Path) -> None:
    """None of them decays, so the first of the Trainer's groups of parameters is empty."""
    assert_close(offloaded(tmp_path / "mine", model=model), stock(tmp_path / "stock", model=model), model)


def prompts() -> Any:
    return peft.get_peft_model(models.llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


def prefixes() -> Any:
    settings = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, prefix_projection=True)
    return peft.get_peft_model(models.llama(), settings)


def encoded_prompts() -> Any:
    settings = peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16)
    return peft.get_peft_model(models.llama(), settings)


def sparse() -> Any:
    return peft.get_peft_model(models.llama(), peft.ShiraConfig(r=4, target_modules=["q_proj"], random_seed=0))


def best_vectors() -> Any:
    settings = peft.VBLoRAConfig(
        num_vectors=8, vector_length=8, topk=2, target_modules=["q_proj"], save_only_topk_weights=True
    )
    return peft.get_peft_model(models.llama(), settings)


def shared_projections() -> Any:
    return peft.get_peft_model(models.llama(), peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"]))


def shared_bases() -> Any:
    return peft.get_peft_model(models.llama(), peft.RandLoraConfig(r=4, target_modules=["q_proj", "k_proj"]))


METHODS = [prompts, prefixes, encoded_prompts, sparse, best_vectors, shared_projections, shared_bases]


@pytest.mark.sample(1)
@pytest.mark.works("Trainers", "checkpoints of peft's prompt tuning, prefix tuning, P-tuning, SHiRA, VeRA", "right")
@pytest.mark.numeric
@pytest.mark.parametrize("model", METHODS)
def test_a_checkpoint_has_the_files_of_the_stock_trainer(model: Any, tmp_path: Path) -> None:
    """What peft computes when it saves, and buffers that layers share, are in them, and peft loads them."""
    saved = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    stock(tmp_path / "stock", model=model, **saved)
    ids = Texts()[0]["input_ids"][None]
    with ended(trainer(tmp_path / "mine", model=model, rows=FEW, **saved)) as mine:
        own = list(mine.model.parameters())
        mine.train()
        assert all(one is other for one, other in zip(own, mine.model.parameters(), strict=True))
        mine.engine.module.save_pretrained(tmp_path / "gathered")  # by peft, which has all weights gathered
        with torch.no_grad():
            expected = mine.model.eval()(input_ids=ids).logits
    checkpoint = Path("out", "checkpoint-2")
    one, same, other = (
        load_file(tmp_path / folder / "adapter_model.safetensors")
        for folder in (Path("mine") / checkpoint, "gathered", Path("stock") / checkpoint)
    )
    assert_same_tensors(one, same)
    shapes = [{name: (value.shape, value.dtype) for name, value in each.items()} for each in (one, other)]
    assert shapes[0] == shapes[1]
    loaded = peft.PeftModel.from_pretrained(seeded(models.llama), tmp_path / "mine" / checkpoint).eval()
    with torch.no_grad():
        rounding_bounds.same_tensor(loaded(input_ids=ids).logits, expected, rounding_bounds.step_error(models.LORA))


def adaptive() -> Any:
    settings = peft.AdaLoraConfig(
        target_modules=["q_proj"], init_r=6, target_r=3, tinit=1, tfinal=2, deltaT=1, total_step=6
    )
    return peft.get_peft_model(models.llama(), settings)


@pytest.mark.works("Trainers", "AdaLoRA whose ranks stay as they are", "right")
@pytest.mark.numeric
def test_adalora_without_a_change_of_ranks_trains_as_in_the_stock_trainer(tmp_path: Path) -> None:
    assert_close(offloaded(tmp_path / "mine", model=adaptive), stock(tmp_path / "stock", model=adaptive), adaptive)


class Allocate(transformers.TrainerCallback):
    """As peft's documentation writes it."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        model.base_model.update_and_allocate(state.global_step + 1)


@pytest.mark.works("Trainers", "AdaLoRA whose ranks change (`update_and_allocate`)", "refused")
def test_a_change_of_adaloras_ranks_is_refused(tmp_path: Path) -> None:
    with ended(trainer(tmp_path, model=adaptive, rows=FEW)) as mine:
        mine.add_callback(Allocate)
        with pytest.raises(UsageError, match="AdaLoRA chooses the ranks of its adapters"):
            mine.train()
