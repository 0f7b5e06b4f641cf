"""`offload train --keep` keeps a usable run or is an error; a resume with another text is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.swapper.store import store
from offload.swapper.store.drives import Shortage
from tests.support.processes.cli_in_process import call, run_folder, swap_files

__all__ = ["run_folder"]


def test_keep_without_durability_is_an_error() -> None:
    result = call("--steps", "1", "--keep", "--durability", "none")
    assert result.exit_code == 2 and "exclude each other: no commit would be kept" in result.stderr and not swap_files()


def test_keep_on_a_disk_that_is_too_small_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.engine import plan

    for module in (plan, store):
        monkeypatch.setattr(module, "find_shortage", lambda *_: Shortage("swap", 4 << 20, 3 << 20))
    result = call("--steps", "1", "--keep")
    assert result.exit_code == 2 and "4.0 MiB" in result.stderr and "3.0 MiB" in result.stderr and not swap_files()


def test_another_text_or_length_is_reported() -> None:
    assert call("--steps", "1", "--keep").exit_code == 0
    more = ("--keep", "--resume", "auto")
    assert "resumed, and" not in call("--steps", "2", *more).stdout
    output = " ".join(call("--steps", "3", "--seq-len", "16", *more).stdout.split())
    assert "resumed, and the data differ (seq-len was 32, is 16" in output
    Path("other.py").write_text("def half(number):\n    return number // 2\n\n" * 50)
    output = " ".join(call("--steps", "4", "--seq-len", "16", *more, text="other.py").stdout.split())
    assert "the data differ" in output and "checksum was" in output and "seq-len" not in output
