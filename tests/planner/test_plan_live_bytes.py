"""The bytes of activations that a plan predicts are those that are alive in a real step."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import offload
from offload.finetune.model import make_ready
from offload.losses import chunk_loss_of
from offload.planner.activations import Load, need
from offload.planner.model_shape import from_name
from offload.torch_internals import TorchDispatchMode, tree_leaves

TOKENS, LAYERS = 256, 2


class _Alive(TorchDispatchMode):
    """The peak of all bytes of tensors that were made inside and are alive, weights aside."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._known = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers())}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **kwargs or {})
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._alive.values()))
        return out


def drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


@pytest.mark.sample(1)
@pytest.mark.parametrize("words", [128, 4096])
@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_holds_the_planned_bytes(tmp_path: Path, words: int, in_chunks: bool, recompute: bool) -> None:
    """Small tensors, such as the labels, are not counted, and the gradients of the head and of others are a few more.

    Of few words the MLP of a block is the peak, of many the loss.
    """
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=896,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        vocab_size=words,
        use_cache=False,
    )
    config.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    make_ready(model, recompute)
    if in_chunks:
        chunk_loss_of(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(drop)
    ids = torch.zeros(1, TOKENS, dtype=torch.long)
    with _Alive(model) as alive:
        model(input_ids=ids, labels=ids).loss.backward()
    shape = from_name(str(tmp_path), TOKENS)
    planned = need(shape, Load(1, 1, recompute, in_chunks)).device
    largest = 2 * max(layout.numel for layout in shape.layouts)
    assert 0.98 * alive.peak <= planned + 0.01 * largest
    # The head's gradient is there twice in the plan of chunks: while it is summed, and while it is scaled.
    assert planned <= 1.02 * alive.peak + 2 * largest * in_chunks


class _Waiting(torch.autograd.Function):
    """Passes a weight on; its backward counts the gradients of the weight that are alive."""

    made: ClassVar[list[StorageWeakRef]] = []
    most: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (grad,) = grads
        _Waiting.made.append(StorageWeakRef(grad.untyped_storage()))
        _Waiting.most.append(sum(not each.expired() for each in _Waiting.made))
        return grad


class _Head(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, _Waiting.apply(self.weight))


class _Decoder(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(96, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = _Head(32, 96, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.words(ids)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.head(hidden).square().mean()


@pytest.mark.parametrize("schedule", ["layer_major", "micro_batch_major"])
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_of_a_tied_head_wait_in_a_layer_major_step(
    schedule: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """autograd keeps the head's gradient until that of the embedding comes, as the plan says."""
    count = 4
    content = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": count,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 0,
        "offload": {"device": "cpu", "schedule": schedule},
    }
    monkeypatch.setattr(_Waiting, "made", [])
    monkeypatch.setattr(_Waiting, "most", [])
    torch.manual_seed(0)
    engine = offload.initialize(model=_Decoder(tied), config=content)[0]
    ids = torch.arange(8)[None]
    for _ in range(2):  # the micro-batches take turns from the second step on
        engine.train_batch(itertools.repeat(ids))
    assert len(_Waiting.made) == 2 * count
    alive = max(_Waiting.most[count:])
    engine.destroy()
    shape = from_name("gpt2-tiny", 16)
    untied = shape._replace(uses=(shape.uses[0]._replace(unit=1), *shape.uses[1:]))
    planned = [need(each, Load(1, count, schedule=schedule)).device for each in (shape, untied)]
    head = shape.layouts[shape.uses[-1].unit].trainable_stop * shape.itemsize
    assert planned[0] - planned[1] == (count - 1) * head * (schedule == "layer_major")
    assert alive == (count if tied and schedule == "layer_major" else 1)
