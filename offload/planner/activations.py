"""Bytes of activations in every tier. Pure functions of a shape and a load.

With T tokens in a micro-batch, the device holds at most, at a time:

all kept      saved tensors of every block + head
recomputed    inputs of the blocks + the larger of head and one block
inputs        T * hidden * size for each block; in HOST or on DISK all leave the device but the newest and those on
              their way
block         its saved tensors + the gradient of its output + the larger of 2 times the MLP's largest tensor, and 4
              fp32 tensors of a norm, when the MLP's saved tensors are freed
block, tiled  the same without the MLP's saved tensors, for all tokens + its MLP for one tile + sums of its gradients
head          saved tensors of the norm before it + the logits that the loss saves + 2 times the logits in fp32
head, chunked gradients of the hidden states and of the head, in fp32 where there are several chunks + the larger of the
              logits and the head's gradient of one chunk, and of a sum in fp32, scaled into 16 bits
layer-major   for all micro-batches of a step: the saved tensors before and in the blocks, and the inputs; for one: the
              head and the work of a backward; for each further one: T * hidden * size, for the hidden states or their
              gradients between two blocks, and the gradient of a head that is tied to the embedding

The formulas assume that attention keeps no T * T matrix, like torch's scaled_dot_product_attention and FlashAttention.
"""

from __future__ import annotations

import copy
import functools
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from offload.config import Config, load_config
from offload.errors import BudgetError
from offload.layout.pass_order import LAYER_MAJOR
from offload.layout.peak_memory import CHUNK_TOKENS, BesideBudgets, PeakMemory, beside_budgets
from offload.layout.placement import usable_host
from offload.planner.hardware import Hardware
from offload.planner.memory import Memory
from offload.planner.model_shape import RepeatedBlock, Shape, Use
from offload.planner.simulation.simulate import Input
from offload.sizes import PAGE, align_up, format_size
from offload.states import State, Tier

# -- load ----------------------------------------------------------------------------------------------
#
# The work of a step, and the tier in which each block's input waits for the backward.


class Load(NamedTuple):
    """Work of a step: micro-batch, accumulation, recomputation."""

    batch: int
    """Sequences of a micro-batch."""
    accumulation: int = 1
    recompute: bool = False
    """True if repeated blocks keep their input alone, and are computed again in the backward."""
    chunked_loss: bool = False
    """True if the loss is computed for chunks of tokens, so that memory never holds all logits."""
    tile: int = 0
    """Tokens of a tile of an MLP; 0 computes an MLP for all tokens at once, or in `tiles`."""
    tiles: int = 0
    """Number of tiles of an MLP, in place of the tokens of a tile; 0 to use `tile`."""
    keep_attention: bool = False
    """True if a block that is computed again keeps the output of its attention."""
    on_disk: int = 0
    """Blocks whose input waits on DISK, the first ones of the forward."""
    on_host: int = 0
    """Blocks whose input waits in HOST memory, the next ones; the inputs of all others stay on the device."""
    first: int = 0
    """Blocks that are recomputed, the first ones of the forward; 0 for all."""
    schedule: str = "auto"
    """Order of micro-batches and blocks: "layer_major", "micro_batch_major", or "auto" before a plan has chosen."""
    speculate: bool = True
    """True to update units under the backward wherever the engine can drop such an update."""
    in_flight: int = 1
    """Micro-batches that a stage of a pipeline has begun and whose backward it has not run."""
    whole_steps: bool = False
    """True if one call runs all micro-batches of every step, so that the run takes the order that "auto" chooses."""

    @property
    def alive(self) -> int:
        """Returns the number of micro-batches whose activations are in memory at a time."""
        return self.accumulation if self.schedule == LAYER_MAJOR else self.in_flight

    def tokens(self, shape: Shape) -> int:
        return self.batch * self.accumulation * shape.sequence


# -- formulas ------------------------------------------------------------------------------------------


SCALED_NUMEL = 1 << 22
"""Elements of a gradient that the loss scales at a time, in fp32, as `offload.losses.chunked`."""
IN_FLIGHT = 2
"""Inputs on the device in addition to the newest: one in a copy to or from the device, and one in use."""
STAGED_INPUTS = 4
"""Host buffers through which inputs go to DISK."""
_TENSORS_OF_NORM = 4
"""Tensors in fp32 that the backward of a norm creates, in addition to the saved one."""
_FP32 = 4


class Need(NamedTuple):
    """Bytes of activations in each tier."""

    device: int
    host: int = 0
    disk: int = 0


def need(shape: Shape, load: Load) -> Need:
    """Returns the bytes of activations in every tier: of one micro-batch, or of all in a layer-major step.

    A longer sequence, a larger micro-batch or more of them never need less in any tier.
    """
    blocks = shape.blocks
    staged = min(load.on_disk, STAGED_INPUTS) * max((input_nbytes(shape, load, block) for block in blocks), default=0)
    moved = moving(shape, load)
    device = _on_device(shape, load, blocks)
    if is_tiled(shape, load):
        # The longest sequence that fits into one tile is not tiled, and may need more than a slightly longer one.
        longest, batch = (1, load.batch) if load.tiles else (load.tile, 1)
        device = max(device, _on_device(shape.at(longest), load._replace(batch=batch), blocks))
    return Need(
        device,
        staged + load.alive * sum(align_up(kept_input.nbytes) for kept_input in moved if not kept_input.on_disk),
        load.alive * sum(align_up(kept_input.nbytes) for kept_input in moved if kept_input.on_disk),
    )


def moving(shape: Shape, load: Load) -> list[Input]:
    """Returns for each block the bytes that leave the device in a micro-batch; none for blocks whose input stays."""
    blocks = shape.blocks
    if not load.recompute:
        return [Input() for _ in blocks]
    # The newest of the recomputed blocks' inputs stays, since the backward begins with it.
    tiers = [index < load.on_disk for index in range(load.on_disk + load.on_host)]
    stay = [Input()] * (len(blocks) - len(tiers))
    return [Input(input_nbytes(shape, load, block), on) for block, on in zip(blocks, tiers, strict=False)] + stay


def input_nbytes(shape: Shape, load: Load, block: RepeatedBlock) -> int:
    """Returns the bytes of a block's input in a micro-batch."""
    return load.batch * shape.uses[block.uses[0]].boundary


def recomputed(shape: Shape, load: Load) -> tuple[RepeatedBlock, ...]:
    """Returns the blocks that are computed again in the backward."""
    return shape.blocks[: load.first or None] if load.recompute else ()


def tile_tokens(shape: Shape, load: Load) -> int:
    """Returns the number of a micro-batch's tokens that an MLP computes at a time."""
    whole = load.batch * shape.sequence
    if load.tiles:
        # Every sequence of the micro-batch is divided.
        return load.batch * -(-shape.sequence // load.tiles)
    return min(load.tile, whole) if load.tile else whole


def is_tiled(shape: Shape, load: Load) -> bool:
    """Returns True if a micro-batch has more tokens than a tile."""
    return tile_tokens(shape, load) < load.batch * shape.sequence


def mlp_numel(shape: Shape, use: Use) -> int:
    """Returns the elements of an MLP's weights: a product takes two operations per element and token."""
    return round(use.mlp_flops / (2 * shape.sequence))


def _on_device(shape: Shape, load: Load, blocks: tuple[RepeatedBlock, ...]) -> int:
    first, behind = _outside(blocks, len(shape.uses))
    before = sum(shape.uses[position].saved for position in first)
    # The activations of the head and of the norm before it are freed when the backward reaches the last block.
    tail = _tail(shape, load, [shape.uses[position] for position in behind])
    saved = [sum(_saved(shape, load, shape.uses[position]) for position in block.uses) for block in blocks]
    work = [max(_work(shape, load, shape.uses[position]) for position in block.uses) for block in blocks]
    again = recomputed(shape, load)
    # The blocks that keep all activations come last, and end their backward before the first recomputation.
    kept = load.alive * sum(saved[len(again) :]) + max(tail, *work[len(again) :], 0)
    in_block = max((of + more for of, more in zip(saved, work[: len(again)], strict=False)), default=0)
    beside = _borders(shape, load) + _tied_gradients(shape, load) + _inputs(shape, load, again)
    beside += _kept_attention(shape, load, again)
    return load.alive * load.batch * before + beside + max(kept, in_block)


@functools.lru_cache
def _outside(blocks: tuple[RepeatedBlock, ...], count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the positions of the uses outside blocks: those before the last block's end, and those after it.

    Cached, since a search for the longest sequence calls it hundreds of times with the same blocks.
    """
    inside = {position for block in blocks for position in block.uses}
    last = max(inside, default=-1)
    outside = [position for position in range(count) if position not in inside]
    return tuple(layer for layer in outside if layer < last), tuple(layer for layer in outside if layer > last)


def _tied_gradients(shape: Shape, load: Load) -> int:
    """Returns the bytes of a tied head's gradients that wait in autograd, for all micro-batches but the newest.

    autograd adds the gradient of the head to the gradient of the embedding, which a micro-batch computes last. The
    newest micro-batch's gradient is not counted here: a backward in any order needs it.
    """
    blocks = shape.blocks
    if not blocks:
        return 0
    unit = shape.uses[-1].unit
    tied = any(use.unit == unit for use in shape.uses[: blocks[0].uses.start])
    return (load.alive - 1) * shape.layouts[unit].trainable_stop * shape.itemsize * tied


def _borders(shape: Shape, load: Load) -> int:
    """Returns the bytes of hidden states, or of their gradients, that wait between two blocks for their turn."""
    # One of them is counted elsewhere: in the forward as the newest input, in the backward as the output's gradient.
    return (load.alive - 1) * max((input_nbytes(shape, load, block) for block in shape.blocks), default=0)


def _inputs(shape: Shape, load: Load, blocks: tuple[RepeatedBlock, ...]) -> int:
    gone = min(load.on_disk + load.on_host, len(blocks))
    sizes = [input_nbytes(shape, load, block) for block in blocks]
    return load.alive * sum(sizes[gone:]) + min(load.alive * gone, IN_FLIGHT) * max(sizes, default=0)


def _kept_attention(shape: Shape, load: Load, blocks: tuple[RepeatedBlock, ...]) -> int:
    """Returns the bytes of attention's outputs, each as large as its block's input, and of its sums in fp32.

    A head of 64 features or more has one sum for each token: at most a thirty-second of its output in 16 bits.
    """
    if not load.keep_attention:
        return 0
    uses = (shape.uses[position] for block in blocks for position in block.uses)
    outputs = load.batch * sum(use.boundary for use in uses if use.attention)
    return load.alive * (outputs + outputs // 32)


def _saved(shape: Shape, load: Load, use: Use) -> int:
    # A tiled MLP saves its input alone.
    return load.batch * (use.saved - use.mlp_saved + use.boundary if _tiles(shape, load, use) else use.saved)


def _work(shape: Shape, load: Load, use: Use) -> int:
    """Returns the bytes that a block's use needs in the backward beyond its saved tensors; they may be negative.

    The use needs the gradient of its output, and then the larger of two needs. The MLP's backward needs two of the
    MLP's largest tensors. The backward of the norm before the MLP needs four tensors, after the MLP's are freed.
    """
    output, norm = load.batch * use.boundary, _TENSORS_OF_NORM * load.batch * use.largest
    if not _tiles(shape, load, use):
        return output + max(2 * load.batch * use.mlp_largest, norm - load.batch * use.mlp_saved)
    # A tile needs as much as the whole MLP, for its own tokens. The fp32 sums over tiles are in memory beside the
    # gradients of one tile.
    one_tile = (use.mlp_saved + 2 * use.mlp_largest) * tile_tokens(shape, load) // shape.sequence
    return output + max(output + one_tile + mlp_numel(shape, use) * (_FP32 + shape.itemsize), norm)


def _tiles(shape: Shape, load: Load, use: Use) -> bool:
    return bool(use.mlp_saved) and is_tiled(shape, load)


def _tail(shape: Shape, load: Load, uses: Sequence[Use]) -> int:
    if not uses:
        return 0
    saved = load.batch * sum(use.saved for use in uses[:-1])
    norm = load.batch * (_TENSORS_OF_NORM * max((use.largest for use in uses[:-1]), default=0) + uses[-1].boundary)
    return saved + max(_head(shape, load), norm)


def head_copy(shape: Shape, load: Load) -> int:
    """Returns the bytes by which a copy of the head's weights, in the layout of a product, raises the loss's peak.

    With a chunked loss, the copy is freed after the products, before the gradients are scaled. Products in fp32 make
    none.
    """
    if shape.itemsize == _FP32:
        return 0
    return _head(shape, load, shape.layouts[shape.uses[-1].unit].numel * shape.itemsize) - _head(shape, load)


def _head(shape: Shape, load: Load, copy: int = 0) -> int:
    """Returns the bytes of the head and the loss, with a `copy` of the head's weights during its products."""
    head, size = shape.uses[-1], shape.itemsize
    if not load.chunked_loss:
        return load.batch * (head.saved + 2 * shape.temporary) + copy
    tokens = load.batch * shape.sequence
    # Logits in fp32, and in the model's dtype if that is another one. A cap has a slope for each.
    of_token = head.largest // shape.sequence * (1 + shape.capped)
    logits = min(CHUNK_TOKENS, tokens) * (of_token + (of_token * size // _FP32 if size < _FP32 else 0))
    hidden = load.batch * head.boundary
    # The head's input stays. Several chunks sum the head's gradients in fp32. The backward later scales a sum of the
    # model's dtype in place, another one into new memory, a piece at a time.
    summed, chunk = _summed(shape, load)
    of_hidden = hidden
    if shape.uncut is not None:  # gradients of the hidden states in fp32: of one piece, and the sum over pieces
        of_hidden += 2 * hidden * _FP32 // size
    scaled = chunk + min(SCALED_NUMEL, summed) * _FP32
    return hidden + summed + of_hidden + max(logits + chunk + copy, scaled)


def _summed(shape: Shape, load: Load) -> tuple[int, int]:
    """Returns the bytes of the head's gradient in a chunked loss: the sum's, and those of a second one of 16 bits."""
    numel, size = shape.layouts[shape.uses[-1].unit].trainable_stop, shape.itemsize  # a frozen head has no gradient
    # The gradient of a piece of a table is summed in fp32 whatever the number of chunks is.
    in_fp32 = size < _FP32 and (shape.uncut is not None or load.batch * shape.sequence > CHUNK_TOKENS)
    return numel * (_FP32 if in_fp32 else size), numel * size if in_fp32 else 0


# -- budgets -------------------------------------------------------------------------------------------
#
# Memory of activations in addition to the budgets: the peaks of device and host memory in a planned step.


def beside_weights(memory: Memory, shape: Shape, load: Load) -> int:
    """Returns the bytes of GPU memory for activations, and for gradients that wait for their copy to the host."""
    return need(shape, load).device + gradients_in_flight(memory, load.alive > 1)


def gradients_in_flight(memory: Memory, layer_major: bool) -> int:
    """Returns the bytes of gradients on a GPU that wait for their copy to the host.

    These are one unit's gradient of a micro-batch. A layer-major step has two sums more: one to which gradients are
    added, and one that is copied to the host.
    """
    # Gradients whose tier is DEVICE stay in the arena, which is counted already.
    copies_out = any(tiers.get(State.GRAD, Tier.DEVICE) is not Tier.DEVICE for tiers in memory.placement.tiers)
    parts = memory.parts
    sums = 2 * max(map(parts.sum_nbytes, range(len(parts.nbytes))), default=0) if layer_major else 0
    return parts.largest_gradient + sums if copies_out else 0


def host_peak(memory: Memory, shape: Shape, hardware: Hardware, load: Load) -> PeakMemory:
    """Returns the peak of RAM beyond the bytes in use before the run.

    On a GPU the peak consists of the host arena and of inputs in HOST. If the CPU computes, the peak also includes the
    device arena and what torch allocates beside both, and only the touched pages of the host arena: no tiles if states
    are updated in place.
    """
    inputs = need(shape, load).host
    if not hardware.on_cpu:
        # The arena is pinned at the start, which touches all of its pages.
        return PeakMemory(memory.host + inputs, 0, *BesideBudgets(libraries=0))
    touched = memory.host - (0 if memory.slots or memory.spilled else memory.placement.classes.tiles)
    return PeakMemory.of(touched + inputs, memory.device, beside(memory, shape, load), memory.stored)


def beside(memory: Memory, shape: Shape, load: Load) -> BesideBudgets:
    """Returns what torch allocates in a step on the CPU beside both arenas.

    These are activations, a gradient, a copy of a layer's weights in the layout of its product, and a second gradient
    if weights are tied.
    """
    parts, units = memory.parts, [use.unit for use in shape.uses]
    # malloc keeps some of what was freed between blocks that are in use.
    activations = need(shape, load).device * 17 // 16
    # A unit that is used twice has tied weights. The engine adds the gradients of a table in pieces itself.
    tied = shape.uncut is None and len(set(units)) < len(units)
    head = memory.request.layouts[units[-1]].numel if units else 0
    # A chunked loss holds a copy of the head's weights, and then the head's gradient, which the activations count. The
    # rest of the backward takes no more if the head is the largest unit, except for the second gradient of a tied one,
    # and for those of others if the head is frozen.
    if load.chunked_loss and head == max(layout.numel for layout in memory.request.layouts):
        more = max((2 if tied else 1) * parts.largest_gradient - sum(_summed(shape, load)), 0)
        return BesideBudgets(more, copy=head_copy(shape, load), activations=activations)
    # torch adds the two gradients of a tied parameter into new memory.
    return beside_budgets(parts, 3 if tied else 1, activations, copies=shape.itemsize < _FP32)


# -- seconds -------------------------------------------------------------------------------------------
#
# Seconds that tiles and chunks add to a step in exchange for less memory.


def of_tiles(shape: Shape, use: Use, load: Load, hardware: Hardware) -> float:
    """Returns the seconds that tiles of an MLP add to the backward: its forward once more, and sums of gradients."""
    if not is_tiled(shape, load) or not use.mlp_flops:
        return 0.0
    tiles = math.ceil(load.batch * shape.sequence / tile_tokens(shape, load))
    again = load.batch * use.mlp_flops / hardware.matmul
    return again + tiles * _sum_seconds(mlp_numel(shape, use), hardware)


def of_chunks(shape: Shape, load: Load, hardware: Hardware) -> float:
    """Returns the seconds that chunks of the loss add: a sum of the head's gradients for each chunk."""
    if not load.chunked_loss:
        return 0.0
    chunks = math.ceil(load.batch * shape.sequence / CHUNK_TOKENS)
    return chunks * _sum_seconds(shape.layouts[shape.uses[-1].unit].numel, hardware)


def _sum_seconds(numel: int, hardware: Hardware) -> float:
    return numel * (2 * _FP32 + hardware.itemsize) / hardware.elementwise


# -- kept ----------------------------------------------------------------------------------------------
#
# Where the inputs of repeated blocks wait for the backward: the config's wish, and its tiers for one machine.


_LEAST_TILE = 1024
"""Least tokens of an automatic tile, as of the engine's."""


class Wish(NamedTuple):
    """The config's keys on activations."""

    tier: str | None = None
    """ "device", "cpu", "nvme" or "auto"; None if no block is computed again by the engine."""
    tiles: int | None = 0
    """Tiles of an MLP; 0 for none, None for tiles of as many tokens as the engine takes by itself."""
    first: int = 0
    """Blocks that are recomputed, the first ones; 0 for all."""
    keep_attention: bool = False
    """True if blocks that the engine computes again keep the output of attention."""


def wish_of(config: Config) -> Wish:
    """Returns the wish of a config."""
    own, first = config.offload, config.activation_checkpointing.number_checkpoints or 0
    tiles = None if own.tile_mlp == "auto" else int(own.tile_mlp)
    return Wish(config.activation_tier, tiles, first, own.keep_attention)


def with_host_memory(content: Mapping[str, Any], host: int, inputs: int) -> dict[str, Any]:
    """Returns the config with a host budget of `host` bytes, and `inputs` more if inputs of blocks leave the device."""
    settings = copy.deepcopy(dict(content))
    block = settings.setdefault("offload", {})
    # The least is a page: without the key, the engine would set aside a share of the budget for inputs.
    uses = load_config(settings).activation_tier not in (None, "device")
    inputs = align_up(max(inputs, PAGE)) if uses else 0
    block["host_memory"] = host + inputs
    block.pop("activation_memory", None)
    if inputs:
        block["activation_memory"] = inputs
    return settings


def auto_tile(shape: Shape) -> int:
    """Returns the tokens of an automatic tile: as many as the hidden size, but no fewer than matrix units need."""
    hidden = max((shape.uses[block.uses[0]].boundary for block in shape.blocks), default=0)
    return max(hidden // (shape.sequence * shape.itemsize), _LEAST_TILE)


def placed(shape: Shape, load: Load, wish: Wish, room: Need, drives: bool, most_inputs: int | None = None) -> Load:
    """Returns `load` with the tiers of the blocks' inputs under a wish. The inputs may need more than `room`.

    "auto" keeps inputs on the device while they fit, then in HOST, then on DISK; "cpu" in HOST, then on DISK. The
    oldest inputs leave first, since the backward needs them last. The tiers in `load` are ignored. `most_inputs`
    limits the device bytes that "auto" gives to inputs.
    """
    tile = auto_tile(shape) if wish.tiles is None else 0
    load = load._replace(tile=tile, tiles=wish.tiles or 0, on_disk=0, on_host=0, first=wish.first)
    if wish.tier is None:
        return load
    load = load._replace(recompute=True, keep_attention=wish.keep_attention)
    # The newest input stays, since the backward begins with it.
    most = max(len(recomputed(shape, load)) - 1, 0)
    if wish.tier == "device" or not most:
        return load
    if wish.tier == "nvme":
        return load._replace(on_disk=most)

    sizes = [input_nbytes(shape, load, block) for block in recomputed(shape, load)]

    def on_device(gone: int) -> bool:
        load_gone = load._replace(on_host=gone)
        staying = load.alive * sum(sizes[gone:])
        return need(shape, load_gone).device <= room.device and (most_inputs is None or staying <= most_inputs)

    gone = most if wish.tier == "cpu" else min(bisect_left(range(most + 1), True, key=on_device), most)
    largest = load.alive * max(sizes)
    in_host = min(gone, max(room.host, 0) // largest)
    if in_host < gone and drives:
        # Inputs on DISK pass through buffers in HOST.
        in_host = max(0, min(gone, (max(room.host, 0) - STAGED_INPUTS * max(sizes)) // largest))
        return load._replace(on_host=in_host, on_disk=gone - in_host)
    return load._replace(on_host=gone)


# -- room ----------------------------------------------------------------------------------------------
#
# Memory that a run's budgets leave to activations, and the longest sequence and largest micro-batch that fit into it.


_RESERVE = 4
"""Divisor of an accelerator's room: "auto" leaves a quarter to everything but inputs, as the engine does."""
_UNKNOWN = 1 << 62
"""Room on drives whose free space is not known."""
_MOST = 1 << 40
"""Most tokens or sequences that a search tries."""


class Room(NamedTuple):
    """Bytes that activations may take in each tier."""

    device: int
    host: int
    disk: int
    one_memory: bool = False
    """True if device memory is host memory, so that inputs in HOST take the device's room."""
    drives: bool = True

    def has(self, needed: Need) -> bool:
        on_device = needed.device + (needed.host if self.one_memory else 0)
        return on_device <= self.device and needed.host <= self.host and needed.disk <= self.disk


def for_device(hardware: Hardware, memory: Memory) -> int:
    """Returns the bytes that the GPU may take: of a memory shared with the CPU, the part outside the host arena."""
    return hardware.gpu_memory - memory.host if hardware.unified else hardware.gpu_memory


def room_of(
    hardware: Hardware, memory: Memory, wish: Wish, shape: Shape, load: Load, layer_major: bool = False
) -> Room:
    """Returns the room for activations beside a run's budgets.

    In layer-major order gradients are summed on the device, a unit at a time.
    """
    rest = hardware.ram - memory.host
    if hardware.on_cpu:
        device = rest - memory.device - sum(beside(memory, shape, load)._replace(activations=0))
    else:
        device = for_device(hardware, memory) - memory.device - gradients_in_flight(memory, layer_major)
    host = memory.placement.inputs_nbytes
    if host is None:
        host = max(usable_host(rest, own_device_memory=False), 0)
    elif memory.config.offload.host_memory is None:
        host = min(host, rest)
    # Files of inputs are in the folders that the config names.
    drives = hardware.drives if memory.config.drives else ()
    unknown = any(drive.free is None for drive in drives)
    free = _UNKNOWN if unknown else sum(drive.free or 0 for drive in drives) - memory.stored - memory.spilled
    return Room(device, host, free if drives else 0, hardware.on_cpu or hardware.unified, bool(drives))


def within(shape: Shape, load: Load, wish: Wish, room: Room) -> Load:
    """Returns `load` with the tiers of the blocks' inputs under a wish. The inputs may need more than `room`."""
    # A copy within one memory would free nothing, so no input goes to HOST.
    host = 0 if room.one_memory else room.host
    tier = "auto" if wish.tier == "cpu" and room.one_memory else wish.tier
    most = None if room.one_memory else room.device - room.device // _RESERVE
    return placed(shape, load, wish._replace(tier=tier), Need(room.device, host, room.disk), room.drives, most)


def fits(shape: Shape, load: Load, wish: Wish, room: Room) -> bool:
    """Returns True if a micro-batch's activations have room in every tier."""
    return room.has(need(shape, within(shape, load, wish, room)))


def longest_sequence(shape: Shape, load: Load, wish: Wish, room: Room) -> int:
    """Returns the tokens of the longest sequence that fits at the load's micro-batch; 0 if none does."""
    return _most(lambda tokens: fits(shape.at(tokens), load, wish, room))


def largest_batch(shape: Shape, load: Load, wish: Wish, room: Room) -> int:
    """Returns the sequences of the largest micro-batch that fits; 0 if none does."""
    return _most(lambda batch: fits(shape, load._replace(batch=batch), wish, room))


def _most(fitting: Callable[[int], bool]) -> int:
    """Returns the largest number up to `_MOST` for which `fitting` is true, given that it is for all smaller ones."""
    low, high = 0, 1
    while high <= _MOST and fitting(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fitting(middle) else (low, middle)
    return low


def check(shape: Shape, load: Load, wish: Wish, room: Room) -> None:
    """Raises `BudgetError` if the activations have no room beside the budgets."""
    needed = need(shape, load)
    if room.has(needed):
        return
    if room.disk < 0:
        raise BudgetError(
            f"the swap files take {format_size(-room.disk)} more than is free on the drives; give larger drives or "
            f'more (--drive), or store fewer bytes ("durability": "none", "moments": "int8")'
        )
    if needed.disk > room.disk:
        raise BudgetError(
            f"inputs of {load.on_disk} blocks take {format_size(needed.disk)} of disk, and "
            f"{format_size(room.disk)} is free beside the swap files; give more drives (--drive), lower "
            f"--seq-len, or keep them in host memory (--activations cpu)"
        )
    if needed.host > room.host:
        raise BudgetError(
            f"inputs of {load.on_host} blocks take {format_size(needed.host)} of host memory, and "
            f"{format_size(max(room.host, 0))} is for them; raise activation_memory, lower host_memory or --seq-len, "
            f"or keep them on drives (--activations nvme)"
        )
    raise too_long(shape, load, wish, room)


def too_long(shape: Shape, load: Load, wish: Wish, room: Room) -> BudgetError:
    """Returns the error for activations that exceed the device's room, with the largest micro-batch that fits."""
    most = largest_batch(shape, load, wish, room)
    advice = f"--batch-size {most} fits" if most else "not even one sequence fits: lower --seq-len"
    if not load.recompute:
        advice += ", or recompute them in backward (--gradient-checkpointing)"
    elif not (load.on_host or load.on_disk or room.one_memory):
        advice += ", or keep the inputs of blocks in host memory (--activations cpu)"
    if load.alive > 1:
        advice += ", or keep one micro-batch's at a time (--schedule micro_batch_major)"
    if not load.chunked_loss:
        advice += ", or compute the loss in chunks (--chunked-loss)"
    times = f"{load.alive} x " if load.alive > 1 else ""
    needed, free = format_size(need(shape, load).device), format_size(max(room.device, 0))
    return BudgetError(
        f"activations of {times}{load.batch} x {shape.sequence} tokens take {needed}, and {free} is free beside the "
        f"budgets; {advice}"
    )
