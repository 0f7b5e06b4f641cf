"""Both scripts in one process, since the imports of their libraries take longer than they."""

from __future__ import annotations

import runpy
from pathlib import Path

for name in ("trainer.py", "accelerate_loop.py"):
    runpy.run_path(str(Path(__file__).parent / name), run_name="__main__")
print("right")
