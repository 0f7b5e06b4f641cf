"""The OpenMP team of a thread: a thread that waits for its turn must not keep one.

torch computes on a CPU with OpenMP, which gives each thread that computes a team of its own. GNU's libgomp counts the
threads of all teams. Once they are more than the cores, no team waits actively for its next piece of work any longer:
it sleeps, and each operation of the model wakes it. Eight micro-batches that take turns have eight teams, of which one
works: a step of gpt2-small on two cores took 4 to 15 % longer than with one team, in single runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_SOFT = 1
"""omp_pause_soft of OpenMP 5.0, section 3.2.43: state that the program has set survives."""


def _find() -> Callable[[int], object] | None:
    # torch loads its OpenMP library for all of the process. None is there where torch is built without OpenMP.
    try:
        found: Callable[[int], object] = ctypes.CDLL(None).omp_pause_resource_all
    except (OSError, AttributeError):
        return None
    return found


_pause = _find()


def end_team() -> None:
    """Ends the other threads of the calling thread's team; its next parallel operation makes a team again (0.1 ms)."""
    if _pause is not None:
        _pause(_SOFT)
