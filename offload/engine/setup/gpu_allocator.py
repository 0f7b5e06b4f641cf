"""Growing segments for torch's allocator of a GPU, unless the user has chosen otherwise.

torch's allocator takes memory from the driver in segments. Of fixed size, each keeps the gaps that batches of other
lengths leave in it, and beside an arena that takes most of the GPU a gap is memory that nobody can use. A segment that
grows is one range of addresses, onto which memory is mapped as it is needed.

torch reads the setting once, from the environment, when CUDA is first used. To change it later there is only a private
function, which sets every other setting of the user back to its default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from offload.notices import Remark

_NAME = "PYTORCH_CUDA_ALLOC_CONF"
"""The variable that every version reads for CUDA. torch 2.9 alone warns that it is deprecated, and ignores
PYTORCH_ALLOC_CONF for CUDA in 2.9.1 (pytorch/pytorch#183387); later versions take either name.
"""
_NAMES = (_NAME, "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""All variables with settings of the allocator."""
_GROWING = "expandable_segments:True"


def let_segments_grow(device: str) -> tuple[Remark, ...]:
    """Asks torch for segments that grow, in this process's environment, and returns a line for the user.

    A further call changes nothing, and returns the same line.

    Args:
        device: the device of the config: "auto", "cpu" or "cuda".

    Returns:
        The line if segments grow by this setting, or if it comes too late; nothing if there is no GPU of NVIDIA, or
        if the user has set anything else.
    """
    if device == "cpu" or torch.version.hip is not None or not torch.cuda.is_available():
        return ()
    asks, line = chosen(os.environ, torch.cuda.is_initialized())
    if asks:
        os.environ[_NAME] = _GROWING
    return () if line is None else (line,)


def chosen(environment: Mapping[str, str], in_use: bool) -> tuple[bool, Remark | None]:
    """Returns whether the variable is to be set, and the line for the user, if any.

    Args:
        environment: the environment of the process.
        in_use: True if CUDA has been used, and the environment read.
    """
    given = {name: environment[name] for name in _NAMES if environment.get(name)}
    grows = Remark(
        f"torch's allocator lets its segments grow ({next(iter(given), _NAME)}={_GROWING}), which leaves fewer gaps "
        "beside the weights; another value of this variable changes that"
    )
    if given:
        return False, grows if set(given.values()) == {_GROWING} else None
    if in_use:
        return False, Remark(
            f"CUDA was in use before offload.initialize, so torch's allocator keeps segments of fixed size, which may "
            f"lose memory to gaps: set {_NAME}={_GROWING} in the environment"
        )
    return True, grows
