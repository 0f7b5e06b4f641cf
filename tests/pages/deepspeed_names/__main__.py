"""Writes the page of DeepSpeed's names."""

from __future__ import annotations

from tests.pages.deepspeed_names import PAGE, document

PAGE.write_text(document(), encoding="utf-8")
