"""A preset learns bytes, and a run of a preset alone has the tokenizer of bytes."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from offload.finetune.corpus.packing import encode_text
from offload.finetune.model import byte_tokenizer, learned_bytes

TEXT = "Ċ is a letter; é, 漢 and 😀 are several bytes.\n\n\ttabs\r\n \x01"


@given(st.text())
@example(TEXT)
def test_tokens_are_the_bytes_that_training_learns(text: str) -> None:
    coder = byte_tokenizer()
    ids = coder(text)["input_ids"]
    assert ids == list(text.encode()) and coder.decode(ids) == text
    np.testing.assert_array_equal(encode_text(text, coder), encode_text(text, None))


def test_only_a_run_of_a_preset_has_learned_bytes() -> None:
    assert learned_bytes({"job": {"model": "llama-tiny", "weights": ""}})
    assert not learned_bytes({"job": {"model": "/models/mine", "weights": "0123abcd"}}), "a folder has a tokenizer"
    assert not learned_bytes({}) and not learned_bytes({"job": None}), "a loop of one's own"
