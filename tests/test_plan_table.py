"""docs/guides/plan-table.md, and the figures of docs/guides/single-gpu-13b.md, are what the planner says."""

from __future__ import annotations

import pytest

from offload.planner import table

PAGE = table.PAGE.read_text(encoding="utf-8")


def test_the_rows_of_the_first_model_are_generated() -> None:
    """Those of the others take longer."""
    first = [line for line in PAGE.splitlines() if line.startswith("| 13B")]
    assert first == table.rows(*table.MODELS[0]), "run: python -m offload.planner.table"


@pytest.mark.slow
def test_the_page_is_generated() -> None:
    assert table.document() == PAGE, "run: python -m offload.planner.table"


def test_the_rows_of_13b_on_one_card_are_generated() -> None:
    page = table.CARD_PAGE.read_text(encoding="utf-8")
    assert len(table.card_rows()) == 6
    assert table.card_page(page) == page, "run: python -m offload.planner.table"
