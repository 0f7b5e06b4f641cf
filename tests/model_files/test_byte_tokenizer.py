"""A preset learns bytes, and what is saved or exported of it has the tokenizer of bytes, which scores and generates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from offload.cli.main import app
from offload.finetune.corpus.packing import encode_text
from offload.finetune.model import byte_tokenizer, learned_bytes

TEXT = "Ċ is a letter; é, 漢 and 😀 are several bytes.\n\n\ttabs\r\n \x01"


def call(*arguments: str) -> Any:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 0, result.output
    return result


@given(st.text())
@example(TEXT)
def test_tokens_are_the_bytes_that_training_learns(text: str) -> None:
    coder = byte_tokenizer()
    ids = coder(text)["input_ids"]
    assert ids == list(text.encode()) and coder.decode(ids) == text
    np.testing.assert_array_equal(encode_text(text, coder), encode_text(text, None))


@pytest.mark.slow
def test_what_is_saved_and_exported_of_a_preset_scores_and_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT * 4)
    options = ("--model", "gpt2-tiny", "--seq-len", "32", "--batch-size", "1", "--device", "cpu")
    call("train", "--text", "text.txt", *options, "--steps", "1", "--save", "saved", "--keep")
    call("export", "swap/default", "exported")
    scores = []
    for folder in ("saved", "exported"):
        coder = transformers.AutoTokenizer.from_pretrained(folder)
        assert coder(TEXT)["input_ids"] == list(TEXT.encode()) and coder.decode(list(TEXT.encode())) == TEXT
        scored = call("score", folder, "--data", "text.txt", "--seq-len", "32", "--batch-size", "1", "--device", "cpu")
        scores.append([json.loads(line) for line in scored.stdout.splitlines()])
        call("generate", folder, "--prompt", "Ċ is", "--max-new-tokens", "3", "--device", "cpu")
    assert scores[0] == scores[1] and scores[0][0]["tokens"] == len((TEXT * 4).encode())


def test_only_a_run_of_a_preset_has_learned_bytes() -> None:
    assert learned_bytes({"job": {"model": "llama-tiny", "weights": ""}})
    assert not learned_bytes({"job": {"model": "/models/mine", "weights": "0123abcd"}}), "a folder has a tokenizer"
    assert not learned_bytes({}) and not learned_bytes({"job": None}), "a loop of one's own"
