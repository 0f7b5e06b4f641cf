"""Model folders and data as users have them: a tiny Llama, a tokenizer of bytes, with a chat template or without."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.models import WIDTHS

SPECIAL = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>")
PLAIN_TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
MARKING_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}</s>{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)


def tokenizer(template: str | None = None) -> Any:
    """Returns a tokenizer with a token for each byte after the special ones; 0 begins a text, 1 ends it."""
    vocabulary = {token: at for at, token in enumerate((*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", additional_special_tokens=list(SPECIAL[2:])
    )
    made.chat_template = template
    return made


def llama_config(**more: Any) -> Any:
    settings = {
        **WIDTHS,
        "vocab_size": 256 + len(SPECIAL),
        "max_position_embeddings": 128,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return transformers.LlamaConfig(**(settings | more))


def make_folder(folder: Path, template: str | None = None, weights: bool = True, seed: int = 0, **more: Any) -> Path:
    """Makes a folder with a tokenizer, a config and, if `weights`, weights."""
    tokenizer(template).save_pretrained(folder)
    config = llama_config(**more)
    if weights:
        torch.manual_seed(seed)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    return folder


def write_lines(path: Path, lines: Iterable[Any]) -> None:
    """Writes a file of documents: one line of JSON for each."""
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
