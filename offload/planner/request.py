"""The arguments of `offload plan`, and their conversion into a plan."""

from __future__ import annotations

import copy
import json
import os
import re
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from offload.aio import aligned_empty
from offload.config import load_config, read_json, resolve_batch
from offload.errors import ConfigError
from offload.fileio import check_place
from offload.hardware.gpus import find_gpu
from offload.hardware.info import rated_bytes_of
from offload.hardware.probe import Tell, kept
from offload.layout.memory_plan import Division, division_of
from offload.layout.modes import DTYPES, MASTERS, MOMENT_DTYPES, RULE_LAYOUTS
from offload.layout.pass_order import LAYER_MAJOR, SCHEDULES, makes_early_updates
from offload.planner import recommend
from offload.planner.activations import Load, need, with_host_memory
from offload.planner.hardware import (
    Hardware,
    Measured,
    described,
    drive_rates,
    parse_drive,
    probed,
)
from offload.planner.memory import settings
from offload.planner.model_shape import Shape, config_of, drawn, from_adapted, from_count, from_name, model_of
from offload.planner.options import PlanOptions
from offload.planner.ranks import Cluster, RanksPlan, plan_stages
from offload.planner.reach import Longest, search
from offload.planner.recommend import Planned
from offload.planner.step_time import backward, forward
from offload.precision import choose
from offload.presets import error_message
from offload.sizes import (
    format_size,
    parse_budget,
    parse_count,
    parse_memory,
    parse_rate,
    parse_size,
    parse_tbw,
)
from offload.swapper.memory.limits import free_host_memory

# -- measure model -------------------------------------------------------------------------------------
#
# Rates of compute from the model itself: a timed forward and backward replaces the probe's rates.
#
#     the model, or as many of its layers as fit ─► seconds of a micro-batch ─► rates that predict these seconds
#
# A probe measures products and sums of one size each. The work between a model's products differs up to twofold from
# one model to another.


_SHARE = 0.5
"""Fraction of free memory for the layers that are run and all tensors that they allocate."""
_PASS_SECONDS = 20.0
"""Most seconds of one forward and backward, as predicted by the probe's rates. If all layers take longer, fewer run."""
_ENOUGH_SECONDS = 10.0
"""Measured seconds after which no further pass starts, once the least number of passes is done."""
_PASSES = range(3, 16)
"""Numbers of passes to count: at least the first element, at most the last."""


def measured(
    hardware: Hardware,
    shape: Shape,
    load: Load,
    dtype: torch.dtype,
    units: Division,
    tell: Tell = lambda *_: None,
) -> Hardware:
    """Returns `hardware` with rates of compute scaled to the timed model. Takes up to a few minutes."""
    layers = int(config_of(shape.name).get_text_config().num_hidden_layers)
    part, taken = _that_fits(hardware, shape, layers, load, dtype, units)
    config = config_of(shape.name) if part is shape else config_of(shape.name, taken)
    tell(f"{taken} of {layers} layers of {shape.name}: building them", 0.0)
    try:
        device = torch.device("cpu" if hardware.on_cpu else "cuda")
        seconds = _seconds(config, load.batch, shape.sequence, dtype, device, tell)
    except Exception as error:  # a model's own code may raise any error
        raise ConfigError(
            f"cannot run {shape.name} to measure it ({type(error).__name__}: {error_message(error)}); leave out "
            f"--measure"
        ) from error
    predicted = compute_seconds(part, hardware, load.batch)
    # One factor for all rates of compute: a single time cannot tell products from other work.
    slower = seconds / predicted
    return replace(
        hardware,
        matmul=hardware.matmul / slower,
        weights=hardware.weights / slower,
        fresh=hardware.fresh / slower,
        elementwise=hardware.elementwise / slower,
        measured=Measured(taken, layers, seconds, predicted),
    )


def compute_seconds(shape: Shape, hardware: Hardware, batch: int) -> float:
    """Returns the predicted seconds of a forward and backward of the model alone, without any copy of gradients."""
    alone = replace(hardware, handed_seconds=0.0)
    first = forward(drawn(shape, batch * shape.sequence, 0), alone, Load(batch))
    second = backward(first, [0] * len(shape.layouts), alone, recompute=False)
    return sum(use.seconds for use in first) + sum(use.seconds for use in second)


def _that_fits(
    hardware: Hardware, shape: Shape, layers: int, load: Load, dtype: torch.dtype, units: Division
) -> tuple[Shape, int]:
    """Returns the shape to run and its number of layers: `shape` itself if all of it fits, else one of fewer layers."""
    # This machine's device may have less free memory than that of the planned machine.
    if hardware.on_cpu:
        free = min(hardware.ram, free_host_memory())
    else:
        free = min(hardware.gpu_memory, torch.cuda.mem_get_info()[0])
    most = (int(_SHARE * free), _PASS_SECONDS)

    def takes(part: Shape) -> tuple[float, float]:
        return _nbytes(part, load.batch, dtype), compute_seconds(part, hardware, load.batch)

    whole = takes(shape)
    if whole[0] <= most[0] and (whole[1] <= most[1] or layers == 1):
        return shape, layers
    one = _of(shape, 1, dtype, units)
    least = takes(one)
    # A config whose number of layers has no effect cannot be reduced either.
    if one.parameters >= shape.parameters or least[0] > most[0]:
        raise ConfigError(
            f"the smallest part of {shape.name} that can run takes {format_size(int(least[0]))}, and "
            f"{format_size(most[0])} may be used: give a smaller --batch-size or --seq-len, or leave out --measure"
        )
    # Bytes and seconds each limit the layers; each is interpolated linearly between one layer and all layers.
    taken = min(_layers_within(layers, *sizes) for sizes in zip(least, whole, most, strict=True))
    return (shape, layers) if taken == layers else (_of(shape, taken, dtype, units), taken)


def _of(shape: Shape, layers: int, dtype: torch.dtype, units: Division) -> Shape:
    try:
        return from_name(shape.name, shape.sequence, dtype, units, layers)
    except ConfigError as error:
        raise ConfigError(
            f"{shape.name} is too large to run, and cannot be cut to fewer layers: {error}; leave out --measure"
        ) from error


def _layers_within(layers: int, one: float, all_of_them: float, room: float) -> int:
    """Returns the number of equal layers that need at most `room`, at least one.

    The needs are in bytes or in seconds.
    """
    # `layers - 1` layers make the difference between the two needs: both include embedding and head.
    layer_nbytes = (all_of_them - one) / max(layers - 1, 1)
    if all_of_them <= room or layer_nbytes <= 0:
        return layers
    return max(1, min(layers, 1 + int((room - one) / layer_nbytes)))


def _nbytes(shape: Shape, batch: int, dtype: torch.dtype) -> int:
    """Returns the bytes of weights, of a micro-batch's activations, and of gradients until they are freed."""
    largest = max(layout.used_numel for layout in shape.layouts)
    return (shape.parameters + 2 * largest) * dtype.itemsize + need(shape, Load(batch)).device


def _seconds(
    config: Any, batch: int, sequence: int, dtype: torch.dtype, device: torch.device, tell: Tell = lambda *_: None
) -> float:
    """Returns the mean seconds of several forwards and backwards, after a first one that is not counted.

    Each gradient is freed as soon as autograd has accumulated the gradient, as paging would move the gradient away.
    """

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    # The caller may be a test or a notebook: its random state must stay as it is.
    with torch.random.fork_rng():
        with device:
            model = model_of(config, dtype)
        ids = torch.randint(0, config.get_text_config().vocab_size, (batch, sequence), device=device)
        model.train()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(drop)
            if device.type == "cpu" and parameter.numel():
                # On 2 MiB pages, as in training: large products run faster on such pages.
                memory = torch.frombuffer(aligned_empty(parameter.nbytes), dtype=parameter.dtype)
                parameter.data = memory.view(parameter.shape).copy_(parameter.data)
        taken: list[float] = []
        while len(taken) <= _PASSES[0] or (len(taken) <= _PASSES[-1] and sum(taken) < _ENOUGH_SECONDS):
            done = max(sum(taken) / _ENOUGH_SECONDS, len(taken) / (_PASSES[-1] + 1))
            tell(f"forward and backward, pass {len(taken) + 1}", min(len(taken) / (_PASSES[0] + 1), done))
            start = time.perf_counter()
            model(input_ids=ids, labels=ids).loss.backward()
            if device.type == "cuda":
                # Kernels run asynchronously, and their end is measured.
                torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - start)
    # The first pass allocates memory and chooses kernels.
    return statistics.fmean(taken[1:])


# -- request -------------------------------------------------------------------------------------------


_DURABILITIES = ("auto", "step", "none")
_ACTIVATIONS = ("device", "cpu", "nvme", "auto")


def planned(request: PlanOptions, tell: Tell = lambda *_: None) -> Planned:
    """Returns the plan of a request; --measure scales the rates of compute by a run of the model."""
    _check(request)
    if request.measure and (request.model is None or request.gpu is not None or request.adapters is not None):
        raise ConfigError("--measure runs the model on this machine: it needs --model, and neither --gpu nor --lora")
    content, dtype, units, on, of = _resolved(request)
    elementwise = RULE_LAYOUTS[units.rule].elementwise
    of = of.in_groups() if elementwise else of  # a rule for matrices steps each expert
    load = _load(request, on.on_cpu, _in_chunks(request), content)
    on = measured(on, of, load, DTYPES[dtype], units, tell) if request.measure else on
    if content is not None:
        return recommend.plan(of, on, load, content)
    options = {"activations": request.activations, **_options(request, on, dtype)}
    tried = recommend.loads(load, of.sequence, request.batch_size, request.accumulation)
    return recommend.choose_load(of, on, tried, request.recompute, **options)


def ranks(request: PlanOptions, cluster: Cluster) -> tuple[Shape, Hardware, dict[int, RanksPlan]]:
    """Returns the model, one machine with one of its GPUs, and the plan of each ZeRO stage that fits."""
    _check(request)
    cluster.check()
    unplanned = {
        "--deepspeed": request.config,
        "--lora": request.adapters,
        "--activations": request.activations,
        "--tile-mlp": request.tile_mlp,
        "--schedule layer_major": request.schedule == LAYER_MAJOR or None,
    }
    for option, value in unplanned.items():
        if value is not None:
            raise ConfigError(f"a plan of several GPUs is made without {option}: leave it out beside --gpus")
    _, dtype, _, on, of = _resolved(request)
    if on.on_cpu or on.unified:
        raise ConfigError(f"--gpus counts GPUs with memory of their own, and {on.name} has none: give --gpu")
    load = _load(request, on.on_cpu, _in_chunks(request), None)
    plans = plan_stages(
        *(of, on, load, cluster, request.batch_size, request.accumulation, request.recompute),
        dtype=dtype,
        moments=request.moments,
        master=request.master,
        durability=_durability(request),
    )
    return of, on, plans


def longest(request: PlanOptions) -> list[Longest]:
    """Returns the longest sequence for each way to keep activations."""
    _check(request)
    content, dtype, _, on, of = _resolved(request)
    # With None, `reach` tries both losses and takes the one that allows the longer sequence.
    chunked = None if request.chunked_loss is None and request.chunks else _in_chunks(request)
    load = _load(request, on.on_cpu, bool(chunked), content)
    if content is not None:
        return search(of, on, load, [content], chunked)
    options = _options(request, on, dtype)
    contents = [
        settings(weights, states, batch=load.batch, accumulation=load.accumulation, **options)
        for weights, states in recommend.PLACEMENTS
        if on.drives or "nvme" not in (weights, states)
    ]
    return search(of, on, load, contents, chunked)


def _in_chunks(request: PlanOptions) -> bool:
    """Returns True if the loss is computed in chunks: as the user chooses, else if the model allows it."""
    if request.chunked_loss and not request.chunks:
        raise ConfigError(
            f"--chunked-loss: the loss of {request.model} cannot be computed in chunks, since the model scales its "
            "logits or reads them for another term, or its head is no linear layer; leave the option out"
        )
    return request.chunks if request.chunked_loss is None else request.chunked_loss


def _resolved(request: PlanOptions) -> tuple[dict[str, Any] | None, str, Division, Hardware, Shape]:
    """Returns the file's content with the user's keys unchanged, dtype, units, machine, and model."""
    content = None if request.config is None else read_json(request.config)
    config = None if content is None else load_config(content)
    dtype = request.dtype or (config.dtype if config is not None else _dtype(request))
    on = hardware(request, dtype, config is not None and config.torch_autocast.enabled)
    units = division_of(config)
    return content, dtype, units, on, _shape(request, DTYPES[dtype], units)


def _load(request: PlanOptions, on_cpu: bool, chunked_loss: bool, content: Mapping[str, Any] | None) -> Load:
    """Returns the work of a step on one rank. The config supplies the numbers that no option gives."""
    config = load_config(content or {})
    sizes = resolve_batch(config, 1)
    early = makes_early_updates(config.offload.speculate, on_cpu) if request.speculate is None else request.speculate
    return Load(
        request.batch_size or sizes.micro,
        request.accumulation or sizes.accumulation,
        # Without a config the planner itself tries recomputation.
        recompute=content is not None and bool(request.recompute),
        chunked_loss=chunked_loss,
        schedule=request.schedule or config.offload.schedule,
        speculate=early,
    )


def _durability(request: PlanOptions) -> str | dict[str, int]:
    word = request.durability or "auto"
    return {"every": int(word)} if word.isdecimal() else word


def _options(request: PlanOptions, on: Hardware, dtype: str) -> dict[str, Any]:
    tile = request.tile_mlp
    options: dict[str, Any] = {
        "dtype": dtype,
        "durability": _durability(request),
        "drive_budget": request.drive_budget,
        "tile_mlp": None if tile in (None, "off") else tile if tile == "auto" else int(tile),
        "moments": request.moments,
        "master": request.master,
        "frozen": None if request.adapters is None else request.adapters.frozen,
    }
    # Drives of the probed machine have real folders, which the config can name.
    if request.gpu is None and on.drives and not request.drive:
        options["paths"] = [drive.name for drive in on.drives]
    return options


def _dtype(request: PlanOptions) -> str:
    """Returns the default dtype, the choice of `offload train`: fp32 on a GPU without units for bf16, mostly bf16."""
    if request.master not in (None, "fp32"):
        return "bf16"
    if request.gpu is not None:
        return "bf16" if find_gpu(request.gpu)[0].has_bf16 else "fp32"
    rates = kept()
    return "bf16" if rates is None else choose(torch.device("cuda" if rates.machine["gpu"] else "cpu")).dtype


def _check(request: PlanOptions) -> None:
    """Raises `ConfigError` for values out of range, and for options that a config file already sets."""
    for name in ("batch_size", "seq_len", "accumulation", "steps"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise ConfigError(f"expected --{name.replace('_', '-')} of at least 1, got {value}")
    # Each message is written out, since docs/reference/errors.md lists it and users search for its words.
    if request.dtype is not None and request.dtype not in DTYPES:
        raise ConfigError(f"there is no dtype {request.dtype!r}: expected {', '.join(DTYPES)}")
    every = str(request.durability)
    if request.durability not in (None, *_DURABILITIES) and not (every.isdecimal() and int(every)):
        expected = ", ".join(_DURABILITIES)
        raise ConfigError(
            f"there is no durability {request.durability!r}: expected {expected}, or a number of steps from 1 on"
        )
    if request.moments is not None and request.moments not in MOMENT_DTYPES:
        raise ConfigError(f"expected --moments of {', '.join(MOMENT_DTYPES)}, got {request.moments!r}")
    if request.master is not None and request.master not in MASTERS:
        raise ConfigError(f"expected --master of {', '.join(MASTERS)}, got {request.master!r}")
    if request.activations is not None and request.activations not in _ACTIVATIONS:
        raise ConfigError(f"expected --activations of {', '.join(_ACTIVATIONS)}, got {request.activations!r}")
    if request.schedule is not None and request.schedule not in SCHEDULES:
        raise ConfigError(f"expected --schedule of {', '.join(SCHEDULES)}, got {request.schedule!r}")
    tile = request.tile_mlp
    if tile not in (None, "auto", "off") and not re.fullmatch("[1-9][0-9]{0,9}", tile or ""):
        raise ConfigError(f"expected --tile-mlp of auto, off or a number of tiles, got {tile!r}")
    if request.activations is not None and request.recompute is False:
        raise ConfigError(
            "--activations computes blocks again in the backward, and --no-gradient-checkpointing forbids that; leave "
            "one of them out"
        )
    budget = request.drive_budget
    if budget is not None:
        parse_budget(budget)
    of_config = (request.dtype, request.durability, budget, request.activations, tile, request.moments, request.master)
    if request.config is not None and any(of_config):
        raise ConfigError(
            "--dtype, --moments, --master, --durability, --drive-budget, --activations and --tile-mlp cannot be given "
            "beside --config; set them in the config"
        )


def _shape(request: PlanOptions, dtype: torch.dtype, units: Division) -> Shape:
    if request.model is not None:
        if request.parameters is not None or request.layers is not None:
            raise ConfigError("give --model, or --parameters and --layers, not both")
        if request.adapters is not None:
            return from_adapted(request.model, request.adapters, request.seq_len, dtype, units)
        return from_name(request.model, request.seq_len, dtype, units)
    if request.parameters is not None and request.layers is None:
        raise ConfigError("--parameters needs --layers, the number of the model's blocks: --parameters 8B --layers 32")
    if request.parameters is None or request.layers is None:
        raise ConfigError("expected a model: --model llama-7b, or --parameters 13B --layers 40")
    return from_count(parse_count(request.parameters), request.layers, request.seq_len, dtype.itemsize)


def hardware(request: PlanOptions, dtype: str = "bf16", autocast: bool = False) -> Hardware:
    """Returns the described machine, or the probed one with the given changes."""
    ram = None if request.ram is None else parse_memory(request.ram)
    drives = tuple(map(parse_drive, request.drive or ()))
    memory = None if request.memory_bandwidth is None else parse_rate(request.memory_bandwidth)
    link = None if request.pcie is None else parse_rate(request.pcie)
    if request.gpu is not None:
        if request.nvme_path:
            raise ConfigError("--nvme-path names a drive of the probed machine; with --gpu describe drives by --drive")
        return described(request.gpu, ram, drives, memory, link, dtype, autocast)
    rates = kept()
    if rates is None:
        raise ConfigError(
            "this machine was not probed: run `offload probe /mnt/nvme` first, or describe one: "
            "--gpu 24GB --ram 64GB --drive 7GB/s,4GB/s"
        )
    if memory is not None or link is not None:
        raise ConfigError("--memory-bandwidth and --pcie belong to a described machine; give --gpu too")
    on = probed(rates, free_host_memory() if ram is None else ram, request.nvme_path or (), dtype, autocast)
    if not drives:
        return on
    kept_rates = tuple(rate for rate in on.rates if rate not in drive_rates(on.drives, "measured", "offload probe"))
    return replace(on, drives=drives, rates=(*kept_rates, *drive_rates(drives, "given", "--drive")))


# -- drives -------------------------------------------------------------------------------------------


def endurance(on: Hardware, given: str | None) -> int | None:
    """Returns the rated bytes written (TBW) of all drives together, or None if unknown.

    `given` is the rating of each drive as text; without it the ratings are read from SMART.
    """
    if given is not None:
        return parse_tbw(given) * max(len(on.drives), 1)
    rated = [rated_bytes_of(drive.name) for drive in on.drives if os.path.isdir(drive.name)]
    known = [rate for rate in rated if rate is not None]
    return sum(known) if known and len(known) == len(on.drives) else None


# -- config file ---------------------------------------------------------------------------------------
#
# The config file of a plan: `offload plan --write`.


def check_target(path: Path | None) -> None:
    """Raises `ConfigError` if `path` exists already, or cannot be made."""
    if path is None:
        return
    if path.exists():
        raise ConfigError(f"--write {path} exists already; give another file")
    check_place(path, "--write")


def ready(planned: Planned) -> dict[str, Any]:
    """Returns the plan's config with the planned budgets, so that a run of the config uses the planned memory.

    The device budget of a GPU is left out unless the config sets one: the first step measures the memory that the
    activations leave. Where GPU and CPU share one memory, both budgets are written, since a run would count the free
    memory twice.
    """
    content = copy.deepcopy(dict(planned.content))
    block = content.setdefault("offload", {})
    if planned.memory.host and "host_memory" not in block:
        inputs = need(planned.shape, planned.load).host
        content = with_host_memory(content, planned.memory.host, inputs)
        block = content["offload"]
        block |= {name: format_exact(block[name]) for name in ("host_memory", "activation_memory") if name in block}
    if planned.hardware.on_cpu or planned.hardware.unified:
        block.setdefault("device_memory", format_exact(planned.memory.device))
    if planned.load.accumulation > 1:
        block["schedule"] = planned.choice.schedule
    if not planned.load.speculate:
        block["speculate"] = False
    content.setdefault("train_micro_batch_size_per_gpu", planned.load.batch)
    content.setdefault("gradient_accumulation_steps", planned.load.accumulation)
    return content


def format_exact(nbytes: int) -> int | str:
    """Returns a readable size if the text stands for exactly `nbytes`, else the number."""
    words = format_size(nbytes).replace(" ", "")
    return words if parse_size(words) == nbytes else nbytes


def write_config(planned: Planned, path: Path, extra: Mapping[str, Any]) -> None:
    """Writes the result of `ready`, updated by `extra`, to a new file. A failure leaves no file.

    `extra` are top-level keys on learning, such as "optimizer".
    """
    text = json.dumps({**ready(planned), **extra}, indent=2) + "\n"
    try:
        # Mode "x" never replaces a file that appeared since `check_target`.
        with open(path, "x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except OSError:
                path.unlink()
                raise
    except OSError as error:
        raise OSError(f"cannot write the config {path}: {error.strerror}; give --write another file") from error
