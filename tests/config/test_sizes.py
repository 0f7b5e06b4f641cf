"""Sizes and counts are parsed and formatted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError
from offload.sizes import GIB, align_up, count_of, format_count, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("16GiB", 16 * GIB),
        ("16G", 16 * GIB),
        ("1.5 gib", GIB * 3 // 2),
        ("800MB", 800_000_000),
        (4096, 4096),
        ("1e9", 10**9),
    ],
)
def test_sizes_are_parsed(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "many", "-1", "1 XB", "1GiBB", True, "nan", "0x10"])
def test_text_that_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ConfigError, match="16GiB"):
        parse_size(text)  # type: ignore[arg-type]


def test_numbers_are_formatted() -> None:
    assert [format_size(n) for n in (0, 1023, 1536, 13314398618)] == ["0 B", "1023 B", "1.5 KiB", "12.4 GiB"]


def test_a_count_is_singular_or_plural() -> None:
    assert [count_of(number, "step") for number in (0, 1, 2, 2500)] == ["0 steps", "1 step", "2 steps", "2,500 steps"]
    assert [count_of(number, "batch is", "batches are") for number in (1, 3)] == ["1 batch is", "3 batches are"]


def test_counts_are_formatted() -> None:
    counts = {
        0: "0",
        999: "999",
        1000: "1k",
        100_000_000: "100M",
        1_234_567: "1.23M",
        999_999_999: "1B",
        2 * 10**12: "2T",
    }
    assert {number: format_count(number) for number in counts} == counts


@given(st.integers(0, 2**60), st.integers(1, 2**30))
def test_sizes_are_rounded_up_to_the_alignment(value: int, step: int) -> None:
    aligned = align_up(value, step)
    assert aligned % step == 0 and 0 <= aligned - value < step
