"""How fast this machine is: what `offload plan` counts with, measured once and kept for the machine.

Everything is measured by what training will use: the I/O queue, the kernels, pinned memory, torch's matrix products.

rates     what is measured, and of what
pace      sizes that grow until a call takes long enough, and rounds within a budget of seconds
host      memory and the optimizer: what the CPU does whatever computes
compute   matrix products and what lies between them, of the device
disturb   whether something else ran meanwhile
measure   all of it, one after the other
kept      the file in which it waits for a plan, and its words
"""

from offload.hardware.probe.kept import as_json, check_kept, keep, kept, kept_at, lines
from offload.hardware.probe.measure import (
    SECONDS,
    check_folders,
    check_size,
    device_of,
    drive_rates,
    machine_of,
    measure_rates,
    probe,
)
from offload.hardware.probe.rates import DTYPES, DriveRates, DtypeRates, Probed, Rates

__all__ = [
    "DTYPES",
    "SECONDS",
    "DriveRates",
    "DtypeRates",
    "Probed",
    "Rates",
    "as_json",
    "check_folders",
    "check_kept",
    "check_size",
    "device_of",
    "drive_rates",
    "keep",
    "kept",
    "kept_at",
    "lines",
    "machine_of",
    "measure_rates",
    "probe",
]
