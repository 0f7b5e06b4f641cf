"""Writes docs/configuration.md: `python -m offload.config`."""

from __future__ import annotations

from pathlib import Path

from offload.config.documentation import document

(Path(__file__).parents[2] / "docs" / "configuration.md").write_text(document(), encoding="utf-8")
