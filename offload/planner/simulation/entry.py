"""The state of one unit's weights in the simulated pager."""

from __future__ import annotations

from dataclasses import dataclass

from offload.planner.simulation.clock import Work
from offload.states import Tier
from offload.swapper.policy import Block
from offload.swapper.residency import Residency
from offload.swapper.unit_table import UnitSize


@dataclass
class Entry:
    """Weights of one unit, as in the real pager."""

    index: int
    size: UnitSize
    residency: Residency
    host_buffer: Block | None = None
    """Host buffer of the weights, also during their read. None for weights whose tier is HOST."""
    device_buffer: Block | None = None
    """Device buffer of the weights."""
    reading: Work | None = None
    copied: Work | None = None
    """Last copy from the host buffer to the device buffer. The host buffer must not be reused before its end."""
    pins: int = 0
    updating: bool = False
    in_update: bool = False
    unwritten: bool = False

    def read_ended(self) -> bool:
        """Returns True if a read of the weights has ended that nobody has delivered yet."""
        return self.reading is not None and self.reading.done

    @property
    def reading_in_place(self) -> bool:
        """Returns True while a read fills the device buffer."""
        return self.residency is Residency.UPLOADING and self.reading is not None

    @property
    def at_hand(self) -> bool:
        """Returns True if HOST holds the newest weights, or will hold them once a read has ended."""
        return self.host_buffer is not None or self.size.tier is not Tier.DISK
