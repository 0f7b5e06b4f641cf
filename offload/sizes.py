"""Conversions between numbers and words for bytes, seconds and counts ("16GiB" and back), and alignment."""

from __future__ import annotations

import contextlib
import math
import re
from typing import Any

from offload.errors import ConfigError

PAGE = 4096
"""Unit of extents and host buffers, in bytes: O_DIRECT needs offset, length and address to be multiples of it."""

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[_letter] = _UNITS[_letter + "ib"] = 1024**_power
    _UNITS[_letter + "b"] = 1000**_power
_SIZE = re.compile(r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e\+?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(text: str | int | float, *, other: str = "") -> int:
    """Returns the bytes of a size such as "1.5GiB", "800MB" or "4G" (binary, as in most tools).

    Args:
        other: a value of another form that the caller accepts, for the message.

    Raises:
        ConfigError: the text is no size, or the number is too large.
    """
    match = _SIZE.fullmatch(str(text))
    if isinstance(text, bool) or match is None or match[2].lower() not in _UNITS:
        also = f", {other}" if other else ""
        raise ConfigError(f"expected a size such as '16GiB', '800MB'{also} or a number of bytes, got {text!r}")
    try:
        return int(float(match[1]) * _UNITS[match[2].lower()])
    except OverflowError as error:
        raise ConfigError(f"{text!r} is too large a number of bytes; give a smaller size") from error


def parse_memory(text: str) -> int:
    """Returns the bytes of RAM that `text` names as it is sold: "64GB" contains 64 GiB, as "64GiB" does.

    A number without a unit is refused: a user who types "64" means gigabytes.
    """
    nbytes = parse_size(re.sub(r"([kmgt])b\s*$", r"\1ib", with_unit(text), flags=re.IGNORECASE))
    if not nbytes:
        raise ConfigError(f"expected a size above 0, such as '64GB', got {text!r}")
    return nbytes


def with_unit(text: str) -> str:
    """Returns `text`, a size; raises `ConfigError` for a number alone."""
    if re.fullmatch(r"\s*[0-9.]+\s*", text):
        raise ConfigError(f"expected a size with its unit, got {text!r}; did you mean {text.strip()}GB?")
    return text


def parse_rate(text: str) -> float:
    """Returns the bytes per second of a text such as "7GB/s".

    A number without a unit is refused: a user who types "7" means gigabytes, and seven bytes would be the result.
    """
    # "Gb" are gigabits and "GB" are gigabytes: the check below refuses bits instead of being wrong by a factor of 8.
    words = re.sub(r"/s$", "", text.strip(), flags=re.IGNORECASE)
    if re.search(r"[a-z]b$", words, re.IGNORECASE) and words.endswith("b") and not words.islower():
        raise ConfigError(f"{text!r} are bits a second; give bytes, such as '7GB/s'")
    rate = parse_size(words) if re.search(r"\d\s*[a-z]+\s*$", words, re.IGNORECASE) else 0
    if not rate:
        raise ConfigError(f"expected a rate such as '7GB/s', got {text!r}")
    return float(rate)


def parse_tbw(text: str) -> int:
    """Returns the bytes of a text such as "1200TB". A number alone means terabytes, as "drive_tbw" does in a config."""
    plain = re.fullmatch(r"\s*[0-9]+(\.[0-9]+)?\s*", text)
    nbytes = parse_size(f"{text.strip()}TB" if plain else text)
    if not nbytes:
        raise ConfigError(f"expected the rated endurance of a drive, such as 1200TB, got {text!r}")
    return nbytes


_PERCENT = re.compile(r"\s*([0-9]{1,3}(?:\.[0-9]+)?)\s*%\s*")


def parse_percent(value: Any) -> float | None:
    """Returns the fraction of a text such as "50%", above 0 and at most 1; None for a value without a percent sign.

    Raises:
        ConfigError: the text has a percent sign, and is no percentage above 0 and up to 100.
    """
    if not isinstance(value, str) or "%" not in value:
        return None
    match = _PERCENT.fullmatch(value)
    if match is None or not 0 < float(match[1]) <= 100:
        raise ConfigError(f"expected a percentage above 0% and up to 100%, such as '50%', got {value!r}")
    return float(match[1]) / 100


def parse_device_size(value: Any) -> int | str:
    """Returns the bytes of a size, or a percentage such as "50%" as it is written.

    Raises:
        ConfigError: the value is neither.
    """
    if parse_percent(value) is not None:
        return str(value)
    return parse_size(value, other="'50%' (of the weights)")


def format_size(nbytes: float) -> str:
    """Returns `nbytes` with a binary unit and one decimal: 13314398618 -> '12.4 GiB'."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def align_up(value: int, step: int = PAGE) -> int:
    """Returns the smallest multiple of `step` that is at least `value`."""
    return -(-value // step) * step


def format_decimal(nbytes: float) -> str:
    """Returns `nbytes` with a decimal unit, as the capacity and endurance of drives are given: 1.2 TB."""
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes:.0f} B"


def format_count(number: float) -> str:
    """Returns a count with at most three significant digits and a letter: 10**8 -> '100M', 1234567 -> '1.23M'."""
    for letter, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= 0.9995 * size:
            return f"{float(f'{number / size:.3g}'):g}{letter}"
    return f"{number:.0f}"


def count_of(number: int, one: str, more: str = "") -> str:
    """Returns a number with its noun: (1, "step") -> '1 step', (2500, "step") -> '2,500 steps'.

    Args:
        more: the words for any other count, if an s at the end of `one` is not enough: "files are" for "file is".
    """
    return f"{number:,} {one if number == 1 else more or f'{one}s'}"


def rounded(value: Any) -> Any:
    """Returns a float with four significant digits, which JSON shows, and anything else unchanged."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


_COUNT = re.compile(r"((?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:e\+?[0-9]{1,2})?)(?:([kmgbt])(i?))?", re.IGNORECASE)


def parse_count(text: str) -> int:
    """Returns the count that `text` names.

    Examples are "250M", "64Mi" for 64 * 2**20, "1.5B" for 1.5 billion, and "2T" for 2 * 10**12.

    Raises:
        ConfigError: `text` is not such a count, is less than 1, or is beyond the largest float.
    """
    match = _COUNT.fullmatch(text.strip())
    # "b" for billion counts as "g", so that the position in the string is the power of 1000.
    power = 0 if match is None else " kmgt".index((match[2] or " ").lower().replace("b", "g"))
    amount = 0.0 if match is None else float(match[1]) * (1024 if match[3] else 1000) ** power
    if not 1 <= amount < math.inf:
        raise ConfigError(f"expected a number such as 250M, 64Mi, 1.5B or 2T, got {text!r}")
    return int(amount)


def format_share(fraction: float) -> str:
    """Returns a fraction with two significant digits: 0.1234 -> '12%', 0.00456 -> '0.46%', 1234.5 -> '1,200 times'."""
    if fraction >= 10:
        return f"{float(f'{fraction:.2g}'):,.0f} times"
    return f"{float(f'{100 * fraction:.2g}'):g}%"


def format_time(seconds: float) -> str:
    """Returns seconds in the largest unit that fits twice: 475200 -> '5.5 days'."""
    for unit, length in (("years", 365.25 * 86400), ("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.3g} seconds"


_PERIODS = {
    **dict.fromkeys(("h", "hour"), 3600.0),
    **dict.fromkeys(("d", "day"), 86400.0),
    **dict.fromkeys(("w", "week"), 7 * 86400.0),
    **dict.fromkeys(("y", "year"), 365.25 * 86400),
}
_PERIOD = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|)\s*([a-z]+?)s?\s*", re.IGNORECASE)


def parse_budget(text: str) -> tuple[int, float]:
    """Returns the bytes and the seconds of a budget such as "1TB/day" or "600TBW/5y".

    Raises:
        ConfigError: the text is no size with a period, or one of them is 0.
    """
    size, _, period = str(text).partition("/")
    match = _PERIOD.fullmatch(period)
    length = None if match is None else _PERIODS.get(match[2].lower())
    if match is not None and length is not None:
        with contextlib.suppress(ConfigError):  # of the size alone
            nbytes = parse_size(with_unit(re.sub(r"(?<=b)w\s*$", "", size, flags=re.IGNORECASE)))
            seconds = float(match[1] or 1) * length
            if nbytes and seconds:
                return nbytes, seconds
    raise ConfigError(f"expected bytes over a time, such as '1TB/day' or '600TB/5y' (h, day, week, year), got {text!r}")
