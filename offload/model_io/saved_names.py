"""Names and parts of weights in the files of a model whose class decides on them, as its own `save_pretrained` would.

The same decisions, in the same order: `state_dict()` with the hooks and methods of the model's classes, then
`_keys_to_ignore_on_save`, ties and conversions of transformers. For example, transformers has the experts of a layer as
one parameter, and saves each expert. Entries that are consecutive elements of a weight are streamed. Entries that the
class computes from weights need these weights in memory.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from offload.engine.saved_state import SavedPart, saved_state
from offload.engine.snapshot import all_persistent_buffers
from offload.errors import ConfigError
from offload.layout.fingerprint import about
from offload.layout.frozen import quantized_by_other_library
from offload.torch_internals import storage_key

_SAVED, _ADAPTER = "saved", "adapter"
"""Keys in the description of a model: the table of its files, and the adapter that alone trains."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedNames:
    """The tensors that a model's class writes into files."""

    parts: Mapping[str, SavedPart]
    """Parts of weights, by their names in the files."""
    ties: Mapping[str, str]
    """Names that are not written, each with the written name of the same values; for files without a config."""
    values: Mapping[str, torch.Tensor]
    """Further tensors, by the names in the files."""
    left_out: tuple[str, ...]
    """Entries that no file contains: they are no tensors, or their values are not known here."""
    computed: str | None
    """A clause that explains why the weights must be in memory; None if they need not be."""
    unconverted: bool = False
    """True if transformers computes the weights that it saves. The names are then those in memory, which load too."""


def about_saved(model: nn.Module, divided: bool, base_files: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns `offload.layout.fingerprint.about` of a model, with the tensors that its class writes into files.

    Args:
        divided: True if this process has a part of the model, whose weights are put together under their own names.
        base_files: The result of `base_files.base_files`, from before an engine took the model over.
    """
    # If only transformers' conversions change the names, the class and the config determine them.
    said = about(model)
    if not divided and (adapter := _adapter_of(model)) is not None:
        return {**said, _ADAPTER: {**adapter, "base_files": base_files}}
    if divided or saved_names(model, conversions=False, said=said) is None:
        return said
    names = saved_names(model, said=said)
    assert names is not None
    table = {
        "parts": {name: [part.source, part.start, list(part.shape)] for name, part in names.parts.items()},
        "ties": dict(names.ties),
        "left_out": [*names.values, *names.left_out],
        "computed": names.computed,
        "unconverted": names.unconverted,
    }
    return {**said, _SAVED: table}


def _adapter_of(model: Any) -> dict[str, Any] | None:
    """Returns the config and the tensors that peft saves of a model, if these are all that trains; None otherwise.

    The adapter names its base model: without it, only an export of all weights can be loaded.
    """
    kind = getattr(sys.modules.get("peft"), "PeftModel", None)
    if kind is None or not isinstance(model, kind) or len(model.peft_config) != 1:
        return None
    from peft import get_peft_model_state_dict

    name, config = next(iter(model.peft_config.items()))
    if config.is_prompt_learning or not config.base_model_name_or_path:
        return None
    named = dict(model.named_parameters(remove_duplicate=False))
    # peft selects by name; tensors on meta cost no memory.
    empty = {own: torch.empty(parameter.shape, device="meta") for own, parameter in named.items()}
    own_names = {id(value): own for own, value in empty.items()}
    # Not "auto", which asks the hub whether a vocabulary has grown.
    selected = get_peft_model_state_dict(model, dict(empty), name, save_embedding_layers=False)
    parts = {
        key: [own_names[id(value)], list(value.shape)] for key, value in selected.items() if id(value) in own_names
    }
    if len(parts) < len(selected) or {own for own, _ in parts.values()} != {
        own for own, parameter in named.items() if parameter.requires_grad
    }:
        return None
    content = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    return {"config": json.loads(json.dumps({**content, "inference_mode": True}, default=str)), "parts": parts}


class DescribedAdapter(NamedTuple):
    """An adapter of peft, as the description of its model has it."""

    config: Mapping[str, Any]
    """Content of `adapter_config.json`."""
    names: SavedNames
    base_files: Sequence[Mapping[str, Any]]
    """See `base_files.base_files`; empty in a description of an earlier version."""


def described_adapter(said: Mapping[str, Any]) -> DescribedAdapter | None:
    """Returns the adapter that alone trains; None of any other model."""
    adapter = said.get(_ADAPTER)
    if adapter is None:
        return None
    parts = {name: SavedPart(source, 0, tuple(shape)) for name, (source, shape) in adapter["parts"].items()}
    names = SavedNames(parts=parts, ties={}, values={}, left_out=(), computed=None)
    return DescribedAdapter(adapter["config"], names, adapter.get("base_files", ()))


def described_names(said: Mapping[str, Any]) -> SavedNames | None:
    """Returns the names of a model in its files; None if they are the names of the parameters."""
    table = said.get(_SAVED)
    if table is None:
        return _names_of_class(said)
    if table["computed"]:
        raise ConfigError(
            f"{table['computed']}, so the files of this model are written by its own code: resume the run and call "
            "engine.save_pretrained(folder)"
        )
    parts = {name: SavedPart(source, start, tuple(shape)) for name, (source, start, shape) in table["parts"].items()}
    return SavedNames(
        parts=parts,
        ties=table["ties"],
        values={},
        left_out=tuple(table["left_out"]),
        computed=table["computed"],
        unconverted=table["unconverted"],
    )


def saved_names(model: nn.Module, conversions: bool = True, said: Mapping[str, Any] | None = None) -> SavedNames | None:
    """Returns the tensors that a model's class writes into files; None if all weights have just their own names.

    Args:
        conversions: False if the result leaves transformers' conversions of names out.
        said: The result of `about`; None if this function calls it.
    """
    if quantized_by_other_library(model):
        return None  # no file has the values of such weights
    library = _is_of_transformers(model)
    ignored: set[str] = set(getattr(model, "_keys_to_ignore_on_save", None) or ()) if library else set()
    ties = _loader_ties(about(model) if said is None else said) if library else set()

    def not_ignored(entries: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in entries.items() if name not in ignored}

    own = state = saved_state(model, not_ignored)
    by_class = _own_way_to_save(model)
    plain = by_class is None and _is_plain(model, own.parts) and not own.others and own.computed is None
    unconverted = False
    if library and own.computed is None:
        # A run of `state_dict()` takes a few percent of an engine's start: the ties of parts need no second one.
        if own.others:
            state = untied = saved_state(model, lambda entries: _untied(not_ignored(entries), ties))
        else:
            state = untied = dataclasses.replace(own, parts=_untied_parts(own.parts, ties))
        if conversions and own.computed is None:
            state = saved_state(model, lambda entries: _converted(model, _untied(not_ignored(entries), ties)))
        if state.computed is not None:
            state, unconverted = untied, True
    if plain and not unconverted and own.parts.items() >= state.parts.items():
        return None
    values = {name: value for name, value in state.others.items() if isinstance(value, torch.Tensor)}
    parts, further = (state.parts, {}) if library else _first_names(state.parts)
    return SavedNames(
        parts=parts,
        ties=further,
        values={name: value.detach().to("cpu") for name, value in values.items()},
        left_out=tuple(name for name in state.others if name not in values),
        computed=by_class or own.computed or _overlap(parts),
        unconverted=unconverted,
    )


def _names_of_class(said: Mapping[str, Any]) -> SavedNames | None:
    """Returns the names of a model of transformers in its files, by its class and config alone.

    Returns:
        The names; None if they are the names of the parameters, or if the installed transformers does not know the
        class.
    """
    settings = said.get("config")
    if settings is None or importlib.util.find_spec("transformers") is None:
        return None
    import transformers

    kind = getattr(transformers, str(said["class"]), None)
    if kind is None or getattr(kind, "config_class", None) is None:
        return None
    with torch.device("meta"):
        return saved_names(kind(kind.config_class.from_dict(dict(settings))))


def _is_of_transformers(model: nn.Module) -> bool:
    return any(
        kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.")
        for kind in type(model).__mro__
    )


def _own_way_to_save(model: nn.Module) -> str | None:
    """Returns words on a `save_pretrained` that a class outside of transformers defines; None without one."""
    owner = next((kind for kind in type(model).__mro__ if "save_pretrained" in vars(kind)), None)
    if owner is None or owner.__module__.startswith("transformers.") or not _is_of_transformers(model):
        return None
    return f"{owner.__name__} has a save_pretrained of its own"


def _is_plain(model: nn.Module, parts: Mapping[str, SavedPart]) -> bool:
    """Returns True if each parameter and persistent buffer is whole under each of its names, without other entries."""
    named = {**dict(model.named_parameters(remove_duplicate=False)), **all_persistent_buffers(model)}
    first: dict[int, str] = {}
    whole = {name: SavedPart(first.setdefault(id(value), name), 0, tuple(value.shape)) for name, value in named.items()}
    return dict(parts) == whole


def _loader_ties(said: Mapping[str, Any]) -> set[str]:
    return set(said["loader_ties"]) if (said["config"] or {}).get("tie_word_embeddings", True) else set()


def _untied(entries: dict[str, Any], ties: Collection[str]) -> dict[str, Any]:
    """Leaves out the names that transformers ties when it loads, as its `save_pretrained` does."""
    places = {
        name: (storage_key(value), value.storage_offset(), value.shape)
        for name, value in entries.items()
        if isinstance(value, torch.Tensor)
    }
    counts = Counter(places.values())
    for name in sorted(places.keys() & ties):
        if counts[places[name]] > 1:
            counts[places[name]] -= 1
            del entries[name]
    return entries


def _untied_parts(parts: Mapping[str, SavedPart], ties: Collection[str]) -> dict[str, SavedPart]:
    """Leaves out the names that `_untied` leaves out. Equal parts are the same elements."""
    left, counts = dict(parts), Counter(parts.values())
    for name in sorted(left.keys() & ties):
        if counts[left[name]] > 1:
            counts[left.pop(name)] -= 1
    return left


def _converted(model: nn.Module, entries: dict[str, Any]) -> dict[str, Any]:
    """Returns entries in the form that transformers saves. Some weights have another form in memory."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before 5.0 it saves weights in their in-memory form
        return entries
    converted: dict[str, Any] = revert_weight_conversion(cast("Any", model), entries)
    return converted


def _first_names(parts: Mapping[str, SavedPart]) -> tuple[dict[str, SavedPart], dict[str, str]]:
    """Returns each part under its first name, and the further names, each with the first one."""
    first: dict[SavedPart, str] = {}
    ties = {name: first[part] for name, part in parts.items() if first.setdefault(part, name) != name}
    return {name: part for name, part in parts.items() if name not in ties}, ties


def _overlap(parts: Mapping[str, SavedPart]) -> str | None:
    """Returns words on entries that share elements without being the same part; None if there are none."""
    stops: dict[str, int] = {}
    for part in sorted(set(parts.values())):
        if part.start < stops.get(part.source, 0):
            return f"entries of its state_dict() share elements of {part.source}"
        stops[part.source] = part.start + torch.Size(part.shape).numel()
    return None
