"""The tokenizer of models that `offload train` trains on bytes: a preset has none of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload.presets import require_transformers

_SHOWN = (*range(33, 127), *range(161, 173), *range(174, 256))
"""Bytes that byte-level tokenizers write as the character of their number. All others follow from character 256 on."""


def byte_tokenizer() -> Any:
    """Returns a tokenizer of transformers with a token for each byte of UTF-8, whose id is the byte.

    The tokenizer has no merges and no special tokens, so any text is encoded as its bytes and decoded without loss. The
    newline that ends a document in training is no special token: a text may contain newlines anywhere.

    Raises:
        ConfigError: transformers is not installed.
    """
    transformers = require_transformers()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    others = [byte for byte in range(256) if byte not in _SHOWN]
    characters = {byte: chr(byte) for byte in _SHOWN} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    found = Tokenizer(models.BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=found, clean_up_tokenization_spaces=False)


def learned_bytes(client_state: Mapping[str, Any]) -> bool:
    """Returns True if the client state of a run is that of `offload train` with a preset, whose tokens are bytes."""
    job = client_state.get("job")
    return isinstance(job, Mapping) and job.get("weights") == ""  # a checksum of the weights for every folder
