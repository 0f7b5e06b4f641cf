"""The arguments of `offload plan`, and their conversion into a plan."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offload.config import load_config, read_json, resolve_batch
from offload.errors import ConfigError
from offload.hardware.probe import kept
from offload.hardware.probe.measure import Tell
from offload.hardware.smart import rated_bytes_of
from offload.layout.memory_plan import Division, division_of
from offload.layout.modes import DTYPES, MASTERS, MOMENT_DTYPES
from offload.layout.pass_order import SCHEDULES, makes_early_updates
from offload.planner import recommend as choice
from offload.planner.activations.load import Load
from offload.planner.gpus import find_gpu
from offload.planner.hardware import Hardware, described, drive_rates, parse_drive, parse_memory, parse_rate, probed
from offload.planner.measure_model import measured
from offload.planner.memory import settings
from offload.planner.model_shape import Adapters, Shape, from_adapted, from_count, from_name
from offload.planner.reach import Longest, search
from offload.planner.recommend import Planned
from offload.precision import choose
from offload.sizes import parse_size
from offload.swapper.memory.limits import free_host_memory

_DURABILITIES = ("auto", "step", "none")
_ACTIVATIONS = ("device", "cpu", "nvme", "auto")


class Model(NamedTuple):
    """A preset or folder, or a number of parameters and layers."""

    name: str | None
    parameters: int | None = None
    layers: int | None = None
    adapters: Adapters | None = None
    chunks: bool = True
    """True if the loss of the model can be computed for chunks of tokens."""


class Described(NamedTuple):
    """Options that describe the machine. None or empty leaves a value to the probed machine."""

    gpu: str | None = None
    ram: str | None = None
    drives: tuple[str, ...] = ()
    memory: str | None = None
    link: str | None = None
    paths: tuple[str, ...] = ()


class Step(NamedTuple):
    """Options that describe a step. None leaves a value to the config or to its default."""

    batch: int | None = None
    sequence: int = 1024
    accumulation: int | None = None
    recompute: bool | None = None
    dtype: str | None = None
    durability: str | None = None
    activations: str | None = None
    """Tier of the inputs of repeated blocks."""
    chunked_loss: bool | None = None
    """None for a loss in chunks where the model allows it, as in `offload train`."""
    tile_mlp: str | None = None
    """ "auto", "off", or a number of tiles."""
    moments: str | None = None
    """Form of the optimizer's moments; None for fp32."""
    master: str | None = None
    """Form of the master of a bf16 weight; None for fp32."""
    schedule: str | None = None
    """Order of micro-batches and blocks; None for "auto"."""
    speculate: bool | None = None
    """False for no updates under the backward."""


def planned(
    model: Model,
    machine: Described,
    step: Step,
    file: Path | None = None,
    measure: bool = False,
    tell: Tell = lambda *_: None,
) -> Planned:
    """Returns the plan that the options ask for.

    Args:
        model: the model.
        machine: the described machine, or additions to the probed one.
        step: batch, sequence and the like.
        file: a config file; None lets the planner choose tiers and budgets.
        measure: True to scale the rates of compute by running the model.
        tell: receives the progress of that run.

    Raises:
        ConfigError: options or config are wrong.
        BudgetError: the run does not fit.
    """
    _check(step, file)
    if measure and (model.name is None or machine.gpu is not None or model.adapters is not None):
        raise ConfigError("--measure runs the model on this machine: it needs --model, and neither --gpu nor --lora")
    content, dtype, units, on, of = _resolved(model, machine, step, file)
    load = _load(step, on.on_cpu, _in_chunks(model, step), content)
    on = measured(on, of, load, DTYPES[dtype], units, tell) if measure else on
    if content is not None:
        return choice.plan(of, on, load, content)
    options = _options(machine, on, step, dtype) | _frozen(model)
    return choice.choose(of, on, load, step.recompute, activations=step.activations, **options)


def longest(model: Model, machine: Described, step: Step, file: Path | None = None) -> list[Longest]:
    """Returns the longest sequence for each way to keep activations; arguments as of `planned`.

    Raises:
        ConfigError: options or config are wrong.
        BudgetError: the states alone do not fit.
    """
    _check(step, file)
    content, dtype, _, on, of = _resolved(model, machine, step, file)
    # None compares both losses, and takes the one that reaches further.
    chunked = None if step.chunked_loss is None and model.chunks else _in_chunks(model, step)
    load = _load(step, on.on_cpu, bool(chunked), content)
    if content is not None:
        return search(of, on, load, [content], chunked)
    options = _options(machine, on, step, dtype) | _frozen(model)
    contents = [
        settings(weights, states, batch=load.batch, accumulation=load.accumulation, **options)
        for weights, states in choice.PLACEMENTS
        if on.drives or "nvme" not in (weights, states)
    ]
    return search(of, on, load, contents, chunked)


def _in_chunks(model: Model, step: Step) -> bool:
    """Returns True if the loss is computed in chunks: as the user wants, else where the model allows it.

    Raises:
        ConfigError: the user wants chunks, and the model does not allow them.
    """
    if step.chunked_loss and not model.chunks:
        raise ConfigError(
            f"--chunked-loss: the loss of {model.name} cannot be computed in chunks, since the model scales or caps "
            f"its logits, or its head is no linear layer; leave the option out"
        )
    return model.chunks if step.chunked_loss is None else step.chunked_loss


class _Resolved(NamedTuple):
    """What the options say, or else the config file, of model and machine."""

    content: dict[str, Any] | None
    """The file's content as it is: the plan's config must contain the user's keys unchanged."""
    dtype: str
    units: Division
    on: Hardware
    of: Shape


def _resolved(model: Model, machine: Described, step: Step, file: Path | None) -> _Resolved:
    content = None if file is None else read_json(file)
    config = None if content is None else load_config(content)
    dtype = step.dtype or (config.dtype if config is not None else _dtype(machine, step))
    on = hardware(machine, dtype, config is not None and config.torch_autocast.enabled)
    units = division_of(config)
    return _Resolved(content, dtype, units, on, shape(model, step.sequence, DTYPES[dtype], units))


def _load(step: Step, on_cpu: bool, chunked_loss: bool, content: Mapping[str, Any] | None = None) -> Load:
    """Returns the work of a step; a config has the numbers that no option gives, and is planned for one rank."""
    load = Load(
        step.batch or 1,
        step.accumulation or 1,
        chunked_loss=chunked_loss,
        schedule=step.schedule or "auto",
        speculate=makes_early_updates("auto", on_cpu) if step.speculate is None else step.speculate,
    )
    if content is None:
        return load
    config = load_config(content)
    sizes = resolve_batch(config, 1)
    return load._replace(
        batch=step.batch or sizes.micro,
        accumulation=step.accumulation or sizes.accumulation,
        recompute=bool(step.recompute),
        schedule=step.schedule or config.offload.schedule,
        speculate=load.speculate
        if step.speculate is not None
        else makes_early_updates(config.offload.speculate, on_cpu),
    )


def _options(machine: Described, on: Hardware, step: Step, dtype: str) -> dict[str, Any]:
    """Returns the arguments of `memory.settings` that the options give."""
    options: dict[str, Any] = {"dtype": dtype, "durability": step.durability or "auto"}
    # Drives of the probed machine have real folders, which the config can name.
    if machine.gpu is None and on.drives and not machine.drives:
        options["paths"] = [drive.name for drive in on.drives]
    if step.tile_mlp not in (None, "off"):
        options["tile_mlp"] = step.tile_mlp if step.tile_mlp == "auto" else int(step.tile_mlp)
    if step.moments is not None:
        options["moments"] = step.moments
    if step.master is not None:
        options["master"] = step.master
    return options


def _frozen(model: Model) -> dict[str, Any]:
    return {} if model.adapters is None or model.adapters.frozen is None else {"frozen": model.adapters.frozen}


def _dtype(machine: Described, step: Step) -> str:
    """Returns the default dtype, the choice of `offload train`: fp32 on a GPU without units for bf16, mostly bf16."""
    if step.master not in (None, "fp32"):
        return "bf16"
    if machine.gpu is not None:
        return "bf16" if find_gpu(machine.gpu)[0].has_bf16 else "fp32"
    found = kept()
    return "bf16" if found is None else choose(torch.device("cuda" if found.machine["gpu"] else "cpu")).dtype


def _check(step: Step, file: Path | None) -> None:
    """Raises `ConfigError` for values out of range, and for options that a config file already sets."""
    for name, value in (("batch-size", step.batch), ("seq-len", step.sequence), ("accumulation", step.accumulation)):
        if value is not None and value < 1:
            raise ConfigError(f"expected {name} of at least 1, got {value}")
    # Each message is written out: docs/troubleshooting.md lists it by its words, by which users find it.
    if step.dtype is not None and step.dtype not in DTYPES:
        raise ConfigError(f"there is no dtype {step.dtype!r}: expected {', '.join(DTYPES)}")
    if step.durability is not None and step.durability not in _DURABILITIES:
        raise ConfigError(f"there is no durability {step.durability!r}: expected {', '.join(_DURABILITIES)}")
    if step.moments is not None and step.moments not in MOMENT_DTYPES:
        raise ConfigError(f"expected --moments of {', '.join(MOMENT_DTYPES)}, got {step.moments!r}")
    if step.master is not None and step.master not in MASTERS:
        raise ConfigError(f"expected --master of {', '.join(MASTERS)}, got {step.master!r}")
    if step.activations is not None and step.activations not in _ACTIVATIONS:
        raise ConfigError(f"expected --activations of {', '.join(_ACTIVATIONS)}, got {step.activations!r}")
    if step.schedule is not None and step.schedule not in SCHEDULES:
        raise ConfigError(f"expected --schedule of {', '.join(SCHEDULES)}, got {step.schedule!r}")
    tile = step.tile_mlp
    if tile not in (None, "auto", "off") and not re.fullmatch("[1-9][0-9]{0,9}", tile or ""):
        raise ConfigError(f"expected --tile-mlp of auto, off or a number of tiles, got {tile!r}")
    if step.activations is not None and step.recompute is False:
        raise ConfigError(
            "--activations computes blocks again in the backward, and --no-gradient-checkpointing forbids that; leave "
            "one of them out"
        )
    if file is not None and (step.dtype or step.durability or step.activations or tile or step.moments or step.master):
        raise ConfigError(
            "--dtype, --moments, --master, --durability, --activations and --tile-mlp cannot be given beside --config; "
            "set them in the config"
        )


def shape(model: Model, sequence: int, dtype: torch.dtype, units: Division | Sequence[str] = ()) -> Shape:
    """Returns the model in numbers.

    Args:
        model: a name, or parameters and layers; not both.
        sequence: tokens of a sequence.
        dtype: dtype of the weights.
        units: the division into units.

    Raises:
        ConfigError: both or none are given, or the model cannot be built.
    """
    if model.name is not None:
        if model.parameters is not None or model.layers is not None:
            raise ConfigError("give --model, or --parameters and --layers, not both")
        if model.adapters is not None:
            return from_adapted(model.name, model.adapters, sequence, dtype, units)
        return from_name(model.name, sequence, dtype, units)
    if model.parameters is not None and model.layers is None:
        raise ConfigError("--parameters needs --layers, the number of the model's blocks: --parameters 8B --layers 32")
    if model.parameters is None or model.layers is None:
        raise ConfigError("expected a model: --model llama-7b, or --parameters 13B --layers 40")
    return from_count(model.parameters, model.layers, sequence, dtype.itemsize)


def hardware(machine: Described, dtype: str = "bf16", autocast: bool = False) -> Hardware:
    """Returns the described machine, or the probed one with the given changes.

    Args:
        machine: the options.
        dtype: bf16, fp16 or fp32.
        autocast: True if fp32 weights are multiplied in bf16.

    Raises:
        ConfigError: an option does not fit the others, or this machine was not probed.
    """
    ram = None if machine.ram is None else parse_memory(machine.ram)
    drives = tuple(map(parse_drive, machine.drives))
    memory = None if machine.memory is None else parse_rate(machine.memory)
    link = None if machine.link is None else parse_rate(machine.link)
    if machine.gpu is not None:
        if machine.paths:
            raise ConfigError("--nvme-path names a drive of the probed machine; with --gpu describe drives by --drive")
        return described(machine.gpu, ram, drives, memory, link, dtype, autocast)
    found = kept()
    if found is None:
        raise ConfigError(
            "this machine was not probed: run `offload probe /mnt/nvme` first, or describe one: "
            "--gpu 24GB --ram 64GB --drive 7GB/s,4GB/s"
        )
    if memory is not None or link is not None:
        raise ConfigError("--memory-bandwidth and --pcie belong to a described machine; give --gpu too")
    on = probed(found, free_host_memory() if ram is None else ram, machine.paths, dtype, autocast)
    if not drives:
        return on
    kept_rates = tuple(rate for rate in on.rates if rate not in drive_rates(on.drives, "measured", "offload probe"))
    return replace(on, drives=drives, rates=(*kept_rates, *drive_rates(drives, "given", "--drive")))


# -- drives -------------------------------------------------------------------------------------------


def endurance(on: Hardware, given: str | None) -> int | None:
    """Returns the rated bytes written (TBW) of all drives together, or None if unknown.

    Args:
        on: the machine with its drives.
        given: the rating of each drive as text; None to derive the ratings of all drives from SMART.
    """
    if given is not None:
        return parse_tbw(given) * max(len(on.drives), 1)
    rated = [rated_bytes_of(drive.name) for drive in on.drives if os.path.isdir(drive.name)]
    known = [each for each in rated if each is not None]
    return sum(known) if known and len(known) == len(on.drives) else None


def parse_tbw(text: str) -> int:
    """Returns the bytes of a text such as "1200TB". A number alone means terabytes, as "drive_tbw" does in a config."""
    plain = re.fullmatch(r"\s*[0-9]+(\.[0-9]+)?\s*", text)
    nbytes = parse_size(f"{text.strip()}TB" if plain else text)
    if not nbytes:
        raise ConfigError(f"expected the rated endurance of a drive, such as 1200TB, got {text!r}")
    return nbytes
