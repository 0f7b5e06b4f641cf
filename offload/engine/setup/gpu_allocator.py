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

_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables with settings of the allocator. From torch 2.9 on the first is for all devices, and the second warns."""
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
    name, line = chosen(os.environ, torch.__version__, torch.cuda.is_initialized())
    if name is not None:
        os.environ[name] = _GROWING
    return () if line is None else (line,)


def chosen(environment: Mapping[str, str], version: str, in_use: bool) -> tuple[str | None, Remark | None]:
    """Returns the variable to set, if any, and the line for the user.

    Args:
        environment: the environment of the process.
        version: the version of torch.
        in_use: True if CUDA has been used, and the environment read.
    """
    given = {name: environment[name] for name in _NAMES if environment.get(name)}
    major, minor = (int(part) for part in version.split(".")[:2])
    name = _NAMES[0] if (major, minor) >= (2, 9) else _NAMES[1]
    grows = Remark(
        f"torch's allocator lets its segments grow ({next(iter(given), name)}={_GROWING}), which leaves fewer gaps "
        "beside the weights; another value of this variable changes that"
    )
    if given:
        return None, grows if set(given.values()) == {_GROWING} else None
    if in_use:
        return None, Remark(
            f"CUDA was in use before offload.initialize, so torch's allocator keeps segments of fixed size, which may "
            f"lose memory to gaps: set {name}={_GROWING} in the environment"
        )
    return name, grows
