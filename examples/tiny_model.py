"""A folder as `save_pretrained` writes it, for the other examples: a Llama of 0.2M parameters and a tokenizer of bytes.

    python examples/tiny_model.py

writes ./tiny-model. Nothing is downloaded; the other examples take any folder in its place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}</s>{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer() -> Any:
    """One token for each byte, four special ones, and a chat template that marks the assistant's words."""
    vocabulary = {token: at for at, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", additional_special_tokens=SPECIAL[2:]
    )
    made.chat_template = TEMPLATE
    return made


def make(folder: str = "tiny-model") -> Path:
    """The folder, which is written where it is not there yet."""
    path = Path(folder)
    if not path.exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=3,
            num_attention_heads=4,
            vocab_size=256 + len(SPECIAL),
            max_position_embeddings=256,
            bos_token_id=0,
            eos_token_id=1,
        )
        tokenizer().save_pretrained(path)
        LlamaForCausalLM(config).save_pretrained(path)
    return path


if __name__ == "__main__":
    print(make())
