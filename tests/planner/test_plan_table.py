"""docs/reference/plan-table.md, and the figures of docs/guides/finetune-13b.md, are what the planner says."""

from __future__ import annotations

import shlex

import pytest

from offload.cli.console import parse_count
from offload.planner.model_shape import from_count
from offload.planner.request import Described, hardware
from tests.pages import plan_table as table

PAGE = table.PAGE.read_text(encoding="utf-8")
ROWS = (*table.CASES, *((*other, 1) for other in table.OTHERS))
"""Of the first model, in the order of the page: by GPU and drives, and of other machines, which have one drive."""
SMALL = tuple(f"| 13B | {gpu} |" for gpu in table.SMALL)
CARD_ROWS = [line for line in table.CARD_PAGE.read_text(encoding="utf-8").splitlines() if table.is_of_card(line)]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_a_row_of_the_first_model_is_generated(number: int) -> None:
    """Those of the others take longer."""
    first = [line for line in PAGE.splitlines() if line.startswith("| 13B") and not line.startswith(SMALL)]
    assert first[number] == table.row(table.MODELS[0], *ROWS[number]), "run: python -m tests.pages.plan_table"


@pytest.mark.slow
def test_the_page_is_generated() -> None:
    assert table.document() == PAGE, "run: python -m tests.pages.plan_table"


def test_the_tables_have_all_rows() -> None:
    assert len(CARD_ROWS) == len(table.CARD_CASES) == 6
    assert sum(line.startswith("| 13B") for line in PAGE.splitlines()) == len(ROWS) + len(table.SMALL)


@pytest.mark.parametrize("number", range(len(table.GPUS)))
def test_the_rates_of_each_gpu_are_on_the_page_with_their_origins(number: int) -> None:
    gpu = table.GPUS[number]
    sources = [line.partition(". ")[2] for line in PAGE.splitlines() if line.partition(". ")[0].isdigit()]
    assert table.rates_row(gpu, sources) in PAGE.splitlines(), "run: python -m tests.pages.plan_table"


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", range(len(table.STEPS)))
def test_a_prediction_beside_a_step_of_others_is_generated(number: int) -> None:
    assert table.step_row(table.STEPS[number]) in PAGE.splitlines(), "run: python -m tests.pages.plan_table"


@pytest.mark.slow
def test_the_rows_of_smaller_cards_are_on_the_page() -> None:
    rows = [table.small_row(table.SMALL_MODELS[0], table.SMALL[0])]
    assert all(row in PAGE.splitlines() for row in rows), "run: python -m tests.pages.plan_table"


def test_the_command_of_the_cards_page_plans_its_first_row() -> None:
    """A reader who types the command finds the row below it."""
    text = table.CARD_PAGE.read_text(encoding="utf-8").partition("\noffload plan ")[2].partition("      #")[0]
    typed = shlex.split(text.replace("\\\n", ""))
    assert table.CARD_CASES[0][1].chunked_loss, "as without an option"
    given = dict(zip(typed[::2], typed[1::2], strict=True))
    ram, load, durability = table.CARD_CASES[0]
    assert f"{load.batch} {load.accumulation}" == f"{given.pop('--batch-size')} {given.pop('--accumulation')}"
    shape = from_count(parse_count(given.pop("--parameters")), int(given.pop("--layers")), int(given.pop("--seq-len")))
    asked = Described(given.pop("--gpu"), given.pop("--ram"), (given.pop("--drive"),), given.pop("--memory-bandwidth"))
    assert not given and shape == table.card_shape() and durability == "step"
    assert hardware(asked) == table.card_machine(ram)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("number", range(len(table.CARD_CASES)))
def test_a_row_of_13b_on_one_card_is_generated(number: int) -> None:
    assert CARD_ROWS[number] == table.card_row(*table.CARD_CASES[number]), "run: python -m tests.pages.plan_table"
