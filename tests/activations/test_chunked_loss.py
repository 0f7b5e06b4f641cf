"""The loss in chunks of tokens is that of all logits, for a head alone and for a whole model."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook
from torch.nn.utils import parametrize, prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.loss import loss_utils

import offload
from offload import testing
from offload.engine.params import ParamHandle
from offload.losses import causal_lm, chunk_loss_of
from offload.losses.causal_model import choose_loss
from tests.support import models
from tests.support.modules.older_libraries import older
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
    tokens: int, words: int, chunk: int, seed: int, bias: bool, smoothing: float, z_loss: float, softcap: float | None
) -> None:
    given_tensors = tensors_of(tokens, words, seed, bias)
    terms = {"label_smoothing": smoothing, "z_loss": z_loss, "softcap": softcap}
    exact = [tensor.detach().double().requires_grad_() if tensor is not None else None for tensor in given_tensors[:3]]
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
        loss = causal_lm(hidden, model.lm_head, labels, num_items_in_batch=items, chunk_tokens=5)
        assert loss.sub(by_items).abs() < 1e-6


def test_a_retained_graph_gives_its_gradients_again() -> None:
    hidden, weight, _, labels = tensors_of(9, 8, 0)
    loss = causal_lm(hidden, weight, labels, chunk_tokens=4)
    (3 * loss).backward(retain_graph=True)
    first = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    loss.backward()
    assert torch.allclose(first[0], 3 * hidden.grad) and torch.allclose(first[1], 3 * weight.grad)


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
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given_storages:
                storage = tensor.untyped_storage()
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


SMALL = {**models.DECODER, "max_position_embeddings": 64, "pad_token_id": 0}


def of(kind: str, **more: Any) -> nn.Module:
    """Returns a small causal language model of a family, without dropout."""
    config = getattr(transformers, f"{kind}Config")(**SMALL, **more)
    return getattr(transformers, f"{kind}ForCausalLM")(config)  # type: ignore[no-any-return]


def mixtral() -> nn.Module:
    return of("Mixtral", num_local_experts=2, output_router_logits=True, router_aux_loss_coef=0.5)


def gemma3_with_images() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.SiglipVisionConfig(**sizes, image_size=28, patch_size=14)
    config = transformers.Gemma3Config(text_config={**SMALL, "head_dim": 8}, vision_config=vision.to_dict())
    return transformers.Gemma3ForConditionalGeneration(config)


def adapted() -> nn.Module:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(models.llama(), config)  # type: ignore[no-any-return, arg-type]


FAMILIES = {
    "gpt2, tied": models.shallow,
    "llama": models.llama,
    "mistral": lambda: of("Mistral"),
    "qwen3": lambda: of("Qwen3", head_dim=8),
    "gemma2, with a cap": lambda: of("Gemma2", head_dim=8, final_logit_softcapping=0.5),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SMALL, head_dim=8)),
    "gemma3 with images": gemma3_with_images,
    "mixtral": mixtral,
    "lora": adapted,
    "lora, of peft 0.18": lambda: older("peft").OfPeft018(),
    "llama, of transformers 5.0": lambda: older("transformers").OfTransformers50(models.llama().config),
}


def ids() -> torch.Tensor:
    return torch.randint(1, 128, (2, 12), generator=torch.Generator().manual_seed(0))


def gradients(model: nn.Module, **inputs: Any) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.sample(3)
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
        output = model(**plain)
    assert output.logits.shape == (2, 0, 128) and abs(output.loss - expected) < 2e-6
    assert model(input_ids=ids()).logits.shape == (2, 12, 128)
    assert torch.equal(model.generate(ids()[:, :4], max_new_tokens=3), written)


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
    with pytest.raises(offload.UsageError, match="LlamaForCausalLM has a forward of its own"):
        chunk_loss_of(model)


def test_a_deep_copy_computes_all_logits() -> None:
    model = models.llama()
    chunk_loss_of(model)
    twin = copy.deepcopy(model)
    assert twin(input_ids=ids()).logits.shape == (2, 12, 128)


# -- what reads or changes logits ---------------------------------------------------------------------


def halved(module: Any, args: Any, output: Any) -> Any:
    return output / 2


def with_z_loss(model: Any, args: Any, output: Any) -> Any:
    output.loss = output.loss + 0.1 * output.logits.float().logsumexp(-1).square().mean()
    return output


def around(function: Any) -> Any:
    """A function of the user that carries the names and the text of another."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return result * 3 if isinstance(result, torch.Tensor) else with_z_loss(None, None, result)

    return wrapper


def replaced(owner: Any, name: str) -> Callable[[Any, Any], None]:
    return lambda model, patch: patch.setattr(owner, name, around(getattr(owner, name)))


def everywhere(register: Any, hook: Any) -> Callable[[Any, Any], None]:
    def change(model: Any, patch: Any) -> None:
        handle = register(lambda module, *args: hook(*args) if module is model.lm_head else None)
        patch.undo_later(handle.remove)

    return change


def half_of_gradients(_: Any, slopes: Any) -> Any:
    return tuple(slope / 2 for slope in slopes)


def by_accelerate(model: Any, patch: Any) -> None:
    class Half(accelerate.hooks.ModelHook):  # type: ignore[misc]
        def post_forward(self, module: Any, output: Any) -> Any:
            return output / 2

    accelerate.hooks.add_hook_to_module(model.lm_head, Half())


def in_object(model: Any, patch: Any) -> None:
    patch.setattr(model.lm_head, "forward", around(model.lm_head.forward))


class Smoothed(TorchFunctionMode):
    """A mode in which each cross entropy smooths its labels."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        also = {"label_smoothing": 0.25} if function is nn.functional.cross_entropy else {}
        return function(*args, **{**(kwargs or {}), **also})


def in_mode(model: Any, patch: Any) -> None:
    mode = Smoothed()
    mode.__enter__()
    patch.undo_later(mode.__exit__, None, None, None)


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "forward hook of the head": lambda model, _: model.lm_head.register_forward_hook(halved),
    "forward pre-hook of the head": lambda model, _: model.lm_head.register_forward_pre_hook(lambda _, x: (x[0] / 2,)),
    "backward hook of the head": lambda model, _: model.lm_head.register_full_backward_hook(
        lambda head, slopes, _: half_of_gradients(head, slopes)
    ),
    "backward pre-hook of the head": lambda model, _: model.lm_head.register_full_backward_pre_hook(half_of_gradients),
    "forward hook of the model": lambda model, _: model.register_forward_hook(
        lambda module, args, kwargs, output: with_z_loss(module, args, output), with_kwargs=True, always_call=True
    ),
    "hook of all modules": everywhere(register_module_forward_hook, lambda args, output: output / 2),
    "backward hook of all modules": everywhere(
        register_module_full_backward_hook, lambda slopes, _: half_of_gradients(None, slopes)
    ),
    "forward in the head": in_object,
    "accelerate's hook": by_accelerate,
    "pruned head": lambda model, _: prune.l1_unstructured(model.lm_head, "weight", 0.5),
    "parametrization": lambda model, _: parametrize.register_parametrization(model.lm_head, "weight", Thirds()),
    "compiled head": lambda model, _: model.lm_head.compile(backend="eager"),
    "forward of the class": replaced(transformers.LlamaForCausalLM, "forward"),
    "forward of nn.Linear": replaced(nn.Linear, "forward"),
    "wrapped loss": lambda model, _: setattr(model, "loss_function", around(loss_utils.ForCausalLMLoss)),
    "partial loss": lambda model, _: setattr(
        model, "loss_function", functools.partial(loss_utils.ForCausalLMLoss, ignore_index=int(ids()[0, 3]))
    ),
    "loss of the table": lambda model, patch: patch.setitem(
        loss_utils.LOSS_MAPPING, "ForCausalLM", around(loss_utils.ForCausalLMLoss)
    ),
    "cross entropy of transformers": replaced(loss_utils, "fixed_cross_entropy"),
    "cross entropy of torch": replaced(nn.functional, "cross_entropy"),
    "mode of torch functions": in_mode,
}


class Thirds(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 3


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """Patches of a test, and what else ends with it."""
    with contextlib.ExitStack() as stack:
        yield types.SimpleNamespace(setattr=monkeypatch.setattr, setitem=monkeypatch.setitem, undo_later=stack.callback)


def same(left: tuple[float, dict[str, torch.Tensor]], right: tuple[float, dict[str, torch.Tensor]]) -> bool:
    return left[0] == right[0] and all(torch.equal(left[1][name], value) for name, value in right[1].items())


@pytest.mark.filterwarnings("ignore:For backward hooks:UserWarning", "ignore:Full backward hook:UserWarning")
@pytest.mark.sample(4)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.works(
    "Trainers", "hooks, wrappers and replaced functions on the way to the loss: all logits, and one line", "right"
)
def test_what_reads_or_changes_logits_has_its_effect(change: Callable[[Any, Any], None], patches: Any) -> None:
    """The loss is not computed in chunks, and a line says what prevents it."""
    torch.manual_seed(0)
    model = models.llama()
    changed = copy.deepcopy(model)
    inputs = {"input_ids": ids(), "labels": ids()}
    plain = gradients(model, **inputs)
    change(changed, patches)
    expected = gradients(changed, **inputs)
    compiled = changed.lm_head._compiled_call_impl is not None
    assert compiled or plain[1].keys() != expected[1].keys() or not same(plain, expected), "the change has no effect"
    chosen = choose_loss(changed, None, off="off")
    assert not chosen.chunked and str(chosen.line).startswith("the loss is not computed in chunks of tokens: ")
    assert same(gradients(changed, **inputs), expected)
    with pytest.raises(offload.UsageError):
        chunk_loss_of(changed)


LATE = (
    "forward hook of the head",
    "forward hook of the model",
    "backward hook of all modules",
    "forward in the head",
    "wrapped loss",
    "cross entropy of torch",
    "mode of torch functions",
)


@pytest.mark.filterwarnings("ignore:For backward hooks:UserWarning", "ignore:Full backward hook:UserWarning")
@pytest.mark.parametrize("name", LATE)
def test_a_change_that_comes_later_has_its_effect_and_is_told_once(
    name: str, patches: Any, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = models.llama()
    twin = copy.deepcopy(model)
    inputs = {"input_ids": ids(), "labels": ids()}
    chunk_loss_of(model)
    assert model(**inputs).logits.shape == (2, 0, 128)
    CHANGES[name](model, patches)
    results = [gradients(model, **inputs) for _ in range(2)]
    assert caplog.text.count("the loss is not computed in chunks of tokens: ") == 1
    if name not in ("cross entropy of torch", "mode of torch functions"):  # which are for both
        CHANGES[name](twin, patches)
    expected = gradients(twin, **inputs)
    assert same(results[0], expected) and same(results[1], expected)


def test_losses_by_row_are_refused_where_logits_are_read() -> None:
    model = models.llama()
    chunk_loss_of(model, by_row=True)
    model.lm_head.register_forward_hook(halved)
    with pytest.raises(offload.UsageError, match="forward hook halved"):
        model(input_ids=ids(), labels=ids())


def test_a_hook_that_is_registered_between_beginning_and_head_is_noticed() -> None:
    """The path was looked at when the call began."""
    model = models.llama()
    chunk_loss_of(model)
    model.model.norm.register_forward_hook(lambda *_: model.lm_head.register_forward_hook(halved) and None)
    with pytest.raises(offload.UsageError, match="changes its logits"):
        model(input_ids=ids(), labels=ids())


def test_hooks_beside_the_way_to_the_loss_prevent_no_chunks() -> None:
    """Of the decoder, of layers, of parameters, and of this library."""
    model = models.llama()
    model.model.register_forward_hook(lambda *_: None)
    model.model.layers[0].register_full_backward_hook(lambda *_: None)
    model.lm_head.weight.register_hook(lambda slope: slope / 2)
    expected = gradients(model, input_ids=ids(), labels=ids())[1]["lm_head.weight"]
    chunk_loss_of(model)
    assert model(input_ids=ids(), labels=ids()).logits.shape == (2, 0, 128)
    gradient = gradients(model, input_ids=ids(), labels=ids())[1]["lm_head.weight"]
    assert torch.allclose(gradient, expected, rtol=1e-4, atol=2e-6)


class SubclassOfTheUser(transformers.LlamaForCausalLM):
    """Its parent's text says nothing of its outputs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return with_z_loss(self, args, super().forward(*args, **kwargs))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: of("Cohere"), "scales its logits"),
        (lambda: of("Bamba", attn_layer_indices=[0], mamba_n_heads=8, mamba_d_head=8), "reads them for another term"),
        (lambda: SubclassOfTheUser(models.llama().config), "is no class of transformers"),
        (models.t5, "the loss of T5|scales its logits|has another form"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), "has no head"),
    ],
    ids=["cohere", "bamba", "subclass", "t5", "sequential"],
)
def test_a_model_with_another_loss_is_refused(make: Callable[[], nn.Module], message: str) -> None:
    model = make()
    with pytest.raises(offload.UsageError, match=message):
        chunk_loss_of(model)
    assert not any(module._forward_pre_hooks for module in model.modules())
