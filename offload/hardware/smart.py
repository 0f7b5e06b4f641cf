"""The rated endurance of a drive, by its SMART data."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

from offload.hardware.info import drive as about_drive


def rated_bytes_of(folder: str) -> int | None:
    """Returns the rated bytes of the drive of `folder` by SMART; None without smartctl or the right to use it."""
    # The rating is an extra: a missing tool, right or field must not fail the plan.
    with contextlib.suppress(OSError, ValueError, KeyError, subprocess.SubprocessError):
        if shutil.which("smartctl") is None:
            return None
        command = ["smartctl", "-j", "-A", about_drive(folder)["device"]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        return rated_bytes(json.loads(done.stdout))
    return None


def rated_bytes(smart: Mapping[str, Any]) -> int | None:
    """Returns the bytes written so far divided by the fraction of the drive's life used.

    `smart` is smartctl's JSON of an NVMe drive, whose data units are 512,000 bytes.

    Returns:
        None for a drive that reports 0 % used, since the division has no result.
    """
    log = smart["nvme_smart_health_information_log"]
    # NVMe reports the used life in percent of the rated endurance, so the quotient is the rating.
    used, written = int(log["percentage_used"]), int(log["data_units_written"]) * 512_000
    return written * 100 // used if used else None
