"""The command `python -m offload.config`, which writes docs/configuration.md."""

from __future__ import annotations

from pathlib import Path

from offload.config.documentation import document

(Path(__file__).parents[2] / "docs" / "configuration.md").write_text(document(), encoding="utf-8")
