"""Tiny configs of the families of transformers, made by one rule from the defaults of each."""

from __future__ import annotations

import re
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

_SIZES = (
    (r"layers?$|^depth$|^num_blocks$", 2),
    (r"(kv|key_value)_heads$|experts_per_tok$|num_query_groups$", 2),
    (r"heads?$|experts$", 4),
    (r"head_dim$|^d_kv$|^patch_size$", 8),
    (r"lora_rank$", 16),
    (r"intermediate|ffn|inner|mlp_dim|d_ff$", 64),
    (r"hidden_size$|d_model$|^dim$|^n_embd$|embed_dim$|hidden_dim$|embedding_size$|_dim_model$|^image_size$", 32),
    (r"vocab_size$|codebook_size$", 130),
    (r"positions$|^n_ctx$|max_position_embeddings$", 64),
)
"""Largest value of each integer of a config whose name matches; the first match counts."""

FAMILIES = {
    kind: (names if isinstance(names, str) else names[0], CONFIG_MAPPING_NAMES[kind])
    for kind, names in MODEL_MAPPING_NAMES.items()
    if kind in CONFIG_MAPPING_NAMES
}
"""Names of the base model and the config of each family."""


def tiny_config(kind: type[Any]) -> Any:
    """Returns a config of this class with small sizes, also in the configs within it."""
    sizes: dict[str, Any] = {}
    for name, value in vars(kind()).items():
        if isinstance(value, transformers.PretrainedConfig):
            sizes[name] = tiny_config(type(value))
        elif type(value) is int:
            limit = next((size for pattern, size in _SIZES if re.search(pattern, name)), value)
            sizes[name] = 1 if name.endswith("token_id") and value >= 130 else min(value, limit)
    return kind(**{name: value for name, value in sizes.items() if not name.startswith("_")})
