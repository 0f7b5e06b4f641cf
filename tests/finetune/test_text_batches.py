"""Batches are a function of seed, step and micro-batch, and files are read in a stable order."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from offload import testing
from offload.errors import ConfigError
from offload.finetune.corpus import token_stream
from offload.finetune.corpus.data import steps_of
from offload.finetune.corpus.token_stream import Batches, find_files, read_bytes, read_tokens
from offload.finetune.options import Options
from tests.support.processes import warm_process

TEXT = np.arange(1000, dtype=np.uint8)


def test_a_batch_depends_on_nothing_else() -> None:
    first, again = (Batches(TEXT, 4, 16, seed=3) for _ in range(2))
    first.batch(1, 0)  # an earlier one leaves no trace
    assert torch.equal(first.batch(7, 2), again.batch(7, 2))
    assert first.batch(7, 2).shape == (4, 16) and first.batch(7, 2).dtype == torch.int64
    different = [Batches(TEXT, 4, 16, seed=4).batch(7, 2), first.batch(8, 2), first.batch(7, 3)]
    assert not any(torch.equal(first.batch(7, 2), other) for other in different)


def test_too_little_text_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"3 tokens.*16"):
        Batches(np.zeros(3, np.uint8), 1, 16, 0)


def test_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("b/2.py", "b/1.py", "a.txt", "c.bin"):
        (tmp_path / name).write_bytes(name.encode())
    assert [p.name for p in find_files([tmp_path])] == ["a.txt", "1.py", "2.py"]
    assert bytes(read_bytes(find_files([tmp_path / "c.bin", tmp_path / "a.txt"]))) == b"c.bin\na.txt"
    for missing in (tmp_path / "none", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(ConfigError):
            find_files([missing])


@pytest.mark.parametrize("name", ["data.jsonl", "data.ndjson"])
def test_documents_are_not_learned_as_text(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"text": "words"}\n')
    with pytest.raises(ConfigError, match="give the file by --data"):
        find_files([tmp_path / name])


def test_passes_are_of_the_decimal_number_that_was_given() -> None:
    """As floats, 0.07 * 100 is more than 7."""
    batches = Batches(TEXT, 1, 10, seed=0)
    assert batches.steps_of_a_pass == 100
    for epochs, steps in ((0.07, 7), (0.071, 8), (0.55, 55), (1e-9, 1), (2.0, 200)):
        assert steps_of(Options(epochs=epochs), 5, batches) == steps


def test_a_tokenizer_makes_the_tokens_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one two \xff")
    tokens = read_tokens([tmp_path / "a.txt"], lambda text: [len(word) for word in text.split()])
    assert tokens.tolist() == [3, 3, 1]


# --------------------------------------------------------------------------------------------------
# Large token lists are stored in unnamed files; training has the same bits, and a full disk is an error.


@pytest.fixture(autouse=True)
def _files_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def mapped() -> int:
    """How many temporary files this process has mapped."""
    return Path("/proc/self/maps").read_text().count(tempfile.gettempdir())


def test_texts_in_files_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / f"{n}.txt" for n in range(5)]
    for n, file in enumerate(files):
        file.write_bytes(f"{n} words ".encode() * 50)

    def read() -> list[np.ndarray]:
        as_bytes = token_stream.read_bytes(files)
        as_tokens = token_stream.read_tokens(files, lambda text: np.frombuffer(text.encode(), np.uint8) + np.int32(1))
        return [each for tokens in (as_bytes, as_tokens) for each in (tokens, *token_stream.hold_out(tokens, 16))]

    expected = read()
    assert bytes(expected[0]) == b"\n".join(file.read_bytes() for file in files)
    testing.replace(monkeypatch, "size.tokens_in_memory", 100)
    batches = read()
    assert mapped() >= 4, "tokens, and those that are learned, of each"
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(batches, expected, strict=True))


def test_a_full_disk_is_an_error_and_not_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    testing.replace(monkeypatch, "size.tokens_in_memory", 100)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"do not fit in .*: No space left on device; .* set TMPDIR"):
        token_stream.make_array((100,), np.int32)


_LIMITED = """
import json, resource, sys
from pathlib import Path
from offload.finetune.corpus import data, token_stream
from offload.finetune.options import Options
token_stream._IN_RAM = int(sys.argv[2])
options = Options(data=(Path(sys.argv[1]),), seq_len=512)
files = data.find_files(options)
used = 4096 * int(Path("/proc/self/statm").read_text().split()[5])  # what RLIMIT_DATA counts: not what files back
resource.setrlimit(resource.RLIMIT_DATA, (used + (64 << 20), resource.RLIM_INFINITY))
try:
    found = data.read_files(options, files, None, data.Share(1, 1, 0, 0, 1), True)
    print(json.dumps(found.batches.token_count))
except MemoryError:
    print(json.dumps("MemoryError"))
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("in_files", [True, False])
def test_data_may_be_larger_than_memory(tmp_path: Path, in_files: bool) -> None:
    """20 MB of text are 20 million tokens without a tokenizer, 340 MB with all that is known of each."""
    line = json.dumps({"text": "to be or not to be " * 500}) + "\n"
    (tmp_path / "data.jsonl").write_text(line * (20_000_000 // len(line)))
    arguments = (str(tmp_path / "data.jsonl"), str(1 << 20 if in_files else 1 << 40))
    done = warm_process.run(["-c", _LIMITED, *arguments])
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report > 18_000_000 if in_files else report == "MemoryError"
