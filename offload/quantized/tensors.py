"""Moves parameters that another library has quantized into units, and reads their bytes there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from offload.engine.callbacks import Extension
from offload.engine.edits import WeightEdits
from offload.engine.fill import Values
from offload.engine.params import ParamHandle, last_keys
from offload.errors import UsageError
from offload.layout.flat_layout import ParameterSegment
from offload.layout.frozen import OWN, first_names, holders, inner_starts, inner_tensors_of, tensors_of
from offload.quantized.paged_tensor import PagedTensor, paged, paged_kind
from offload.states import State
from offload.torch_internals import inner_tensors


class ParameterBytes:
    """The bytes of one frozen parameter in a unit; implements `PagedBytes`."""

    def __init__(self, name: str, unit: int, start: int, device: torch.device) -> None:
        """Describes bytes that begin at byte `start` of unit `unit`. `read` works once `owner` is set."""
        self.name, self.unit, self.start, self.device = name, unit, start, device
        self.owner: WeightEdits | None = None
        """The object that reads the bytes. None until the engine is complete, and again after its end."""

    def read(self, geometry: torch.Tensor) -> torch.Tensor:
        """Returns some of the bytes as an ordinary tensor.

        In a forward or a backward the tensor is a view of a device buffer, otherwise a copy. `geometry` is a tensor on
        meta with the shape, the strides, the dtype and the offset in the unit. Raises `UsageError` if the engine was
        destroyed.
        """
        if self.owner is None:
            raise UsageError(
                f"parameter {self.name} has no weights, because its engine was destroyed: call state_dict() before "
                "destroy(), or resume the run, or `offload export` what it has kept"
            )
        return self.owner.read_view(self.unit, geometry)


def is_under_engine(tensor: torch.Tensor) -> bool:
    """Returns True for a paged tensor whose bytes are in a unit."""
    return isinstance(tensor, PagedTensor) and isinstance(tensor.source, ParameterBytes)


# -- buffers -------------------------------------------------------------------------------------------
#
# Layers of GPTQ and AWQ keep their quantized weights in buffers. These buffers become frozen parameters.
#
# The engine pages only parameters, so a buffer would stay on the device for good.


_CODES = "qweight"
"""Name of the buffer of codes, in every layer of GPTQ and AWQ."""


@contextlib.contextmanager
def with_adopted_buffers(model: nn.Module) -> Iterator[None]:
    """Turns the buffers of quantized layers into frozen parameters. If the body raises, turns them into buffers again.

    The parameters keep the buffers' names, values and ties.
    """
    parameters: dict[int, nn.Parameter] = {}
    taken: list[tuple[nn.Module, str, torch.Tensor]] = []
    for module in model.modules():
        codes = module._buffers.get(_CODES)
        if codes is None or codes.is_floating_point():
            continue
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                taken.append((module, name, buffer))
                del module._buffers[name]
                made = parameters.setdefault(id(buffer), nn.Parameter(buffer, requires_grad=False))
                module.register_parameter(name, made)
    try:
        yield
    except BaseException:
        for module, name, buffer in taken:
            del module._parameters[name]
            module._buffers[name] = buffer
        raise


# -- form ----------------------------------------------------------------------------------------------
#
# A quantized parameter moves into a unit: its inner tensors are copied into the unit, and paged tensors replace them.


_PACKS = "support_avx512bf16_for_cpu"
"""Attribute of a Linear4bit: True if it packs its weight for the CPU."""


class QuantizedTensors(Values):
    """The form of a quantized parameter in a unit. It stores the bytes of the inner tensors one after another."""

    def __init__(self, segment: ParameterSegment, source: ParameterBytes) -> None:
        super().__init__(segment)
        self.content = segment.kind
        self._source = source

    def attach(self, owner: WeightEdits) -> None:
        self._source.owner = owner

    def detach(self) -> None:
        self._source.owner = None

    def fill(self, model: nn.Module, chunk: range, flats: Mapping[State, torch.Tensor]) -> None:
        """Copies the inner tensors of the parameter, or reads them from their file."""
        memory = self.memory(chunk, flats)
        if memory is None:
            return
        starts = inner_starts(self.segment.inner)
        for name, tensor in _inner(model, self.segment).items():
            if name not in starts:
                continue
            nbytes = tensor.numel() * tensor.element_size()
            place = memory[starts[name] : starts[name] + nbytes].view(tensor.dtype)
            place = place.as_strided(tensor.size(), _stride(tensor), place.storage_offset())
            place.copy_(tensor.values() if isinstance(tensor, PagedTensor) else _plain(tensor))

    def empty(self, model: nn.Module, in_place: bool = False) -> None:
        """Replaces the parameter's inner tensors by paged tensors without memory. The parameter keeps its ties.

        With `in_place`, the bytes are read from the model's own files. Tensors that are in memory already, such as a
        code book, then move to the device and stay there.
        """
        parameter, owner = model.get_parameter(self.segment.name), _owner(model, self.segment)
        tensors, starts = _inner(model, self.segment), inner_starts(self.segment.inner)
        first = first_names(tensors)

        def made(name: str, kind: type[PagedTensor] = PagedTensor) -> torch.Tensor:
            if in_place and not isinstance(tensors[name], PagedTensor):
                return tensors[name].to(self._source.device)
            return paged(kind, self._source, _geometry(tensors[name], self._source.start + starts[first[name]]))

        if inner_tensors(parameter) is not None:
            wrapper = _rewrapped(parameter, "", made)
            wrapper.__dict__.update(
                {name: value for name, value in vars(parameter).items() if name not in vars(wrapper)}
            )
            wrapper.requires_grad_(False)
            torch.utils.swap_tensors(parameter, wrapper)
            return
        for prefix, holder in list(holders(parameter, owner)):
            for name in tensors_of(holder):
                setattr(holder, name, made(f"{prefix}{name}"))
        standin = made(OWN, paged_kind(getattr(parameter, "original", None) or type(parameter)))
        standin.__dict__.update({name: value for name, value in vars(parameter).items() if name not in vars(standin)})
        torch.utils.swap_tensors(parameter, standin)

    def read(self, handle: ParamHandle) -> torch.Tensor:
        """Returns a copy of a parameter that consists of one tensor, such as integers or scales.

        Raises `UsageError` if the parameter consists of several tensors, which only its library can interpret.
        """
        parameter = handle.parameter
        if isinstance(parameter, PagedTensor) and [field.name for field in self.segment.inner] == [OWN]:
            return parameter.values()
        raise UsageError(
            f"parameter {handle.name} has no values that the engine can read: it is stored as its library has "
            f"quantized it ({self.content}); state_dict() of its module returns codes and scales"
        )

    def saved_keys(self, handle: ParamHandle, state: dict[str, Any], prefix: str, name: str) -> list[str]:
        """Returns the keys of the parameter and of tensors that its module derives from it, such as scales."""
        keys = last_keys(state, prefix)
        return [key for key in keys if f"{key}.".startswith(f"{prefix}{name}.") or isinstance(state[key], PagedTensor)]

    def saved(self, handle: ParamHandle, value: Any, copy: Callable[[], torch.Tensor]) -> Any:
        """Returns `value` with copies in place of paged tensors."""
        return ordinary(value)


class UnpackedWeights(Extension):
    """Keeps modules of bitsandbytes from packing weights for the CPU, as a Linear4bit would do in evaluation mode."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        """Stops the modules of the parameters `names` from packing."""
        owners: list[Any] = [model.get_submodule(name.rpartition(".")[0]) for name in names]
        self._packing = [owner for owner in owners if getattr(owner, _PACKS, False)]
        for owner in self._packing:
            setattr(owner, _PACKS, False)

    def remove(self) -> None:
        while self._packing:
            setattr(self._packing.pop(), _PACKS, True)


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of `tensor` on the CPU without paged tensors.

    A wrapper keeps its class, and ordinary tensors replace its paged inner tensors. Each inner tensor moves by itself,
    because some classes change their format when the wrapper moves.
    """

    def made(name: str) -> torch.Tensor:
        inner = tensor
        for attribute in filter(None, name.split(".")):
            inner = getattr(inner, attribute)
        return (inner.values() if isinstance(inner, PagedTensor) else inner).to("cpu")

    return _rewrapped(tensor, "", made)


def _rewrapped(tensor: torch.Tensor, prefix: str, made: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Returns a wrapper like `tensor` around other tensors. If `tensor` is no wrapper, returns the other tensor itself.

    `made` takes the dotted name of an inner tensor and returns the replacement. The names begin with `prefix`.
    """
    contents = inner_tensors(tensor)
    if contents is None:
        return made(prefix[:-1])
    inner: Mapping[str, Any] = {
        name: _rewrapped(value, f"{prefix}{name}.", made) if isinstance(value, torch.Tensor) else value
        for name, value in contents[0].items()
    }
    kind: Any = type(tensor)
    wrapper: torch.Tensor = kind.__tensor_unflatten__(inner, contents[1], tensor.size(), tensor.stride())
    return wrapper


def _inner(model: nn.Module, segment: ParameterSegment) -> dict[str, torch.Tensor]:
    return inner_tensors_of(model.get_parameter(segment.name), _owner(model, segment))


def _owner(model: nn.Module, segment: ParameterSegment) -> nn.Module:
    return model.get_submodule(segment.name.rpartition(".")[0])


def _geometry(tensor: torch.Tensor, start: int) -> torch.Tensor:
    """Returns a tensor on meta with the shape and dtype of `tensor`, at byte `start`."""
    offset = start // tensor.dtype.itemsize
    memory = torch.empty(offset + tensor.numel(), dtype=tensor.dtype, device="meta")
    return memory.as_strided(tensor.size(), _stride(tensor), offset)


def _stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides of `tensor` as the unit stores it, without gaps between elements."""
    if isinstance(tensor, PagedTensor):
        return tensor.stride()
    return torch.empty_like(_plain(tensor), device="meta").stride()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor over the same memory, of torch's own class."""
    return tensor.detach().as_subclass(torch.Tensor)
