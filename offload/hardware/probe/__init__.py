"""Measurement of this machine's speed, the input of `offload plan`: measured once and cached for the machine.

Everything is measured with the code that training will use: the I/O queue, the kernels, pinned memory, and torch's
matrix products.

    rates     the results
    pace      sizes that grow until a call takes long enough, and rounds within a budget of seconds
    host      memory and the optimizer: the CPU's work on every compute device
    compute   matrix products, and the operations between them, of the compute device
    disturb   detection of other work on the machine during the measurement
    measure   all measurements, one after the other
    kept      the cache, and the results in words
"""

from offload.hardware.probe.kept import (
    as_json,
    cache_path,
    check_kept,
    drive_line,
    drive_under,
    keep,
    kept,
    kept_window,
    lines,
)
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
    "cache_path",
    "check_folders",
    "check_kept",
    "check_size",
    "device_of",
    "drive_line",
    "drive_rates",
    "drive_under",
    "keep",
    "kept",
    "kept_window",
    "lines",
    "machine_of",
    "measure_rates",
    "probe",
]
