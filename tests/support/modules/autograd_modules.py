"""Modules with functions, hooks, wrappers and views of their own."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests import device
from tests.support.modules.module_kinds import WIDTH, Layers

# -- functions of the user ----------------------------------------------------------------------------


class Scaled(torch.autograd.Function):
    """A function of the user that keeps what it needs of the weight where `keep` names."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, keep: str) -> torch.Tensor:
        ctx.keep = keep
        if keep == "saved":
            ctx.save_for_backward(hidden, weight)
        else:
            ctx.save_for_backward(hidden)
            ctx.weight = weight.t() if keep == "view" else weight
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        weight = ctx.saved_tensors[1] if ctx.keep == "saved" else ctx.weight
        weight = weight.t() if ctx.keep == "view" else weight
        hidden = ctx.saved_tensors[0]
        return gradient @ weight, gradient.flatten(0, 1).t() @ hidden.flatten(0, 1), None


class Custom(nn.Module):
    def __init__(self, keep: str) -> None:
        super().__init__()
        self.keep = keep
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(hidden, self.weight, self.keep)


class Customs(Layers):
    keep = "saved"

    def layer(self, index: int) -> nn.Module:
        return Custom(self.keep)


class KeepsParameters(Customs):
    keep = "parameter"


class KeepsViews(Customs):
    keep = "view"


class Borrows(nn.Module):
    """A module whose function reads the weight of a module that does not run."""

    def __init__(self, lender: nn.Module, as_data: bool) -> None:
        super().__init__()
        self.own, self.as_data = nn.Linear(WIDTH, WIDTH), as_data
        self.lenders = [lender]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.lenders[0].weight
        return Scaled.apply(self.own(hidden), weight.data if self.as_data else weight, "saved")


class Borrowing(Layers):
    as_data = False

    def layer(self, index: int) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH) if index == 0 else Borrows(self.first, self.as_data)

    def __init__(self) -> None:
        self.__dict__["first"] = nn.Linear(WIDTH, WIDTH)
        super().__init__()
        self.layers[0] = self.first


class BorrowingData(Borrowing):
    as_data = True


def _at(address: int, numel: int, like: torch.Tensor) -> torch.Tensor:
    """Returns a copy of (numel,) values at an address, which a kernel on the device of `like` makes."""
    if like.device.type == device.NAME:
        return device.read_by_address(address, numel, like.dtype)
    memory = (ctypes.c_char * (numel * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).clone()


class ReadsAddress(nn.Module):
    """A module that reads memory by address, as a kernel does, after its own module has run beside."""

    def __init__(self, lender: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.lenders = [lender]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.lenders[0].weight
        address = weight.data_ptr()
        hidden = self.own(hidden)
        return hidden @ _at(address, weight.numel(), weight).view(weight.shape).t()


class ReadingAddresses(Borrowing):
    def layer(self, index: int) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH) if index == 0 else ReadsAddress(self.first)


def _read(tensor: torch.Tensor, strides_first: bool) -> torch.Tensor:
    """Reads a matrix by its address and strides, which a launcher of kernels asks for in one order or the other."""
    strides = tensor.stride() if strides_first else None
    address, (rows, columns) = tensor.data_ptr(), tensor.shape
    step, next_column = strides or (tensor.stride(0), tensor.stride(1))
    assert tensor.is_contiguous() == (next_column == 1)
    room = (rows - 1) * step + (columns - 1) * next_column + 1
    return _at(address, room, tensor).as_strided((rows, columns), (step, next_column)).clone()


class Kernel(torch.autograd.Function):
    """A product by a kernel that torch does not see: `apply` hands a placeholder on as it is."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, strides_first: bool) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.strides_first = strides_first
        return hidden @ _read(weight, strides_first).t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        flat = gradient.flatten(0, -2)
        return gradient @ _read(weight, ctx.strides_first), flat.t() @ hidden.flatten(0, -2), None


class Launches(nn.Module):
    """A module whose kernels read the weight of a module that does not run, as a fused loss reads the head's."""

    def __init__(self, lender: nn.Module) -> None:
        super().__init__()
        self.own, self.lenders = nn.Linear(WIDTH, WIDTH), [lender]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.lenders[0].weight
        hidden = Kernel.apply(self.own(hidden), weight, True)
        return Kernel.apply(hidden, weight, False)


class Launching(Borrowing):
    def layer(self, index: int) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH) if index == 0 else Launches(self.first)


class Wrap(torch.autograd.Function):
    """A tensor subclass that has no memory of its own, as those of torchao and DTensor have none."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return TwoTensor(hidden.clone(), hidden * 2)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> torch.Tensor:
        return gradient.a + gradient.b * 2


class Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Any) -> torch.Tensor:
        return both.a + both.b

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return TwoTensor(gradient.clone(), gradient.clone())


class Wrapper(nn.Module):
    """A model that passes a wrapped tensor between its modules and out of one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.wrapped = nn.Linear(WIDTH, WIDTH), nn.Tanh()
        self.inner = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        both = self.wrapped(Wrap.apply(self.linear(hidden)))
        return self.inner[0](Unwrap.apply(both * both.exp()))


class Wrapping(Layers):
    def layer(self, index: int) -> nn.Module:
        return Wrapper()


class HooksInside(Layers):
    """A model that runs under saved-tensor hooks of the user, which keep everything that they receive."""

    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index == 1:
                with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                    hidden = hidden + torch.tanh(functional.linear(hidden, layer.weight, layer.bias))
            else:
                hidden = hidden + torch.tanh(layer(hidden))
        return hidden


class SavedOnCpuInside(Layers):
    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().through(hidden, ids)


class PenaltyInside(Layers):
    """A model that computes a gradient inside of its forward."""

    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        inner = super().through(hidden, ids)
        (slope,) = torch.autograd.grad(inner.float().square().mean(), hidden, create_graph=True)
        return inner + slope


class Mapped(Layers):
    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + torch.vmap(layer)(hidden)
        return hidden


class Pushed(Layers):
    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            value, slope = torch.func.jvp(layer, (hidden,), (torch.ones_like(hidden),))
            hidden = hidden + torch.tanh(value) * slope
        return hidden


class Sparse(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.embedding.sparse = True


class Selective(Layers):
    """A model that keeps products and recomputes the rest; the user's mode must not see the engine's copies."""

    def layer(self, index: int) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        contexts = functools.partial(create_selective_checkpoint_contexts, products)
        for layer in self.layers:
            hidden = hidden + checkpoint(layer, hidden, use_reentrant=False, context_fn=contexts)
        return hidden
