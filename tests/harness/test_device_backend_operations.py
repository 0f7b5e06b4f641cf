"""The test device computes the CPU's bits, whatever its order, and submits work without reading a value."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests import device

pytestmark = pytest.mark.test_device

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=[1.0, 0.5], autouse=True)
def _late(request: pytest.FixtureRequest) -> Iterator[None]:
    device.seed(0, request.param)
    yield
    torch.accelerator.synchronize()


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def moved(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to("test").requires_grad_(value.requires_grad)


def results(call: Callable[..., Any], given: list[Any]) -> list[torch.Tensor]:
    """What a call gives, and the gradients of its arguments."""
    torch.manual_seed(5)
    made = call(*given)
    out = [*made] if isinstance(made, (tuple, list)) else [made]
    leaves = [each for each in given if isinstance(each, torch.Tensor) and each.requires_grad]
    if leaves:
        loss = sum((each.float() * 1.5).sum() for each in out if each.requires_grad)
        assert isinstance(loss, torch.Tensor)
        out += torch.autograd.grad(loss, leaves)
    return [each.detach() for each in out]


def check(call: Callable[..., Any], *given: Any, waits: int = 0) -> None:
    """The call gives the same bits on the CPU and on the device, where it waits so often."""
    expected = results(call, [*given])
    there = [moved(each) for each in given]
    before = device.counter(device.SYNCHRONIZING)
    found = results(call, there)
    assert device.counter(device.SYNCHRONIZING) - before == waits
    for one, other in zip(expected, found, strict=True):
        assert other.device.type == "test"
        assert one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.cpu().reshape(-1).view(torch.uint8))


def causal_math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


LAYERS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "matmul": (torch.matmul, [(3, 4, 5), (5, 6)]),
    "bmm": (torch.bmm, [(2, 3, 5), (2, 5, 4)]),
    "linear": (F.linear, [(3, 4, 5), (6, 5), (6,)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (5,), w, b), [(3, 4, 5), (5,), (5,)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (5,), w), [(3, 4, 5), (5,)]),
    "group_norm": (lambda x, w, b: F.group_norm(x, 3, w, b), [(2, 6, 4, 4), (6,), (6,)]),
    "convolution": (F.conv2d, [(2, 3, 8, 8), (4, 3, 3, 3), (4,)]),
    "softmax": (lambda x: F.softmax(x, -1), [(3, 4, 5)]),
    "log_softmax": (lambda x: F.log_softmax(x, -1), [(3, 4, 5)]),
    "gelu": (F.gelu, [(30, 4)]),
    "gelu by tanh": (lambda x: F.gelu(x, approximate="tanh"), [(30, 4)]),
    "silu": (F.silu, [(30, 4)]),
    "attention": (F.scaled_dot_product_attention, [(2, 2, 8, 16)] * 3),
    "attention by math": (causal_math, [(2, 2, 8, 16)] * 3),
    "attention with dropout": (lambda *qkv: F.scaled_dot_product_attention(*qkv, dropout_p=0.2), [(2, 2, 8, 16)] * 3),
    "dropout": (lambda x: F.dropout(x, 0.1), [(30, 40)]),
    "dropout of 0.3": (lambda x: F.dropout(x, 0.3), [(30, 40)]),
    "mse_loss": (F.mse_loss, [(4, 5), (4, 5)]),
    "norm": (torch.linalg.vector_norm, [(60, 5)]),
    "mean": (lambda x: x.mean(1), [(60, 5)]),
    "cat": (lambda one, two: torch.cat([one, two]).flip(0), [(6, 5), (2, 5)]),
    "views": (lambda x: x.transpose(0, 1).reshape(-1).view(5, 6)[1:3].unfold(1, 2, 1).contiguous(), [(6, 5)]),
    "where": (lambda x: torch.where(x > 0, x, 0.5), [(6, 5)]),
    "masked_fill": (lambda x: x.masked_fill(x > 0, float("-inf")).exp(), [(6, 5)]),
    "tril": (torch.tril, [(6, 5)]),
    "dtypes": (lambda x: x.double().float().half(), [(40,)]),
}


@pytest.mark.sample(21)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_and_its_gradients_have_the_bits_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    call, shapes = LAYERS[name]
    check(call, *(leaf(*shape, dtype=dtype) for shape in shapes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_indices_have_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    rows, columns = torch.tensor([1, 2, 2, 0]), torch.randint(0, 5, (6, 3))
    check(F.cross_entropy, leaf(6, 5, dtype=dtype), torch.randint(0, 5, (6,)))
    check(lambda weight, ids: F.embedding(ids, weight), leaf(6, 5, dtype=dtype), rows)
    check(lambda x, index: x[index], leaf(6, 5, dtype=dtype), rows)
    check(lambda x: x[rows], leaf(6, 5, dtype=dtype))
    check(lambda x, index: x.gather(1, index), leaf(6, 5, dtype=dtype), columns)
    check(lambda x, index, y: x.scatter_add(1, index, y), leaf(6, 5, dtype=dtype), columns, leaf(6, 3, dtype=dtype))
    check(lambda x, index: x.clone().index_fill_(0, index, 1.0), leaf(6, 5, dtype=dtype), rows)


def test_random_numbers_are_those_of_the_cpu_in_the_order_of_submission() -> None:
    check(lambda x: [torch.rand(5, device=x.device), torch.randn(5, device=x.device)], torch.zeros(1))
    check(lambda x: torch.randperm(9, device=x.device), torch.zeros(1))
    check(lambda x: torch.randint(0, 9, (5,), device=x.device), torch.zeros(1))
    numbers = [
        torch.rand(4, generator=torch.Generator(where).manual_seed(3), device=where) for where in ("cpu", "test")
    ]
    assert torch.equal(numbers[0], numbers[1].cpu())


def test_operations_that_depend_on_values_wait_and_are_counted() -> None:
    check(lambda x: x.nonzero().contiguous(), torch.tensor([0, 1, 1]), waits=1)
    check(lambda x: x.unique(), torch.tensor([0, 1, 1]), waits=1)
    check(lambda x, mask: x[mask], torch.randn(3), torch.tensor([True, False, True]), waits=2)
    ones = torch.ones(3, device="test")
    before = device.counter(device.SYNCHRONIZING)
    assert ones.sum().item() == 3
    assert device.counter(device.SYNCHRONIZING) - before == 1


def test_results_in_place_and_into_outputs() -> None:
    x, y = torch.randn(4, 5), torch.randn(4, 5)
    there, out = x.to("test"), torch.empty(0, device="test")
    torch.add(there, y.to("test"), out=out)
    there.mul_(2).add_(y.to("test"), alpha=3)
    assert torch.equal(out.cpu(), x + y)
    assert torch.equal(there.cpu(), (x * 2).add_(y, alpha=3))


def test_tensors_of_two_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match="to be on the same device"):
        torch.ones(3, device="test") + torch.ones(3)
    assert (torch.ones(3, device="test") + torch.tensor(2.0)).sum().item() == 9


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD"])
def test_an_optimizer_has_the_bits_of_the_cpu(kind: str) -> None:
    weights = []
    for where in ("cpu", "test"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4)
        )
        model.to(where)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, foreach=False)
        for _ in range(4):
            loss = F.cross_entropy(model(torch.randn(6, 8).to(where)), torch.randint(0, 4, (6,)).to(where))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        weights.append([weight.detach().cpu() for weight in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_a_fault_of_a_kernel_reaches_the_thread_that_waits() -> None:
    late = F.embedding(torch.tensor([7], device="test"), torch.ones(3, 2, device="test"))
    with pytest.raises(RuntimeError, match=r"on the test device: .*index"):
        late.cpu()
    torch.ones(1, device="test").cpu()


def test_a_storage_by_dlpack_shows_the_same_memory() -> None:
    from torch.utils.dlpack import from_dlpack, to_dlpack

    memory = torch.zeros(64, dtype=torch.uint8, device="test")
    view = from_dlpack(to_dlpack(memory[16:32]))
    assert view.device == memory.device and view.untyped_storage().data_ptr() == memory.data_ptr() + 16
    view.view(torch.float32).fill_(1.0)
    assert memory.cpu().view(torch.float32).tolist() == [0.0] * 4 + [1.0] * 4 + [0.0] * 8


def test_the_gradient_of_a_sparse_embedding_becomes_dense() -> None:
    found = []
    for where in ("cpu", "test"):
        weight = torch.ones(5, 3, device=where, requires_grad=True)
        rows = F.embedding(torch.tensor([4, 1, 4], device=where), weight, sparse=True)
        rows.backward(torch.arange(9.0, device=where).view(3, 3))
        assert weight.grad is not None and weight.grad.is_sparse
        found.append(weight.grad.to_dense().cpu())
    assert torch.equal(*found)


def test_autocast_computes_in_the_dtypes_of_the_cpu() -> None:
    for where in ("cpu", "test"):
        x = torch.ones(2, 2, device=where)
        with torch.autocast(where, torch.bfloat16):
            product = x @ x
            found = [
                product,
                F.linear(x, x),
                F.mse_loss(product, product),
                torch.cat((product, x)),
                product.softmax(-1),
            ]
        assert [each.dtype for each in found] == [
            torch.bfloat16,
            torch.bfloat16,
            torch.float32,
            torch.float32,
            torch.bfloat16,
        ]
        assert (x @ x).dtype == torch.float32


@pytest.mark.parametrize("kind", [torch.nn.GRU, torch.nn.LSTM])
def test_recurrent_modules_compute_what_the_cpu_computes(kind: type[torch.nn.RNNBase]) -> None:
    found = []
    for where in ("cpu", "test"):
        torch.manual_seed(0)
        module = kind(3, 4, num_layers=2, bidirectional=True).to(where)
        rows = torch.randn(5, 2, 3).to(where).requires_grad_()
        module(rows)[0].square().sum().backward()
        gradients = [rows.grad, *(each.grad for each in module.parameters())]
        found.append([each.cpu() for each in gradients if each is not None])
    assert len(found[0]) == len(found[1]) > 16
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*found, strict=True))


def test_a_kernel_of_which_torch_knows_nothing_runs_on_the_stream() -> None:
    device.seed(0, 1.0)
    values = torch.arange(4.0, device="test")
    read = device.read_by_address(values.data_ptr() + 4, 2, torch.float32)
    values.zero_()
    assert read.tolist() == [1.0, 2.0]


def test_a_saved_tensor_is_loaded_onto_the_device() -> None:
    buffer = io.BytesIO()
    torch.save(torch.ones(3, device="test"), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert loaded.device.type == "test" and loaded.cpu().tolist() == [1.0] * 3
