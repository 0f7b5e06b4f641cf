"""The cache of a measurement, and its results in words."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from offload.aio.file import window_bytes
from offload.errors import ConfigError, OffloadError
from offload.fileio import cache_file, own_cache_folder, read_cache, write_cache
from offload.hardware.info import machine as about_machine
from offload.hardware.probe import disturb
from offload.hardware.probe.rates import DriveRates, DtypeRates, Probed, Rates
from offload.records import parse
from offload.sizes import count_of, format_size

_VERSION = 5


def check_kept() -> None:
    """Raises `ConfigError` if a result cannot be cached. Called before the measurement, which takes half a minute."""
    path = cache_path()
    try:
        # A file without a name: nothing is left behind if the probe is killed.
        with own_cache_folder(path), tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"the result cannot be stored in {path.parent}: {error.strerror or error}; set XDG_CACHE_HOME, or give "
            "--no-keep"
        ) from error


def cache_path() -> Path:
    """Returns the path of the cache of this machine."""
    return cache_file("probe")


def unusable(found: Probed) -> list[str]:
    """Returns sentences on why a measurement says nothing about the machine; none for a usable one."""
    reasons = []
    if found.spread > disturb.FAR:
        reasons.append(f"a rate that was measured twice differs {found.spread:,.0f}-fold")
    by_dtype = found.rates.by_dtype
    for name, rate, unit in (
        *((f"matrix products in {name}", of.matmul, "operations") for name, of in by_dtype.items()),
        ("norms, activations and sums in fp32", by_dtype["fp32"].elementwise, "bytes"),
        ("memory", found.rates.memory, "bytes"),
    ):
        if not rate >= disturb.SLOWEST:
            reasons.append(f"{name}: {rate:.3g} {unit} a second is no rate of a machine")
    return reasons


def keep(found: Probed) -> Path:
    """Caches a measurement for the planner, and returns the path.

    Drives that were measured earlier and are not in `found` are kept.

    Raises:
        OffloadError: the measurement says nothing about the machine. What was cached before stays.
        OSError: the file cannot be written.
    """
    if reasons := unusable(found):
        raise OffloadError(f"the result is not stored: {'; '.join(reasons)}; {disturb.CURE}")
    path = cache_path()
    before = kept()
    mine = {each.path for each in found.drives}
    drives = [*(each for each in (before.drives if before else ()) if each.path not in mine), *found.drives]
    write_cache(path, json.dumps(as_json(found._replace(drives=tuple(drives))), indent=2) + "\n")
    return path


def kept() -> Probed | None:
    """Returns the cached measurement; None if there is none, or if it is of another processor or number of cores."""
    try:
        content = parse(read_cache(cache_path()))
        if content["version"] != _VERSION:
            return None
        found = Probed(
            content["machine"],
            _rates(content["rates"]),
            tuple(DriveRates(**each) for each in content["drives"]),
            content["date"],
            content["seconds"],
            tuple(content["doubts"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # none yet, or damaged: the next probe replaces it
    if unusable(found):
        return None  # an earlier version has stored such figures too
    # A home folder may be shared by several machines, so the cache is checked against this one.
    here = about_machine()
    return found if all(found.machine.get(key) == here[key] for key in ("processor", "cores")) else None


def drive_under(found: Probed, folder: str) -> DriveRates | None:
    """Returns the rates measured in `folder`, or else in another folder of the same file system; None without any."""
    path = os.path.realpath(folder)
    for each in found.drives:
        if each.path == path:
            return each
    system = _file_system(path)
    return next((each for each in found.drives if os.path.isdir(each.path) and _file_system(each.path) == system), None)


def _file_system(path: str) -> int:
    """Returns the device number of the file system of `path`, which need not exist yet."""
    # The folder may not exist yet: its first existing parent is on the same file system.
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return os.stat(path).st_dev


def kept_window(folders: Sequence[str]) -> int:
    """Returns the bytes of a window of reads or writes for a queue over `folders`, by the cached measurement.

    Returns:
        The bytes; 0 to read and write at once, also if one of the drives was not measured.
    """
    found = kept() if folders else None
    if found is None:
        return 0
    drives = [each for folder in folders if (each := drive_under(found, folder)) is not None]
    return window_bytes(drives) if len(drives) == len(folders) else 0


def as_json(found: Probed) -> dict[str, Any]:
    """Returns the content that `--json` prints and `keep` writes."""
    return {
        "version": _VERSION,
        "machine": found.machine,
        "rates": {
            **_rounded(found.rates),
            "by_dtype": {name: _rounded(each) for name, each in found.rates.by_dtype.items()},
        },
        "drives": [_rounded(each) for each in found.drives],
        "date": found.date,
        "seconds": round(found.seconds, 1),
        "doubts": list(found.doubts),
    }


def _rounded(values: NamedTuple) -> dict[str, Any]:
    return {name: float(f"{v:.4g}") if isinstance(v, float) else v for name, v in values._asdict().items()}


def _rates(content: dict[str, Any]) -> Rates:
    by_dtype = {name: DtypeRates(**each) for name, each in content["by_dtype"].items()}
    return Rates(**content | {"by_dtype": by_dtype})


def lines(found: Probed) -> list[tuple[str, str]]:
    """Returns the results for people, as pairs of name and value."""
    host, rates = found.machine, found.rates
    device = host["gpu"] or f"{host['processor']}, {count_of(host['cores'], 'core')}"
    rows = [
        ("compute", device),
        ("memory", f"{rates.memory / 1e9:.1f} GB/s read and written, {rates.copy / 1e9:.1f} GB/s copied"),
        ("to the device", f"{rates.upload / 1e9:.1f} GB/s, and from it {rates.download / 1e9:.1f} GB/s"),
        ("new memory", f"{rates.fresh / 1e9:.1f} GB/s"),
    ]
    for name, of in rates.by_dtype.items():
        rows += [
            (f"{name}: products", f"{of.matmul / 1e12:.3g} Tflop/s, {of.weights / 1e9:.1f} GB/s of weights"),
            ("elementwise", f"{of.elementwise / 1e9:.1f} GB/s"),
            ("optimizer", f"{of.optimizer / 1e6:.0f} M parameters a second"),
            ("gradients", f"{of.gradient / 1e6:.0f} M parameters a second"),
        ]
    return rows + [(each.path, drive_line(each)) for each in found.drives]


def drive_line(rates: DriveRates) -> str:
    """Returns the rates of a drive in words, and the order in which a queue reads and writes there."""
    window = window_bytes([rates])
    order = f"in windows of {format_size(window)}" if window else "at once"
    return (
        f"reads {rates.read / 1e9:.2f}, writes {rates.write / 1e9:.2f}, both {rates.mixed / 1e9:.2f} GB/s: "
        f"reads and writes go {order}"
    )
