"""Common Trainers work: evaluation and generation during training, methods of peft, trl's SFTTrainer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from offload.errors import UsageError
from offload.hf import OffloadMixin
from tests.support import models, rounding_bounds
from tests.support.oracle import assert_same_tensors
from tests.support.trainer_runs import (
    CHECKPOINTING,
    FEW,
    MEMORY,
    Texts,
    arguments,
    assert_close,
    assert_same,
    config,
    ended,
    offloaded,
    result,
    seeded,
    stock,
    trainer,
    unbroken,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),  # peft and trl ask for the old name
    pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning"),  # peft's, of every norm
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),  # torch's, of peft's sparse tensors
]

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}


def lora() -> Any:
    """Adapters whose second half is not zero, so that both learn at once."""
    settings = peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True)
    return peft.get_peft_model(models.shallow(), settings)


class OffloadSeq2SeqTrainer(OffloadMixin, transformers.Seq2SeqTrainer):
    """As a user writes it."""


# -- evaluation ---------------------------------------------------------------------------------------


def evaluations(trainer: Any) -> list[float]:
    return [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]


@pytest.mark.slow
def test_evaluation_before_training(tmp_path: Path) -> None:
    with ended(trainer(tmp_path / "mine", rows=FEW)) as mine:
        before = mine.evaluate()["eval_loss"]
        engine = mine.engine
        assert before == pytest.approx(4.45, abs=0.1)
        mine.train()
        assert mine.engine is engine
        assert_same(result(mine), unbroken())
        assert mine.evaluate()["eval_loss"] < before - 0.1


@pytest.mark.numeric
def test_prediction_by_a_model_that_trains_nothing(tmp_path: Path) -> None:
    mine = trainer(tmp_path)
    mine.model.requires_grad_(False)
    expected = seeded().eval()(**mine.data_collator([Texts()[row] for row in range(5)])).logits
    with ended(mine):
        predictions = mine.predict(Texts(5)).predictions
        assert mine.engine is not None
        rounding_bounds.same_tensor(
            torch.from_numpy(predictions), expected.detach(), rounding_bounds.step_error(models.SHALLOW)
        )


@pytest.mark.slow
@pytest.mark.works("Trainers", "a callback that generates between steps", "right")
def test_a_callback_that_generates(tmp_path: Path) -> None:
    """What is written between steps changes nothing, and is what the plain model writes."""
    written: list[torch.Tensor] = []

    class Write(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            prompt = Texts()[0]["input_ids"][None, :4]
            model.eval()
            written.append(model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0))
            model.train()

    with ended(trainer(tmp_path / "mine", rows=FEW)) as mine:
        mine.add_callback(Write)
        mine.train()
        assert_same(result(mine), unbroken())
        plain = seeded()
        plain.load_state_dict(result(mine).weights)
        prompt = Texts()[0]["input_ids"][None, :4]
        assert torch.equal(
            written[-1], plain.eval().generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
        )


class Pairs(Texts):
    """For a model that reads one text and writes another."""

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        ids = super().__getitem__(row)["input_ids"].clamp(min=2)
        return {"input_ids": ids, "labels": ids.flip(0)}


@pytest.mark.slow
@pytest.mark.works("Trainers", "transformers' `Seq2SeqTrainer` with `predict_with_generate`", "right")
@pytest.mark.numeric
def test_predict_with_generate(tmp_path: Path) -> None:
    def made(kind: Any, folder: Path, **more: Any) -> Any:
        return kind(
            model=seeded(models.t5),
            args=arguments(
                folder,
                transformers.Seq2SeqTrainingArguments,
                predict_with_generate=True,
                generation_max_length=8,
                num_train_epochs=1,
                **EVALUATED,
            ),
            train_dataset=Pairs(FEW),
            eval_dataset=Pairs(5),
            compute_metrics=lambda prediction: {"mean": float(prediction.predictions.mean())},
            **more,
        )

    theirs = made(transformers.Seq2SeqTrainer, tmp_path / "stock")
    theirs.train()
    mine = made(OffloadSeq2SeqTrainer, tmp_path / "mine", offload_config=config(tmp_path))
    with ended(mine):
        mine.train()
        assert_close(result(mine), result(theirs), models.t5)
        means = [[log["eval_mean"] for log in t.state.log_history if "eval_mean" in log] for t in (mine, theirs)]
        assert means[0] == means[1] and len(means[0]) == 2
        assert torch.equal(
            torch.from_numpy(mine.predict(Pairs(5)).predictions), torch.from_numpy(theirs.predict(Pairs(5)).predictions)
        )


# -- adapters -----------------------------------------------------------------------------------------


@pytest.mark.works("Trainers", "LoRA by peft in a Trainer", "right")
@pytest.mark.numeric
def test_lora_equals_the_stock_trainer(tmp_path: Path) -> None:
    mine = unbroken(lora)
    assert_close(mine, stock(tmp_path / "stock", model=lora), lora)
    assert_same(mine, offloaded(tmp_path / "memory", MEMORY, model=lora))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("save_only_model", [False, True])
def test_lora_loads_its_best_model(save_only_model: bool, tmp_path: Path) -> None:
    """The best is the one with the largest loss here: an early one."""
    best = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    best |= {"load_best_model_at_end": True, "save_only_model": save_only_model, "greater_is_better": True}
    with ended(trainer(tmp_path, model=lora, rows=FEW, **best)) as mine:
        mine.train()
        losses = evaluations(mine)
        assert max(losses) > losses[-1] + 1e-3
        assert mine.evaluate()["eval_loss"] == max(losses)


# -- trl ----------------------------------------------------------------------------------------------


@pytest.mark.works(
    "Trainers", "trl's `SFTTrainer`, whose own loss computes logits in chunks (where trl is installed)", "right"
)
@pytest.mark.filterwarnings("ignore:.*chunked_nll:FutureWarning")  # trl's name for the chunks when both losses existed
@pytest.mark.parametrize("loss_type", ["nll", "chunked_nll", "dft"])
@pytest.mark.numeric
def test_sft_trainer_of_trl(loss_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """trl reads the head's weights in a function of its own, and computes its metrics there; nothing replaces it."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    caplog.set_level(logging.INFO, "offload")

    class OffloadSFTTrainer(OffloadMixin, trl.SFTTrainer):  # type: ignore[misc, name-defined]
        pass

    rows = [{"input_ids": Texts()[row]["input_ids"].tolist()} for row in range(FEW)]

    def made(kind: Any, folder: Path, **more: Any) -> Any:
        chosen = {"max_length": 12, "bf16": False, "loss_type": loss_type, CHECKPOINTING: False}
        dataset = datasets.Dataset.from_list(rows)
        args = arguments(folder, trl.SFTConfig, **EVALUATED, **chosen)
        options = {"train_dataset": dataset, "eval_dataset": dataset, "processing_class": _tokenizer()}
        return kind(model=seeded(), args=args, **options, **more)

    theirs = made(trl.SFTTrainer, tmp_path / "stock")
    theirs.train()
    mine = made(OffloadSFTTrainer, tmp_path / "mine", offload_config=config(tmp_path))
    with ended(mine):
        mine.train()
        assert_close(result(mine), result(theirs))
        rounding_bounds.same_losses(evaluations(mine), evaluations(theirs), models.SHALLOW)
        accuracies = [[log.get("mean_token_accuracy") for log in each.state.log_history] for each in (mine, theirs)]
        assert accuracies[0] == accuracies[1] and any(accuracies[0])
    assert "not computed in chunks of tokens: OffloadSFTTrainer.compute_loss may read the logits" in caplog.text


def _tokenizer() -> Any:
    """Bytes, without any file."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"[PAD]": 0, "[EOS]": 1}, unk_token="[PAD]")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="[PAD]", eos_token="[EOS]"
    )


def biases() -> Any:
    """A model of which biases alone train: BitFit."""
    model = models.shallow()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.endswith("bias")
    return model


def norms() -> Any:
    return peft.get_peft_model(models.shallow(), peft.LNTuningConfig(target_modules=["ln_1", "ln_f"]))


@pytest.mark.slow
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
    adapter, gathered, stock_adapter = (
        load_file(tmp_path / folder / "adapter_model.safetensors")
        for folder in (Path("mine") / checkpoint, "gathered", Path("stock") / checkpoint)
    )
    assert_same_tensors(adapter, gathered)
    shapes = [{name: (value.shape, value.dtype) for name, value in each.items()} for each in (adapter, stock_adapter)]
    assert shapes[0] == shapes[1]
    loaded = peft.PeftModel.from_pretrained(seeded(models.llama), tmp_path / "mine" / checkpoint).eval()
    with torch.no_grad():
        rounding_bounds.same_tensor(loaded(input_ids=ids).logits, expected, rounding_bounds.step_error(models.LORA))


def adaptive() -> Any:
    settings = peft.AdaLoraConfig(
        target_modules=["q_proj"], init_r=6, target_r=3, tinit=1, tfinal=2, deltaT=1, total_step=6
    )
    return peft.get_peft_model(models.llama(), settings)


@pytest.mark.slow
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
