"""Each rate of a plan says where it comes from, and one memory of GPU and CPU is never given away twice."""

from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

from offload.cli.main import app
from offload.errors import BudgetError, ConfigError
from offload.planner import memory, output, recommend, request
from offload.planner.activations import Load, beside_weights
from offload.planner.gpus import GPUS, ORIGINS, Gpu, Rate, find_gpu
from offload.planner.hardware import described, parse_drive
from offload.planner.model_shape import from_count
from offload.sizes import GIB
from tests.pages.plan_table import PAGE

UNIFIED = [gpu for gpu in GPUS if gpu.unified]
COUNT = ("plan", "--parameters", "1B", "--layers", "16", "--seq-len", "1024", "--ram", "64GB", "--drive", "7GB/s,5GB/s")


def of(gpu: str, origin: str) -> list[str]:
    return [rate.name for rate in described(gpu).rates if rate.origin == origin]


# -- origins ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_rate_of_every_gpu_has_an_origin_and_a_source(gpu: Gpu) -> None:
    assert find_gpu(gpu.name) == (gpu, None)
    for rate in described(gpu.name).rates:
        assert rate.origin in ORIGINS and rate.origin not in ("measured", "given")
        assert rate.source and rate.value > 0
        assert (rate.origin == "published") == any(word in rate.source for word in (".com/", ".info/", "docs/"))


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_no_program_of_others_is_said_to_have_gone_far_beyond_a_data_sheet(gpu: Gpu) -> None:
    """By clocks above those of the data sheet by an eighth at most: a figure typed wrong is found."""
    for figure, peak in ((gpu.matmul, gpu.flops), (gpu.matmul_fp32, gpu.flops_fp32), (gpu.reached, gpu.bandwidth)):
        assert figure is None or 0.25 * peak < figure.value < 1.15 * peak


def test_a_rate_that_an_option_gives_is_given() -> None:
    machine = described("RTX 4090", memory=80e9, link=20e9)
    assert {rate.name: rate.source for rate in machine.rates if rate.origin == "given"} == {
        "copies to and from the GPU, each way,": "--pcie",
        "host memory": "--memory-bandwidth",
    }
    assert machine.upload == machine.download == 20e9 and machine.memory == 80e9


def test_drives_have_their_origin_too() -> None:
    given = {rate.name: rate.amount for rate in described("H200", drives=[parse_drive("7GB/s,5GB/s")] * 2).rates}
    assert given["reads of 2 drives"] == "14 GB/s" and given["writes of 2 drives"] == "10 GB/s"
    assert {"reads of the drive", "writes of the drive"} <= set(of("H200", "assumed"))


def test_what_nobody_published_is_assumed_and_named() -> None:
    assert "matrix products in bf16" in of("Radeon PRO W7900", "assumed")
    assert any("76% of the data sheet's 122.6 Tflop/s" in words for words in described("W7900").assumptions)
    assert "matrix products in bf16" in of("RTX 4090", "published")
    assert not any("matrix products" in words for words in described("RTX 4090").assumptions)


@pytest.mark.parametrize(
    ("gpu", "dtype", "share"),
    [
        # The median of five cards of the series is 1.03: more than all is not assumed.
        ("RTX 4070", "bf16", 1.0),
        ("RTX 4070 Ti", "bf16", 1.0),
        ("RTX 4080 SUPER", "bf16", 1.0),
        ("RTX 4070", "fp32", 54.7 / 82.6),
        ("MI300A", "bf16", 668.4 / 1307),
        # No card of the generation has a figure in fp32.
        ("MI300A", "fp32", 0.5),
    ],
)
def test_a_card_without_a_figure_reaches_what_its_generation_reaches(gpu: str, dtype: str, share: float) -> None:
    card, machine = find_gpu(gpu)[0], described(gpu, dtype=dtype)
    assert machine.matmul == pytest.approx(share * (card.flops if dtype == "bf16" else card.flops_fp32))
    (rate,) = [rate for rate in machine.rates if rate.name.startswith("matrix products")]
    assert rate.origin == "assumed"
    assert (f", as other cards of {card.generation} reached" in rate.source) == (share != 0.5)


def test_the_ratios_of_the_page_are_those_of_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    halved = [gpu for gpu in GPUS if gpu.generation.startswith("GeForce")]
    whole = [gpu for gpu in GPUS if gpu.generation.split()[0] in ("A100", "Hopper", "Ada", "Ampere")]

    def span(cards: list[Gpu], dtype: str) -> str:
        pairs = [(gpu.matmul, gpu.flops) if dtype == "bf16" else (gpu.matmul_fp32, gpu.flops_fp32) for gpu in cards]
        reached = [figure.value / peak for figure, peak in pairs if figure is not None]
        return f"{100 * min(reached):.0f} to {100 * max(reached):.0f} %"

    text = " ".join(page.split())
    assert f"reached {span(halved, 'bf16')} in bf16" in text
    assert f"reached {span(whole, 'bf16')} of it" in text and f"reached {span(halved, 'fp32')}" in text


def test_the_plan_prints_a_line_for_each_origin() -> None:
    done = CliRunner().invoke(app, [*COUNT, "--gpu", "RTX 4090", "--pcie", "20GB/s"])
    lines = {line.partition(":")[0]: " ".join(line.split()) for line in done.stdout.splitlines()}
    assert done.exit_code == 0 and "Tflop/s" in done.stdout
    assert lines["published"].startswith("published: matrix products in bf16 165 Tflop/s (github.com/")
    assert lines["given"].startswith(
        "given: copies to and from the GPU, each way, 20 GB/s (--pcie); reads of the drive 7"
    )
    assert lines["assumed"]


def test_json_has_the_origin_of_each_rate() -> None:
    done = CliRunner().invoke(app, [*COUNT, "--gpu", "GB10", "--json"])
    machine = json.loads(done.stdout)["machine"]
    assert machine["unified"] and {rate["origin"] for rate in machine["rates"]} == {"published", "given", "assumed"}
    (copies,) = (rate for rate in machine["rates"] if "copies" in rate["name"])
    assert copies["value"] is None, "JSON has no infinity"
    assert all(rate["source"] for rate in machine["rates"])


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [(164.8e12, "flop/s", "165 Tflop/s"), (25e9, "B/s", "25 GB/s"), (1.8e9, "parameters/s", "1.8B parameters/s")],
)
def test_amounts_are_read_in_units(value: float, unit: str, words: str) -> None:
    assert Rate(name="", value=value, unit=unit, origin="assumed", source="").amount == words
    assert Rate(name="", value=math.inf, unit=unit, origin="assumed", source="").amount == "no time"


# -- one memory ---------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("gpu", UNIFIED, ids=lambda gpu: gpu.name)
def test_copies_take_no_time_where_gpu_and_cpu_have_one_memory(gpu: Gpu) -> None:
    machine = described(gpu.name, drives=[parse_drive("7GB/s,5GB/s")])
    assert machine.upload == machine.download == math.inf and machine.gpu_memory == machine.ram
    shape = from_count(3 * 10**9, 24, 1024)
    step = recommend.choose(shape, machine, Load(1), None).timing
    assert step.busy["PCIe"] == 0 and step.waited.upload == 0 and 0 < step.seconds < math.inf


def test_a_size_alone_never_means_a_machine_with_one_memory() -> None:
    for size in ("16GB", "24GB", "48GB", "96GB", "128GB", "192GB", "300GB"):
        assert not find_gpu(size)[0].unified
    assert find_gpu("24GB")[1] == "the GPU is as fast as a RTX 3090"
    assert find_gpu("H200")[0].name == "H200", "not the one whose name contains it"


def test_one_memory_holds_both_budgets_and_the_activations() -> None:
    """Of any placement and config; a budget that has no room beside the other is an error."""
    shape = from_count(13 * 10**9, 40, 1024)
    machine = described("Ryzen AI MAX+ 395", drives=[parse_drive("7GB/s,5GB/s")])
    assert machine.unified
    load = Load(4, 1, True)
    planned = recommend.choose(shape, machine, load, True)
    for each in (planned, recommend.with_host_budget(planned)):
        beside = beside_weights(each.memory, shape, load)
        assert each.memory.host + each.memory.device + beside <= machine.ram
    content = memory.settings("nvme", "nvme", host_memory=110 * GIB, batch=4)
    with pytest.raises(BudgetError, match="activations"):
        recommend.plan(shape, machine, Load(8, 1, True), content)
    written = request.ready(planned)["offload"]
    assert {"host_memory", "device_memory"} <= written.keys(), "a run would see the same bytes free twice"


def test_a_bus_between_gpu_and_cpu_that_have_one_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="--pcie has no meaning"):
        described("GB10", link=25e9)


def test_the_heading_names_one_memory_once() -> None:
    machine = described("GB10", drives=[parse_drive("7GB/s,5GB/s")])
    planned = recommend.choose(from_count(3 * 10**9, 24, 1024), machine, Load(1), None)
    line = output.heading(planned)[1]
    assert "115.2 GiB of RAM that the GPU shares" in line and "GPU memory" not in line
