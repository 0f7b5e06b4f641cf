"""The snapshot of training without weights and moments: counters, random generators, schedule, buffers.

The blob of a commit contains the snapshot. It is a safetensors file, without pickle.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.engine.saved_state import NO_ENTRIES, Entries
from offload.errors import ConfigError, StoreError, UsageError
from offload.fileio.plain_json import mark_floats, to_plain, unmark_floats
from offload.layout.flat_layout import UnitLayout
from offload.records import MOST, anything, expected, fields, flag, maybe, parse, rows, table, text, whole

DECOUPLED = "decoupled weight decay"
"""Name of the setting of each group that distinguishes AdamW from Adam."""
SIZES_OF_BATCH = ("micro-batch size", "accumulation")
"""Names of two settings whose product is the number of samples of one rank in a step."""
SAMPLES_OF_STEP = "samples of a step"
"""Name of the setting that is the number of samples of all ranks in a step."""
_FACTS = "facts"
_BUFFER = "buffer."
_ENTRY = "entry."
_ENTRIES = "entries"
_RNG = "rng."


def _check_value(value: Any, name: str) -> None:
    """Accepts a value of an optimizer's group: a number, a truth value, None, or a list of these."""
    for item in value if isinstance(value, list) else [value]:
        if not (item is None or isinstance(item, float) or (isinstance(item, int) and abs(item) <= MOST)):
            raise expected("a number, or a list of numbers", name, value)


_OF_A_GROUP = rows(table(_check_value))
_INTEGER = whole(-MOST)
_FACTS_OF_STEP = fields(
    {
        "global_steps": whole(),
        "skipped_steps": whole(),
        "micro_steps": whole(),
        "global_samples": whole(),
        "parameter_steps": rows(rows(whole())),
        "scheduler": anything,
        "loss_scale": maybe(
            fields({"scale": _check_value, "steps": whole(), "overflowed_at": _INTEGER, "patience": _INTEGER})
        ),
        "client_state": fields({}),
        "registered": rows(fields({"type": text(), "state": anything})),
        "data": maybe(fields({"epoch": whole(), "batch": whole(), "samples": whole(), "samples_of_a_batch": whole(1)})),
        "groups": _OF_A_GROUP,
        "configured": _OF_A_GROUP,
        "settings": fields({}, dict.fromkeys((*SIZES_OF_BATCH, SAMPLES_OF_STEP), whole(1))),
    },
    {"members": rows(rows(text())), "options": rows(table(rows(anything, 1, 2))), "turns": flag},
)
"""Checks the form of the facts. A matching checksum does not prove that the form is right."""
_ADVICE = (
    "each commit holds the schedule's state, which may be None, booleans, numbers, strings, and lists, tuples and "
    "dicts of them. Let its state_dict() return such values, or do not pass it to initialize: step the schedule after "
    "engine.step() and keep the values that a resumed run needs in engine.client_state"
)


class Snapshot(NamedTuple):
    """Content of a blob, taken at the entry of the first engine call after a step."""

    facts: Mapping[str, Any]
    """Facts as JSON.

    The keys are global_steps, skipped_steps, micro_steps, global_samples, parameter_steps (by unit), scheduler,
    loss_scale, registered, client_state, data (position of the loader), groups (their values), configured (the values
    of the groups at `initialize`), and settings. With several groups, the key members has the names of each group's
    parameters. If other entries of the groups have changed, the key options has the changes (see `GroupOptions`). If
    micro-batches can take turns, the key turns says whether the first step allowed it (see `PassSchedule`).
    """
    generators: Mapping[str, torch.Tensor]
    """State of each random generator, as bytes."""
    buffers: Mapping[str, torch.Tensor]
    """Persistent buffers of the model on the CPU, by name."""
    entries: Entries = NO_ENTRIES
    """The other entries of the model's `state_dict`."""

    def pack(self) -> dict[str, torch.Tensor]:
        """Returns the tensors of the blob: `facts`, `rng.*`, `buffer.*` and `entry.*`."""
        tensors = {_RNG + name: state for name, state in self.generators.items()}
        tensors |= {_BUFFER + name: value for name, value in self.buffers.items()}
        tensors |= {_ENTRY + number: value for number, value in self.entries.tensors.items()}
        # Written only if there are entries: blobs of other models lack this key.
        facts = {**self.facts, _ENTRIES: self.entries.plain} if self.entries.plain else self.facts
        # JSON has no NaN and no infinity, so such floats are marked.
        tensors[_FACTS] = as_bytes(json.dumps(mark_floats(facts), allow_nan=False).encode())
        return tensors

    @classmethod
    def unpack(cls, contents: Mapping[str, torch.Tensor]) -> Snapshot:
        """Returns the snapshot that `pack` has packed; raises `StoreError` for anything else."""
        tensors = dict(contents)
        try:
            if _FACTS not in tensors:
                raise ValueError("there are none")
            packed = parse(bytes(tensors.pop(_FACTS).numpy()))
            if not isinstance(packed, dict):
                raise ValueError("they are no object")
            entries = packed.pop(_ENTRIES, {})  # as they are: `from_plain` reads marked floats itself
            table(anything)(entries, _ENTRIES)
            facts = unmark_floats(packed)
            _FACTS_OF_STEP(facts, "")
            if len({len(facts[name]) for name in ("groups", "configured", "members") if name in facts}) > 1:
                raise ValueError("they have groups, configured and members of different numbers of groups")
        except (TypeError, ValueError, RecursionError) as error:
            raise StoreError(f"the facts on a step are damaged, or made up: {error}") from error
        generators = {name.removeprefix(_RNG): t for name, t in tensors.items() if name.startswith(_RNG)}
        buffers = {name.removeprefix(_BUFFER): t for name, t in tensors.items() if name.startswith(_BUFFER)}
        outside = {name.removeprefix(_ENTRY): t for name, t in tensors.items() if name.startswith(_ENTRY)}
        _check_generators(generators)
        return cls(facts, generators, buffers, Entries(entries, outside))

    def check_fits(self, layouts: Sequence[UnitLayout]) -> None:
        """Raises `StoreError` if the snapshot's counts of updates do not match the parameters of these units."""
        counts = [len(row) for row in self.facts["parameter_steps"]]
        if counts != (expected := [len(layout.segments) for layout in layouts]):
            raise StoreError(
                f"the facts on a step count the updates of {sum(counts)} parameters, expected {sum(expected)} in "
                "their units"
            )


class GeneratorStates(dict[str, Any]):
    """States of all random generators, by name, in their own forms. Reading them as bytes takes three times as long."""

    @classmethod
    def of(cls, device: torch.device) -> GeneratorStates:
        """Returns the states of the generators of torch, Python, numpy (if imported) and `device`."""
        states = cls(torch=torch.get_rng_state(), python=random.getstate())
        # numpy is optional: if nobody has imported it, nobody has drawn from its generator.
        if "numpy.random" in sys.modules:
            states["numpy"] = sys.modules["numpy.random"].get_state()
        if device.type not in ("cpu", "meta"):  # others have a generator of their own
            states[device.type] = torch.get_device_module(device).get_rng_state(device)
        return states

    def restore(self, device: torch.device) -> None:
        """Restores the states of the generators. `device` must be the device that `of` received."""
        torch.set_rng_state(self["torch"])
        random.setstate(self["python"])
        if "numpy" in self:
            sys.modules["numpy.random"].set_state(self["numpy"])
        if device.type in self:
            torch.get_device_module(device).set_rng_state(self[device.type], device)


def read_generators(device: torch.device) -> dict[str, torch.Tensor]:
    """Returns the states of the generators of torch, Python, numpy (if imported) and `device`, as bytes."""
    states = dict(GeneratorStates.of(device))
    states["python"] = as_bytes(json.dumps(states["python"]).encode())
    if "numpy" in states:
        name, keys, *rest = states["numpy"]
        states["numpy"] = as_bytes(json.dumps([name, keys.tolist(), *rest]).encode())
    return states


def write_generators(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Restores the states that `read_generators` has returned.

    The state of an accelerator is skipped if `device` is of another type.
    """
    torch.set_rng_state(states["torch"])
    version, internal, gauss = json.loads(bytes(states["python"].numpy()))
    random.setstate((version, tuple(internal), gauss))
    # Imported here, because numpy is optional and the run may not need it.
    if "numpy" in states:
        import numpy

        name, keys, *rest = json.loads(bytes(states["numpy"].numpy()))
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    if device.type not in ("cpu", "meta") and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)


def _check_generators(states: Mapping[str, torch.Tensor]) -> None:
    """Raises `StoreError` if a generator could not be restored. Changes no generator."""
    try:
        for name, state in states.items():
            # States from before the next batch have longer names.
            if name.endswith("torch"):
                torch.Generator(device="cpu").set_state(state)
            elif name.endswith("python"):
                version, internal, gauss = parse(bytes(state.numpy()))
                random.Random().setstate((version, tuple(internal), gauss))
            elif name.endswith("numpy"):
                import numpy

                kind, keys, *rest = parse(bytes(state.numpy()))
                numpy.random.RandomState().set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
        if states and not {"torch", "python"} <= states.keys():
            raise ValueError(f"expected those of torch and Python, got {', '.join(states)}")
    except (LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise StoreError(f"the states of random generators are damaged, or made up: {error}") from error


@contextlib.contextmanager
def keep_generators(device: torch.device) -> Iterator[None]:
    """Restores the generators of torch, Python, numpy and `device` at the end of the block, also after an error."""
    before = read_generators(device)
    try:
        yield
    finally:
        write_generators(before, device)


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the buffers that belong in a checkpoint, by name. A shared tensor is listed only under its first name."""
    buffers: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, buffer in all_persistent_buffers(model).items():
        if id(buffer) not in seen:
            seen.add(id(buffer))
            buffers[name] = buffer
    return buffers


def all_persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the buffers of the model's `state_dict`, by name. A shared tensor is listed under all its names."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        # torch keeps the names of buffers that are excluded from `state_dict` in this private set.
        if name not in module._non_persistent_buffers_set
    }


def write_buffers(buffers: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Writes values into the buffers of their names."""
    for name, value in values.items():
        write_buffer(buffers[name], value)


def write_buffer(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Writes `value` into a buffer of its shape, whose elements may share memory, as after `expand`.

    If the values of elements that share memory differ, the buffer gets memory of its own.
    """
    if buffer.is_contiguous() or not buffer.numel():
        buffer.detach().copy_(value)
        return
    # torch refuses to write elements that overlap, so each place in memory is written once.
    places = 1 + sum((size - 1) * stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
    if places >= buffer.numel():
        buffer.detach().copy_(value)
        return
    order = torch.arange(places, device="cpu").as_strided(buffer.shape, buffer.stride()).flatten()
    memory = buffer.detach().as_strided((places,), (1,))
    memory[order.to(buffer.device)] = value.to(buffer).flatten()
    if not torch.equal(buffer, value.to(buffer)):
        buffer.data = value.to(buffer).clone(memory_format=torch.contiguous_format)


def is_held(scheduler: Any) -> bool:
    """Returns True if a commit can contain the schedule's state, and restore it."""
    return all(callable(getattr(scheduler, name, None)) for name in ("state_dict", "load_state_dict"))


def scheduler_state(scheduler: Any) -> Any:
    """Returns the state of a learning-rate schedule as JSON (see `to_plain`); None if it has none.

    Raises `ConfigError` if the state contains objects that JSON cannot represent.
    """
    if scheduler is None or not is_held(scheduler):
        return None
    try:
        return to_plain(scheduler.state_dict(), f"the state of {type(scheduler).__name__}", _ADVICE)
    except UsageError as error:
        raise ConfigError(str(error)) from None


def as_bytes(data: bytes) -> torch.Tensor:
    """Returns a copy of `data`, (len(data),) uint8."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
