"""Writes the page of DeepSpeed's names."""

from __future__ import annotations

from tests.support.deepspeed_names import PAGE, document

PAGE.write_text(document(), encoding="utf-8")
