"""Readers of the document files that `--data` names. Records are read and checked one by one, without tokenizing.

*.jsonl, *.ndjson, *.json   one object a line: {"text": …}, {"messages": […]} or {"prompt": …, "completion": …}
*.json                      also one list of such objects
*.parquet, *.csv            one document a row, in columns of these names
any other file              one document, plain text
OWNER/NAME[:SPLIT]          a data set of the Hugging Face Hub, one document a row, in columns of these names

ShareGPT's {"conversations": [{"from": "human", "value": …}, …]} and Alpaca's {"instruction": …, "output": …} are read
as messages.
"""

from __future__ import annotations

import codecs
import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from offload.errors import ConfigError
from offload.fileio.inner_files import open_data
from offload.hub import data_set
from offload.sizes import GIB, MIB, format_size

# -- tables --------------------------------------------------------------------------------------------
#
# Readers of CSV and Parquet files. Each row is a mapping of columns to values, as of parsed JSON.


COLUMNS = ("text", "messages", "prompt", "completion", "conversations", "instruction")
"""Columns of documents; a table needs one of them."""
_READ = (*COLUMNS, "tools", "system", "input", "output", "history")
"""Columns that are read; all others are ignored."""
_ROWS_AT_ONCE = 256
_MOST_AT_ONCE = GIB
"""Bytes of a column in the rows that are in memory at once, at most."""
_SMALL, _EXPANDS = 64 * MIB, 1000
"""Bytes to which any Parquet file may expand, and times its size. Text expands tens of times."""


def require_pyarrow() -> Any:
    """Returns the module `pyarrow.parquet`."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            "*.parquet files need pyarrow, which is not installed; run: pip install 'offload[data]'"
        ) from error
    return pyarrow.parquet


def read_csv(file: Path, lines: Iterable[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the rows of a CSV file, each with the place of its first line, such as "data.csv:17".

    All values are strings.

    The first line names the columns; a quoted field may span several lines.
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
                yield {name: value for name, value in zip(names, row, strict=True) if name in _READ}, place
    except csv.Error as error:
        raise ConfigError(
            f"{file}:{begins} is not CSV: {error}; quote fields with commas, quotes or line ends"
        ) from error
    finally:
        csv.field_size_limit(limit)
    if names is None:
        _check([], str(file))


def read_parquet(file: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the rows of a Parquet file, each with its place, counted from 1. A few hundred rows are in memory at once.

    Nulls are left out. Parquet stores null for columns that a row does not use, and for keys of messages that only
    other messages contain.
    """
    parquet = require_pyarrow()
    import pyarrow

    number = nbytes = 0
    try:
        with parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            _check(names, str(file))
            columns = [name for name in _READ if name in names]
            # Batches bound the memory: a row group may be larger than the RAM, and each row as long as the group.
            largest = _largest_chunk(table.metadata, columns)
            _check_size(file, largest)
            rows = min(max(1, _MOST_AT_ONCE // max(1, largest)), _ROWS_AT_ONCE)
            for batch in table.iter_batches(rows, columns=columns):
                nbytes += batch.nbytes
                _check_size(file, nbytes)
                for row in batch.to_pylist():
                    number += 1
                    yield _without_nulls(row), f"{file}: row {number}"
    except ConfigError:
        raise
    except (pyarrow.ArrowException, ValueError, OverflowError, RecursionError) as error:
        words = " ".join(str(error).split())[:500]
        raise ConfigError(f"{file} cannot be read as Parquet after row {number}: {words}") from error


def _largest_chunk(metadata: Any, columns: Sequence[str]) -> int:
    """Returns the most bytes that one of `columns` claims to have in a row group, decompressed."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    chunks = (group.column(at) for group in groups for at in range(group.num_columns))
    of_columns = (chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in columns)
    return max((chunk.total_uncompressed_size for chunk in of_columns), default=0)


def _check_size(file: Path, nbytes: int) -> None:
    size = file.stat().st_size
    if nbytes > max(_SMALL, _EXPANDS * size):
        raise ConfigError(
            f"{file} has {format_size(size)} and expands to {format_size(nbytes)} or more, which no text does: it was "
            "made to fill the memory, and is not read"
        )


def _check(names: Sequence[str], place: str) -> None:
    if not any(name in COLUMNS for name in names):
        raise ConfigError(
            f"{place} contains the columns {', '.join(names)[:500] or '(none)'}; rename one to text or messages, or "
            "two to prompt and completion"
        )


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


# -- documents -----------------------------------------------------------------------------------------


_T = TypeVar("_T")
_AT_ONCE = 1 << 20
"""Bytes of a list that are read at a time."""
_LINES = (".jsonl", ".ndjson", ".json")
_IN_FOLDERS = (".jsonl", ".ndjson", ".parquet", ".csv", ".txt", ".md", ".py")
_SHAPES = (
    '{"text": "…"}, {"messages": [{"role": "user", "content": "…"}, …]}, {"prompt": "…", "completion": "…"}, '
    '{"conversations": [{"from": "human", "value": "…"}, …]} or {"instruction": "…", "output": "…"}'
)


class Text(NamedTuple):
    """A document whose tokens are all learned."""

    place: str
    """File, and line if the format has lines, for messages: "data.jsonl:17"."""
    text: str


class Chat(NamedTuple):
    """Messages for a tokenizer's chat template."""

    place: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the functions that the assistant may call, which the chat template shows to it."""


class Prompt(NamedTuple):
    """A text to continue."""

    place: str
    prompt: str


class Completion(NamedTuple):
    """A prompt, and the completion to learn after the prompt."""

    place: str
    prompt: str
    completion: str


Record = Text | Chat | Completion


class HubData(NamedTuple):
    """A split of a data set of the hub."""

    name: str
    """OWNER/NAME, or OWNER/NAME:SPLIT."""
    table: Any
    """A `datasets.Dataset`."""


DataFile = Path | HubData


def find_data(paths: Sequence[Path]) -> list[DataFile]:
    """Returns the files of `paths`, those of a folder sorted by path, and data sets of the hub."""
    files: list[DataFile] = []
    for path in paths:
        if path.is_dir():
            # Sorted, since the order of a folder differs between file systems and the data must not.
            inside = sorted(file for file in path.rglob("*") if file.suffix in _IN_FOLDERS and file.is_file())
            if not inside:
                raise ConfigError(f"there is no {', '.join(f'*{kind}' for kind in _IN_FOLDERS)} file under {path}")
            files += inside
        elif path.is_file():
            files.append(path)
        # A path with the ending of a file is a mistyped path, and no data set.
        elif path.suffix in (*_IN_FOLDERS, ".json") or (table := data_set(str(path))) is None:
            raise ConfigError(f"there is no data at {path}")
        else:
            files.append(HubData(str(path), table))
    if any(isinstance(file, Path) and file.suffix == ".parquet" for file in files):
        require_pyarrow()
    return files


def read_records(files: Iterable[DataFile]) -> Iterator[Record]:
    """Yields the documents of all files in order.

    Memory holds one record at a time, a few hundred rows of a Parquet file, or one file of plain text.
    """
    return _read(files, _record)


def read_prompts(files: Iterable[DataFile]) -> Iterator[Prompt | Chat]:
    """Yields the prompts of all files in order: `prompt` or `text` of a line or row, a chat, or a file of plain text.

    A completion beside a prompt is ignored.
    """
    for record in _read(files, _prompt):
        yield Prompt(record.place, record.text) if isinstance(record, Text) else record


def _read(files: Iterable[DataFile], make: Callable[[Any, str], _T]) -> Iterator[_T | Text]:
    """Yields the result of `make` for each parsed line or row and its place, and files of plain text as `Text`."""
    for file in files:
        if isinstance(file, HubData):
            for row, place in _hub_rows(file):
                yield make(row, place)
            continue
        try:
            # A file of an unknown kind is plain text: users name such files explicitly.
            rows = _ROWS.get(file.suffix)
            if rows is None:
                with open_data(file) as content:
                    data = content.read()
                yield Text(str(file), _decode(data, str(file)))
            else:
                for row, place in rows(file):
                    yield make(row, place)
        except OSError as error:
            words = error.strerror or " ".join(str(error).split())[:500]
            raise ConfigError(f"cannot read {file}: {words}") from error


def _hub_rows(data: HubData) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the rows of a data set, each with its place, counted from 1. Nulls are left out, as of Parquet."""
    names = data.table.column_names
    _check(names, data.name)
    for number, row in enumerate(data.table.select_columns([name for name in _READ if name in names]), 1):
        yield _without_nulls(row), f"{data.name}: row {number}"


def _lines(file: Path) -> Iterator[tuple[Any, str]]:
    with open_data(file) as content:
        if file.suffix == ".json" and _begins_list(content):
            yield from _items(file, content)
            return
        for number, line in enumerate(content, 1):
            place = f"{file}:{number}"
            text = _decode(line, place).strip()
            if text:
                yield _parse(text, place), place


def _begins_list(content: BinaryIO) -> bool:
    """Returns True if the first line begins a list, and not an object; the position stays."""
    if not content.seekable():
        return False
    first = content.read(_AT_ONCE).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    content.seek(0)
    return first == b"["


def _items(file: Path, content: BinaryIO) -> Iterator[tuple[Any, str]]:
    """Yields the items of a file that is one list, each with its place, counted from 1. One item is in memory."""
    decoder, utf8 = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8-sig")()
    text, at, number, ended = "", 0, 0, False
    due = "["  # the character before the next item
    while True:
        place = f"{file}: item {number + 1}"
        while at < len(text) and text[at].isspace():
            at += 1
        sign = text[at : at + 1]
        if sign and sign == due:
            due, at = "", at + 1
            continue
        if sign == "]" and due != "[":
            return
        try:
            if due:
                raise ValueError(f"expected {due!r} or the end of the list, got {sign!r}")
            item, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            if ended or isinstance(error, RecursionError) or (due and sign):
                raise ConfigError(f"{place} is not JSON: {error}; each item must be one of {_SHAPES}") from error
            # The item may go on: read as much as there is of it already, so that a long one is not parsed too often.
            data = content.read(max(_AT_ONCE, len(text) - at))
            ended = not data
            try:
                text, at = text[at:] + utf8.decode(data, ended), 0
            except UnicodeDecodeError as wrong:
                raise ConfigError(f"{place} is not UTF-8: {wrong.reason}; convert the file") from wrong
            continue
        number, due = number + 1, ","
        _check_surrogates(item, place)
        yield item, place


def _csv(file: Path) -> Iterator[tuple[Any, str]]:
    with open_data(file) as content:
        # Lines are decoded one by one, so that an error names the line and the file need not fit in memory.
        lines = (_decode(line, f"{file}:{number}") for number, line in enumerate(content, 1))
        yield from read_csv(file, lines)


_ROWS: dict[str, Callable[[Path], Iterator[tuple[Any, str]]]] = {
    **dict.fromkeys(_LINES, _lines),
    ".csv": _csv,
    ".parquet": read_parquet,
}
"""For each kind of file the parsed lines or rows, each with its place."""


def _decode(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place} is not UTF-8: {error.reason} at byte {error.start}; convert the file") from error


def _parse(line: str, place: str) -> Any:
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place} is not JSON: {error}; each line must be one of {_SHAPES}") from error
    _check_surrogates(parsed, place)
    return parsed


def _check_surrogates(parsed: Any, place: str) -> None:
    # JSON may escape a single surrogate, "\ud83d", which Python reads but no tokenizer can encode.
    try:
        json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{place} contains half of a surrogate pair, {error.object[error.start]!a}; fix the line"
        ) from error


def _record(row: Any, place: str) -> Record:
    row = _with_messages(row, place)
    kind = _kind_of(row, place)
    if kind == "text":
        return Text(place, _string(row, "text", place))
    if kind == "messages":
        return _chat(row, place)
    return Completion(place, _string(row, "prompt", place), _string(row, "completion", place))


def _prompt(row: Any, place: str) -> Prompt | Chat:
    row = _with_messages(row, place)
    kind = _kind_of(row, place)
    if kind == "messages":
        return _chat(row, place)
    return Prompt(place, _string(row, kind, place))


_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
"""Roles of ShareGPT's speakers."""


def _with_messages(row: Any, place: str) -> Any:
    """Returns a line in the form of ShareGPT or of Alpaca with its messages, and any other line as it is."""
    if not isinstance(row, dict) or any(key in row for key in ("text", "messages", "prompt")):
        return row
    if isinstance(row.get("conversations"), list):
        turns = [_turn(turn, f"{place}: message {number}") for number, turn in enumerate(row["conversations"], 1)]
    elif "instruction" in row and "output" in row:
        question = _string(row, "instruction", place)
        if row.get("input"):
            question += f"\n\n{_string(row, 'input', place)}"
        turns = [{"role": "user", "content": question}]
        turns += [{"role": "assistant", "content": _string(row, "output", place)}]
        if row.get("history"):
            raise ConfigError(f"{place} contains a history, which is not read; write the turns as messages")
    else:
        return row
    system = [{"role": "system", "content": _string(row, "system", place)}] if row.get("system") else []
    return {"messages": [*system, *turns], "tools": row.get("tools")}


def _turn(turn: Any, where: str) -> Any:
    if not isinstance(turn, dict) or "from" not in turn:
        return turn  # some files have messages there
    speaker = _string(turn, "from", where)
    if speaker not in _SPEAKERS:
        raise ConfigError(f"{where} is from {speaker!r:.99}; expected one of {', '.join(_SPEAKERS)}")
    kept = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {**kept, "role": _SPEAKERS[speaker], "content": _string(turn, "value", where)}


def _kind_of(row: Any, place: str) -> str:
    """Returns the key that determines the kind of a line or row."""
    if not isinstance(row, dict):
        cure = "; a file that is one list is called *.json" if isinstance(row, list) else ""
        raise ConfigError(f"{place} contains {_kind(row)}, and each line must be one of {_SHAPES}{cure}")
    kinds = [key for key in ("text", "messages", "prompt") if key in row]
    if len(kinds) != 1:
        keys = ", ".join(row)[:500] or "no key"
        raise ConfigError(f"{place} contains {keys}; each line must be one of {_SHAPES}")
    return kinds[0]


def _chat(row: dict[str, Any], place: str) -> Chat:
    return Chat(place, _messages(row["messages"], place), _tools(row.get("tools"), place))


def _tools(value: Any, place: str) -> list[dict[str, Any]] | None:
    """Returns the checked tools of a chat: a list, or the JSON of one, which a column of a table contains."""
    if value is None or value == "":
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{place}: tools must be a list of JSON schemas, or its JSON: {error}") from error
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ConfigError(f"{place}: tools must be a list of JSON schemas, got {_kind(value)}")
    return value or None


def _messages(value: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{place}: messages must be a list of at least one message, got {_kind(value)}")
    for number, message in enumerate(value, 1):
        where = f"{place}: message {number}"
        if not isinstance(message, dict):
            raise ConfigError(f'{where} must be an object with "role" and "content", got {_kind(message)}')
        _string(message, "role", where)
        # A message with tool calls may have null content in the OpenAI format.
        if not message.get("tool_calls"):
            _string(message, "content", where)
        if message.get("weight", 1) not in (0, 1) or message.get("train", True) not in (True, False):
            raise ConfigError(f'{where}: expected 0 or 1 as "weight", and true or false as "train"')
    return value


def _string(row: dict[str, Any], key: str, place: str) -> str:
    if key not in row:
        raise ConfigError(f'{place} contains no "{key}"')
    if not isinstance(row[key], str):
        raise ConfigError(f"{place}: {key} must be a string, got {_kind(row[key])}")
    value: str = row[key]
    return value


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "a number"
    words = {str: "a string", bool: "true or false", type(None): "null"}
    # Parquet columns have more types than JSON.
    return words.get(type(value), f"a value of type {type(value).__name__}")
