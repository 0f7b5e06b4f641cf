"""`OffloadTrainer` computes the loss in chunks by default, and leaves alone whatever reads the logits."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch.nn import functional

from offload import testing
from offload.errors import ConfigError, UsageError
from offload.hf import OffloadMixin, OffloadTrainer
from offload.losses import chunk_loss_of
from tests.support import models
from tests.support.trainer_runs import (
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
)
from tests.trainers.test_trainer_checkpoints import broken_off, resumed

SMALL = {**models.DECODER, "max_position_embeddings": 64, "use_cache": False}


def qwen3() -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, head_dim=8))


def cohere() -> Any:
    """A model that scales its logits."""
    return transformers.CohereForCausalLM(transformers.CohereConfig(**SMALL))


def lora() -> Any:
    settings = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(models.llama(), settings)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the hidden states of each loss in chunks; chunks are of five tokens."""
    shapes: list[torch.Size] = []

    def recorded(loss: Callable[..., torch.Tensor], hidden: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        shapes.append(hidden.shape)
        return loss(hidden, *args, **more | {"chunk_tokens": 5})

    testing.intercept(monkeypatch, "loss.in_chunks", recorded)
    return shapes


@pytest.mark.works("Trainers", "the loss in chunks of tokens, by default: that of the stock `Trainer`", "right")
@pytest.mark.sample(1)
@pytest.mark.parametrize("model", [models.shallow, models.llama, qwen3, lora])
@pytest.mark.numeric
def test_the_loss_in_chunks_is_that_of_the_stock_trainer(
    model: Callable[[], Any], calls: list[torch.Size], tmp_path: Path
) -> None:
    """Sums of micro-batches are divided by the tokens of the step, which the Trainer counts."""
    mine, theirs = offloaded(tmp_path / "mine", model=model), stock(tmp_path / "stock", model=model)
    assert len(calls) == 10 and set(calls) <= {torch.Size((2, 12, 64)), torch.Size((2, 12, 32))}
    assert_close(mine, theirs, model, reordered=True)


def test_one_line_tells_of_the_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "offload")
    expected = {
        models.llama: "from the logits of 1024 tokens at a time; chunked_loss=False computes all at once",
        cohere: "not computed in chunks of tokens: CohereForCausalLM does not compute its loss from the output of",
    }
    for model, message in expected.items():
        caplog.clear()
        offloaded(tmp_path / model.__name__, MEMORY, model, num_train_epochs=1)
        (line,) = [each.message for each in caplog.records if each.message.startswith("the loss is ")]
        assert message in line


# -- what needs all logits ----------------------------------------------------------------------------


class OwnLoss(OffloadTrainer):
    """As users write it: from the logits."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        assert outputs.logits.shape[1] == 12
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def made(folder: Path, kind: Any = OffloadTrainer, model: Any = models.llama, **more: Any) -> Any:
    args = {key: more.pop(key) for key in [*more] if key in ("label_smoothing_factor",)}
    return kind(
        model=seeded(model),
        args=arguments(folder, num_train_epochs=1, **args),
        train_dataset=Texts(FEW),
        eval_dataset=Texts(5),
        **{"offload_config": config(folder, MEMORY)} | more,
    )


def of_logits(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss of the user's own, which reads the logits."""
    return functional.cross_entropy(outputs.logits.transpose(1, 2), labels, reduction="sum") / num_items_in_batch


READERS: dict[str, dict[str, Any]] = {
    "label smoothing": {"label_smoothing_factor": 0.1},
    "compute_loss_func": {"compute_loss_func": of_logits},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("more", READERS.values(), ids=READERS)
@pytest.mark.numeric
def test_a_loss_of_the_logits_is_computed_from_the_logits(
    more: dict[str, Any], calls: list[torch.Size], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "offload")
    with ended(made(tmp_path / "mine", **more)) as mine:
        mine.train()
        theirs = made(tmp_path / "stock", kind=_stock, **more)
        theirs.train()
        assert_close(result(mine), result(theirs), models.llama)
    assert not calls and "not computed in chunks of tokens: " in caplog.text
    with pytest.raises(ConfigError, match="chunked_loss=True computes no logits, but "):
        made(tmp_path / "refused", chunked_loss=True, **more).train()


def _stock(offload_config: Any, **more: Any) -> transformers.Trainer:
    return transformers.Trainer(**more)


def test_a_trainer_with_a_loss_of_its_own_receives_all_logits(
    calls: list[torch.Size], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "offload")
    with ended(made(tmp_path / "own", OwnLoss)) as mine:
        mine.train()
    assert not calls and "OwnLoss.compute_loss may read the logits (chunked_loss=True if it does not)" in caplog.text


def test_its_author_may_ask_for_chunks(calls: list[torch.Size], tmp_path: Path) -> None:
    class LossAlone(OffloadTrainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return model(**inputs).loss

    with ended(made(tmp_path, LossAlone, chunked_loss=True)) as mine:
        mine.train()
    assert len(calls) == 5


@pytest.mark.numeric
def test_an_evaluation_computes_logits_only_for_who_receives_them(calls: list[torch.Size], tmp_path: Path) -> None:
    """Its loss is as ever. Metrics and predictions receive the logits, also in the middle of a training."""
    shapes: list[tuple[int, ...]] = []

    def metrics(prediction: Any) -> dict[str, float]:
        shapes.append(prediction.predictions.shape)
        return {"mean": float(prediction.predictions.mean())}

    losses = []
    # Five steps of a training, and three batches of an evaluation that computes no logits.
    for count, more in ((8, {}), (5, {"compute_metrics": metrics}), (0, {"chunked_loss": False})):
        calls.clear()
        with ended(made(tmp_path / str(count), **more)) as mine:
            mine.train()
            losses.append(mine.evaluate()["eval_loss"])
            assert mine.predict(Texts(5)).predictions.shape == (5, 12, 128)
        assert len(calls) == count
    assert shapes == [(5, 12, 128)] * 2
    assert losses == [pytest.approx(losses[0], rel=1e-5)] * 3


def test_a_prediction_step_of_ones_own_receives_all_logits(calls: list[torch.Size], tmp_path: Path) -> None:
    class OwnStep(transformers.Trainer):
        def prediction_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            with torch.no_grad():
                outputs = model(**inputs)
            assert outputs.logits.shape[1] == 12
            return outputs.loss, None, None

    class Mine(OffloadMixin, OwnStep):
        pass

    with ended(made(tmp_path, Mine)) as mine:
        mine.train()
        assert len(calls) == 5 and mine.evaluate()["eval_loss"] > 0 and len(calls) == 5


def test_a_callback_that_calls_the_model_receives_all_logits(calls: list[torch.Size], tmp_path: Path) -> None:
    """Also in the middle of a training: only the Trainer's own steps compute chunks."""
    shapes: list[tuple[int, ...]] = []

    class Reads(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            ids = Texts()[0]["input_ids"][None]
            shapes.append(mine.engine(input_ids=ids, labels=ids).logits.shape)

    with ended(made(tmp_path)) as mine:
        mine.add_callback(Reads)
        mine.train()
    assert len(calls) == 5 and shapes == [(1, 12, 128)] * 3


def test_a_replaced_method_of_the_trainers_class_receives_all_logits(
    calls: list[torch.Size], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = transformers.Trainer.compute_loss

    @functools.wraps(usual)
    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss, outputs = usual(self, *args, **kwargs | {"return_outputs": True})
        assert outputs.logits.shape[1] == 12
        return loss

    monkeypatch.setattr(transformers.Trainer, "compute_loss", replaced)
    with ended(made(tmp_path)) as mine:
        mine.train()
    assert not calls


def test_off_is_off_and_the_impossible_is_an_error(calls: list[torch.Size], tmp_path: Path) -> None:
    with ended(made(tmp_path / "off", chunked_loss=False)) as mine:
        mine.train()
    assert not calls
    with pytest.raises(UsageError, match="CohereForCausalLM does not compute its loss from the output of lm_head"):
        made(tmp_path / "on", model=cohere, chunked_loss=True).train()


def test_a_script_that_has_chosen_itself_is_left_alone(calls: list[torch.Size], tmp_path: Path) -> None:
    """By `chunk_loss_of` before; an explicit argument overrules it."""

    def prepared() -> Any:
        model = models.llama()
        chunk_loss_of(model)
        return model

    with ended(made(tmp_path / "mine", OwnLossOfNothing, model=prepared)) as mine:
        mine.train()
    assert len(calls) == 5
    with ended(made(tmp_path / "off", model=prepared, chunked_loss=False)) as mine:
        mine.train()
    assert len(calls) == 5


class OwnLossOfNothing(OffloadTrainer):
    """A loss that reads no logits, in a script that says so by `chunk_loss_of`."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        outputs = model(**inputs)
        assert outputs.logits.shape[1] == 0
        return outputs.loss


# -- resumed ------------------------------------------------------------------------------------------


LLAMA = {"model": models.llama}


def begun(folder: Path, **more: Any) -> Path:
    """Trains three steps, and returns the checkpoint of the second."""
    broken_off(folder, 3, **LLAMA, **more)
    return folder / "out" / "checkpoint-2"


@pytest.mark.slow
def test_a_resumed_run_computes_its_loss_as_it_began(
    calls: list[torch.Size], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that began with all logits stays with them, bit for bit, unless the script asks for chunks."""
    caplog.set_level(logging.INFO, "offload")
    in_chunks, at_once = (offloaded(tmp_path / str(way), **LLAMA, chunked_loss=way) for way in (None, False))
    assert in_chunks.logs != at_once.logs, "the roundings differ, so that the bits tell which loss it was"
    assert_same(resumed(tmp_path / "a", begun(tmp_path / "b"), **LLAMA), in_chunks)
    old = begun(tmp_path / "c", chunked_loss=False)
    calls.clear()
    assert_same(resumed(tmp_path / "d", old, **LLAMA), at_once)
    assert not calls and "not computed in chunks of tokens: the run has begun with all logits" in caplog.text
    resumed(tmp_path / "e", old, **LLAMA, chunked_loss=True)
    assert calls
