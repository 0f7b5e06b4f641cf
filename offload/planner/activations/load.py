"""The work of a step, with where each block's input waits for the backward."""

from __future__ import annotations

from typing import NamedTuple

from offload.layout.pass_order import LAYER_MAJOR
from offload.planner.model_shape import Shape


class Load(NamedTuple):
    """Work of a step: micro-batch, accumulation, recomputation."""

    batch: int
    """Sequences of a micro-batch."""
    accumulation: int = 1
    recompute: bool = False
    """True if repeated blocks keep their input alone, and are computed again in the backward."""
    chunked_loss: bool = False
    """True if the loss is computed for chunks of tokens, so that never all logits are in memory."""
    tile: int = 0
    """Tokens of a tile of an MLP; 0 computes an MLP for all tokens at once, or in `tiles`."""
    tiles: int = 0
    """Tiles of an MLP, in the place of their tokens; 0 leaves them to `tile`."""
    on_disk: int = 0
    """Blocks whose input waits on DISK, the first ones of the forward."""
    on_host: int = 0
    """Blocks whose input waits in HOST memory, the next ones; the inputs of all others stay on the device."""
    first: int = 0
    """Blocks that are recomputed, the first ones of the forward; 0 for all."""
    schedule: str = "auto"
    """Order of micro-batches and blocks: "layer_major", "micro_batch_major", or "auto" before a plan has chosen."""
    speculate: bool = True
    """True if units are updated under the backward wherever such an update can be dropped."""

    @property
    def alive(self) -> int:
        """Returns the micro-batches whose activations are in memory at a time."""
        return self.accumulation if self.schedule == LAYER_MAJOR else 1

    def tokens(self, shape: Shape) -> int:
        """Returns the tokens of a step."""
        return self.batch * self.accumulation * shape.sequence
