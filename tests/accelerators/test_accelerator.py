"""Every accelerator that torch reports is used by the same code, and what is CUDA's own has a plain fall-back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from offload.engine.plan import _device_kernels
from offload.engine.snapshot import read_generators, write_generators
from offload.errors import ConfigError
from offload.swapper.memory import device as device_choice
from offload.swapper.memory.device import (
    AcceleratorDevice,
    CudaHostSide,
    Device,
    TorchHostSide,
    compute_device,
    host_side_of,
    open_device,
)
from offload.torch_internals import SHALLOW_COPY_QUERY, set_data
from tests.accelerators.accelerator_modules import CUDA, XPU, Torch


@pytest.mark.parametrize(
    ("of", "name", "expected"),
    [
        (None, "auto", "cpu"),
        (None, "cpu", "cpu"),
        ("cuda", "auto", "cuda:0"),
        ("cuda", "cuda", "cuda:0"),
        ("cuda", "cpu", "cpu"),
        ("xpu", "auto", "xpu:0"),
        ("xpu", "xpu", "xpu:0"),
    ],
)
def test_auto_is_the_accelerator_that_torch_finds(
    of: str | None, name: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Torch(monkeypatch, of)
    assert compute_device(name) == torch.device(expected)


@pytest.mark.parametrize(
    ("of", "name", "message"),
    [
        (None, "cuda", '"device" is cuda, but torch finds no CUDA device; set it to "auto" or "cpu"'),
        (None, "xpu", '"device" is xpu, but torch finds no XPU device; set it to "auto" or "cpu"'),
        ("xpu", "cuda", '"device" is cuda, but torch finds no CUDA device'),
        (None, "tpu", "there is no device 'tpu': \"device\" may be auto, cpu, cuda$"),
        ("xpu", "meta", "there is no device 'meta': \"device\" may be auto, cpu, cuda, xpu$"),
        ("cuda", "cuda:1", "there is no device 'cuda:1': .*cuda; CUDA_VISIBLE_DEVICES=1 chooses one of several$"),
        ("cuda", "hip", "there is no device 'hip': \"device\" may be auto, cpu, cuda; ROCm is cuda to torch$"),
    ],
)
def test_a_device_that_is_not_there_is_an_error(
    of: str | None, name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Torch(monkeypatch, of)
    with pytest.raises(ConfigError, match=message):
        compute_device(name)


def test_of_several_devices_each_rank_takes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Torch(monkeypatch, "xpu", 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert compute_device("auto") == torch.device("xpu", 1) and machine.history == [1]
    assert compute_device("auto") == torch.device("xpu", 1), "a current device other than 0 is the user's"
    machine.index = 0
    for rank in ("2", "node07", "-1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        expected = f"LOCAL_RANK is {rank}, but torch finds 2 devices; start one process for each"
        with pytest.raises(ConfigError, match=expected):
            compute_device("auto")


def test_what_is_cudas_own_is_used_for_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    Torch(monkeypatch, "cuda")
    assert type(host_side_of(CUDA)) is CudaHostSide and type(host_side_of(XPU)) is TorchHostSide
    monkeypatch.setitem(device_choice.HOST_SIDES, "xpu", CudaHostSide)
    assert type(host_side_of(XPU)) is CudaHostSide
    open_device.cache_clear()
    try:
        assert type(open_device(CUDA)) is AcceleratorDevice and open_device(torch.device("cuda")) is open_device(CUDA)
        assert type(open_device(torch.device("cpu"))) is Device
    finally:
        open_device.cache_clear()


def test_an_accelerator_without_kernels_of_ours_says_so() -> None:
    device = Device(XPU)
    device.host_addressable = False
    found, (notice,) = _device_kernels(device)
    assert not found and "kernels for CUDA alone, and this device is xpu" in notice


def test_the_generator_of_any_accelerator_is_kept_and_a_state_of_another_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generators = {name: torch.Generator().manual_seed(seed) for seed, name in enumerate(("cuda", "xpu"))}
    modules: dict[str, Any] = {
        name: SimpleNamespace(
            get_rng_state=lambda _, generator=generator: generator.get_state(),
            set_rng_state=lambda state, _, generator=generator: generator.set_state(state),
        )
        for name, generator in generators.items()
    }
    monkeypatch.setattr(torch, "get_device_module", lambda device: modules[device.type])
    kept = read_generators(XPU)
    assert "cuda" not in kept and torch.equal(kept["xpu"], generators["xpu"].get_state())
    old = read_generators(CUDA)
    assert "cuda" in old and "xpu" not in old, "the name that runs before had"
    expected = {name: torch.rand(3, generator=copy.deepcopy(each)) for name, each in generators.items()}
    torch.rand(3, generator=generators["xpu"])
    write_generators(kept, XPU)
    write_generators(old, XPU)
    write_generators(kept, torch.device("cpu"))
    assert torch.equal(torch.rand(3, generator=generators["xpu"]), expected["xpu"])
    write_generators(old, CUDA)
    assert torch.equal(torch.rand(3, generator=generators["cuda"]), expected["cuda"])


class Marked(nn.Parameter):
    pass


def test_a_parameter_keeps_all_that_is_its_own_where_torch_refuses_its_new_device() -> None:
    """As between the CPU and a device of a backend of one's own. The meta device stands for one."""
    called: list[str] = []
    parameter = Marked(torch.ones(2, 3))
    parameter.mark = "mine"  # type: ignore[attr-defined]
    parameter.register_hook(lambda gradient: called.append("hook"))
    parameter.register_post_accumulate_grad_hook(lambda leaf: called.append("after"))
    there = torch.zeros((), device="meta").expand(2, 3)
    assert not SHALLOW_COPY_QUERY(parameter, there)
    set_data(parameter, there)
    assert parameter.is_meta and parameter.requires_grad and parameter.mark == "mine"  # type: ignore[attr-defined]
    parameter.sum().backward()
    assert called == ["hook", "after"] and parameter.grad is not None and parameter.grad.is_meta
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    set_data(frozen, torch.ones(3))
    assert frozen.shape == (3,) and not frozen.requires_grad


def test_a_parameter_with_a_weak_reference_moves_too() -> None:
    """As those of an nn.GRU, which torch itself does not swap."""
    gru = nn.GRU(2, 3)
    weight = gru.weight_ih_l0
    weight.mark = "mine"  # type: ignore[attr-defined]
    set_data(weight, torch.zeros(9, 2, device="meta"))
    assert weight.is_meta and weight.requires_grad and weight.mark == "mine"  # type: ignore[attr-defined]
    assert gru.weight_ih_l0 is weight and gru._flat_weights[0] is weight
    assert next(gru.parameters()) is weight and type(weight) is nn.Parameter
    held = (gru.weight_hh_l0 * 2).sum()
    with pytest.raises(RuntimeError):
        set_data(gru.weight_hh_l0, torch.zeros(9, 3, device="meta"))
    assert held is not None and not gru.weight_hh_l0.is_meta


@pytest.mark.parametrize("hold", [lambda p: (p * p).sum(), lambda p: p.view(-1)], ids=["a graph", "a view"])
def test_a_parameter_that_a_graph_holds_is_an_error_of_torch(hold: Callable[[nn.Parameter], Any]) -> None:
    parameter = nn.Parameter(torch.ones(2))
    held = hold(parameter)
    with pytest.raises(RuntimeError):
        set_data(parameter, torch.zeros(2, device="meta"))
    assert held is not None and not parameter.is_meta
