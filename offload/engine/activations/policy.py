"""Which inputs of checkpointed units leave the device, and which leave host memory: pure functions of sizes.

Inputs are kept in the order of the forward, and a backward asks for the newest first. So the oldest ones leave first:
their next use is furthest away. The newest one never leaves the device, since the backward may begin with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload.config import Config
from offload.errors import ConfigError
from offload.notices import Remark
from offload.sizes import count_of

STAGED_INPUTS = 4
"""Host buffers through which inputs go to DISK: two are written or read, one is copied, one is ahead."""
FREE_SHARE = 0.8
"""Fraction of the free host memory that inputs may take where no budget is configured."""
_HEADROOM = 2
"""Free host buffers that writes to DISK keep ahead of the forward."""


def leaves_device(sizes: Sequence[int], limit: float) -> int:
    """Returns how many of the inputs on the device leave it, oldest first.

    Args:
        sizes: bytes of each input on the device, oldest first. The newest does not count and does not leave.
        limit: bytes that the others may take together.
    """
    kept = sum(sizes[:-1])
    count = 0
    while kept > limit:
        kept -= sizes[count]
        count += 1
    return count


def writes(unwritten: int, room: int, nbytes: int) -> bool:
    """Returns True if the oldest input in host memory is to be written to DISK now, to keep buffers free.

    Args:
        unwritten: inputs in host buffers whose bytes are not on DISK, nor on their way there.
        room: bytes of host memory for inputs.
        nbytes: bytes of an input.
    """
    buffers = max(room // max(nbytes, 1), STAGED_INPUTS)
    return unwritten > buffers - _HEADROOM


def check_tier(tier: str | None, drives: bool) -> None:
    """Raises `ConfigError` if inputs are to go to DISK without a drive."""
    if tier == "nvme" and not drives:
        raise ConfigError(
            '"activations": "nvme" needs a folder for files, but no "nvme_path" is given; set one in the "offload" '
            "block"
        )


def notices(config: Config, blocks: int, host_addressable: bool) -> tuple[str, ...]:
    """Returns the lines that tell a user which blocks are computed again, and which keys have no effect.

    Args:
        config: the whole config, which asks for blocks to be computed again.
        blocks: number of blocks that are.
        host_addressable: True if device memory is host memory.
    """
    theirs, tier = config.activation_checkpointing, config.activation_tier
    if not blocks:
        return (
            "no block is computed again in backward: the model has no ModuleList or Sequential of modules with "
            'parameters; name the modules in "units" of the "offload" block',
        )
    where = {
        "device": "on the device",
        "cpu": "in host memory, and in files where that ends" if config.drives else "in host memory",
        "nvme": "in files",
        "auto": "on the device while there is room, then in host memory and in files",
    }[tier or "device"]
    if host_addressable and tier in ("cpu", "auto"):
        where = "where they are, in host memory" + (", and in files where that ends" if config.drives else "")
    wanted = theirs.number_checkpoints
    lines = (
        (
            wanted is not None and wanted > blocks,
            f"number_checkpoints is {wanted}, and the model has {blocks} blocks, all of which are computed again",
        ),
        (
            theirs.cpu_checkpointing and tier != "cpu",
            f'cpu_checkpointing has no effect, since "activations" is "{tier}"',
        ),
        (
            theirs.contiguous_memory_optimization and tier == "device",
            "contiguous_memory_optimization has no effect, since inputs of blocks stay on the device",
        ),
    )
    told = Remark(f"{count_of(blocks, 'block is', 'blocks are')} computed again in backward; inputs wait {where}")
    return (told, *(line for holds, line in lines if holds))
