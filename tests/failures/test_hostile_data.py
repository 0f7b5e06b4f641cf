"""Data that were made to break their reader are an error of one line, in the memory that the process had before."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from offload.errors import ConfigError
from offload.finetune.corpus.documents import read_records
from tests.support.processes import warm_process

MIB = 1 << 20
ROOM = 768 * MIB
"""Address space that a reader may take beside what it has imported."""
READ = f"""
import resource, sys
from pathlib import Path
import pyarrow.parquet
from offload.errors import ConfigError
from offload.finetune.corpus.documents import read_records
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + {ROOM},) * 2)
for name in sys.argv[1:]:
    try:
        print("read", sum(1 for _ in read_records([Path(name)])))
    except ConfigError as error:
        print(error)
"""


def _table(file: Path, column: Any, name: str = "text", **options: Any) -> None:
    pyarrow.parquet.write_table(pyarrow.table({name: column}), file, **options)


def _bomb(file: Path) -> None:
    """One string of 128 MiB in 20 KiB, in each of 300 rows: 37 GiB."""
    values = pyarrow.array(["x" * (128 * MIB)])
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 300, pyarrow.int32()), values)
    _table(file, column, compression="zstd", store_schema=False)


def _nested(file: Path) -> None:
    """Lists in lists, almost as deep as a schema may be."""
    column = pyarrow.array([["x"]])
    for _ in range(40):
        column = pyarrow.ListArray.from_arrays(pyarrow.array([0, 1], pyarrow.int32()), column)
    _table(file, column, "messages")


def _huge_page(file: Path) -> None:
    """The header of the first page claims two gigabytes, as varint of thrift."""
    _table(file, pyarrow.array(["x" * 1000]), compression="none", use_dictionary=False)
    content = bytearray(file.read_bytes())
    # PageHeader: type, then uncompressed_page_size (field 2, i32) as a zigzag varint of two bytes here.
    at = content.index(b"\x15", 6)
    size = content[at + 1 : at + 3]
    content = content.replace(b"\x15" + bytes(size), b"\x15\xfe\xff\xff\xff\x0f", 1)
    file.write_bytes(content)


def _truncated(file: Path) -> None:
    _table(file, pyarrow.array([str(number) * 50 for number in range(1000)]))
    file.write_bytes(file.read_bytes()[:-3000] + file.read_bytes()[-500:])


def _footer(file: Path) -> None:
    file.write_bytes(b"PAR1" + b"x" * 64 + struct.pack("<I", 1 << 31) + b"PAR1")


def _invalid(file: Path) -> None:
    _table(file, pyarrow.array([b"\xff\xfe"]).cast(pyarrow.binary()).view(pyarrow.string()), store_schema=False)


def _dates(file: Path) -> None:
    _table(file, pyarrow.array([1 << 62], pyarrow.timestamp("us")))


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "bomb.parquet": (_bomb, "which no text does: it was made to fill the memory, and is not read"),
    "nested.parquet": (_nested, "message 1 must be an object"),
    "page.parquet": (_huge_page, "cannot (be )?read|expands to"),
    "truncated.parquet": (_truncated, "cannot (be )?read"),
    "footer.parquet": (_footer, "cannot (be )?read"),
    "bytes.parquet": (_invalid, "cannot (be )?read|not UTF-8"),
    "dates.parquet": (_dates, "cannot (be )?read|must be a string"),
    "deep.jsonl": (lambda file: file.write_text('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}"), "is not JSON"),
    "number.jsonl": (lambda file: file.write_text('{"text": ' + "9" * 100_000 + "}"), "is not JSON"),
    "keys.jsonl": (
        lambda file: file.write_text(json.dumps({f"key{number}": 0 for number in range(200_000)})),
        "each line must be one of",
    ),
    "bytes.jsonl": (lambda file: file.write_bytes(b'{"text": "\xff\xfe"}'), "is not UTF-8"),
    "array.npy": (lambda file: file.write_bytes(b"\x93NUMPY\x01\x00v\x00{}" + bytes(range(256))), "UTF-8"),
    "columns.csv": (lambda file: file.write_text(",".join(f"c{number}" for number in range(200_000))), "the columns"),
}


def test_hostile_files_are_one_line_in_bounded_memory(tmp_path: Path) -> None:
    for name, (make, _) in FILES.items():
        make(tmp_path / name)
    code = f"import sys\nsys.argv = {['', *FILES]!r}\n{READ}"
    done = warm_process.python(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == len(FILES), done.stdout[-3000:]
    for (name, (_, words)), line in zip(FILES.items(), lines, strict=True):
        assert line.startswith((name, f"cannot read {name}")) and re.search(words, line), line
        assert len(line) < 1500, name


@pytest.mark.parametrize("depth", [985, 990, 995, 1000])
def test_no_depth_of_json_is_an_error_of_python(depth: int, tmp_path: Path) -> None:
    """Near the depth that the reader can just parse, the check of its characters goes deeper."""
    (tmp_path / "deep.jsonl").write_text('{"text": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(ConfigError):
        list(read_records([tmp_path / "deep.jsonl"]))
