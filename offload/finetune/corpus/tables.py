"""Readers of CSV and Parquet files. Each row is a mapping of columns to values, as of parsed JSON."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from offload.errors import ConfigError

COLUMNS = ("text", "messages", "prompt", "completion")
"""Columns of documents; a table needs one of them."""
_READ = (*COLUMNS, "tools")
"""Columns that are read; all others are ignored."""
_ROWS_AT_ONCE = 256


def require_pyarrow() -> Any:
    """Returns the module `pyarrow.parquet`.

    Raises:
        ConfigError: pyarrow is not installed; the message contains the command to install it.
    """
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            "*.parquet files need pyarrow, which is not installed; run: pip install 'offload[data]'"
        ) from error
    return pyarrow.parquet


def read_csv(file: Path, lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the rows of a CSV file, each with the place of its first line, such as "data.csv:17".

    All values are strings.

    Args:
        file: The file, for messages.
        lines: Lines of the file, with their ends. The first names the columns; a quoted field may span several lines.

    Raises:
        ConfigError: There is no column of `COLUMNS`, a row has another number of fields than the first line, or quotes
            are unbalanced.
    """
    # Without `strict` the reader would silently accept unbalanced quotes.
    rows = csv.reader(lines, strict=True)
    names: list[str] | None = None
    # The default limit of a field is 131072 characters, and a document may be longer.
    begins, limit = 1, csv.field_size_limit(sys.maxsize)
    try:
        for row in rows:
            place, begins = f"{file}:{begins}", rows.line_num + 1
            # csv yields an empty list for an empty line.
            if not row:
                continue
            if names is None:
                names = row
                _check(names, place)
            elif len(row) != len(names):
                raise ConfigError(f"{place} contains {len(row)} fields, and the first line names {len(names)} columns")
            else:
                yield place, {name: value for name, value in zip(names, row, strict=True) if name in _READ}
    except csv.Error as error:
        raise ConfigError(
            f"{file}:{begins} is not CSV: {error}; quote fields with commas, quotes or line ends"
        ) from error
    finally:
        csv.field_size_limit(limit)
    if names is None:
        _check([], str(file))


def read_parquet(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the rows of a Parquet file, each with its place, counted from 1. A few hundred rows are in memory at once.

    Nulls are left out. Parquet stores null for columns that a row does not use, and for keys of messages that only
    other messages contain.

    Raises:
        ConfigError: There is no column of `COLUMNS`, or pyarrow cannot read the file.
    """
    parquet = require_pyarrow()
    import pyarrow

    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            _check(names, str(file))
            columns = [name for name in _READ if name in names]
            # Batches bound the memory: a row group may be larger than the RAM.
            for batch in table.iter_batches(_ROWS_AT_ONCE, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}: row {number}", _without_nulls(row)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as Parquet after row {number}: {error}") from error


def _check(names: Sequence[str], place: str) -> None:
    """Raises `ConfigError` if no column of `COLUMNS` is present."""
    if not any(name in COLUMNS for name in names):
        raise ConfigError(
            f"{place} contains the columns {', '.join(names) or '(none)'}; rename one to text or messages, or two to "
            f"prompt and completion"
        )


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
