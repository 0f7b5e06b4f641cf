"""Dollars of a run: its rent or power, and the wear of its drives.

The table `prices.toml` contains usual prices with their date and sources.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from offload.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

USUAL = "usual"
"""The name of the package's own prices, where a file of prices may be given."""
DAY = 24 * 3600
"""Seconds of a day."""
_YEAR = 365.25 * DAY


class Prices(NamedTuple):
    """Prices of a machine, in US dollars. `prices.toml` says what each number means."""

    drive: float
    tbw: float
    ram: float
    watts: float
    kwh: float
    rent: float
    years: float
    sources: Mapping[str, str] = {}
    """A sentence on the origin of each number, by its name."""

    def with_(self, **given: tuple[float, str]) -> Prices:
        """Returns the prices with some numbers of the machine itself, each with its source."""
        numbers = {name: number for name, (number, _) in given.items()}
        return self._replace(
            sources={**self.sources, **{name: source for name, (_, source) in given.items()}}, **numbers
        )


class Cost(NamedTuple):
    """Dollars of some steps."""

    parts: Mapping[str, float]
    """Dollars by part: "rent" or "power", "wear of drives", and what was bought for the steps."""
    seconds: float
    tokens: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def a_day(self) -> float | None:
        """Returns the dollars of a day of such steps; None if they took no time."""
        return self.total / self.seconds * DAY if self.seconds else None

    @property
    def a_million(self) -> float | None:
        """Returns the dollars of a million tokens; None without tokens."""
        return self.total / self.tokens * 1e6 if self.tokens else None


def read_prices(name: str) -> Prices:
    """Returns the prices of a TOML file, whose keys replace those of `prices.toml`; `USUAL` names that table itself.

    Raises:
        ConfigError: the file cannot be read, or contains something else than prices.
    """
    rows = tomllib.loads((files("offload") / "prices.toml").read_text("utf-8"))
    date = rows.pop("date")
    values = {key: float(row["value"]) for key, row in rows.items()}
    sources = {key: f"{row['source']} ({date})" for key, row in rows.items()}
    if name == USUAL:
        return Prices(**values, sources=sources)
    try:
        given = tomllib.loads(Path(name).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read prices from {name}: {error}; give a TOML file, or the word {USUAL}") from error
    for key, row in given.items():
        if key == "date":
            continue
        value: Any = row.get("value") if isinstance(row, dict) else row
        # A life of no writes or no years would make a price infinite.
        if key not in values or not _is_price(value, above=key in ("tbw", "years")):
            raise ConfigError(
                f"{name}: expected a number of 0 or more for each of {', '.join(values)}, with tbw and years above 0, "
                f"got {key} = {value!r}"
            )
        values[key], sources[key] = (
            float(value),
            str(row["source"]) if isinstance(row, dict) and "source" in row else name,
        )
    return Prices(**values, sources=sources)


def _is_price(value: Any, above: bool) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and (0 < value if above else 0 <= value) and value < 1e15


def cost(prices: Prices, seconds: float, tokens: float, written: float, ram: float = 0, drives: int = 0) -> Cost:
    """Returns the dollars of steps.

    Args:
        prices: prices of the machine.
        seconds: duration of the steps.
        tokens: tokens of the steps.
        written: bytes that they write to all drives together. A drive is worth nothing at its rated bytes.
        ram: bytes of RAM that are bought for the steps, paid off over `prices.years`.
        drives: drives that are bought for them, paid off likewise beside their wear.
    """
    hours = seconds / 3600
    of_life = seconds / (prices.years * _YEAR)
    parts = {"rent": prices.rent * hours} if prices.rent else {"power": prices.watts / 1000 * prices.kwh * hours}
    parts["wear of drives"] = prices.drive * written / (prices.tbw * 1e12)
    if ram:
        parts["more RAM"] = prices.ram * ram / 1e9 * of_life
    if drives:
        parts["another drive"] = drives * prices.drive * of_life
    return Cost(parts, seconds, tokens)


def in_words(cost: Cost) -> str:
    """Returns the dollars of steps a day, by part, and those of a million tokens."""
    if not cost.seconds:
        return f"{dollars(cost.total)}"
    scale = DAY / cost.seconds
    parts = ", ".join(f"{name} {dollars(value * scale)}" for name, value in cost.parts.items())
    million = "" if cost.a_million is None else f"{dollars(cost.a_million)} a million tokens; "
    return f"{million}{dollars(cost.total * scale)} a day: {parts}"


def dollars(value: float) -> str:
    """Returns dollars in words: two decimals, or two digits of less than ten cents."""
    return f"${value:,.2f}" if value >= 0.1 or not value else f"${value:.2g}"


def as_json(cost: Cost) -> dict[str, Any]:
    """Returns the dollars of steps as the object that `--json` prints."""
    return {
        "dollars": cost.total,
        "parts_dollars": dict(cost.parts),
        "day_dollars": cost.a_day,
        "million_tokens_dollars": cost.a_million,
    }
