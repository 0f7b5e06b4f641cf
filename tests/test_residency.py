"""The table of residencies: the pager takes every arrow that is listed and refuses every other."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from offload.swapper import pager as pager_module
from offload.swapper.arena import DeviceArena
from offload.swapper.device import Device
from offload.swapper.host import Classes, HostArena
from offload.swapper.pager import Pager, UnitSize
from offload.swapper.policy import Limits
from offload.swapper.residency import ARROWS, Residency, Tier


@pytest.mark.parametrize(("start", "end"), list(itertools.product(Residency, Residency)))
def test_every_pair(start: Residency, end: Residency) -> None:
    cpu = Device(torch.device("cpu"))
    host = HostArena(Classes(0, 0, 0, 4096), cpu)
    unit = UnitSize("unit", 4096, Tier.HOST, (range(4096),))
    pager = Pager([unit], host, DeviceArena(4096, cpu), cpu, None, Limits())
    entry = pager._entries[0]
    entry.residency = start
    with pager.lock:
        if (start, end) in ARROWS:
            pager._move(entry, end)
            assert pager.residency(0) is end
        else:
            with pytest.raises(AssertionError):
                pager._move(entry, end)


def test_the_functions_that_the_table_names_exist() -> None:
    for function in set(ARROWS.values()):
        assert hasattr(Pager, function) or hasattr(Pager, f"_{function}"), function


def test_failed_is_the_end() -> None:
    assert not [arrow for arrow in ARROWS if arrow[0] is Residency.FAILED]


def test_only_move_assigns_a_residency() -> None:
    source = Path(pager_module.__file__).read_text()
    assert source.count(".residency = ") == 1
