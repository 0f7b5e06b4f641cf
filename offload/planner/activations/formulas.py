"""Bytes of activations in every tier. Pure functions of a shape and a load.

With T the tokens of a micro-batch, on the device there are at most, at a time:

all kept      what every block saves + head
recomputed    inputs of the blocks + the larger of head, and one block with what it saves
inputs        T * hidden * size for each block; in HOST or on DISK all leave the device but the newest and those on
              their way
block         what it saves + the gradient of its output + the larger of 2 times the MLP's largest tensor, and of 4 of a
              norm's in fp32, for which what the MLP saved has gone
block, tiled  the same without what its MLP saves, for all tokens + its MLP for one tile + sums of its gradients
head          what the norm before it saves + the logits that the loss saves + 2 times the logits in fp32
head, chunked gradients of the hidden states and of the head, in fp32 where there are several chunks + the larger of the
              logits and the head's gradient of one chunk, and of the same gradients, scaled
layer-major   what stands before and in the blocks, and the inputs, of all micro-batches of a step; the head and the
              work of a backward of one; T * hidden * size for each further one, for the hidden states or their
              gradients at the border of two blocks; and of a head that is tied to the embedding its gradient for each
              further one

Attention is taken to keep no matrix of T * T, as torch's scaled_dot_product_attention and FlashAttention do.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from offload.planner.activations.load import Load
from offload.planner.model_shape import Block, Shape, Use
from offload.sizes import align_up

CHUNK_TOKENS = 1024
"""Tokens of a chunk of the loss, as `offload.losses.chunked.CHUNK_TOKENS`."""
SCALED_NUMEL = 1 << 22
"""Elements of a gradient that the loss scales at a time, in fp32, as `offload.losses.chunked`."""
IN_FLIGHT = 2
"""Inputs on the device, beside the newest: one that leaves it or is ahead of the backward, and one that is in use."""
STAGED_INPUTS = 4
"""Host buffers through which inputs go to DISK."""
_TENSORS_OF_NORM = 4
"""Tensors in fp32 that the backward of a norm makes, beside the one that it saved."""
_FP32 = 4


class Need(NamedTuple):
    """Bytes of activations in each tier."""

    device: int
    host: int = 0
    disk: int = 0


class Moving(NamedTuple):
    """Bytes of a block's input that leave the device in the forward and return in the backward."""

    nbytes: int = 0
    on_disk: bool = False


def need(shape: Shape, load: Load) -> Need:
    """Returns the bytes of activations in every tier: of one micro-batch, or of all of a step if it is layer-major.

    A longer sequence, a larger micro-batch or more of them never need less in any tier.

    Args:
        shape: the model.
        load: work of a step.
    """
    blocks = shape.blocks
    staged = min(load.on_disk, STAGED_INPUTS) * max((input_nbytes(shape, load, each) for each in blocks), default=0)
    moved = moving(shape, load)
    device = _on_device(shape, load, blocks)
    if is_tiled(shape, load):
        # The longest sequence of one tile is computed whole, and may need more than one that is just longer.
        longest, batch = (1, load.batch) if load.tiles else (load.tile, 1)
        device = max(device, _on_device(shape.at(longest), load._replace(batch=batch), blocks))
    return Need(
        device,
        staged + load.alive * sum(align_up(each.nbytes) for each in moved if not each.on_disk),
        load.alive * sum(align_up(each.nbytes) for each in moved if each.on_disk),
    )


def moving(shape: Shape, load: Load) -> list[Moving]:
    """Returns for each block what leaves the device in a micro-batch; nothing for blocks whose input stays."""
    blocks = shape.blocks
    if not load.recompute:
        return [Moving() for _ in blocks]
    # The newest of the recomputed blocks' inputs stays, since the backward begins with it.
    tiers = [index < load.on_disk for index in range(load.on_disk + load.on_host)]
    stay = [Moving()] * (len(blocks) - len(tiers))
    return [Moving(input_nbytes(shape, load, each), on) for each, on in zip(blocks, tiers, strict=False)] + stay


def input_nbytes(shape: Shape, load: Load, block: Block) -> int:
    """Returns the bytes of a block's input in a micro-batch."""
    return load.batch * shape.uses[block.uses[0]].boundary


def recomputed(shape: Shape, load: Load) -> tuple[Block, ...]:
    """Returns the blocks that are computed again in the backward."""
    return shape.blocks[: load.first or None] if load.recompute else ()


def tile_tokens(shape: Shape, load: Load) -> int:
    """Returns the tokens of a micro-batch that an MLP computes at a time."""
    whole = load.batch * shape.sequence
    if load.tiles:
        # Every sequence of the micro-batch is divided.
        return load.batch * -(-shape.sequence // load.tiles)
    return min(load.tile, whole) if load.tile else whole


def is_tiled(shape: Shape, load: Load) -> bool:
    """Returns True if a micro-batch has more tokens than a tile."""
    return tile_tokens(shape, load) < load.batch * shape.sequence


def mlp_numel(shape: Shape, use: Use) -> int:
    """Returns the elements of an MLP's weights: a product takes two operations for each, and token."""
    return round(use.mlp_flops / (2 * shape.sequence))


def _on_device(shape: Shape, load: Load, blocks: tuple[Block, ...]) -> int:
    """Returns the most bytes on the device at a time."""
    first, behind = _outside(blocks, len(shape.uses))
    before = sum(shape.uses[position].saved for position in first)
    # The head and the norm before it have gone when the backward reaches the last block.
    tail = _tail(shape, load, [shape.uses[position] for position in behind])
    saved = [sum(_saved(shape, load, shape.uses[position]) for position in block.uses) for block in blocks]
    work = [max(_work(shape, load, shape.uses[position]) for position in block.uses) for block in blocks]
    again = recomputed(shape, load)
    # The blocks that keep all come last, and are done before the first one is computed again.
    kept = load.alive * sum(saved[len(again) :]) + max(tail, *work[len(again) :], 0)
    in_block = max((of + more for of, more in zip(saved, work[: len(again)], strict=False)), default=0)
    beside = _borders(shape, load) + _tied_gradients(shape, load) + _inputs(shape, load, again)
    return load.alive * load.batch * before + beside + max(kept, in_block)


@functools.lru_cache
def _outside(blocks: tuple[Block, ...], count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the positions of uses in no block, of `count` uses: those before the last block's end, and the others.

    A search for the longest sequence asks hundreds of times about one model.
    """
    inside = {position for block in blocks for position in block.uses}
    last = max(inside, default=-1)
    outside = [position for position in range(count) if position not in inside]
    return tuple(each for each in outside if each < last), tuple(each for each in outside if each > last)


def _tied_gradients(shape: Shape, load: Load) -> int:
    """Returns the bytes of a tied head's gradients that wait in autograd, of all micro-batches but the newest.

    autograd adds the gradient of the head to that of the embedding, which a micro-batch has at its very end. The
    newest is among the gradients that a backward needs in any order.
    """
    blocks = shape.blocks
    if not blocks:
        return 0
    unit = shape.uses[-1].unit
    tied = any(use.unit == unit for use in shape.uses[: blocks[0].uses.start])
    return (load.alive - 1) * shape.layouts[unit].trainable_stop * shape.itemsize * tied


def _borders(shape: Shape, load: Load) -> int:
    """Returns the bytes of hidden states, or of their gradients, that wait between two blocks for their turn."""
    # One is counted already: as the newest input in the forward, and as the gradient of the output in the backward.
    return (load.alive - 1) * max((input_nbytes(shape, load, block) for block in shape.blocks), default=0)


def _inputs(shape: Shape, load: Load, blocks: tuple[Block, ...]) -> int:
    """Returns the bytes of inputs that are on the device: those that stay, and those on their way."""
    gone = min(load.on_disk + load.on_host, len(blocks))
    sizes = [input_nbytes(shape, load, block) for block in blocks]
    return load.alive * sum(sizes[gone:]) + min(load.alive * gone, IN_FLIGHT) * max(sizes, default=0)


def _saved(shape: Shape, load: Load, use: Use) -> int:
    """Returns the bytes that a block's use saves for the backward of a micro-batch."""
    # A tiled MLP saves its input alone.
    return load.batch * (use.saved - use.mlp_saved + use.boundary if _tiles(shape, load, use) else use.saved)


def _work(shape: Shape, load: Load, use: Use) -> int:
    """Returns the bytes that a block's use needs in the backward, beside what it saved; they may be negative.

    The gradient of the output is there first. The MLP's backward needs two of its largest tensors. The one before, of a
    norm, needs four of its own, when what the MLP saved has gone.
    """
    output, norm = load.batch * use.boundary, _TENSORS_OF_NORM * load.batch * use.largest
    if not _tiles(shape, load, use):
        return output + max(2 * load.batch * use.mlp_largest, norm - load.batch * use.mlp_saved)
    # A tile needs what the whole MLP needs, for its own tokens; sums over tiles are in fp32, beside those of one tile.
    one_tile = (use.mlp_saved + 2 * use.mlp_largest) * tile_tokens(shape, load) // shape.sequence
    return output + max(output + one_tile + mlp_numel(shape, use) * (_FP32 + shape.itemsize), norm)


def _tiles(shape: Shape, load: Load, use: Use) -> bool:
    return bool(use.mlp_saved) and is_tiled(shape, load)


def _tail(shape: Shape, load: Load, uses: Sequence[Use]) -> int:
    """Returns the bytes of the uses after the last block: the head and its loss, or the norm before them."""
    if not uses:
        return 0
    saved = load.batch * sum(use.saved for use in uses[:-1])
    norm = load.batch * (_TENSORS_OF_NORM * max((use.largest for use in uses[:-1]), default=0) + uses[-1].boundary)
    return saved + max(_head(shape, load), norm)


def head_copy(shape: Shape, load: Load) -> int:
    """Returns the bytes by which a copy of the head's weights in its products' layout raises the peak of its loss.

    In chunks the copy goes with the products, before the gradients are scaled.
    """
    return _head(shape, load, shape.layouts[shape.uses[-1].unit].numel * shape.itemsize) - _head(shape, load)


def _head(shape: Shape, load: Load, copy: int = 0) -> int:
    """Returns the bytes of the head and the loss, with those of a copy of its weights beside its products."""
    head, size = shape.uses[-1], shape.itemsize
    if not load.chunked_loss:
        return load.batch * (head.saved + 2 * shape.temporary) + copy
    tokens = load.batch * shape.sequence
    # Logits in fp32, and in the model's dtype if that is another one.
    of_token = head.largest // shape.sequence
    logits = min(CHUNK_TOKENS, tokens) * (of_token + (of_token * size // _FP32 if size < _FP32 else 0))
    numel, hidden = shape.layouts[head.unit].numel, load.batch * head.boundary
    # The head's input stays. Gradients of the head are summed in fp32 if there are several chunks, and later scaled
    # into new memory of the model's dtype, a piece at a time.
    several = tokens > CHUNK_TOKENS or size == _FP32
    summed = numel * (_FP32 if several else size) + hidden
    chunk = numel * size if several and size < _FP32 else 0
    return hidden + summed + max(logits + chunk + copy, hidden + numel * size + min(SCALED_NUMEL, numel) * _FP32)
