"""Descriptions of machines, counts and drives are parsed, and a count of parameters is near a model of that size."""

from __future__ import annotations

import pytest

from offload.cli.console import parse_count
from offload.errors import ConfigError
from offload.hardware.info import rated_bytes
from offload.planner import request
from offload.planner.hardware import find_gpu, parse_drive
from offload.planner.model_shape import Shape, from_count, from_name
from offload.sizes import GIB, parse_size


@pytest.fixture(scope="module")
def shape() -> Shape:
    return from_count(13 * 10**9, 20, 2048)


def test_counts_are_parsed() -> None:
    for message, count in (
        ("13B", 13e9),
        ("13b", 13e9),
        ("1.5e9", 1.5e9),
        ("2T", 2e12),
        ("64Mi", 64 * 2**20),
        ("7", 7),
    ):
        assert parse_count(message) == count
    for message in ("", "nan", "inf", "-3", "0", "0.1", "3 apples", "Mi", "1e999", "9" * 400, "9" * 300 + "T"):
        with pytest.raises(ConfigError, match="expected a number"):
            parse_count(message)


def test_a_rated_life_without_a_unit_is_in_terabytes_as_in_a_config() -> None:
    assert request.parse_tbw("600") == request.parse_tbw("600TB") == 600 * 10**12 and request.parse_tbw("1PB") == 10**15


def test_machines_are_parsed() -> None:
    assert find_gpu("24.5GB")[0].memory == 24.5 * GIB
    assert find_gpu("4090")[0].name == "RTX 4090" and find_gpu("4090")[1] is None
    for smi, name in (
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti SUPER"),
        ("NVIDIA GeForce RTX 4060", "RTX 4060"),
        ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA H200", "H200"),
    ):
        assert find_gpu(smi)[0].name == name, "as nvidia-smi and torch write it"
    with pytest.raises(ConfigError, match="there is no GPU 'NVIDIA GeForce RTX 4070 Laptop GPU' here"):
        find_gpu("NVIDIA GeForce RTX 4070 Laptop GPU")  # a slower card with less memory
    assert find_gpu("a100-80gb")[0].memory == 80 * GIB and find_gpu("A100")[0].memory == 80 * GIB
    assert find_gpu("16GB")[0].memory == 16 * GIB and "as fast as" in (find_gpu("16GB")[1] or "")
    drive = parse_drive("7GB/s,5GB/s,2TB")
    assert (drive.read, drive.write, drive.free) == (7e9, 5e9, parse_size("2TB"))
    assert parse_drive("3GB/s").write == 3e9
    with pytest.raises(ConfigError, match="expected a drive"):
        parse_drive("1,2,3,4")


def test_a_count_is_near_the_model_of_that_size() -> None:
    real = from_name("llama-7b", 256)
    counted = from_count(real.parameters, 32, 256)
    assert counted.parameters == real.parameters

    def total(shape: Shape, name: str) -> float:
        return sum(getattr(use, name) for use in shape.uses)

    assert total(counted, "flops") == pytest.approx(total(real, "flops"), rel=0.05)
    for name in ("nbytes", "saved", "boundary"):
        assert total(counted, name) == pytest.approx(total(real, name), rel=0.2), name


def test_smart_tells_what_a_drive_is_rated_for() -> None:
    log = {"percentage_used": 5, "data_units_written": 2_000_000}
    assert rated_bytes({"nvme_smart_health_information_log": log}) == 20 * 2_000_000 * 512_000
    assert rated_bytes({"nvme_smart_health_information_log": log | {"percentage_used": 0}}) is None
