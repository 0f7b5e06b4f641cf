"""Predicted seconds of a step: `simulate` plays the step with a machine's rates.

input of a block     leaves for HOST or DISK during the forward of the next block, and returns during the backward of
                     the next block
update of a unit     runs during the uses that `step_of` lists: under the next forward, and with speculation under the
                     backward too

The module also predicts the tokens per micro-batch from which all I/O hides behind compute, and the cost of repeating
the updates under the backward.
"""

from __future__ import annotations

import functools
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from offload.errors import ConfigError
from offload.layout.drive_budget import steps_between
from offload.layout.memory_plan import limits, unit_sizes
from offload.layout.modes import Mode
from offload.layout.optimizer_states import cuts, product_flops
from offload.layout.pass_order import LAYER_MAJOR, ScheduleChoice, choose_schedule
from offload.planner.activations import Load, Wish, moving, need, of_chunks, of_tiles, recomputed, room_of, within
from offload.planner.hardware import Hardware
from offload.planner.memory import Memory
from offload.planner.model_shape import Shape, drawn, tied_in_pieces
from offload.planner.simulation.machine import Moved, SimulatedRates, Waited
from offload.planner.simulation.pager import Expected
from offload.planner.simulation.simulate import Input, Simulation, Use, buffer_budgets, simulate, staying, update_costs
from offload.planner.simulation.updater import UpdateCost
from offload.report import phases
from offload.states import State, Tier

# -- bound ---------------------------------------------------------------------------------------------
#
# A lower bound of the seconds of a step. No order of moves is faster.
#
# The bound is the larger of two:
#
# order    max over k of (updates up to the k-th use + the first forward from the k-th use on) + the other passes, each
#          the larger of its compute and the reads of weights that cannot be in memory when the pass starts
# work     the larger of all traffic of the drives and all compute; on a CPU, compute includes the optimizer's kernel,
#          which runs on the same cores
#
# An update in two passes counts with its first pass, as far as the rest of the step has time for the second one.
# With updates under the backward, the k-th term adds only the compute of the other passes up to the moment when the
# first of these updates may begin.
#
# A unit's update ends before the unit's next use. The bound leaves out weights that may be in a host buffer when the
# step starts, and the writes of the last few tiles, which may overlap the use of the unit.


class _Updates(NamedTuple):
    """Elements and bytes of several updates together."""

    numel: int = 0
    spared: float = 0.0
    """Elements that could be updated in the time by which first passes are shorter than updates in one pass."""
    weights: int = 0
    """Bytes that are read unless host buffers already hold them."""
    read: int = 0
    written: int = 0
    spilled: int = 0
    """Bytes of gradients written during the backward; `read` includes the same bytes."""

    def plus(self, cost: UpdateCost | None) -> _Updates:
        """Returns the sums with one more update; None stands for a unit without trainable parameters."""
        if cost is None:
            return self
        return _Updates(
            self.numel + cost.numel,
            self.spared + cost.numel * (1 - cost.passes[0] if cost.passes else 0),
            self.weights + cost.weight_nbytes,
            self.read + cost.state_nbytes + cost.gradient_nbytes,
            self.written + cost.written_nbytes,
            self.spilled + cost.gradient_nbytes,
        )


def least(
    first: Sequence[Use],
    others: Sequence[Sequence[Use]],
    memory: Memory,
    costs: Sequence[UpdateCost | None],
    rates: SimulatedRates,
    tile_numel: int,
    speculates: bool = False,
) -> float:
    """Returns the lower bound of a step's seconds."""
    costs, used = _as_read(costs, memory), {use.unit for use in first if use.lookup is None}
    again, buffer_nbytes = _again(memory, used), _buffers_of_updates(memory, speculates)
    # The last tiles of an update may still be written while its unit is used, so `order` must not wait for them.
    tiles = memory.placement.tile_buffers * max(tile_numel, memory.parts.whole.tile)
    unwritten = max((tiles * cost.written_nbytes / cost.numel for cost in costs if cost is not None), default=0.0)
    seconds = _seconds((first, *others))
    whole = sum(max(spent, again / rates.read) for spent in seconds[1:])
    # A first pass spares time, and its second pass has to find time in the rest of the step.
    spared = max(((1 - cost.passes[0]) / cost.passes[1] for cost in costs if cost and cost.passes), default=0.0)
    after = whole
    elapsed = _completed(others) if speculates else {}
    left = seconds[0]
    order = left + whole
    # The k-th use starts after the updates of all units used so far; the rest of the forward follows the k-th use.
    seen: set[int] = set()
    done = _Updates()
    for use in first:
        if use.unit in seen:  # only the first use of a unit waits for its update
            left -= use.seconds
            continue
        seen.add(use.unit)
        done = done.plus(costs[use.unit])
        if speculates:
            whole = min(whole, elapsed.get(use.unit, 0.0))
        read = done.read + max(0, done.weights - buffer_nbytes)
        before = _drive_seconds(read, max(0.0, done.written - unwritten), rates)
        if not rates.on_cpu:
            # On a CPU the kernel shares the cores with compute, so `_work` counts both instead.
            numel = done.numel - min(done.spared, spared * (left + after) * rates.kernel)
            before = max(before, numel / rates.kernel)
        order = max(order, before + left + whole)
        left -= use.seconds
    return max(order, _work(sum(seconds), least_moved(memory, costs, 1 + len(others), speculates, used), costs, rates))


def _seconds(passes: Sequence[Sequence[Use]]) -> list[float]:
    """Returns the seconds of compute of each pass; those of equal micro-batches are one object."""
    known = {id(one): sum(use.seconds for use in one) for one in {id(one): one for one in passes}.values()}
    return [known[id(one)] for one in passes]


def _completed(others: Sequence[Sequence[Use]]) -> dict[int, float]:
    """Returns for each unit the compute of the passes after the first one up to its complete gradient, in seconds."""
    seconds_of: dict[int, float] = {}
    elapsed, last = 0.0, {id(one): number for number, one in enumerate(others)}
    for number, (one, seconds) in enumerate(zip(others, _seconds(others), strict=True)):
        if last[id(one)] > number:  # it counts from its last turn
            elapsed += seconds
            continue
        for use in one:
            elapsed += use.seconds
            for unit in (use.unit, *use.completes):
                seconds_of[unit] = elapsed
    return seconds_of


def _as_read(costs: Sequence[UpdateCost | None], memory: Memory) -> list[UpdateCost | None]:
    """Returns `costs` without reads of weights whose tier is above DISK: a commit writes them, nothing reads them."""
    return [
        cost if cost is None or tiers[State.WEIGHT] is Tier.DISK else cost._replace(weight_nbytes=0)
        for cost, tiers in zip(costs, memory.placement.tiers, strict=True)
    ]


def least_moved(
    memory: Memory,
    costs: Sequence[UpdateCost | None],
    passes: int,
    speculates: bool = False,
    used: Collection[int] | None = None,
) -> tuple[int, int]:
    """Returns the fewest bytes that the drives read and write in a step, but for inputs of blocks.

    With all states on disk in bf16 and little memory, the update moves 24 bytes per parameter, and each pass but the
    first moves 2 more. The first pass takes its weights from the update. `passes` counts how often the weights have to
    be on the device: once for each forward and each backward, or 2 times in all if layer-major.
    """
    every = _Updates()
    for cost in _as_read(costs, memory):
        every = every.plus(cost)
    weights = max(0, every.weights - _buffers_of_updates(memory, speculates))
    return every.read + weights + _again(memory, used) * (passes - 1), every.written + every.spilled


def _again(memory: Memory, used: Collection[int] | None) -> int:
    """Returns the bytes of weights that neither host buffers nor the device can keep from one pass to the next."""
    kept = buffer_budgets(memory.parts, memory.placement).host + memory.placement.moving_nbytes
    on_disk = sum(
        nbytes[State.WEIGHT]
        for unit, (nbytes, tiers) in enumerate(zip(memory.parts.nbytes, memory.placement.tiers, strict=True))
        if tiers[State.WEIGHT] is Tier.DISK and (used is None or unit in used)
    )
    return max(0, on_disk - kept)


def _buffers_of_updates(memory: Memory, speculates: bool) -> int:
    """Returns the bytes of weights that are read once, or not at all, for both an update and the next use."""
    # An update under the backward finds the weights of a use, but the next use may have to read the weights again.
    more = memory.placement.moving_nbytes if speculates else 0
    return buffer_budgets(memory.parts, memory.placement).host + more


def _work(compute: float, moved: tuple[int, int], costs: Sequence[UpdateCost | None], rates: SimulatedRates) -> float:
    kernel = sum(cost.numel for cost in costs if cost is not None) / rates.kernel
    cores = compute + kernel if rates.on_cpu else max(compute, kernel)
    return max(cores, _drive_seconds(*moved, rates))


def _drive_seconds(read: float, written: float, rates: SimulatedRates) -> float:
    """Returns the seconds to read and write these bytes, both at once or one after the other, whichever is faster."""
    if not read + written:
        return 0.0
    return min(read / rates.read + written / rates.written, rates.drive_seconds(read, written))


# -- passes --------------------------------------------------------------------------------------------
#
# Uses of units in one forward and one backward of a micro-batch, with their seconds of compute.
#
# compute of a use     flops / matmul + bytes of weights / weights + bytes / elementwise, once more if recomputed,
#                      + `handed_seconds` if the CPU computes; on a GPU at least `handed_seconds`, since the host
#                      prepares a use while the GPU computes the one before
# backward of a use    the products once for the gradient of the input, and once more for trainable weights' gradient,
#                      + 2 * bytes / elementwise
# of a tiled MLP       its products once more, and sums of its gradients for each tile; a chunked loss adds only sums
# of an embedding      bytes of its gradient / fresh, and the same for each other use of the unit, to sum the gradients
# gradient of a unit   copied beside the backward's compute on a GPU, after the compute on a CPU
# accumulated          (2 * bytes of the total + bytes of the gradient) / elementwise; the last micro-batch copies the
#                      total to the host
#
# Only repeated blocks are recomputed, not the head.


class Pass(NamedTuple):
    """A use of a unit and its seconds of compute."""

    unit: int
    seconds: float
    backward: float = 0.0
    """Seconds of the backward, for a use in a forward."""
    again: float = 0.0
    """Seconds of a recomputation."""
    lookup: bool = False
    row_nbytes: int | None = None
    """Bytes that a lookup in a piece of a table reads from DISK; None for any other use."""
    block: bool = False
    """True for a use in a block that is computed again if there is recomputation."""
    sends: Input = Input()
    """Input of the previous block. It leaves the device during this use's forward."""
    receives: Input = Input()
    """Input of the use's block. It has to be on the device before the backward of the use."""
    choice: Expected = Expected()
    """The router's choice of experts before the use."""
    held: int = 1
    """Uses after which the unit is released: a layer holds its unit while its experts come and go."""
    repeats: int = 0
    """Uses up to this one that a recomputation makes before the backward of this one; 0 if one use serves both."""


def forward(shape: Shape, hardware: Hardware, load: Load, stay: Collection[int] = ()) -> list[Pass]:
    """Returns the uses of one micro-batch's forward, in order; units in `stay` never leave the device."""
    passes, times = [], Counter(use.unit for use in shape.uses)
    blocks = recomputed(shape, load._replace(recompute=True))
    batch, inside = load.batch, {position for block in blocks for position in block.uses}
    for position, use in enumerate(shape.uses):
        layout = shape.layouts[use.unit]
        learning, nbytes = layout.trainable_stop / layout.used_numel, hardware.itemsize * layout.used_numel
        # The time to read weights is paid once per use, for any batch.
        products = batch * use.flops / hardware.matmul + (nbytes / hardware.weights if use.flops else 0.0)
        other = batch * use.nbytes / hardware.elementwise
        # A tied embedding receives a gradient from each of its uses, and all of them are summed.
        made = times[use.unit] * learning * nbytes / hardware.fresh if use.lookup else 0.0
        # One product for the gradient of the input, and one for the gradient of the weights if the weights train.
        back = (1 + learning) * products + 2 * other + made + of_tiles(shape, use, load, hardware)
        if position == len(shape.uses) - 1:
            back += of_chunks(shape, load, hardware)
        seconds, handed = products + other, hardware.handed(use.unit in stay)
        if hardware.on_cpu:
            seconds, back = seconds + handed, back + handed
        else:  # the host prepares a use while the GPU computes
            seconds, back = max(seconds, handed), max(back, handed)
        kept = batch * use.attention / hardware.matmul if load.keep_attention else 0.0
        again = max(seconds - kept, handed)
        row_nbytes, repeats = use.row_nbytes, position in inside
        passes.append(Pass(use.unit, seconds, back, again, use.lookup, row_nbytes, repeats, choice=use.choice))
    for (block, after), input_ in zip(pairwise(shape.blocks), moving(shape, load), strict=False):
        # A block's input leaves once the next block starts. A backward starts a block with the block's last use.
        passes[after.uses[0]] = passes[after.uses[0]]._replace(sends=input_)
        passes[block.uses[-1]] = passes[block.uses[-1]]._replace(receives=input_)
    # A block that chooses experts uses several units, each of which its recomputation needs before its backward does.
    for block in shape.blocks:
        if experts := {unit for position in block.uses for unit in passes[position].choice.units}:
            for position in block.uses:
                held = 1 if passes[position].unit in experts else block.uses.stop - position
                passes[position] = passes[position]._replace(held=held, block=False)
            if block in blocks:
                passes[block.uses[-1]] = passes[block.uses[-1]]._replace(repeats=len(block.uses))
    return passes


class Sums(NamedTuple):
    """Gradients that accumulate on the device over the micro-batches of a step, as one micro-batch treats them."""

    nbytes: Mapping[int, int] = {}
    """Bytes of each total, by unit. Gradients of other units leave the device in every micro-batch."""
    leave: bool = True
    """True if the totals are copied to the host in this micro-batch, the last one."""
    itemsize: int = 4
    """Bytes of an element of the copy."""


NO_SUMS = Sums()
"""Every gradient leaves the device in its micro-batch."""


def backward_seconds(
    use: Pass, completes: bool, parts_numel: Sequence[int], hardware: Hardware, recompute: bool, sums: Sums = NO_SUMS
) -> float:
    """Returns the seconds of one use's backward, including sums and copies of its unit's gradient.

    A gradient is complete after the last use of its unit in the backward. That use is the unit's first in the forward.
    """
    seconds = use.backward + (use.again if recompute and use.block else 0.0)
    if not completes:
        return seconds
    numel = parts_numel[use.unit]
    stored = numel / hardware.gradient
    # The gradient is copied after the backward on a CPU, beside it on a GPU.
    if use.unit not in sums.nbytes:
        downloaded = hardware.itemsize * numel / hardware.download
        return seconds + stored if hardware.on_cpu else max(seconds, stored, downloaded)
    nbytes = sums.nbytes[use.unit]
    seconds += (2 * nbytes + hardware.itemsize * numel) / hardware.elementwise
    if not sums.leave:
        return seconds
    return seconds + stored if hardware.on_cpu else max(seconds, numel * sums.itemsize / hardware.download)


def completing(first: Sequence[Pass]) -> dict[int, int]:
    """Returns for each unit the position of the use whose backward completes the unit's gradient of a micro-batch."""
    return {use.unit: position for position, use in reversed(list(enumerate(first)))}


# -- step order ----------------------------------------------------------------------------------------
#
# The uses of a step in their order, with their seconds of compute: the input of `simulate` and of the lower bound.
#
# micro-batch-major   forward and backward of each micro-batch
# layer-major         forward     each block for all micro-batches; the uses before the blocks count as one more block
#                     loss        the uses after the blocks, forward and at once backward, for one micro-batch at a time
#                     backward    each block for all micro-batches, the last block first
#
# In layer-major the gradients of a unit are summed on the device, and leave once, with the unit's last micro-batch.


def step_of(
    shape: Shape, firsts: Sequence[Sequence[Pass]], memory: Memory, hardware: Hardware, load: Load
) -> tuple[list[Use], ...]:
    """Returns the uses of a step in passes, the first forward first.

    The weights of each unit have to be on the device once in each pass. A layer-major step has two passes: the forward
    with the first micro-batch's head, and the rest. Forwards may visit different experts, but as many in each layer.
    """
    if load.schedule == LAYER_MAJOR:
        return _with_the_rest(*_layer_major(shape, firsts, memory, hardware, load))
    numels, totals = memory.parts.trainable_numel, dict(memory.placement.added)
    made: dict[tuple[int, bool], tuple[list[Use], list[Use]]] = {}
    passes: list[list[Use]] = []
    for number, first in enumerate(firsts, 1):
        key = (id(first), last := number == len(firsts))
        if key not in made:  # micro-batches without experts are one object
            back = backward(
                first,
                numels,
                hardware,
                load.recompute,
                Sums(totals, last, memory.parts.gradients.values.itemsize),
                completes=last,
            )
            forth = [_forward(use) for use in first]
            made[key] = [forth[0]._replace(period=len(forth) + len(back)), *forth[1:]], back
        passes += made[key]
    return _with_the_rest(*passes)


def _with_the_rest(*passes: list[Use]) -> tuple[list[Use], ...]:
    """Returns `passes`, with units that the last micro-batch does not use completed by the step's last use."""
    every, named = set[int](), set[int]()
    for use in (use for one in passes for use in one):
        every.add(use.unit)
        named.update(use.completes)
    last = passes[-1][-1]
    passes[-1][-1] = last._replace(completes=(*last.completes, *sorted(every - named)))
    return passes


def backward(
    first: Sequence[Pass],
    parts_numel: Sequence[int],
    hardware: Hardware,
    recompute: bool,
    sums: Sums = NO_SUMS,
    completes: bool = True,
) -> list[Use]:
    """Returns the uses of a micro-batch's backward."""
    uses: list[Use] = []
    ends = completing(first)
    for position in reversed(range(len(first))):
        use = first[position]
        ended = ends[use.unit] == position
        seconds = backward_seconds(use, ended, parts_numel, hardware, recompute, sums)
        _append(uses, first, position, seconds, (use.unit,) if completes and ended else (), recompute)
    return uses


def segments(shape: Shape) -> list[range]:
    """Returns the uses of a forward in groups: each repeated block, and each run of uses between blocks."""
    groups: list[range] = []
    position = 0
    for block in shape.blocks:
        if block.uses.start > position:
            groups.append(range(position, block.uses.start))
        groups.append(block.uses)
        position = block.uses.stop
    return [*groups, range(position, len(shape.uses))]


def chain(shape: Shape) -> int:
    """Returns the number of repeated blocks if each is the input of the next, else 0."""
    blocks = shape.blocks
    follows = all(before.uses.stop == after.uses.start for before, after in pairwise(blocks))
    return len(blocks) if follows else 0


def _layer_major(
    shape: Shape, firsts: Sequence[Sequence[Pass]], memory: Memory, hardware: Hardware, load: Load
) -> tuple[list[Use], ...]:
    *body, tail = segments(shape)
    numels, ends = memory.parts.trainable_numel, [completing(first) for first in firsts]
    totals = {unit: memory.parts.sum_nbytes(unit) for unit in range(len(memory.parts.nbytes))}
    count, itemsize = load.accumulation, memory.parts.gradients.values.itemsize
    made: dict[tuple[range, int, bool | None], list[Use]] = {}
    """Uses of a segment, by its micro-batch, and whether it is the last; None for a forward."""

    def forth(segment: range, number: int) -> list[Use]:
        key = (segment, id(firsts[number]), None)  # micro-batches without experts are one object
        if key not in made:
            made[key] = [_forward(firsts[number][position]) for position in segment]
        return made[key]

    def back(segment: range, number: int, uses: list[Use]) -> list[Use]:
        first, last = firsts[number], number == count - 1
        for position in reversed(segment):
            use, sums = first[position], Sums(totals if count > 1 else {}, last, itemsize)
            ended = ends[number][use.unit] == position
            seconds = backward_seconds(use, ended, numels, hardware, load.recompute, sums)
            _append(uses, first, position, seconds, (use.unit,) if last and ended else (), load.recompute)
        return uses

    opening = [use for segment in body for number in range(count) for use in _period(forth(segment, number))]
    rest: list[Use] = []
    for number in range(count):
        # The first head belongs to the first pass: the updates of the head's units have to end before the head.
        ahead, key = forth(tail, number), (tail, id(firsts[number]), number == count - 1)
        if key not in made:
            made[key] = back(tail, number, [])
        if number:
            rest += _period([*ahead, *made[key]])
        else:
            opening += ahead
            rest += made[key]
    for segment in reversed(body):
        for number in range(count):
            key = (segment, id(firsts[number]), number == count - 1)
            if firsts[number][segment[-1]].lookup:  # the use before includes it
                back(segment, number, rest)
            else:
                if key not in made:
                    made[key] = _period(back(segment, number, []))
                rest += made[key]
    return opening, rest


def _period(uses: list[Use]) -> list[Use]:
    """Returns the uses of a micro-batch that others alike may follow."""
    return [use._replace(period=len(uses)) for use in uses[:1]] + uses[1:]


def _forward(use: Pass) -> Use:
    return Use(use.unit, use.seconds, use.held, sends=use.sends, expects=use.choice, lookup=use.row_nbytes)


def _append(
    uses: list[Use], first: Sequence[Pass], position: int, seconds: float, completes: tuple[int, ...], recompute: bool
) -> None:
    """Appends a use of a backward, after those of a recomputation that has uses of its own.

    The use of an embedding fetches no weights, so the use before includes it.
    """
    use = first[position]
    if use.lookup and uses:
        before = uses[-1]
        uses[-1] = before._replace(seconds=before.seconds + seconds, completes=(*before.completes, *completes))
        return
    receives = use.receives
    for again in first[position + 1 - use.repeats : position + 1] if recompute and use.repeats else ():
        choice = again.choice._replace(at_once=True)
        uses.append(Use(again.unit, again.again, again.held, receives=receives, expects=choice))
        receives = Input()  # the recomputation needs it first
    uses.append(Use(use.unit, seconds, receives=receives, completes=completes))


# -- prediction ----------------------------------------------------------------------------------------


MOST_MICRO_BATCHES = 4096
"""Most micro-batches of a step that is predicted: the time of a prediction grows with them, to a minute here."""
_NEAR = 1.05
"""Factor within which a step counts as having reached a bound."""
_STEPS = 3
"""Steps to simulate. The last one is reported, since the first ones start without an access order."""
_SPECULATIVE_STEPS, _COUNTED = 5, 2
"""Steps to simulate, and to average, with updates under the backward: each step does part of another step's work."""
_TILES_OF_A_UNIT = 16
"""Most tiles that are simulated per unit: a simulation of the real, smaller tiles would take too long."""
_COARSE_TILES = 3
"""The same for plans that are only compared."""
# A search for the best plan, its advice and its report each simulate the same steps.
_simulated = functools.lru_cache(maxsize=64)(simulate)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Prediction of a step, from one return of `step()` to the next."""

    seconds: float
    compute_seconds: float
    formula_seconds: float
    """Lower bound of `seconds`, see `bound`."""
    busy: dict[str, float]
    """Seconds of work by resource: compute, PCIe, NVMe, DRAM (the optimizer's kernel)."""
    waited: Waited
    moved: Moved
    tokens: int
    miss_seconds: float
    """Most seconds that a clipped step takes longer, since it repeats the updates under its backward."""
    simulation: Simulation

    @property
    def limit(self) -> str:
        """Resource that is busy for most of the step; or "budget", if waits for free host memory take longer."""
        # These waits count as a resource of their own: no hardware is busy then.
        return max((*self.busy, "budget"), key=lambda name: self.busy.get(name, self.waited.room))

    @property
    def limit_seconds(self) -> float:
        """Seconds of the step for which `limit` is busy."""
        return max(*self.busy.values(), self.waited.room)

    @property
    def hidden(self) -> bool:
        """Returns True if I/O adds at most a twentieth to the compute."""
        return self.seconds <= _NEAR * self.compute_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def parts(self) -> dict[str, float]:
        """Returns the seconds of each phase of a step, under the names by which a run measures them.

        "compute" includes uploads: the device's stream waits for them, or the computing thread copies itself.
        """
        waited, worked = self.waited, self.simulation.worked
        return phases.parts(
            {
                "seconds": self.seconds,
                "forward_seconds": self.seconds,  # includes backward and step: only the sum counts
                "wait_for_updates_seconds": waited.update,
                "wait_for_reads_seconds": waited.read,
                "wait_for_memory_seconds": waited.room,
                "update_kernels_seconds": worked.kernels,
                "update_waits_for_reads_seconds": worked.reads,
                "update_waits_for_writes_seconds": worked.writes,
            }
        )


def rates_of(memory: Memory, hardware: Hardware) -> SimulatedRates:
    """Returns the rates for `simulate`."""
    return SimulatedRates(
        hardware.read or math.inf,  # without drives nothing is read or written
        hardware.written or math.inf,
        hardware.mixed or math.inf,
        hardware.upload,
        _kernel_rate(memory, hardware),
        hardware.on_cpu,
        hardware.download,
    )


def _kernel_rate(memory: Memory, hardware: Hardware) -> float:
    """Returns the parameters updated per second, including the products that Muon makes on the compute device.

    The products are in bf16, but their rate is the one measured in the weights' dtype.
    """
    rate = hardware.optimizer if hardware.on_cpu else _updated(memory, hardware)
    optimizer = memory.config.optimizer
    flops = 0.0
    if optimizer is not None:
        flops = product_flops(memory.request.layouts, memory.mode.optimizer, optimizer.settings.get("ns_steps", 0))
    numel = sum(memory.parts.trainable_numel)
    return numel / (numel / rate + flops / hardware.matmul) if flops else rate


def _updated(memory: Memory, hardware: Hardware) -> float:
    """Returns the parameters updated per second, averaged over units updated on the GPU and on the host.

    A unit whose states and gradient are all on DEVICE is updated on the GPU. Otherwise its states on DEVICE are copied
    to the host and back.
    """
    seconds = 0.0
    for row, nbytes, numel in zip(
        memory.placement.tiers, memory.parts.nbytes, memory.parts.trainable_numel, strict=True
    ):
        there = sum(nbytes[state] for state in row if state is not State.GRAD and row[state] is Tier.DEVICE)
        if numel and all(tier is Tier.DEVICE for tier in row.values()):
            seconds += numel / hardware.device_optimizer
        elif numel:
            seconds += numel / hardware.optimizer + there / hardware.download + there / hardware.upload
    return sum(memory.parts.trainable_numel) / seconds if seconds else hardware.optimizer


def predict(memory: Memory, shape: Shape, hardware: Hardware, load: Load, coarse: bool = False) -> Timing:
    """Returns the prediction of a step. `coarse` simulates fewer steps and tiles, to compare many plans.

    Where some states are written at commits alone, it is the mean from one commit to the next: a commit writes them in
    one step, and the drives cannot spread its bytes over the others.
    """
    every = memory.commit_every
    if not memory.placement.deferred(memory.parts, memory.slots, every):
        return _predict(memory, shape, hardware, load, coarse)
    calm, due = (
        _predict(replace(memory, commit_every=steps), shape, hardware, load, coarse) for steps in (sys.maxsize, 1)
    )

    def mean(of_calm: float, of_due: float) -> float:
        return of_calm + (of_due - of_calm) / every

    busy = {name: mean(seconds, due.busy[name]) for name, seconds in calm.busy.items()}
    return replace(
        calm,
        seconds=mean(calm.seconds, due.seconds),
        formula_seconds=mean(calm.formula_seconds, due.formula_seconds),
        busy=busy,
        waited=Waited(*map(mean, calm.waited, due.waited)),
        moved=Moved(*(round(mean(*amounts)) for amounts in zip(calm.moved, due.moved, strict=True))),
    )


def _predict(memory: Memory, shape: Shape, hardware: Hardware, load: Load, coarse: bool) -> Timing:
    if load.accumulation > MOST_MICRO_BATCHES:
        raise ConfigError(
            f"a plan simulates at most {MOST_MICRO_BATCHES} micro-batches a step, got {load.accumulation}; lower "
            "--accumulation, or raise --batch-size"
        )
    shares = tuple((layout.trainable(0, 1), layout.frozen(0, 1)) for layout in memory.request.layouts)
    rates = rates_of(memory, hardware)
    early = bool(memory.early)
    number, counted = (_SPECULATIVE_STEPS, _COUNTED) if early and not coarse else (_STEPS, 1)
    tile_numel = _tile_numel(memory, _COARSE_TILES if coarse else _TILES_OF_A_UNIT)
    # Only the choice of experts differs from step to step.
    passes_of_steps = [_passes(memory, shape, hardware, load, step) for step in range(number if shape.chooses else 1)]
    steps = tuple(tuple(use for one in passes for use in one) for passes in passes_of_steps)
    passes, costs = passes_of_steps[-1], _costs(memory, shape)
    simulation = _simulated(
        steps if shape.chooses else steps * number,
        tuple(
            unit_sizes(
                memory.request.layouts,
                memory.placement,
                shares,
                memory.mode,
                memory.request.in_place_layouts,
                host_addressable=memory.parts.host_addressable,
            )
        ),
        tuple(costs),
        buffer_budgets(memory.parts, memory.placement),
        limits(memory.config, memory.mode),
        rates,
        memory.placement.overlaps_updates(
            memory.config.offload.debug.overlap, on_cpu=hardware.on_cpu, alone=memory.parts.alone, slots=memory.slots
        ),
        tile_numel,
        early,
        counted,
        memory.placement.tile_buffers,
    )
    costs = _of_step(costs, passes)
    compute = sum(_seconds(passes))
    return Timing(
        seconds=simulation.seconds,
        compute_seconds=compute,
        # If both add up the same seconds, rounding may make the bound the larger one.
        formula_seconds=min(_least(passes, memory, costs, rates), simulation.seconds),
        busy=_busy(simulation, costs, rates, compute, hardware),
        waited=simulation.waited,
        moved=simulation.moved,
        tokens=load.tokens(shape),
        miss_seconds=_miss_seconds(simulation, costs, rates),
        simulation=simulation,
    )


def timed(memory: Memory, shape: Shape, hardware: Hardware, load: Load, coarse: bool = False) -> tuple[Memory, Timing]:
    """Returns the prediction of a step, and the memory with the interval of commits that its drive budget allows."""
    timing = predict(memory, shape, hardware, load, coarse)
    if memory.budget is not None and memory.config.offload.thins_commits and memory.commit_every > 1:
        written = memory.written  # of an interval at which what is in memory is written at commits alone
        # A step with fewer writes is shorter, so that the budget allows fewer commits a step.
        for _ in range(_ROUNDS):
            memory = replace(memory, commit_every=steps_between(memory.budget, written, timing.seconds))
            timing = predict(memory, shape, hardware, load, coarse)
    return memory, timing


_ROUNDS = 2
"""Predictions after which the interval of commits and the seconds of a step fit each other."""


def _passes(memory: Memory, shape: Shape, hardware: Hardware, load: Load, step: int = 0) -> tuple[list[Use], ...]:
    """Returns the uses of a step, pass by pass; the step's number decides which experts each micro-batch visits."""
    stay, count = staying(memory.parts, memory.placement), load.accumulation
    # Without a choice of experts all micro-batches are alike.
    draws = range(step * count, (step + 1) * count) if shape.chooses else range(1)
    shapes = [drawn(shape, load.batch * shape.sequence, draw) for draw in draws]
    firsts = [forward(shape, hardware, load, stay) for shape in shapes]
    return step_of(shapes[0], firsts if shape.chooses else firsts * count, memory, hardware, load)


def _of_step(costs: Sequence[UpdateCost | None], passes: Sequence[Sequence[Use]]) -> list[UpdateCost | None]:
    """Returns the costs of the updates that a step of these uses makes; None for all other units."""
    used = {use.unit for one in passes for use in one}
    return [None if cost is None or (cost.if_used and unit not in used) else cost for unit, cost in enumerate(costs)]


def _miss_seconds(simulation: Simulation, costs: Sequence[UpdateCost | None], rates: SimulatedRates) -> float:
    """Returns the most seconds that a clipped step takes longer, since it repeats the updates under its backward."""
    again = [cost for cost in (costs[unit] for unit in simulation.speculated) if cost is not None]
    read = sum(cost.weight_nbytes + cost.state_nbytes for cost in again)
    written = sum(cost.written_nbytes for cost in again)
    return max(rates.drive_seconds(read, written), sum(cost.numel for cost in again) / rates.kernel) if again else 0.0


def _busy(
    simulation: Simulation,
    costs: Sequence[UpdateCost | None],
    rates: SimulatedRates,
    compute: float,
    hardware: Hardware,
) -> dict[str, float]:
    on_link = defaultdict(float, simulation.busy)
    # Both directions of the link work at once.
    copies = max(on_link["upload"] + on_link["input upload"], on_link["input download"])
    moved = simulation.moved
    kernel = sum(cost.numel for cost in costs if cost is not None) / rates.kernel
    return {
        "compute": compute,
        "PCIe": 0.0 if hardware.on_cpu else copies,
        "NVMe": rates.drive_seconds(moved.read, moved.written) if moved.read + moved.written else 0.0,
        "DRAM": max(kernel, (moved.read + moved.written) / hardware.memory),
    }


def _costs(memory: Memory, shape: Shape) -> list[UpdateCost | None]:
    every = memory.commit_every
    costs = update_costs(memory.parts, memory.placement, memory.slots, memory.early, every)
    if memory.config.offload.experts == "visited":
        for unit in (unit for layer_experts in shape.experts for unit in layer_experts.units):
            cost = costs[unit]
            costs[unit] = None if cost is None else cost._replace(if_used=True)
    if _divides(memory):
        for unit, (cost, tiers) in enumerate(zip(costs, memory.placement.tiers, strict=True)):
            if cost is not None and not cost.written_nbytes and set(tiers.values()) == {Tier.HOST}:
                costs[unit] = cost._replace(passes=passes_of(memory.mode, memory.parts.gradient_dtype.itemsize))
    if not memory.mode.matrix_rule:
        return costs
    tiles = (
        cuts(layout, memory.mode, layout.trainable(0, 1), True, _tile_numel(memory))
        for layout in memory.request.layouts
    )
    return [
        None if cost is None else cost._replace(stops=tuple(tile.stop for tile in unit_tiles))
        for cost, unit_tiles in zip(costs, tiles, strict=True)
    ]


def passes_of(mode: Mode, gradient_nbytes: int) -> tuple[float, float]:
    """Returns the bytes that a pass over the weights moves, and one over the moments, if both at once move 1.

    Each pass reads the old moments and the gradient, the first also the weights, and writes its own states.
    """
    weights = sum(dtype.itemsize for dtype in mode.weights.values())
    moments = mode.element_bytes - weights
    whole = 2 * (weights + moments) + gradient_nbytes
    return (2 * weights + moments + gradient_nbytes) / whole, (2 * moments + gradient_nbytes) / whole


def _divides(memory: Memory) -> bool:
    """Returns True if the moments of the optimizer do not depend on the weight; see `kernels.has_two_passes`."""
    optimizer = memory.config.optimizer
    settings: Mapping[str, Any] = {} if optimizer is None else optimizer.settings
    decoupled = optimizer is None or optimizer.type == "AdamW" or settings.get("adam_w_mode", True)
    match memory.mode.optimizer:
        case "adam":
            return bool(decoupled) or not settings.get("weight_decay")
        case "lion":
            return True
        case "adagrad" | "momentum":
            return not settings.get("weight_decay")
    return False


def _tile_numel(memory: Memory, most: int = _TILES_OF_A_UNIT) -> int:
    """Returns the elements of a simulated tile, which may be larger than a real one; a unit has at most `most`."""
    return max(memory.placement.tile_numel, max(memory.parts.trainable_numel) // most)


def _least(
    passes: Sequence[Sequence[Use]], memory: Memory, costs: Sequence[UpdateCost | None], rates: SimulatedRates
) -> float:
    opening, *others = passes
    return least(opening, others, memory, costs, rates, _tile_numel(memory), bool(memory.early))


def lower_bound(memory: Memory, shape: Shape, hardware: Hardware, load: Load) -> float:
    """Returns the lower bound of a step's seconds; arguments as in `predict`."""
    passes = _passes(memory, shape, hardware, load)
    return _least(passes, memory, _of_step(_costs(memory, shape), passes), rates_of(memory, hardware))


def work_of(memory: Memory, shape: Shape, hardware: Hardware, load: Load) -> tuple[float, list[int], tuple[int, int]]:
    """Returns the seconds of compute of a step, the units that it uses in their order, and the bytes of the drives.

    The bytes are the fewest that are read and written, without inputs of blocks.
    """
    passes = _passes(memory, shape, hardware, load)
    uses = [use for one in passes for use in one]
    moved = least_moved(memory, _of_step(_costs(memory, shape), passes), len(passes))
    return sum(_seconds(passes)), [use.unit for use in uses], moved


def update_written(memory: Memory, shape: Shape) -> int:
    """Returns the bytes that the updates of a step write, their gradients on DISK included."""
    return sum(cost.written_nbytes + cost.gradient_nbytes for cost in _costs(memory, shape) if cost is not None)


def hiding_tokens(memory: Memory, shape: Shape, hardware: Hardware, load: Load) -> int | None:
    """Returns the tokens of a micro-batch from which I/O can add at most a twentieth to compute.

    The placement stays that of `memory`. Returns None if no number up to 2**24 tokens suffices.
    """
    every, rates = _costs(memory, shape), rates_of(memory, hardware)

    def hidden(batch: int) -> bool:
        passes = _passes(memory, shape, hardware, load._replace(batch=batch))
        costs = _of_step(every, passes)
        compute = sum(_seconds(passes))
        # The bound makes most simulations unnecessary.
        least = _least(passes, memory, costs, rates)
        return least <= _NEAR * compute and predict(memory, shape, hardware, load._replace(batch=batch)).hidden

    # Double until I/O hides, then bisect.
    batch = 1
    while not hidden(batch):
        batch *= 2
        if batch * shape.sequence > 1 << 24:
            return None
    low = batch // 2
    while batch - low > 1:
        middle = (low + batch) // 2
        low, batch = (low, middle) if hidden(middle) else (middle, batch)
    return batch * shape.sequence


# -- schedule choice -----------------------------------------------------------------------------------
#
# The schedule of a planned run, chosen by the same function as in a run.


def choice_of(shape: Shape, hardware: Hardware, load: Load, memory: Memory, wish: Wish) -> ScheduleChoice:
    """Returns the schedule of a step."""
    room = room_of(hardware, memory, wish, shape, load, layer_major=True)
    tried = within(shape, load._replace(schedule=LAYER_MAJOR), wish, room)
    needed = need(shape, tried)
    on_device = needed.device + (needed.host if room.one_memory else 0)
    tiers = ((on_device, room.device), (needed.host, room.host), (needed.disk, room.disk))
    # The tier that lacks most decides; the device if none lacks any.
    scarcest = max(tiers, key=lambda tier: max(tier[0] - tier[1], 0))
    return choose_schedule(
        asked=load.schedule,
        micro_batches=load.accumulation,
        blocks=chain(shape),
        moves=any(tiers[State.WEIGHT] is not Tier.DEVICE for tiers in memory.placement.tiers),
        sends=not hardware.on_cpu and memory.placement.sends_gradients,
        checkpointed=tried.recompute,
        activation_nbytes=scarcest[0],
        free_nbytes=scarcest[1],
        tied_pieces=tied_in_pieces(shape),
    )
