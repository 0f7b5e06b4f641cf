"""A language model of transformers trains with the chunked loss as with its own, and with nothing else changed."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import offload
from offload.losses import chunk_loss_of
from tests.support import models
from tests.support.oracle import Job, same_bits

SMALL = {**models.DECODER, "max_position_embeddings": 64, "pad_token_id": 0}


def of(kind: str, **more: Any) -> nn.Module:
    """Returns a small causal language model of a family, without dropout."""
    config = getattr(transformers, f"{kind}Config")(**SMALL, **more)
    return getattr(transformers, f"{kind}ForCausalLM")(config)  # type: ignore[no-any-return]


def mixtral() -> nn.Module:
    return of("Mixtral", num_local_experts=2, output_router_logits=True, router_aux_loss_coef=0.5)


def adapted() -> nn.Module:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(models.llama(), config)  # type: ignore[no-any-return, arg-type]


class OfTransformers50(transformers.LlamaForCausalLM):
    """A forward in the form of transformers 5.0."""

    def forward(self, input_ids: Any, labels: Any = None, logits_to_keep: int = 0, **more: Any) -> Any:  # type: ignore[override]
        hidden_states = self.model(input_ids=input_ids).last_hidden_state
        slice_indices = slice(-logits_to_keep, None)
        logits = self.lm_head(hidden_states[:, slice_indices, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **more)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


class OfPeft018(nn.Module):
    """Adapters in the form of peft 0.18: the model inside is not called, its forward is."""

    peft_config = "of adapters"

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = models.llama()

    def get_base_model(self) -> nn.Module:
        return self.model  # type: ignore[no-any-return]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.forward(*args, **kwargs)


FAMILIES = {
    "gpt2, tied": models.gpt2,
    "llama": models.llama,
    "mistral": lambda: of("Mistral"),
    "qwen3": lambda: of("Qwen3", head_dim=8),
    "mixtral": mixtral,
    "lora": adapted,
    "lora, of peft 0.18": OfPeft018,
    "llama, of transformers 5.0": lambda: OfTransformers50(models.llama().config),
}


def ids() -> torch.Tensor:
    return torch.randint(1, 128, (2, 12), generator=torch.Generator().manual_seed(0))


def gradients(model: nn.Module, **inputs: Any) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES.keys())
def test_the_loss_and_its_gradients_are_the_models_own(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    labels = ids().masked_fill(ids() < 20, -100)
    for more in ({}, {"num_items_in_batch": torch.tensor(30)}, {"shift_labels": ids().roll(-1)}):
        inputs = {"input_ids": ids(), "labels": labels, **more}
        expected, right = gradients(model, **inputs)
        undo = chunk_loss_of(model, chunk_tokens=7)
        assert model(**inputs).logits.shape == (2, 0, 128)
        loss, mine = gradients(model, **inputs)
        undo()
        assert abs(loss - expected) < 2e-6 and mine.keys() == right.keys()
        for name, gradient in mine.items():
            assert torch.allclose(gradient, right[name], rtol=1e-4, atol=2e-6), name
    assert gradients(model, input_ids=ids(), labels=ids())[0] and model(input_ids=ids(), labels=ids()).logits.numel()


def test_only_training_with_labels_is_changed() -> None:
    torch.manual_seed(0)
    model = models.llama()
    plain = {"labels": ids(), "input_ids": ids()}
    expected = [model(**plain).loss, model(input_ids=ids()).logits, model.generate(ids()[:, :4], max_new_tokens=3)]
    chunk_loss_of(model)
    assert torch.equal(model(input_ids=ids()).logits, expected[1])
    with torch.no_grad():
        assert torch.equal(model(**plain).loss, expected[0])
    model.eval()
    assert torch.equal(model(**plain).loss, expected[0]) and model(**plain).logits.numel()
    assert torch.equal(model.generate(ids()[:, :4], max_new_tokens=3), expected[2])


def test_evaluation_in_chunks_has_the_same_loss() -> None:
    """Without labels all logits are computed: generation is as before."""
    model = models.llama().eval()
    plain = {"labels": ids(), "input_ids": ids()}
    expected, written = model(**plain).loss, model.generate(ids()[:, :4], max_new_tokens=3)
    chunk_loss_of(model, chunk_tokens=7, evaluation=True)
    with torch.no_grad():
        found = model(**plain)
    assert found.logits.shape == (2, 0, 128) and abs(found.loss - expected) < 2e-6
    assert model(input_ids=ids()).logits.shape == (2, 12, 128)
    assert torch.equal(model.generate(ids()[:, :4], max_new_tokens=3), written)


def test_chunks_can_be_left_under_an_engine(tmp_path: Path) -> None:
    """Between steps: the logits of the next call are those of all tokens."""
    model = models.llama()
    undo = chunk_loss_of(model)
    block = {"nvme_path": str(tmp_path), "durability": "none"}
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "offload": block}
    engine = offload.initialize(model=model, config=config).engine
    for count in (0, 12):
        found = engine(input_ids=ids(), labels=ids())
        assert found.logits.shape[1] == count
        engine.backward(found.loss)
        engine.step()
        undo()
    engine.destroy()


def test_a_second_call_is_refused() -> None:
    model = models.llama()
    undo = chunk_loss_of(model)
    with pytest.raises(offload.UsageError, match="in chunks already"):
        chunk_loss_of(model)
    undo()
    undo = chunk_loss_of(model)
    undo()
    assert model.loss_function.__name__ == "ForCausalLMLoss"


def test_a_model_whose_own_forward_was_replaced_is_refused() -> None:
    """As Liger replaces it: that of the object, which computes its loss without the head's module."""
    model = models.llama()

    def fused(self: Any, input_ids: Any, labels: Any) -> Any:
        hidden = self.model(input_ids=input_ids)[0]
        return nn.functional.cross_entropy((hidden @ self.lm_head.weight.T).flatten(0, 1), labels.flatten())

    model.forward = types.MethodType(fused, model)
    with pytest.raises(offload.UsageError, match="does not compute its loss from the output of lm_head itself"):
        chunk_loss_of(model)


def test_an_exception_between_head_and_loss_leaves_nothing_behind() -> None:
    model = models.llama()
    chunk_loss_of(model)

    def fail(*_: Any) -> None:
        raise ValueError("in between")

    hook = model.lm_head.register_forward_hook(fail)
    with pytest.raises(ValueError, match="in between"):
        model(input_ids=ids(), labels=ids())
    hook.remove()
    model.eval()
    assert model(input_ids=ids(), labels=ids()).logits.shape == (2, 12, 128)


def test_a_deep_copy_computes_all_logits() -> None:
    model = models.llama()
    chunk_loss_of(model)
    twin = copy.deepcopy(model)
    assert twin(input_ids=ids()).logits.shape == (2, 12, 128)


def test_a_model_that_changes_its_logits_is_noticed_while_it_runs() -> None:
    """A hook of the user is not in the text of the forward."""
    model = models.llama()
    chunk_loss_of(model)
    model.lm_head.register_forward_hook(lambda head, args, output: output / 2)
    with pytest.raises(offload.UsageError, match="changes its logits"):
        model(input_ids=ids(), labels=ids())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: of("Gemma2", head_dim=8), "scales or caps"),
        (lambda: of("Cohere"), "scales or caps"),
        (models.t5, "the loss of T5|scales or caps|has another form"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), "has no head"),
    ],
    ids=["gemma2", "cohere", "t5", "sequential"],
)
def test_a_model_with_another_loss_is_refused(make: Callable[[], nn.Module], message: str) -> None:
    model = make()
    with pytest.raises(offload.UsageError, match=message):
        chunk_loss_of(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


def chunked_llama() -> nn.Module:
    model = models.llama()
    chunk_loss_of(model, chunk_tokens=7)
    return model


def test_bits_do_not_depend_on_the_tier(tmp_path: Path) -> None:
    job = Job(chunked_llama, models.language_loss, steps=3, accumulation=2, dtype="bf16")
    same_bits(job, tmp_path, [("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")])
