"""The table of residencies: the pager takes every arrow that is listed and refuses every other."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

import offload
from offload.states import Tier
from offload.swapper.caches import DeviceCache, HostCache
from offload.swapper.memory.device import Device
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostArena, HostBudget
from offload.swapper.pager import Pager, WeightUpdates
from offload.swapper.policy import Limits
from offload.swapper.table import ARROWS, Residency, UnitSize, UnitTable, pieces_of

PACKAGE = Path(offload.__file__).parent


@pytest.mark.parametrize(("start", "end"), list(itertools.product(Residency, Residency)))
def test_the_pager_takes_the_listed_transitions_alone(start: Residency, end: Residency) -> None:
    cpu = Device(torch.device("cpu"))
    host = HostArena(HostBudget(0, 0, 0, 4096), cpu)
    unit = UnitSize("unit", 4096, Tier.HOST, 4096, pieces_of([range(4096)]))
    pager = Pager([unit], host, DeviceArena(4096, cpu), cpu, None, Limits())
    entry = pager._entries[0]
    entry.residency = start
    with pager.lock:
        if (start, end) in ARROWS:
            pager.table.move(entry, end)
            assert pager.residency(0) is end
        else:
            with pytest.raises(AssertionError):
                pager.table.move(entry, end)


def test_the_functions_that_the_table_names_exist() -> None:
    parts = (Pager, WeightUpdates, HostCache, DeviceCache, UnitTable)
    for function in set(ARROWS.values()):
        assert any(hasattr(part, name) for part in parts for name in (function, f"_{function}")), function


def test_failed_is_the_end() -> None:
    assert not [arrow for arrow in ARROWS if arrow[0] is Residency.FAILED]


def test_only_move_assigns_a_residency() -> None:
    """Of the engine's pager; the simulated one has its own."""
    modules = (path for path in PACKAGE.rglob("*.py") if "simulation" not in path.parts)
    found = [path.name for path in modules for _ in re.finditer(r"\.residency(: \w+)? = ", path.read_text())]
    assert found == ["table.py"]
