"""Files of `--data` become documents in a stable order; a wrong file or line is an error that names it."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError
from offload.finetune.corpus.documents import Chat, Completion, Record, Text, find_data, read_records
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


# --------------------------------------------------------------------------------------------------
# CSV and Parquet files give the documents of the same lines of JSON; a wrong row is an error that names it.


CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
TABLE_CHAT = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "name": "add"},
]
TEXTS = ["one\ntwo", "", "2024-01-02", "1.50", "null", 'a "quoted", é\r\nline', "x" * 200_000]


def contents(file: Path) -> list[tuple[Any, ...]]:
    """The documents of a file, without their places."""
    return [(type(record), *record[1:]) for record in read_records([file])]


def as_json(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def as_csv(file: Path, rows: list[dict[str, Any]]) -> Path:
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    return file


def as_parquet(file: Path, rows: list[dict[str, Any]]) -> Path:
    names = dict.fromkeys(name for row in rows for name in row)
    table = pyarrow.Table.from_pylist([dict.fromkeys(names) | row for row in rows])
    pyarrow.parquet.write_table(table, file, row_group_size=2)
    return file


def read(file: Path) -> list[Record]:
    return [*read_records([file])]


# -- the same documents -------------------------------------------------------------------------------


def test_a_chat_has_its_tools_as_a_list_or_as_its_json(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    rows: list[dict[str, Any]] = [
        {"messages": TABLE_CHAT, "tools": tools},
        {"messages": TABLE_CHAT, "tools": None},
        {"messages": TABLE_CHAT[:1], "tools": tools},
    ]
    expected = contents(as_json(tmp_path / "a.jsonl", rows))
    assert [content[2] for content in expected] == [tools, None, tools]
    assert contents(as_parquet(tmp_path / "a.parquet", rows)) == expected
    for row in rows:
        row["tools"] = row["tools"] and json.dumps(row["tools"])
    assert contents(as_parquet(tmp_path / "b.parquet", rows)) == expected
    assert contents(as_json(tmp_path / "b.jsonl", rows)) == expected


def test_texts_come_as_they_were_written(tmp_path: Path) -> None:
    rows = [{"text": text, "id": str(number)} for number, text in enumerate(TEXTS)]
    expected = contents(as_json(tmp_path / "a.jsonl", rows))
    assert [content[1] for content in expected] == TEXTS
    assert contents(as_csv(tmp_path / "a.csv", rows)) == expected
    assert contents(as_parquet(tmp_path / "a.parquet", rows)) == expected
    assert csv.field_size_limit() < 200_000, "a setting of the process, given back"


def test_prompts_and_completions(tmp_path: Path) -> None:
    rows = [{"id": "7", "completion": f" {n}\n", "prompt": f"{n}, "} for n in range(5)]
    expected = contents(as_json(tmp_path / "a.jsonl", rows))
    assert len(expected) == 5
    assert contents(as_csv(tmp_path / "a.csv", rows)) == expected
    assert contents(as_parquet(tmp_path / "a.parquet", rows)) == expected


def test_every_kind_in_one_parquet_file_without_the_nulls_between_them(tmp_path: Path) -> None:
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": TABLE_CHAT}, {"text": "t"}, {"messages": plain}, {"prompt": "p", "completion": ""}]
    assert contents(as_parquet(tmp_path / "a.parquet", rows)) == contents(as_json(tmp_path / "a.jsonl", rows))


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff")), min_size=1))
def test_any_text_survives_csv_and_parquet(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("texts")
    rows = [{"prompt": text, "completion": text[::-1]} for text in texts]
    expected = contents(as_json(folder / "a.jsonl", rows))
    assert contents(as_csv(folder / "a.csv", rows)) == expected
    assert contents(as_parquet(folder / "a.parquet", rows)) == expected


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_every_type_of_strings_that_parquet_has(tmp_path: Path, kind: str) -> None:
    message = pyarrow.array(["one", "two", "one"])
    array = message.dictionary_encode() if kind == "dictionary" else message.cast(getattr(pyarrow, kind)())
    pyarrow.parquet.write_table(pyarrow.table({"text": array}), tmp_path / "a.parquet")
    assert [content[1] for content in contents(tmp_path / "a.parquet")] == ["one", "two", "one"]


# -- places, order, and how much is read --------------------------------------------------------------


def test_records_name_their_line_or_row(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('\ufefftext,n\n"one\ntwo",1\n\nthree,2\n')
    assert [record.place for record in read(file)] == [f"{file}:2", f"{file}:5"]
    rows = as_parquet(tmp_path / "a.parquet", [{"text": str(number)} for number in range(5)])
    assert [record.place for record in read(rows)] == [f"{rows}: row {number}" for number in range(1, 6)]


def test_a_folder_has_tables_too(tmp_path: Path) -> None:
    for name in ("b.csv", "a.parquet", "c.jsonl", "weights.bin"):
        (tmp_path / name).write_text("")
    assert [file.name for file in find_data([tmp_path])] == ["a.parquet", "b.csv", "c.jsonl"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_what_comes_later_is_read_later(tmp_path: Path, name: str) -> None:
    first = "text\nright\n" if name == "a.csv" else '{"text": "right"}\n'
    (tmp_path / name).write_bytes(first.encode() + b"\xff\n")
    records = read_records([tmp_path / name, tmp_path / "missing.jsonl"])
    assert next(records)[1] == "right"
    with pytest.raises(ConfigError, match=r"is not UTF-8"):
        next(records)


def test_parquet_is_read_some_hundred_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"] * 2000, "other": ["b"] * 2000}), file)
    seen: list[tuple[int, list[str]]] = []
    made = pyarrow.parquet.ParquetFile.iter_batches

    def counted(self: Any, *arguments: Any, **named: Any) -> Any:
        for batch in made(self, *arguments, **named):
            seen.append((batch.num_rows, batch.schema.names))
            yield batch

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", counted)
    records = read_records([file])
    next(records)
    assert seen == [(256, ["text"])]
    assert sum(1 for _ in records) == 1999


# -- what is none -------------------------------------------------------------------------------------

WRONG_CSV = {
    "id,body\n1,a\n": r":1 contains the columns id, body; rename one to text",
    "": r" contains the columns \(none\)",
    "text\na\nb,c\n": r":3 contains 2 fields, and the first line names 1 column",
    'text\na\n"b\nc\n': r":3 is not CSV: unexpected end of data",
    'text\n"a"b\n': r":2 is not CSV: ',' expected after '\"'",
    "text,prompt\na,b\n": r":2 contains text, prompt; each line must be one of",
    "prompt\na\n": r':2 contains no "completion"',
    "messages\n[]\n": r":2: messages must be a list of at least one message, got a string",
}


@pytest.mark.parametrize("content", WRONG_CSV)
def test_a_wrong_csv_file_is_an_error_with_its_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(ConfigError, match=rf"a\.csv{WRONG_CSV[content]}"):
        read(tmp_path / "a.csv")


WRONG_ROWS: dict[str, list[dict[str, Any]]] = {
    r" contains the columns id, body; rename one to text": [{"id": 1, "body": "a"}],
    r": row 2 contains no key; each line must be one of": [{"text": "a"}, {"text": None}],
    r": row 1: text must be a string, got a number": [{"text": 3}],
    r": row 1: text must be a string, got a value of type bytes": [{"text": b"a"}],
    r': row 1: message 2 contains no "content"': [{"messages": [{"role": "a", "content": "b"}, {"role": "a"}]}],
}


@pytest.mark.parametrize("message", WRONG_ROWS)
def test_a_wrong_row_of_parquet(tmp_path: Path, message: str) -> None:
    file = as_parquet(tmp_path / "a.parquet", WRONG_ROWS[message])
    with pytest.raises(ConfigError, match=rf"a\.parquet{message}"):
        read(file)


def test_no_parquet_at_all_or_a_torn_one(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    file.write_text('{"text": "right"}\n')
    with pytest.raises(ConfigError, match=r"a\.parquet cannot be read as Parquet after row 0"):
        read(file)
    as_parquet(file, [{"text": f"{n}" * 500} for n in range(100)])
    content = bytearray(file.read_bytes())
    content[len(content) // 3 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 3)
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot read .*a\.parquet: |a\.parquet cannot be read as Parquet"):
        read(file)


def test_without_pyarrow_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_parquet(tmp_path / "a.parquet", [{"text": "a"}])
    as_csv(tmp_path / "b.csv", [{"text": "a"}])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert find_data([tmp_path / "b.csv"]) and len(read(tmp_path / "b.csv")) == 1
    with pytest.raises(ConfigError, match=r"pip install 'offload\[data\]'"):
        find_data([tmp_path])
