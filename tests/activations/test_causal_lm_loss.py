"""The chunked loss of a language model equals cross entropy over all logits, and never holds those."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import offload
from offload import testing
from offload.engine.params import ParamHandle
from offload.losses import causal_lm
from tests.support import models
from tests.support.oracle import Job, plain_loop, same_bits, start

U = torch.finfo(torch.float32).eps / 2
"""The rounding error of one operation in fp32."""


def plain(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """Returns the same loss from all logits, in the dtype of its arguments."""
    logits = F.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    losses = F.cross_entropy(logits, labels, label_smoothing=label_smoothing, reduction="none")
    losses = losses + z_loss * torch.where(labels == -100, 0, logits.logsumexp(-1).square())
    return losses.sum() / (labels != -100).sum()


def tensors_of(tokens: int, words: int, seed: int, bias: bool = True) -> tuple[Any, ...]:
    draw = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(count, 16, generator=draw, requires_grad=True) for count in (tokens, words))
    labels = torch.randint(0, words, (tokens,), generator=draw)
    labels[torch.rand(tokens, generator=draw) < 0.3] = -100
    labels[0] = 0  # one counts
    return hidden, weight, torch.randn(words, generator=draw, requires_grad=True) if bias else None, labels


class Head(nn.Module):
    """A head without a class of torch's."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias


@given(
    tokens=st.integers(1, 20),
    words=st.integers(1, 40),
    chunk=st.integers(1, 25),
    seed=st.integers(0, 1000),
    bias=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    z_loss=st.sampled_from([0.0, 1e-2]),
    softcap=st.sampled_from([None, 5.0]),
)
def test_loss_and_gradients_are_those_of_cross_entropy(
    tokens: int,
    words: int,
    chunk: int,
    seed: int,
    bias: bool,
    smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> None:
    given_tensors = tensors_of(tokens, words, seed, bias)
    terms = {"label_smoothing": smoothing, "z_loss": z_loss, "softcap": softcap}
    exact = [each.detach().double().requires_grad_() if each is not None else None for each in given_tensors[:3]]
    expected = plain(*exact, given_tensors[3], **terms)
    expected.backward()
    hidden, weight, own_bias, labels = given_tensors
    loss = causal_lm(hidden, Head(weight, own_bias), labels, shift=False, chunk_tokens=chunk, **terms)
    loss.backward()
    # A logit is a dot product of 16 terms and a bias. Its error, and some operations on it, move a loss by as much.
    logit = 17 * U * float((exact[0].abs() @ exact[1].abs().T).max().detach() + 4)
    of_loss = (1 + 2 * z_loss * 60) * (2 * logit + (words + 20) * U * 60)
    assert abs(loss.item() - expected.item()) <= of_loss
    for mine, right, factor in zip((hidden, weight, own_bias), exact, (weight, hidden, torch.ones(1)), strict=True):
        if mine is not None:
            # Each probability is off by a share of itself; the products' sums round beside.
            share = 2 * of_loss + (words + tokens + 20) * U
            assert torch.all((mine.grad - right.grad).abs() <= 4 * share * factor.detach().abs().max() * tokens)


def test_a_shifted_loss_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    model = models.llama()
    ids = torch.randint(0, 128, (2, 12))
    labels = ids.masked_fill(torch.rand(2, 12) < 0.2, -100)
    expected = model(input_ids=ids, labels=labels).loss
    hidden = model.model(input_ids=ids).last_hidden_state
    assert causal_lm(hidden, model.lm_head, labels, chunk_tokens=5).sub(expected).abs().item() < 1e-6
    by_items = model(input_ids=ids, labels=labels, num_items_in_batch=40).loss
    for items in (40, torch.tensor(40)):
        found = causal_lm(hidden, model.lm_head, labels, num_items_in_batch=items, chunk_tokens=5)
        assert found.sub(by_items).abs() < 1e-6


def test_no_token_that_counts_is_as_in_torch() -> None:
    hidden, weight, _, labels = tensors_of(4, 8, 0)
    labels.fill_(-100)
    assert causal_lm(hidden, weight, labels).isnan()
    loss = causal_lm(hidden, weight, labels, num_items_in_batch=7)
    loss.backward()
    assert loss == 0 and not hidden.grad.any() and not weight.grad.any()


def test_a_retained_graph_gives_its_gradients_again() -> None:
    hidden, weight, _, labels = tensors_of(9, 8, 0)
    loss = causal_lm(hidden, weight, labels, chunk_tokens=4)
    (3 * loss).backward(retain_graph=True)
    first = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    loss.backward()
    assert torch.allclose(first[0], 3 * hidden.grad) and torch.allclose(first[1], 3 * weight.grad)


def test_what_needs_no_gradient_gets_none() -> None:
    hidden, weight, _, labels = tensors_of(9, 8, 0)
    causal_lm(hidden, weight.detach(), labels).backward()
    assert hidden.grad is not None and weight.grad is None
    hidden.grad = None
    causal_lm(hidden.detach(), weight, labels).backward()
    assert hidden.grad is None and weight.grad is not None
    with torch.no_grad():
        assert not causal_lm(hidden, weight, labels).requires_grad


def test_sixteen_bits_lose_no_small_gradient_to_the_mean() -> None:
    """A gradient over the number of tokens would be below the smallest number of fp16."""
    hidden, weight, _, labels = tensors_of(4, 8, 0)
    half = hidden.detach().half().requires_grad_(), weight.detach().half().requires_grad_()
    (causal_lm(*half, labels, num_items_in_batch=10**9, shift=False) * 2.0**30).backward()
    exact = [each.detach().double().requires_grad_() for each in half]
    (F.cross_entropy(exact[0] @ exact[1].T, labels, reduction="sum") / 10**9 * 2.0**30).backward()
    for mine, right in zip(half, exact, strict=True):
        assert torch.allclose(mine.grad.double(), right.grad, atol=1e-2)


class Peak(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, as they come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._live = 0, dict[int, tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given_storages = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        self._live = {key: found for key, found in self._live.items() if not found[0].expired()}
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else [result]:
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in given_storages:
                storage = each.untyped_storage()
                self._live[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [512, 2048])
def test_memory_is_one_chunk_of_logits_and_the_gradients(tokens: int, dtype: torch.dtype) -> None:
    features, words, chunk = 16, 1000, 64
    hidden = torch.randn(tokens, features, dtype=dtype, requires_grad=True)
    weight = torch.randn(words, features, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, words, (tokens,))
    with Peak() as counted:
        causal_lm(hidden, weight, labels, chunk_tokens=chunk)
    size = dtype.itemsize
    beside = 0 if dtype == torch.float32 else size
    formula = chunk * words * (4 + beside) + tokens * features * size + words * features * (4 + beside)
    labels_and_rows = tokens * 3 * 8 + chunk * 64
    assert counted.peak <= formula + labels_and_rows < tokens * words * size


# -- under an engine ----------------------------------------------------------------------------------


class Chunked(nn.Module):
    """A Llama whose forward returns the chunked loss, or the hidden states alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.llama()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        hidden: torch.Tensor = self.inner.model(input_ids=ids).last_hidden_state
        return hidden if labels is None else causal_lm(hidden, self.inner.lm_head, labels, chunk_tokens=5)


def tokens_for(step: int, micro: int) -> torch.Tensor:
    return torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(step * 10 + micro))


def chunked_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    ids = tokens_for(step, micro)
    return model(ids, ids)  # type: ignore[no-any-return]


CHUNKED = Job(Chunked, chunked_loss, steps=3, accumulation=2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bits_do_not_depend_on_the_tier(dtype: str, tmp_path: Path) -> None:
    job = CHUNKED._replace(dtype=dtype)
    result = same_bits(job, tmp_path, [("none", "none"), ("cpu", "nvme"), ("nvme", "nvme")])
    if dtype == "fp32":
        losses = plain_loop(Job(models.llama, models.language_loss, steps=1)).losses
        assert len(losses) == 1 and result.losses == pytest.approx(plain_loop(job).losses, rel=1e-6)


def test_the_head_is_brought_once(tmp_path: Path) -> None:
    engine = start(CHUNKED, ("nvme", "nvme"), tmp_path)
    pager = testing.inspect(engine).pager
    acquired: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        testing.intercept(patch, "pager.acquire", lambda real, *call: (acquired.append(call[1]), real(*call))[1])
        loss = chunked_loss(engine, 0, 0)
        engine.backward(loss)
    names = [entry.size.name for entry in pager.table.entries]
    uses = [names[unit] for unit in acquired]
    assert uses.count("inner.lm_head") == 1 and uses.count("inner.model.layers.0") == 2
    engine.step()
    engine.destroy(remove=True)


def test_a_loss_outside_of_the_model_trains_the_head(tmp_path: Path) -> None:
    """The engine returns hidden states, and the loss is computed from them and the model's own head."""
    gradients, reads, read = [], list[str](), ParamHandle.read
    for inside in (True, False):
        engine = start(CHUNKED, ("cpu", "cpu"), tmp_path / str(inside))
        ids, head = tokens_for(0, 0), engine.module.inner.lm_head
        hidden = engine(ids)
        with pytest.MonkeyPatch.context() as patch:
            testing.replace(patch, "parameter.read", lambda handle: (reads.append(handle.name), read(handle))[1])
            engine.backward(engine(ids, ids) if inside else causal_lm(hidden, head, ids, chunk_tokens=5))
        gradients.append(offload.safe_get_full_grad(head.weight).clone())
        engine.step()
        engine.destroy(remove=True)
    assert torch.equal(*gradients) and gradients[0].any()
    assert reads == ["inner.lm_head.weight"], "one copy for all chunks"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(3, 5)}, "expected .* features"),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, "one for each token"),
        ({"labels": torch.zeros(3)}, "torch.int64"),
        ({"label_smoothing": 2.0}, "from 0 to 1"),
        ({"softcap": -1.0}, "positive"),
        ({"chunk_tokens": 0}, "at least 1"),
        ({"head": nn.ReLU()}, "without a weight"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    arguments = {
        "hidden": torch.zeros(3, 4),
        "head": nn.Linear(4, 8),
        "labels": torch.zeros(3, dtype=torch.int64),
        **change,
    }
    with pytest.raises(offload.UsageError, match=message):
        causal_lm(**arguments)
