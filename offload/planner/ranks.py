"""A step on several GPUs and machines: the bytes of its collectives, and its seconds by the busiest resource.

    weights      W (n - 1) / n a gather: once a step where all weights stay on the device, else at uses that lack them
    gradients    G (n - 1) / n a reduction, each step or each micro-batch; stage 0 adds up S bytes by 2 S (n - 1) / n

These are the bytes of `engine.communication()`: what one rank sends, once for each receiver. Seconds are the largest of
compute, links, host and drives, as if none of them ever waited for another: no run is faster, and most are slower.

With tensor parallelism of t and a pipeline of p, a GPU has 1 / (t p) of each unit, which ZeRO divides further.
Activations are those of the GPU that has most: a part of what lies between two divided layers, all of what is alike in
a row, and those of several micro-batches in the first stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from offload.errors import BudgetError, ConfigError
from offload.layout.flat_layout import UnitLayout, arrange
from offload.layout.placement import device_fixed, growth
from offload.layout.tiers import Partitions
from offload.planner.activations import Load, gradients_in_flight, input_nbytes, need
from offload.planner.hardware import Hardware
from offload.planner.memory import Memory, Room, settings, settle
from offload.planner.model_shape import Shape, Use
from offload.planner.recommend import PLACEMENTS, WORTH, loads
from offload.planner.step_time import work_of
from offload.sizes import count_of
from offload.states import State, Tier
from offload.swapper.memory.device import DeviceRoom

STAGES = (0, 1, 2, 3)


class Cluster(NamedTuple):
    """The GPUs that train together."""

    gpus: int
    """GPUs of each machine."""
    nodes: int = 1
    """Machines."""
    link: float | None = None
    """Bytes a second of the slowest link, each way: of a machine's network, or of a GPU where there is one machine.
    None for the rate of copies to the GPU."""
    tensor: int = 1
    """GPUs that divide each layer."""
    pipeline: int = 1
    """Stages of the model."""

    @property
    def parts(self) -> int:
        """Number of GPUs that hold one model together, without ZeRO."""
        return self.tensor * self.pipeline

    @property
    def data(self) -> int:
        """Number of GPUs with the same part of the model and batches of their own."""
        return self.gpus * self.nodes // self.parts

    def check(self) -> None:
        """Raises `ConfigError` if the GPUs cannot be divided in this way."""
        for name, value in self._asdict().items():
            if name != "link" and value < 1:
                raise ConfigError(f"expected --{name} of at least 1, got {value}")
        if self.gpus * self.nodes % self.parts or self.gpus % self.tensor:
            raise ConfigError(
                f"{count_of(self.nodes, 'machine')} of {count_of(self.gpus, 'GPU')} cannot be divided by --tensor "
                f"{self.tensor} and --pipeline {self.pipeline}: the product must divide all GPUs, and --tensor those "
                "of a machine"
            )


class Sent(NamedTuple):
    """Collectives of a step, and the bytes that one rank sends in them."""

    collectives: int = 0
    nbytes: int = 0


class Traffic(NamedTuple):
    """What one rank sends in a step, by the kinds of `engine.communication()`; `tensor` is of the model itself."""

    weights: Sent = Sent()
    gradients: Sent = Sent()
    tensor: Sent = Sent()

    @property
    def nbytes(self) -> int:
        return sum(sent.nbytes for sent in self)


class RanksPlan(NamedTuple):
    """A step of one ZeRO stage that fits."""

    stage: int
    weights: str
    """Device of the weights, as in the config."""
    states: str
    """Device of the optimizer's states."""
    load: Load
    """Work of a step on each GPU that has batches of its own."""
    device: int
    """Bytes of each GPU, with activations."""
    host: int
    """Bytes of RAM of each machine."""
    disk: int
    """Bytes of the drives of each machine."""
    traffic: Traffic
    busy: dict[str, float]
    """Seconds of work by resource."""
    tokens: int
    """Tokens of a step on all GPUs."""

    @property
    def limit(self) -> str:
        """The resource that is busy for the whole step."""
        return max(self.busy, key=lambda name: self.busy[name])

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.busy[self.limit]

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of all GPUs together."""
        return self.tokens / self.seconds


# -- traffic -------------------------------------------------------------------------------------------


def gradients_of(parts: Partitions, layouts: Sequence[UnitLayout], accumulation: int, ranks: int) -> Sent:
    """Returns the reductions of a step of `accumulation` micro-batches, without codes of 8 bits."""
    reduction = parts.reduction
    if reduction is None:
        return Sent()
    trained = [layout for layout in layouts if layout.trainable_stop]
    if reduction.replicas > 1:  # an all-reduce of sums in fp32 among ranks that hold whole units
        nbytes = sum(2 * 4 * layout.trainable_stop * (ranks - 1) // ranks for layout in trained)
    else:
        sizes = (layout.trainable_stop * reduction.dtype_of(layout).itemsize for layout in trained)
        nbytes = sum(size * (ranks - 1) // ranks for size in sizes)
    times = 1 if reduction.whole else accumulation
    return Sent(times * len(trained), times * nbytes)


def weights_of(memory: Memory, uses: Sequence[int], ranks: int) -> Sent:
    """Returns the gathers of a step whose forwards and backwards use the units `uses`, in this order.

    A unit stays until its update if there is room for all. Otherwise these are the fewest gathers; a run makes some
    per cent more.
    """
    if memory.parts.nbytes[0][State.WEIGHT] == memory.parts.unit_nbytes[0]:
        return Sent()
    room = memory.placement.moving_nbytes - device_fixed(memory.parts, memory.placement.tiers)
    missing = gathers(uses, memory.parts.unit_nbytes, room)
    nbytes = sum(memory.parts.unit_nbytes[unit] * (ranks - 1) // ranks for unit in missing)
    return Sent(len(missing), nbytes)


def gathers(uses: Sequence[int], nbytes: Sequence[int], room: int) -> list[int]:
    """Returns the units that are missing at their uses in a step, each time one is.

    The device has `room` bytes for units of `nbytes`, and is empty after a step. The unit leaves whose next use is
    furthest away.
    """
    following: dict[int, list[int]] = {}
    for position in reversed(range(len(uses))):
        following.setdefault(uses[position], []).append(position)
    present: set[int] = set()
    missing = []
    for unit in uses:
        following[unit].pop()
        if unit in present:
            continue
        missing.append(unit)
        room -= nbytes[unit]
        while present and room < 0:
            furthest = max(present, key=lambda other: following[other][-1] if following[other] else len(uses))
            present.remove(furthest)
            room += nbytes[furthest]
        present.add(unit)
    return missing


def _tensor_of(shape: Shape, load: Load, cluster: Cluster) -> Sent:
    """Returns the all-reduces of Megatron's layers: two of a block's input in each forward, and in each backward."""
    if cluster.tensor == 1:
        return Sent()
    times = load.accumulation * (6 if load.recompute else 4)
    inputs = [input_nbytes(shape, load, block) for block in shape.blocks]
    nbytes = sum(2 * size * (cluster.tensor - 1) // cluster.tensor for size in inputs)
    return Sent(times * len(inputs) // cluster.pipeline, times * nbytes // cluster.pipeline)


# -- activations ---------------------------------------------------------------------------------------


def stages_of(shape: Shape, load: Load, cluster: Cluster) -> list[tuple[Shape, Load]]:
    """Returns what a GPU computes in each stage of the pipeline.

    Stage s of p has begun at most p - s micro-batches whose backward has not run, as 1F1B orders them.
    """
    blocks, stages = shape.blocks, cluster.pipeline
    uses = [_of_row(use, cluster.tensor) for use in shape.uses]
    ends = [blocks[len(blocks) * count // stages - 1].uses.stop for count in range(1, stages)]
    return [
        (shape._replace(uses=tuple(uses[start:end])), load._replace(in_flight=min(load.accumulation, stages - stage)))
        for stage, (start, end) in enumerate(itertools.pairwise((0, *ends, len(uses))))
    ]


def activations_of(shape: Shape, load: Load, cluster: Cluster) -> int:
    """Returns the bytes of activations of the GPU that has most."""
    most, last = 0, cluster.pipeline - 1
    for stage, (part, of_part) in enumerate(stages_of(shape, load, cluster)):
        # torch has buffers for what all micro-batches of a step receive: hidden states, and their gradients.
        received = (stage > 0) + (stage < last)
        nbytes = load.accumulation * input_nbytes(shape, load, shape.blocks[0]) if received else 0
        most = max(most, need(part, of_part).device + received * nbytes)
    return most


def _of_row(use: Use, size: int) -> Use:
    """Returns a use on one of the ranks that divide a layer."""
    if not use.divided:
        return use
    return use._replace(
        saved=use.saved - use.divided + use.divided // size,
        mlp_saved=min(use.mlp_saved, use.boundary + max(use.mlp_saved - use.boundary, 0) // size),
        mlp_largest=min(use.mlp_largest, max(use.mlp_largest // size, use.boundary)),
    )


# -- plan ----------------------------------------------------------------------------------------------


def plan_stages(
    shape: Shape,
    hardware: Hardware,
    load: Load,
    cluster: Cluster,
    batch: int | None = None,
    accumulation: int | None = None,
    recompute: bool | None = None,
    **options: Any,
) -> dict[int, RanksPlan]:
    """Returns the fastest plan of each ZeRO stage that fits, by its stage.

    `hardware` is one machine with one of its GPUs. `options` are those of `memory.settings`.

    Raises:
        BudgetError: no stage fits.
    """
    layouts = tuple(
        arrange(layout.name, layout.segments, cluster.data, in_fp32=layout.in_fp32) for layout in shape.layouts
    )
    if cluster.data == 1:
        raise ConfigError(
            "ZeRO divides among GPUs that have batches of their own, and this division leaves one: lower --tensor or "
            "--pipeline, or give more --gpus"
        )
    shape = shape._replace(layouts=layouts, tables=(), uncut=None)
    if cluster.pipeline > max(1, len(shape.blocks)):
        raise ConfigError(
            f"--pipeline is {cluster.pipeline}, and {shape.name} has {count_of(len(shape.blocks), 'repeated block')}: "
            "each stage needs one"
        )
    load = load._replace(schedule="micro_batch_major", speculate=False)
    sizes = list(loads(load, shape.sequence, batch, accumulation))
    ways = (False, True) if recompute is None else (recompute,)
    best_plans: dict[int, RanksPlan] = {}
    refusal: Exception | None = None
    for stage in STAGES:
        plans: list[RanksPlan] = []
        for tried in (size._replace(recompute=again) for size in sizes for again in ways):
            for weights, states in PLACEMENTS:
                # Below stage 3 DeepSpeed's files have no weights elsewhere.
                if stage < 3 and weights != "none":
                    continue
                content = settings(weights, states, accumulation=tried.accumulation, **options)
                content["zero_optimization"]["stage"] = stage
                try:
                    plans += _fitting(shape, hardware, tried, cluster, content, stage, (weights, states))
                except (BudgetError, ConfigError) as error:
                    refusal = error
        if plans:
            best = max(plan.tokens_per_second for plan in plans)
            near = (plan for plan in plans if plan.tokens_per_second * WORTH >= best)
            # States on the GPU come first. What is sent beside compute takes its time too, in a run.
            best_plans[stage] = min(
                near,
                key=lambda plan: (PLACEMENTS.index((plan.weights, plan.states)), plan.traffic.nbytes / plan.tokens),
            )
    if not best_plans:
        if isinstance(refusal, ConfigError):  # options that go with no placement
            raise refusal
        raise BudgetError(
            f"{shape.name} does not fit on {count_of(cluster.nodes, 'machine')} of {count_of(cluster.gpus, 'GPU')}, in "
            "no ZeRO stage: give a smaller --batch-size or --seq-len, more --gpus, more --ram or a --drive"
        ) from refusal
    return best_plans


def fastest(plans: dict[int, RanksPlan]) -> RanksPlan:
    """Returns the plan with the most tokens a second; a higher stage must be faster by some per cent."""
    best, *others = (plans[stage] for stage in sorted(plans))
    for plan in others:
        if plan.tokens_per_second > WORTH * best.tokens_per_second:
            best = plan
    return best


def _fitting(
    shape: Shape,
    hardware: Hardware,
    load: Load,
    cluster: Cluster,
    content: dict[str, Any],
    stage: int,
    devices: tuple[str, str],
) -> list[RanksPlan]:
    """Returns the plan of a config on each GPU; none if there is no room for it. Raises as `settle` does."""
    parts, gpus, ranks = cluster.parts, cluster.gpus, cluster.data
    drives = hardware.drives if "nvme" in devices else ()
    # The `parts` GPUs that hold a model together are planned as one, whose every number is theirs together.
    free = hardware.disk if drives else 0
    room = Room(
        hardware.ram * parts // gpus,
        hardware.gpu_memory * parts,
        None if free is None else free * parts // gpus,
        max(len(drives), 1),
    )
    memory = settle(
        shape.layouts,
        content,
        room,
        load.accumulation,
        world_size=1 if stage == 0 else ranks,
        replicas=ranks if stage == 0 else 1,
        speculate=False,
    )
    # A budget without room moves states to a drive, which another candidate covers.
    if memory.placement.on_disk and not drives:
        return []
    gradients = gradients_in_flight(memory, False) // cluster.tensor
    beside = parts * (activations_of(shape, load, cluster) + gradients)
    left = room.device - memory.device - beside
    if left < 0:
        return []
    more = growth(memory.device, memory.placement.device_need, DeviceRoom(left, beside))
    memory = replace(memory, placement=memory.placement.grown(max(more, 0)))
    compute, uses, (read, written) = work_of(memory, shape, hardware, load)

    def of_one(sent: Sent) -> Sent:
        """Returns what one GPU sends of its part of each unit."""
        return Sent(sent.collectives // cluster.pipeline, sent.nbytes // parts)

    traffic = Traffic(
        weights=of_one(weights_of(memory, uses, ranks)),
        gradients=of_one(gradients_of(memory.parts, shape.layouts, load.accumulation, ranks)),
        tensor=_tensor_of(shape, load, cluster),
    )
    trained = sum(memory.parts.trainable_numel)
    on_device = all(tier is Tier.DEVICE for row in memory.placement.tiers for tier in row.values())
    # A pipeline is empty at its ends, for as long as its stages less one take for a micro-batch.
    idle = (load.accumulation + cluster.pipeline - 1) / load.accumulation
    busy = {
        "compute": compute * idle / parts + (trained / parts / hardware.device_optimizer if on_device else 0.0),
        "links": _link_seconds(traffic, stage, hardware, cluster),
        "host": 0.0 if on_device else trained / parts * gpus / hardware.optimizer,
        "PCIe": max(_copied(memory, traffic, ranks)) / parts / hardware.upload,
        "drives": (read / hardware.read + written / hardware.written) / parts * gpus if drives else 0.0,
    }
    plan = RanksPlan(
        stage=stage,
        weights=devices[0],
        states=devices[1],
        load=load,
        device=(memory.device + beside) // parts,
        host=memory.host // parts * gpus,
        disk=(memory.stored + memory.spilled) // parts * gpus,
        traffic=traffic,
        busy=busy,
        tokens=load.tokens(shape) * ranks,
    )
    return [plan]


def _copied(memory: Memory, traffic: Traffic, ranks: int) -> tuple[int, int]:
    """Returns the bytes that are copied to the device, and from it, in a step of one rank."""
    up = down = 0
    shares = sum(row[State.WEIGHT] for row in memory.parts.nbytes)
    whole = sum(memory.parts.unit_nbytes)
    for row, tiers in zip(memory.parts.nbytes, memory.placement.tiers, strict=True):
        if tiers[State.WEIGHT] is Tier.DEVICE:
            # An update on the host sends new weights up, once.
            on_host = any(tier is not Tier.DEVICE for tier in tiers.values())
            up += row[State.WEIGHT] if on_host else 0
        if tiers.get(State.GRAD, Tier.DEVICE) is not Tier.DEVICE:
            down += row[State.GRAD]
    if any(tiers[State.WEIGHT] is not Tier.DEVICE for tiers in memory.placement.tiers):
        # Each gather begins with an upload of this rank's share.
        gathered = traffic.weights.nbytes * ranks // (ranks - 1)
        up += gathered * shares // whole
    return up, down


def _link_seconds(traffic: Traffic, stage: int, hardware: Hardware, cluster: Cluster) -> float:
    """Returns the seconds of all collectives on the slowest link."""
    rate = hardware.upload if cluster.link is None else cluster.link
    if cluster.nodes == 1:
        return traffic.nbytes / rate
    # GPUs of a column in one machine, and columns of a machine.
    inside = max(1, cluster.gpus // cluster.parts)
    columns = cluster.gpus // inside
    outside = (cluster.data - inside) / (cluster.data - 1)
    # A gather brings each byte of other machines once into a machine. An exchange sends what each GPU has for each.
    senders = columns if stage == 0 else cluster.gpus
    crossing = traffic.weights.nbytes * columns * outside + traffic.gradients.nbytes * senders * outside
    return crossing / rate
