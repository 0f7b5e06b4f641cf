"""Every block of Python in the guides runs, in an empty folder of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[1] / "docs" / "guides"
BLOCKS = [
    pytest.param(code, id=f"{guide.stem}: {code.splitlines()[0]}")
    for guide in sorted(GUIDES.glob("*.md"))
    for code in re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL)
]


@pytest.mark.parametrize("code", BLOCKS)
def test_the_block_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for drive in ("drive_a", "drive_b"):
        Path(drive).mkdir()
    exec(compile(code, "a guide", "exec"), {})
