"""Files of `--data` become documents in a stable order; a wrong file or line is an error that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.errors import ConfigError
from offload.finetune.corpus.documents import Chat, Completion, Text, find_data, read_records
from offload.finetune.corpus.token_stream import read_bytes

CHAT = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "id": 7}'


def test_every_kind_of_line(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(f'{{"text": "one\\ntwo"}}\n\n{CHAT}\r\n{{"prompt": "p", "completion": ""}}')
    text, chat, completion = [*read_records([file])]
    assert text == Text(f"{file}:1", "one\ntwo")
    assert isinstance(chat, Chat) and chat.place == f"{file}:3" and chat.messages[1]["content"] == "b"
    assert completion == Completion(f"{file}:4", "p", "")


def test_any_other_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text('\ufeff{"text": 1}\nand more é')
    assert [*read_records([tmp_path / "a.txt"])] == [Text(str(tmp_path / "a.txt"), '{"text": 1}\nand more é')]


def test_a_folder_is_searched_in_an_order_that_stays(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("z.txt", "b/2.jsonl", "b/1.md", "config.json", "weights.bin"):
        (tmp_path / name).write_text("")
    names = [file.relative_to(tmp_path).as_posix() for file in find_data([tmp_path, tmp_path / "config.json"])]
    assert names == ["b/1.md", "b/2.jsonl", "z.txt", "config.json"]


@pytest.mark.parametrize("path", ["missing", "empty"])
def test_no_data_is_an_error(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=f"there is no .*{path}"):
        find_data([tmp_path / path])


WRONG = {
    "{": "is not JSON",
    "[1]": "`jq -c '.[]' FILE` makes lines",
    '"words"': "contains a string",
    "{}": "contains no key; each line must be one of",
    '{"txt": "a"}': "contains txt; each line must be one of",
    '{"text": "a", "messages": []}': "contains text, messages",
    '{"text": null}': "text must be a string, got null",
    '{"prompt": "a"}': 'contains no "completion"',
    '{"prompt": [], "completion": "a"}': "prompt must be a string, got an empty list",
    '{"messages": []}': "at least one message, got an empty list",
    '{"messages": "a"}': "must be a list of at least one message, got a string",
    '{"messages": ["a"]}': "message 1 must be an object",
    '{"messages": [{"content": "a"}]}': 'message 1 contains no "role"',
    '{"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}': 'message 2 contains no "content"',
    '{"messages": [{"role": "user", "content": 3}]}': "content must be a string, got a number",
    '{"messages": [{"role": "user", "content": "a"}], "tools": {"name": "f"}}': "list of JSON schemas, got an object",
    '{"messages": [{"role": "user", "content": "a"}], "tools": ["f"]}': "tools must be a list of JSON schemas",
    '{"messages": [{"role": "user", "content": "a"}], "tools": "{"}': "list of JSON schemas, or its JSON",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_malformed_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(f'{{"text": "right"}}\n\n{line}\n')
    with pytest.raises(ConfigError) as promoted:
        [*read_records([file])]
    assert str(promoted.value).startswith(f"{file}:3") and WRONG[line] in str(promoted.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'{"text": "right"}\n{"text": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"data.jsonl:2 is not UTF-8: invalid start byte at byte 10"):
        [*read_records([file])]


def test_a_lone_surrogate_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "fine"}\n{"text": "lone \\ud83d surrogate"}\n')
    with pytest.raises(ConfigError, match=r"data\.jsonl:2 contains half of a surrogate pair, '\\ud83d'"):
        [*read_records([file])]


@pytest.mark.parametrize("name", ["data.jsonl", "data.csv", "data.txt"])
def test_a_file_of_holes_is_not_read(name: str, tmp_path: Path) -> None:
    """Its first line may be as long as it claims to be, which is any number of terabytes."""
    with (tmp_path / name).open("wb") as file:
        file.truncate(512 << 20)
    with pytest.raises(ConfigError, match=rf"cannot read .*{name}: the file has 512.0 MiB, all but .* holes"):
        [*read_records([tmp_path / name])]
    with pytest.raises(ConfigError, match=rf"cannot read .*{name}: the file has 512.0 MiB, all but .* holes"):
        read_bytes([tmp_path / name])
