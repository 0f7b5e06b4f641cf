"""Batches are a function of seed, step and micro-batch, and files are read in a stable order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from offload.errors import ConfigError
from offload.finetune.corpus.data import steps_of
from offload.finetune.corpus.token_stream import Batches, find_files, read_bytes, read_tokens, standard_library
from offload.finetune.options import Options

TEXT = np.arange(1000, dtype=np.uint8)


def test_a_batch_depends_on_nothing_else() -> None:
    first, again = (Batches(TEXT, 4, 16, seed=3) for _ in range(2))
    first.batch(1, 0)  # an earlier one leaves no trace
    assert torch.equal(first.batch(7, 2), again.batch(7, 2))
    assert first.batch(7, 2).shape == (4, 16) and first.batch(7, 2).dtype == torch.int64
    different = [Batches(TEXT, 4, 16, seed=4).batch(7, 2), first.batch(8, 2), first.batch(7, 3)]
    assert not any(torch.equal(first.batch(7, 2), other) for other in different)


def test_sequences_are_contiguous_in_the_text() -> None:
    for row in Batches(TEXT, 32, 16, seed=0).batch(1, 0):
        assert torch.equal(row, (row[0] + torch.arange(16)) % 256)


def test_every_token_of_the_text_can_be_drawn() -> None:
    rows = Batches(np.arange(17, dtype=np.uint8), 200, 16, seed=0).batch(1, 0)
    assert set(rows[:, 0].tolist()) == {0, 1}


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


def test_the_default_text_is_there() -> None:
    assert len(read_bytes(find_files(standard_library())[:50])) > 100_000
