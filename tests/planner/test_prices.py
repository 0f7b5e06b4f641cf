"""Dollars of a run: prices, the three machines of the guides by hand, the cheapest change, and a report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload.cli.main import app
from offload.errors import ConfigError
from offload.planner import recommend
from offload.planner.activations import Load
from offload.planner.hardware import described, parse_drive
from offload.planner.memory import settings
from offload.planner.model_shape import from_count
from offload.prices import USUAL, Prices, cost, in_words, read_prices
from offload.sizes import GIB
from tests.report.test_report import step, written

HAND = Prices(drive=400, tbw=1200, ram=10, watts=500, kwh=0.2, rent=0, years=4)
MACHINE = ("--gpu", "RTX 4090", "--ram", "64GB", "--drive", "7GB/s,5GB/s,2TB")
COUNT = ("--parameters", "350M", "--layers", "8", "--batch-size", "2", "--accumulation", "2")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("seconds", "tokens", "nbytes", "wear", "million"),
    [
        # docs/guides/finetune-13b.md, 64 GB: 145.9 GiB are 156.66 GB; 1252.2 steps a day write 196.2 TB, 82.06M tokens.
        (69, 65536, 145.9 * GIB, 65.39, 0.826),
        # The same with 128 GB: 145.3 GiB are 156.01 GB, 5.2 cents; 1371.4 steps a day, 89.88M tokens.
        (63, 65536, 145.3 * GIB, 71.32, 0.820),
        # docs/guides/plan-a-run.md, qwen3-8b: 187.7 TB and 1445 x 86400 = 124.8M tokens a day.
        (86400, 1445 * 86400, 187.7e12, 62.57, 0.520),
    ],
)
def test_dollars_of_documented_machines(
    seconds: float, tokens: int, nbytes: float, wear: float, million: float
) -> None:
    spent = cost(HAND, seconds, tokens, nbytes)
    a_day = 86400 / seconds
    assert spent.parts["wear of drives"] * a_day == pytest.approx(wear, abs=0.01)
    assert spent.parts["power"] * a_day == pytest.approx(2.40), "500 W are 12 kWh a day"
    assert spent.a_day == pytest.approx(wear + 2.40, abs=0.01)
    assert spent.a_million == pytest.approx(million, abs=0.001)
    assert in_words(spent).endswith(f" a day: power $2.40, wear of drives ${wear:.2f}")


def test_the_usual_prices_have_a_date_and_sources_and_give_the_documented_dollars() -> None:
    usual = read_prices(USUAL)
    assert set(usual.sources) == {*Prices._fields} - {"sources"}
    assert all(re.search(r"\S.* \(20\d\d-\d\d-\d\d\)$", source) for source in usual.sources.values()), (
        "a source and a date"
    )
    # What is not assumed names where it was read.
    assert "?p=" in usual.sources["drive"] and "axbrief.com" in usual.sources["ram"]
    assert usual.ram == pytest.approx(679.99 / 64, abs=0.05) and usual.drive == pytest.approx((300 + 480) / 2, abs=10)
    # The same machines as above, by hand: 600 W are 14.4 kWh a day at 17 cents, $2.448; $400 / 1200 TB is $0.3333 a TB.
    for seconds, tokens, nbytes, a_day, million in (
        (69, 65536, 145.9 * GIB, 67.84, 0.827),
        (63, 65536, 145.3 * GIB, 73.77, 0.821),
        (86400, 1445 * 86400, 187.7e12, 65.01, 0.521),
    ):
        spent = cost(usual, seconds, tokens, nbytes)
        assert spent.a_day == pytest.approx(a_day, abs=0.01) and spent.a_million == pytest.approx(million, abs=0.001)


def test_rent_takes_the_place_of_power_and_purchases_are_paid_off() -> None:
    rented = cost(HAND._replace(rent=0.5), 86400, 1e6, 0)
    assert rented.parts == {"rent": 12.0, "wear of drives": 0.0} and rented.a_million == 12.0
    bought = cost(HAND, 4 * 365.25 * 86400, 0, 0, ram=64e9, drives=1)
    assert bought.parts["more RAM"] == pytest.approx(640) and bought.parts["another drive"] == pytest.approx(400)
    assert bought.a_million is None


def test_the_cheapest_change_is_the_cheapest_of_all_that_were_simulated() -> None:
    machine = described("RTX 4090", 64 * GIB, [parse_drive("7GB/s,4GB/s,2TB")])
    planned = recommend.plan(from_count(13 * 10**9, 20, 2048), machine, Load(1), settings())
    prices = recommend.priced(planned, HAND)
    shares = [change.share for change in prices.changes]
    assert shares == sorted(shares) and shares[0] < 1
    named = {change.words: change for change in prices.changes}
    assert {"moments in int8", "masters in bf24", "one more drive like the first", "commits every 10 steps"} <= set(
        named
    )
    assert any("free RAM" in words for words in named) and any("micro-batches a step" in words for words in named)
    assert not any(change.option == "--durability none" for change in prices.changes), "no promise is sold"
    assert "more RAM" in next(change for words, change in named.items() if "free RAM" in words).cost.parts
    assert "another drive" in named["one more drive like the first"].cost.parts
    # A plan of the change alone, by hand: $400 for 1200 TB, and $2.40 of power a day.
    alone = recommend.plan(planned.shape, machine, Load(1), settings(moments="int8")).timing
    by_hand = alone.moved.written * 400 / 1200e12 + alone.seconds * 2.4 / 86400
    assert named["moments in int8"].cost.total == pytest.approx(by_hand, rel=0.05), "a change is simulated coarsely"
    exact = planned.timing
    assert prices.cost.total == pytest.approx(exact.moved.written * 400 / 1200e12 + exact.seconds * 2.4 / 86400)


def test_a_plan_has_dollars_where_they_are_asked_for(tmp_path: Path) -> None:
    plan = ("plan", *COUNT, *MACHINE)
    assert "cost" not in run(*plan).stdout
    done = run(*plan, "--prices", USUAL)
    assert done.exit_code == 0, done.output
    assert "\ncost    $" in done.stdout and "a million tokens" in done.stdout
    prices = tmp_path / "prices.toml"
    prices.write_text('watts = 1000\nkwh = { value = 0.5, source = "my bill" }\ndrive = 0\n')
    report = json.loads(run(*plan, "--prices", str(prices), "--tbw", "600TB", "--json").stdout)
    assert report["cost"]["day_dollars"] == pytest.approx(12.0), "1 kW for a day, and drives that cost nothing"
    assert report["cost"]["prices"]["sources"]["kwh"] == "my bill"
    assert (report["cost"]["prices"]["tbw"], report["cost"]["prices"]["sources"]["tbw"]) == (600, "--tbw")
    million = [change["million_tokens_dollars"] for change in report["cost"]["changes"]]
    assert million == sorted(million)
    details = run(*plan, "--prices", USUAL, "--price", "0.5", "--details").stdout
    assert "rent $12.00" in details and "rent 0.5: --price" in details and "thorstenmeyerai.com" in details


@pytest.mark.parametrize(
    "text", ["watts = -1", "tbw = 0", "drive = true", 'ram = "11"', "colour = 1", "drive = nan", "="]
)
def test_what_is_no_price_is_an_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"expected a number of 0 or more|cannot read prices"):
        read_prices(str(path))
    assert run("plan", *COUNT, *MACHINE, "--prices", str(path)).exit_code == 2
    with pytest.raises(ConfigError, match=r"cannot read prices from .*nothing\.toml"):
        read_prices(str(tmp_path / "nothing.toml"))


def test_a_report_has_the_dollars_of_what_a_run_did(tmp_path: Path) -> None:
    # Ten steps of 360 s that write 12 TB each: an hour of power, and a tenth of the life of a drive rated for 1200 TB.
    steps = [step(n, seconds=360.0, written_bytes=12 * 10**12, tokens=10**5) for n in range(1, 11)]
    log = written(tmp_path / "log.jsonl", *steps)
    assert "cost" not in run("report", str(log)).stdout
    prices = tmp_path / "prices.toml"
    prices.write_text("drive = 400\ntbw = 1200\nwatts = 500\nkwh = 0.2\n")
    done = run("report", str(log), "--prices", str(prices))
    assert done.exit_code == 0, done.output
    assert (
        "cost: $40.10 so far; $40.10 a million tokens; $962.40 a day: power $2.40, wear of drives $960.00"
        in done.stdout
    )
    page = log.with_suffix(".html").read_text()
    assert "power $0.10, wear of drives $40.00" in page
    rated = written(tmp_path / "rated.jsonl", step(1, about={"drive_tbw": 2400}, written_bytes=12 * 10**12))
    report = json.loads(run("report", str(rated), "--prices", str(prices), "--json").stdout)
    assert report["cost"]["parts_dollars"]["wear of drives"] == pytest.approx(2.0)
