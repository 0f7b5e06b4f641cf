"""Finds out which entries a model's `state_dict()` has, without reading weights.

Classes and hooks rename, split, leave out and add entries. So the model's own `state_dict` runs here, over stand-ins of
the parameters on the meta device. If an entry is a view of a stand-in, the entry is a part of that parameter, and can
be streamed. Any other entry on meta is computed from values, which must then be read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.errors import ConfigError, StoreError, UsageError
from offload.fileio.plain_json import from_plain, to_plain
from offload.layout.frozen import is_of_bitsandbytes
from offload.torch_internals import TorchDispatchMode, inner_tensors, storage_key

# -- saved state ---------------------------------------------------------------------------------------


EXTRA_STATE = "_extra_state"
"""torch's name of the entry of `get_extra_state` in a module."""


class SavedPart(NamedTuple):
    """Consecutive elements of a parameter or a buffer."""

    source: str
    """First name of the parameter or buffer."""
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedState:
    """Entries of a state dict, in its order."""

    parts: Mapping[str, SavedPart]
    others: Mapping[str, Any]
    """Entries that are no part of a parameter or buffer, such as results of `get_extra_state`."""
    computed: str | None
    """The reason why some entries can be computed only from values of weights; None if there are no such entries."""


class _Copies(TorchDispatchMode):
    """Replaces each copy on meta by an alias. The copy and the alias would have the same values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten.clone.default and args[0].is_meta:
            return aten.alias.default(args[0])
        return func(*args, **(kwargs or {}))


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules whose class defines `get_extra_state`. The keys are the names of their state dict entries."""
    return {
        f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE: module
        for path, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def saved_state(model: nn.Module, also: Any = None) -> SavedState:
    """Returns the entries of `model.state_dict()`, after a change by `also`. The model may be under an engine.

    If another library has quantized weights of a module, the result lacks the module's entries that are neither
    parameters nor buffers, because these are stored with the weights.
    """
    with _stand_ins(model) as sources:
        try:
            with torch.no_grad(), _Copies():  # type: ignore[no-untyped-call]
                state = model.state_dict()
                state = state if also is None else also(dict(state))
        except Exception as error:  # any code of the model's
            return SavedState(
                parts={},
                others={},
                computed=f"state_dict() of {type(model).__name__} needs values of weights ({error})",
            )
        buffers = {storage_key(value): (name, value) for name, value in reversed([*model.named_buffers()])}
        quantized = tuple(
            f"{path}." if path else ""
            for path, module in model.named_modules(remove_duplicate=False)
            if any(map(_is_quantized, module.parameters(recurse=False)))
        )
        parts: dict[str, SavedPart] = {}
        plain: dict[str, Any] = {}
        computed = None
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                plain[name] = value
                continue
            part = _part(value, sources)
            source, buffer = buffers.get(storage_key(value), ("", None)) if value.numel() else ("", None)
            if part is not None:
                parts[name] = part
            elif buffer is not None and _same_view(value, buffer):
                parts[name] = SavedPart(source, 0, tuple(value.shape))
            elif value.is_meta:
                computed = computed or f"entry {name} of its state_dict() is computed from weights"
            else:
                plain[name] = value
    if quantized:
        plain = {name: value for name, value in plain.items() if not name.startswith(quantized)}
    return SavedState(parts=parts, others=plain, computed=computed)


def _part(value: torch.Tensor, sources: Mapping[int, tuple[str, torch.Tensor]]) -> SavedPart | None:
    """Returns the elements of a stand-in that `value` shows; None if it is no view of consecutive elements."""
    source = sources.get(storage_key(value))
    if source is None or value.dtype != source[1].dtype or not value.is_contiguous():
        return None
    return SavedPart(source[0], int(value.storage_offset()), tuple(value.shape))


def _same_view(value: torch.Tensor, buffer: torch.Tensor) -> bool:
    return (value.dtype, value.shape, value.stride(), value.storage_offset()) == (
        *(buffer.dtype, buffer.shape, buffer.stride(), buffer.storage_offset()),
    )


def _is_quantized(parameter: nn.Parameter) -> bool:
    """Returns True if the module of `parameter` saves it in a form of its own, as for quantized weights."""
    return is_of_bitsandbytes(parameter) or inner_tensors(parameter) is not None or not parameter.is_floating_point()


@contextlib.contextmanager
def _stand_ins(model: nn.Module) -> Iterator[Mapping[int, tuple[str, torch.Tensor]]]:
    """Replaces the model's parameters by stand-ins on meta within the context.

    Yields the name and the stand-in of each parameter. The keys identify the storages of the stand-ins.
    """
    stand_ins: dict[int, nn.Parameter] = {}
    sources: dict[int, tuple[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        if not _is_quantized(parameter):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            stand_ins[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
            sources[storage_key(empty)] = (name, empty)
    places: list[tuple[dict[str, Any], str, nn.Parameter]] = [
        (module._parameters, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and id(parameter) in stand_ins
    ]
    try:
        for place, name, parameter in places:
            place[name] = stand_ins[id(parameter)]
        yield sources
    finally:
        for place, name, parameter in places:
            place[name] = parameter


# -- module entries ------------------------------------------------------------------------------------
#
# Commits and checkpoints contain the entries of a model's `state_dict()` that are neither parameters nor buffers.
#
# Modules create these entries by `get_extra_state`, hooks or methods of their own. `load_state_dict` restores them.


_ADVICE = (
    "commits and checkpoints hold None, booleans, numbers, strings, bytes, dense tensors, and lists, tuples and dicts "
    "of them, never pickles. Let get_extra_state return such values, or register tensors as buffers"
)


class Entries(NamedTuple):
    """Entries in the form in which a commit stores them."""

    plain: Mapping[str, Any]
    """Entries by name, as JSON."""
    tensors: Mapping[str, torch.Tensor]
    """The tensors in the entries. `plain` contains the keys of this mapping in place of the tensors."""


NO_ENTRIES = Entries({}, {})


class ModuleEntries:
    """The entries of one model."""

    def __init__(self, model: nn.Module, commits: bool) -> None:
        """Finds the entries of `model`. If `commits`, also checks that a commit can contain them.

        Raises `ConfigError` if a module cannot restore its entries, or if `commits` and an entry is not plain.
        """
        self._model = model
        self._extra = extra_states(model)
        names = {name for name in saved_state(model).others if name not in self._extra}
        self._others = _taken_back(model, names)
        self.problem = ""
        """The reason why no commit or checkpoint can contain the entries; empty if they can."""
        for module in self._extra.values():
            if type(module).set_extra_state is nn.Module.set_extra_state:
                raise ConfigError(
                    f"{type(module).__name__} has get_extra_state without set_extra_state, so what it returns could "
                    "not be restored in a resumed run: add set_extra_state to the class"
                )
        try:
            self.take()
        except UsageError as error:
            self.problem = str(error)
            if commits:
                raise ConfigError(
                    f'{error}; or set "durability": "none" in the "offload" block for a run without commits'
                ) from None

    def take(self) -> Entries:
        """Returns the present entries. Raises `UsageError` if an entry contains an object that is not plain."""
        if not self._extra and not self._others:
            return NO_ENTRIES
        values = {name: module.get_extra_state() for name, module in self._extra.items()}
        if self._others:
            values |= {name: value for name, value in saved_state(self._model).others.items() if name in self._others}
        tensors: list[torch.Tensor] = []
        plain = {name: to_plain(value, self._words(name), _ADVICE, tensors) for name, value in values.items()}
        return Entries(plain, {str(number): tensor for number, tensor in enumerate(tensors)})

    def check_fits(self, entries: Entries, what: str) -> None:
        """Raises `StoreError` if a commit or checkpoint, named `what`, contains entries that this model lacks."""
        for name in entries.plain:
            if name not in self._extra and name not in self._others:
                raise StoreError(
                    f"{what} contains the entry {name} of the model's state_dict(), which this model does not have: "
                    "give the model of the run"
                )

    def restore(self, entries: Entries, device: torch.device) -> list[str]:
        """Restores the entries in the modules. Returns notices about entries of the model that `entries` lacks."""
        values = {name: from_plain(value, entries.tensors, device) for name, value in entries.plain.items()}
        for name, module in self._extra.items():
            if name in values:
                module.set_extra_state(values.pop(name))
        if values:
            self._model.load_state_dict(values, strict=False)
        absent = [name for name in (*self._extra, *self._others) if name not in entries.plain]
        if not absent:
            return []
        return [f"{', '.join(absent)} of the model's state_dict() was not saved, and stays as the script has made it"]

    def _words(self, name: str) -> str:
        module = self._extra.get(name)
        return (
            f"entry {name} of state_dict()" if module is None else f"{type(module).__name__}.get_extra_state() ({name})"
        )


def _taken_back(model: nn.Module, names: set[str]) -> set[str]:
    """Returns the `names` that the model's `load_state_dict` accepts. Others are constant or computed from weights.

    Raises `ConfigError` if `load_state_dict` raises an error.
    """
    if not names:
        return set()
    entries = {name: value for name, value in saved_state(model).others.items() if name in names}
    try:
        result = model.load_state_dict(entries, strict=False)
    except Exception as error:  # any code of the model's
        raise ConfigError(
            f"state_dict() of {type(model).__name__} contains {min(names)}, which is neither a parameter nor a buffer, "
            f"and load_state_dict() does not take it alone ({error}); keep it by get_extra_state and set_extra_state, "
            "or register it as a buffer"
        ) from error
    return names - set(result.unexpected_keys)
