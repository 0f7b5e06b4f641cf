"""`offload plan` for a described machine: the report, its verdict, defaults and advice."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from offload.cli.console import parse_count
from offload.cli.main import app
from offload.errors import BudgetError, ConfigError
from offload.planner import activations, memory, recommend
from offload.planner.activations import Load
from offload.planner.hardware import Hardware, described, parse_drive
from offload.planner.model_shape import Shape, from_count
from offload.planner.output import Asked, cautions, verdict
from offload.planner.request import PlanRequest, hardware
from offload.sizes import GIB, MIB, format_count, format_time
from tests.pages import plan_table as table


def run(*arguments: str) -> Any:
    """Returns what `offload plan` did with these arguments."""
    return CliRunner().invoke(app, ["plan", *arguments])


def found(*arguments: str) -> dict[str, Any]:
    """Returns the object that `offload plan --json` prints for these arguments."""
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def shape() -> Shape:
    return from_count(13 * 10**9, 20, 2048)


def plan(shape: Shape, machine: Hardware, load: Load, **options: Any) -> recommend.Planned:
    return recommend.plan(shape, machine, load, memory.settings(**options))


def test_the_first_line_is_the_verdict(shape: Shape) -> None:
    planned = plan(shape, described("RTX 4090", 64 * GIB, [parse_drive("7GB/s,4GB/s")]), Load(1))
    best = recommend.Change("more of something", 1.0, 2.0, "--more 2")
    line = verdict(planned, recommend.Advice((best, best._replace(words="another", gain=1.5)), 0), Asked())
    daily = format_count(planned.timing.tokens_per_second * 86400)
    assert line.startswith(f"it fits; {daily} tokens a day; NVMe limits (")
    assert line.endswith("; first change: more of something (--more 2): 2.00 times the tokens a second")
    none = verdict(planned, recommend.Advice((), 0), Asked())
    assert none.endswith("; no change that was tried is more than 5 % faster")


def test_the_first_line_names_a_drive_that_is_soon_worn_out(shape: Shape) -> None:
    planned = plan(shape, described("RTX 4090", 64 * GIB, [parse_drive("7GB/s,4GB/s")] * 2), Load(1))
    rate = planned.timing.moved.written / planned.timing.seconds
    days = 86400 * rate

    def named(asked: Asked) -> list[str]:
        return [each for each in cautions(planned, asked) if "worn out" in each]

    # Two drives without a rating are taken as two of a usual one.
    (typical,) = named(Asked())
    assert typical == f"a drive rated for 1200 TB would be worn out in {format_time(2 * 1200e12 / rate)} of training"
    (given,) = named(Asked(endurance=int(9.9 * days)))
    assert given == "the drives would be worn out in 9.9 days of training"
    assert given in verdict(planned, recommend.Advice((), 0), Asked(endurance=int(9.9 * days)))
    assert not named(Asked(endurance=int(10.1 * days)))
    # A run of known length is named if it takes more than a tenth of their life.
    day = round(86400 * planned.timing.tokens_per_second)
    assert not named(Asked(tokens=day // 2, endurance=int(9 * days)))
    (long,) = named(Asked(tokens=day, endurance=int(9 * days)))
    assert long.endswith(", and this run takes 11% of its life")


def test_the_first_line_says_that_a_run_cannot_be_resumed(shape: Shape) -> None:
    machine = described("RTX 4090", 64 * GIB, [parse_drive("7GB/s,4GB/s")])
    words = "no resume after a kill (durability none)"
    assert words in cautions(plan(shape, machine, Load(1), durability="none"), Asked())
    assert words not in cautions(plan(shape, machine, Load(1)), Asked())


def test_the_first_line_says_that_the_probe_was_disturbed(shape: Shape) -> None:
    doubts = ("memory: 2 GB/s at the beginning of the probe", "other processes took 60% of the cores during the probe")
    machine = replace(described("RTX 4090", 64 * GIB, [parse_drive("7GB/s,4GB/s")]), doubts=doubts)
    assert cautions(plan(shape, machine, Load(1)), Asked())[0] == doubts[-1]


def test_advice_is_a_prediction_of_its_own(shape: Shape) -> None:
    machine = described("RTX 4090", 64 * GIB, [parse_drive("7GB/s,4GB/s")])
    planned = recommend.choose(shape, machine, Load(1), None)
    found = {change.words: change for change in recommend.advise(planned).changes}
    many = planned.load._replace(accumulation=4)
    again = recommend.plan(shape, machine, many, planned.content)
    assert found["4 micro-batches a step"].seconds == again.timing.seconds
    assert all(change.gain >= 1.05 for change in found.values())


def test_the_recommended_host_budget_is_what_pays(shape: Shape) -> None:
    machine = described("RTX 4090", 512 * GIB, [parse_drive("7GB/s,4GB/s")])
    by_default, tight = (plan(shape, machine, Load(1, 1, True), host_memory=n) for n in (None, 30 * GIB))
    advised = recommend.recommended_host(by_default)
    assert advised == recommend.recommended_host(tight) > by_default.memory.host
    assert plan(shape, machine, Load(1, 1, True), host_memory=advised).timing.seconds < by_default.timing.seconds / 1.03
    slow = plan(shape, replace(machine, matmul=1e12), Load(1, 1, True))
    assert recommend.recommended_host(slow) == by_default.memory.host, "compute hides it all"


def test_what_fits_in_memory_stays_there() -> None:
    small = from_count(3 * 10**9, 24, 1024)
    for gpu, ram, on_disk in (("A100 80GB", 2, False), ("RTX 4090", 64, False), ("RTX 4090", 2, True)):
        machine = described(gpu, ram * GIB, [parse_drive("7GB/s")])
        assert recommend.choose(small, machine, Load(1), None).memory.placement.on_disk is on_disk


def test_a_gpu_has_room_for_more_layers_the_less_activations_take() -> None:
    """As a run of it does after its first step; half of what they take stays free beside them."""
    shape = from_count(13 * 10**9, 40, 2048)
    sizes = []
    for room in (24 * GIB, 40 * GIB, 80 * GIB):
        machine = replace(described("A100", 128 * GIB, [parse_drive("7GB/s")]), gpu_memory=room)
        planned = plan(shape, machine, Load(2, 1, True))
        beside = activations.beside_weights(planned.memory, shape, planned.load)
        assert planned.memory.device + beside < room
        sizes.append(planned.memory.device)
        if planned.memory.device < planned.memory.placement.device_need.most:
            assert planned.memory.device + beside + beside // 2 <= room - 255 * MIB
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_without_a_drive_no_state_is_placed_there(shape: Shape) -> None:
    machine = replace(described("RTX 4090", 64 * GIB), drives=())
    with pytest.raises(BudgetError):
        recommend.choose(shape, machine, Load(1), None)
    with pytest.raises(ConfigError, match="no drive"):
        plan(shape, machine, Load(1, 1, True))


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
    asked = PlanRequest(
        gpu=given.pop("--gpu"),
        ram=given.pop("--ram"),
        drive=[given.pop("--drive")],
        memory_bandwidth=given.pop("--memory-bandwidth"),
    )
    assert not given and shape == table.card_shape() and durability == "step"
    assert hardware(asked) == table.card_machine(ram)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("number", range(len(table.CARD_CASES)))
def test_a_row_of_13b_on_one_card_is_generated(number: int) -> None:
    assert CARD_ROWS[number] == table.card_row(*table.CARD_CASES[number]), "run: python -m tests.pages.plan_table"
