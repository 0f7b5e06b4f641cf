"""Write docs/configuration.md from the descriptions in offload/config.py."""

from __future__ import annotations

from pathlib import Path

from offload.config import document

if __name__ == "__main__":
    (Path(__file__).parents[1] / "docs" / "configuration.md").write_text(document())
