"""What `--data` names: files of documents, read and checked line by line. Pure but for the reading; knows no tokens.

*.jsonl, *.ndjson, *.json   one object a line: {"text": …}, {"messages": […]} or {"prompt": …, "completion": …}
any other file              one document, plain text
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from offload.errors import ConfigError

_LINES = (".jsonl", ".ndjson", ".json")
_IN_FOLDERS = (".jsonl", ".ndjson", ".txt", ".md", ".py")
_SHAPES = '{"text": "…"}, {"messages": [{"role": "user", "content": "…"}, …]} or {"prompt": "…", "completion": "…"}'


class Text(NamedTuple):
    """A document of which all is learned."""

    place: str
    """Its file, and the line where it has one: "data.jsonl:17"."""
    text: str


class Chat(NamedTuple):
    """Messages for a tokenizer's chat template."""

    place: str
    messages: list[dict[str, Any]]


class Completion(NamedTuple):
    """A prompt, and what is to be learned after it."""

    place: str
    prompt: str
    completion: str


Record = Text | Chat | Completion


def find_data(paths: Sequence[Path]) -> list[Path]:
    """The files of `paths`, folders searched for *.jsonl, *.ndjson, *.txt, *.md and *.py, in an order that stays."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.suffix in _IN_FOLDERS and file.is_file())
            if not inside:
                raise ConfigError(f"there is no {', '.join(f'*{kind}' for kind in _IN_FOLDERS)} file under {path}")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise ConfigError(f"there is no data at {path}")
    return found


def read_records(files: Sequence[Path]) -> list[Record]:
    """All documents of all files, in order. Raises `ConfigError` with file and line for what is none."""
    return [record for file in files for record in _read(file)]


def _read(file: Path) -> Iterator[Record]:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    if file.suffix not in _LINES:
        yield Text(str(file), _decode(content, str(file)))
        return
    for number, line in enumerate(content.split(b"\n"), 1):
        place = f"{file}:{number}"
        text = _decode(line, place).strip()
        if text:
            yield _record(text, place)


def _decode(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{place} is not UTF-8: {error.reason} at byte {error.start}; convert the file") from error


def _record(line: str, place: str) -> Record:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place} is not JSON: {error}; each line must be one of {_SHAPES}") from error
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{place} has half a character in it, {error.object[error.start]!a}; mend the line"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{place} holds {_kind(found)}, and each line must be one of {_SHAPES}")
    kinds = [key for key in ("text", "messages", "prompt") if key in found]
    if len(kinds) != 1:
        keys = ", ".join(found) or "no key"
        raise ConfigError(f"{place} has {keys}; it must be one of {_SHAPES}")
    if kinds == ["text"]:
        return Text(place, _string(found, "text", place))
    if kinds == ["messages"]:
        return Chat(place, _messages(found["messages"], place))
    return Completion(place, _string(found, "prompt", place), _string(found, "completion", place))


def _messages(value: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{place}: messages must be a list of at least one message, and it is {_kind(value)}")
    for number, message in enumerate(value, 1):
        where = f"{place}: message {number}"
        if not isinstance(message, dict):
            raise ConfigError(f'{where} must be an object with "role" and "content", and it is {_kind(message)}')
        _string(message, "role", where)
        if not message.get("tool_calls"):
            _string(message, "content", where)
    return value


def _string(found: dict[str, Any], key: str, place: str) -> str:
    if key not in found:
        raise ConfigError(f"{place} has no {key}")
    if not isinstance(found[key], str):
        raise ConfigError(f"{place}: {key} must be a string, and it is {_kind(found[key])}")
    value: str = found[key]
    return value


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, dict):
        return "an object"
    return {str: "a string", bool: "true or false", type(None): "null"}.get(type(value), "a number")
