"""The command `python -m offload.config`, which writes docs/reference/configuration.md."""

from __future__ import annotations

from pathlib import Path

from offload.config.documentation import document

(Path(__file__).parents[2] / "docs" / "reference" / "configuration.md").write_text(document(), encoding="utf-8")
