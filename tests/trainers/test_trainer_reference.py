"""The reference of a Trainer such as trl's DPOTrainer is paged beside the model that trains, in the same budgets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional

from offload import testing
from offload.engine.params import handle_of
from offload.errors import BudgetError, UsageError
from offload.hf import Accelerator, OffloadMixin
from tests.support import models
from tests.support.trainer_runs import (
    CHECKPOINTING,
    FEW,
    Run,
    Texts,
    arguments,
    assert_close,
    assert_same,
    config,
    result,
    seeded,
)

COLUMNS = ("prompt", "chosen", "rejected")


class WithReference(transformers.Trainer):
    """What trl's DPOTrainer does with its reference, in a loss that is short."""

    def __init__(self, *args: Any, ref_model: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ref_model = self.accelerator.prepare_model(ref_model, evaluation_mode=True)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = self.ref_model(**inputs).logits.float()
        apart = functional.kl_div(outputs.logits.float().log_softmax(-1), wanted.softmax(-1), reduction="batchmean")
        loss = (outputs.loss + apart / 100) / self.args.gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


class OffloadWithReference(OffloadMixin, WithReference):
    """As a user writes it."""


def reference() -> Any:
    """Of other weights than the model, and frozen by nobody."""
    torch.manual_seed(1)
    return models.gpt2().eval()


def made(kind: Any, folder: Path, **given: Any) -> Any:
    rows = Texts(FEW)
    return kind(
        model=seeded(), ref_model=reference(), args=arguments(folder), train_dataset=rows, eval_dataset=rows, **given
    )


@contextmanager
def offloaded(folder: Path, tier: str = "nvme", **block: Any) -> Iterator[Any]:
    content = config(folder, tier)
    trainer = made(OffloadWithReference, folder, offload_config=content | {"offload": content["offload"] | block})
    try:
        yield trainer
    finally:
        for engine in (trainer.engine, *trainer.accelerator.references):
            if engine is not None:
                engine.destroy(remove=True)


def trained(folder: Path, tier: str, **block: Any) -> Run:
    with offloaded(folder, tier, **block) as mine:
        mine.train()
        return result(mine)


@pytest.mark.works("Trainers", "a reference model, as trl's `DPOTrainer` prepares it: paged", "right")
@pytest.mark.numeric
def test_training_is_the_stock_trainers(tmp_path: Path) -> None:
    stock = made(WithReference, tmp_path / "stock")
    stock.train()
    on_disk = trained(tmp_path / "disk", "nvme")
    assert_close(on_disk, result(stock))
    assert_same(trained(tmp_path / "memory", "none"), on_disk)


def test_the_reference_is_in_swap_files_of_its_own_and_does_not_train(tmp_path: Path) -> None:
    with offloaded(tmp_path, log=str(tmp_path / "log")) as mine:
        (engine,) = mine.accelerator.references
        assert mine.ref_model is engine.module and mine.engine is None
        assert all(handle_of(parameter) is not None for parameter in mine.ref_model.parameters())
        assert (tmp_path / "swap" / "default-reference" / "rank0" / "manifest.json").is_file()
        assert testing.inspect(engine).store is not None and testing.inspect(engine).store.run == "default-reference"
        before = {name: value.clone() for name, value in engine.state_dict().items()}
        mine.train()
        assert mine.engine is not engine and mine.model is not mine.ref_model
        assert mine.accelerator.prepare_model(mine.ref_model, evaluation_mode=True) is mine.ref_model
        assert len(mine.accelerator.references) == 1
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    left = {path.name for path in (tmp_path / "swap").rglob("*") if path.is_file()}
    assert left <= {"finished.json"}


def test_device_memory_is_that_of_both(tmp_path: Path) -> None:
    with offloaded(tmp_path / "alone") as mine:
        mine.evaluate()
        needed = mine.engine.device_memory, mine.accelerator.references[0].device_memory
    with offloaded(tmp_path / "given", device_memory=sum(needed)) as mine:
        mine.evaluate()
        assert mine.engine.device_memory + mine.accelerator.references[0].device_memory <= sum(needed)
    for left in (0, 4096):
        with offloaded(tmp_path / str(left), device_memory=needed[1] + left) as mine, pytest.raises(BudgetError):
            mine.evaluate()


@pytest.mark.slow
def test_host_memory_is_that_of_both(tmp_path: Path) -> None:
    with offloaded(tmp_path / "alone") as mine:
        mine.evaluate()
        needed = mine.engine.host_memory + mine.accelerator.references[0].host_memory
    with offloaded(tmp_path / "given", host_memory=needed) as mine:
        mine.train()
        assert mine.engine.host_memory + mine.accelerator.references[0].host_memory <= needed


def test_a_reference_that_comes_later_finds_no_device_memory(tmp_path: Path) -> None:
    content = config(tmp_path)
    content["offload"]["device_memory"] = "64MiB"
    accelerator = Accelerator(cpu=True, offload_config=content)
    model = models.gpt2()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    with pytest.raises(UsageError, match="before prepare"):
        accelerator.prepare_model(reference(), evaluation_mode=True)
    accelerator.engine.destroy(remove=True)


@pytest.mark.numeric
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # trl asks for the old name
def test_dpo_trainer_of_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")

    class OffloadDPOTrainer(OffloadMixin, trl.DPOTrainer):  # type: ignore[misc, name-defined]
        pass

    words = [f"w{word}" for word in range(126)]
    rows = [
        {
            name: "".join(f" {words[(row * 7 + n * 3 + place) % 126]}" for n in range(4))
            for place, name in enumerate(COLUMNS)
        }
        for row in range(FEW)
    ]

    def made(kind: Any, folder: Path, **more: Any) -> Any:
        args = arguments(folder, trl.DPOConfig, max_length=12, bf16=False, **{CHECKPOINTING: False})
        dataset = datasets.Dataset.from_list(rows)
        return kind(
            model=seeded(),
            ref_model=reference(),
            args=args,
            train_dataset=dataset,
            processing_class=tokenizer(words),
            **more,
        )

    theirs = made(trl.DPOTrainer, tmp_path / "stock")
    theirs.train()
    mine = made(OffloadDPOTrainer, tmp_path / "mine", offload_config=config(tmp_path))
    mine.train()
    assert mine.accelerator.references[0].module is mine.ref_model
    assert_close(result(mine), result(theirs))
    for engine in (mine.engine, *mine.accelerator.references):
        engine.destroy(remove=True)


def tokenizer(words: list[str]) -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    ids = {"[PAD]": 0, "[EOS]": 1} | {word: index + 2 for index, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="[PAD]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", eos_token="[EOS]")
