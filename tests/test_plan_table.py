"""docs/reference/plan-table.md, and the figures of docs/guides/finetune-13b.md, are what the planner says."""

from __future__ import annotations

import pytest

from offload.planner import guide_table as table

PAGE = table.PAGE.read_text(encoding="utf-8")
CARD_ROWS = [line for line in table.CARD_PAGE.read_text(encoding="utf-8").splitlines() if table.is_of_card(line)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", range(len(table.CASES)))
def test_a_row_of_the_first_model_is_generated(number: int) -> None:
    """Those of the others take longer."""
    first = [line for line in PAGE.splitlines() if line.startswith("| 13B")]
    assert first[number] == table.row(table.MODELS[0], *table.CASES[number]), (
        "run: python -m offload.planner.guide_table"
    )


@pytest.mark.slow
def test_the_page_is_generated() -> None:
    assert table.document() == PAGE, "run: python -m offload.planner.guide_table"


def test_the_tables_have_all_rows() -> None:
    assert len(CARD_ROWS) == len(table.CARD_CASES) == 6
    assert sum(line.startswith("| 13B") for line in PAGE.splitlines()) == len(table.CASES)


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", range(len(table.CARD_CASES)))
def test_a_row_of_13b_on_one_card_is_generated(number: int) -> None:
    assert CARD_ROWS[number] == table.card_row(*table.CARD_CASES[number]), "run: python -m offload.planner.guide_table"
