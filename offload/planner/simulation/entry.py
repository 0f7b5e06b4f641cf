"""The state of one unit's weights in the simulated pager."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from offload.planner.simulation.clock import Work
from offload.states import Tier
from offload.swapper.policy import Block
from offload.swapper.table import Residency, UnitSize


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


class Candidates:
    """Indices of the units of which a decision picks the next in the access order."""

    def __init__(self, entries: Iterable[Entry], streams: Callable[[int], bool]) -> None:
        """Notes all of `entries`; `streams` returns True for a unit that no host buffer can hold."""
        self._streams = streams
        self.to_read: set[int] = set()
        """Units on DISK that may be read into a host buffer."""
        self.to_upload: set[int] = set()
        """Units that are not on the device, and not on their way into its memory from DISK."""
        for entry in entries:
            self.note(entry)

    def note(self, entry: Entry) -> None:
        """Adds or removes a unit whose state has changed."""
        # A unit on DISK has no host buffer but during an update.
        reads = entry.residency is Residency.DISK and not entry.updating and not self._streams(entry.index)
        uploads = entry.residency is not Residency.DEVICE and not entry.reading_in_place
        for units, belongs in ((self.to_read, reads), (self.to_upload, uploads)):
            (units.add if belongs else units.discard)(entry.index)
