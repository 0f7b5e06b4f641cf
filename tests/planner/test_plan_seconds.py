"""The seconds of a plan follow the rates of its dtype, never fall below the least, and name their limit."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from offload.planner import memory, recommend, step_time
from offload.planner.activations import Load
from offload.planner.gpus import GPUS
from offload.planner.hardware import Hardware, described, parse_drive
from offload.planner.model_shape import Shape, from_count
from offload.planner.output import in_short
from offload.sizes import GIB

PLACEMENTS = (("none", "none"), ("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "nvme"))


def small(itemsize: int = 2) -> Shape:
    return from_count(60_000_000, 6, 128, itemsize)


def machine(on_cpu: bool, drive: str, dtype: str = "bf16", **rates: float) -> Hardware:
    found = described("RTX 4090", 8 * GIB, [parse_drive(drive)], 30e9, dtype=dtype)
    of_cpu = {
        "gpu_memory": 0,
        "matmul": 2e11,
        "weights": 1e10,
        "fresh": 4e9,
        "elementwise": 1e10,
        "handed_seconds": 4e-4,
    }
    return replace(found, **(of_cpu if on_cpu else {}) | rates)


def planned(shape: Shape, on: Hardware, load: Load, tiers: tuple[str, str], **options: int) -> recommend.Planned:
    return recommend.plan(shape, on, load, memory.settings(*tiers, dtype=on.dtype, batch=load.batch, **options))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("on_cpu", "tiers"), list(itertools.product((True, False), PLACEMENTS)))
def test_no_least_is_above_what_is_predicted(
    on_cpu: bool, tiers: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound itself, without what cuts it off where both are one sum."""
    found: list[float] = []
    real = step_time._least
    monkeypatch.setattr(step_time, "_least", lambda *given: found.append(real(*given)) or found[-1])
    reached = {False: 0, True: 0}
    loads = (Load(1), Load(8), Load(1, 3, schedule="micro_batch_major"), Load(1, 3, schedule="layer_major"))
    for drive, load, dtype, speculate in itertools.product(
        ("5GB/s,3GB/s", "0.2GB/s", "0.05GB/s,0.5GB/s"), (*loads, Load(2, 1, True)), ("bf16", "fp32"), (False, True)
    ):
        load = load._replace(speculate=speculate)
        prediction = planned(small(4 if dtype == "fp32" else 2), machine(on_cpu, drive, dtype), load, tiers).timing
        assert found[-1] <= prediction.seconds * (1 + 1e-9), (drive, load, dtype)
        reached[speculate] += prediction.seconds <= (1.25 if speculate else 1.1) * found[-1]
    assert min(reached.values()) >= 15, "it says something: half of the steps come near it"


def test_a_step_that_mostly_computes_is_limited_by_compute() -> None:
    """Whatever it waits for beside: on a CPU the kernel, of an update that is not ready the drive."""
    on = machine(True, "5GB/s")
    for tiers in PLACEMENTS:
        step = planned(small(), on, Load(8), tiers).timing
        assert step.compute_seconds > 0.5 * step.seconds and step.limit == "compute", tiers
        assert step.limit_seconds == step.compute_seconds


def test_what_limits_is_what_most_of_the_seconds_are_spent_on() -> None:
    shape = small()
    for on, tiers, limit in (
        (machine(True, "0.05GB/s"), ("nvme", "nvme"), "NVMe"),
        (machine(True, "5GB/s", optimizer=1e7), ("none", "none"), "DRAM"),
        (machine(True, "5GB/s", optimizer=1e7), ("cpu", "nvme"), "DRAM"),
        (machine(False, "5GB/s", upload=2e7), ("cpu", "cpu"), "PCIe"),
    ):
        prediction = planned(shape, on, Load(1), tiers)
        step = prediction.timing
        assert step.limit == limit and step.compute_seconds < step.limit_seconds <= step.seconds * (1 + 1e-9)
        assert f"{limit} limits ({step.limit_seconds / step.seconds:.0%} of the step)" in in_short(prediction)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_host_adds_to_what_a_cpu_computes_and_bounds_what_a_gpu_computes(on_cpu: bool) -> None:
    """A GPU computes one use while the host prepares the next, so the slower of the two counts."""
    shape, on = small(), machine(on_cpu, "5GB/s")
    alone = step_time.forward(shape, replace(on, handed_seconds=0.0), Load(1))
    handed = max(each.seconds for each in alone) * 0.9
    assert min(each.seconds for each in alone) < handed
    for with_host, without in zip(
        step_time.forward(shape, replace(on, handed_seconds=handed), Load(1)), alone, strict=True
    ):
        if on_cpu:
            assert with_host.seconds == without.seconds + handed
            assert with_host.backward == without.backward + handed
        else:
            assert with_host.seconds == max(without.seconds, handed)
            assert with_host.backward == max(without.backward, handed)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_unit_that_stays_takes_the_host_less(on_cpu: bool) -> None:
    shape, on = small(), replace(machine(on_cpu, "5GB/s"), handed_seconds=4e-4)
    comes, stays = (step_time.forward(shape, on, Load(1), stay) for stay in ((), range(len(shape.layouts))))
    alone = step_time.forward(shape, replace(on, handed_seconds=0.0), Load(1))
    for moved, kept, without in zip(comes, stays, alone, strict=True):
        assert without.seconds <= kept.seconds <= moved.seconds and without.backward <= kept.backward <= moved.backward
    assert sum(each.seconds for each in stays) < sum(each.seconds for each in comes)


def test_a_plan_counts_the_units_that_stay() -> None:
    on, tiers = machine(True, "5GB/s"), (("none", "cpu"), ("cpu", "cpu"))
    kept, moved = (planned(small(), on, Load(1), each) for each in tiers)
    assert kept.timing.compute_seconds < moved.timing.compute_seconds


def test_the_hosts_seconds_count_on_every_machine() -> None:
    assert all(described(gpu.name).handed_seconds > 0 for gpu in GPUS)


# -- dtypes -------------------------------------------------------------------------------------------


def test_fp32_of_a_gpu_is_that_of_its_plain_units() -> None:
    for gpu in GPUS:
        rates = {dtype: described(gpu.name, dtype=dtype).matmul for dtype in ("bf16", "fp16", "fp32")}
        if gpu.has_bf16:
            assert rates["bf16"] == rates["fp16"] > rates["fp32"]
        else:  # its matrix units know fp16 alone
            assert rates["fp16"] > rates["bf16"]
        assert described(gpu.name, dtype="fp32", autocast=True).matmul == rates["bf16"]
        for found, peak, dtype in ((gpu.matmul, gpu.flops, "bf16"), (gpu.matmul_fp32, gpu.flops_fp32, "fp32")):
            assert rates[dtype] <= peak if found is None else rates[dtype] == found.value


def test_weights_and_activations_of_fp32_have_four_bytes() -> None:
    on = {dtype: machine(True, "5GB/s", dtype) for dtype in ("bf16", "fp32")}
    for name, more in (("weights", 2.0), ("elementwise", 1.4)):
        seconds = {}
        for dtype, of in on.items():  # of blocks alone: a loss in bf16 copies its logits to fp32 first
            found = step_time.forward(small(of.itemsize), replace(of, **{name: 1e7}), Load(1))
            seconds[dtype] = sum(each.seconds for each in found[1:-1])
        assert seconds["fp32"] > more * 0.95 * seconds["bf16"], name
    assert on["fp32"].optimizer == pytest.approx(on["bf16"].optimizer * 26 / 28)
    assert on["fp32"].gradient == pytest.approx(on["bf16"].gradient / 2)


def test_a_slow_dtype_makes_a_slow_step() -> None:
    """A machine without bf16 units: a plan of fp32 knows nothing of how slow bf16 is there."""
    slow = planned(small(), machine(True, "5GB/s", matmul=7e9), Load(1), ("cpu", "cpu"))
    fast = planned(small(4), machine(True, "5GB/s", "fp32", matmul=1e11), Load(1), ("cpu", "cpu"))
    assert slow.timing.seconds > 5 * fast.timing.seconds
