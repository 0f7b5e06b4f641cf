"""Tiny configs of the families of transformers: of all by one rule, and by hand of those that people fine-tune."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from tests.support.models import DECODER

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


class Release(NamedTuple):
    """A causal model that people fine-tune by its name: its class, and a tiny config with each kind of its layers."""

    model: str
    """The class of transformers."""
    year: int
    """In which the first weights were published."""
    layers: str
    """What mixes the tokens."""
    config: dict[str, Any]
    experts: str = ""
    """"groups" if groups of experts are units, "layer" if experts are one unit with their layer; empty without any."""
    noisy: bool = False
    """Some gradients are differences of nearly equal numbers: only losses and norms are compared with PyTorch's."""

    def build(self) -> Any:
        kind = getattr(transformers, self.model)
        return kind(kind.config_class(**self.config))


_BASE = {**DECODER, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_HEADS = {**_BASE, "head_dim": 8}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    **{f"linear_num_{what}_heads": count for what, count in (("key", 2), ("value", 4))},
    **{f"linear_{what}_head_dim": 8 for what in ("key", "value")},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 16}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
_DENSE_FIRST = {**_ROUTED, "first_k_dense_replace": 1}
_LATENT = {
    **_BASE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    **{f"{what}_head_dim": 8 for what in ("qk_rope", "qk_nope", "v")},
}
_INDEXED = {**_LATENT, **_DENSE_FIRST, "q_lora_rank": 16, "index_topk": 16, "index_head_dim": 16, "index_n_heads": 2}
_MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16}
_LAYER_TABLES = {
    **_HEADS,
    **_SLIDING,
    "global_head_dim": 8,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 8,
}
_CHUNKED = {"attention_chunk_size": 16, "no_rope_layer_interval": 2, "interleave_moe_layer_step": 2}
_COMPRESSED = {
    **_BASE,
    **_ROUTED,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "sliding_window": 16,
    "q_lora_rank": 16,
    "o_lora_rank": 16,
    "o_groups": 2,
    "index_topk": 16,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "mlp_layer_types": ["moe", "moe"],
}

_FULL, _LATENT_WORDS, _SPARSE = "full attention", "latent attention", "latent attention, indexed"
_GATED, _WINDOW = "gated delta rule, full attention", "sliding and full attention"

RELEASES = {
    "Mistral": Release("MistralForCausalLM", 2023, _FULL, _HEADS),
    "Mixtral": Release("MixtralForCausalLM", 2023, _FULL, {**_HEADS, **_LOCAL}, "groups"),
    "DeepSeek-V3": Release(
        "DeepseekV3ForCausalLM", 2024, _LATENT_WORDS, {**_LATENT, **_DENSE_FIRST, "q_lora_rank": 16}, "groups"
    ),
    "Llama 3": Release("LlamaForCausalLM", 2024, _FULL, _HEADS),
    "DeepSeek-V3.2": Release("DeepseekV32ForCausalLM", 2025, _SPARSE, _INDEXED, "groups"),
    "Gemma 3": Release("Gemma3ForCausalLM", 2025, _WINDOW, {**_HEADS, **_SLIDING}),
    "GLM-4": Release("Glm4ForCausalLM", 2025, _FULL, {**_HEADS, "attention_bias": False}),
    "GLM-4.5": Release("Glm4MoeForCausalLM", 2025, _FULL, {**_HEADS, **_DENSE_FIRST}, "groups"),
    "gpt-oss": Release("GptOssForCausalLM", 2025, _WINDOW, {**_HEADS, **_LOCAL, **_SLIDING}, "groups"),
    "Kimi-Linear": Release(
        "KimiLinearForCausalLM",
        2025,
        "delta attention, latent attention",
        {**_LATENT, **_EXPERTS, "layer_types": _LINEAR["layer_types"], "linear_head_dim": 8, "linear_num_heads": 4},
        "groups",
    ),
    "Llama-4": Release(
        "Llama4ForCausalLM",
        2025,
        "chunked and full attention",
        {**_HEADS, **_CHUNKED, "num_local_experts": 4, "intermediate_size_mlp": 64},
        "layer",
    ),
    "MiniMax-M2": Release("MiniMaxM2ForCausalLM", 2025, _FULL, {**_HEADS, **_LOCAL}, "groups"),
    "Nemotron-H": Release(
        "NemotronHForCausalLM",
        2025,
        "Mamba-2, full attention",
        {
            **_HEADS,
            **_ROUTED,
            **_MAMBA,
            "moe_shared_expert_intermediate_size": 16,
            "layers_block_type": ["mamba", "moe", "attention"],
        },
        "groups",
    ),
    "OLMo 3": Release("Olmo3ForCausalLM", 2025, _WINDOW, {**_BASE, **_SLIDING}),
    "Qwen3": Release("Qwen3ForCausalLM", 2025, _FULL, _HEADS),
    "Qwen3-MoE": Release("Qwen3MoeForCausalLM", 2025, _FULL, {**_HEADS, **_EXPERTS}, "groups"),
    "Qwen3-Next": Release("Qwen3NextForCausalLM", 2025, _GATED, {**_HEADS, **_SHARED, **_LINEAR}, "groups"),
    "DeepSeek-V4": Release(
        "DeepseekV4ForCausalLM", 2026, "compressed attention, hyper-connections", _COMPRESSED, "groups", noisy=True
    ),
    "Gemma-4": Release("Gemma4ForCausalLM", 2026, _WINDOW, _LAYER_TABLES),
    "Gemma-4, mixture": Release(
        "Gemma4ForCausalLM",
        2026,
        _WINDOW,
        {**_LAYER_TABLES, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
        "groups",
    ),
    "GLM-4.7-Flash": Release(
        "Glm4MoeLiteForCausalLM", 2026, _LATENT_WORDS, {**_LATENT, **_DENSE_FIRST, "q_lora_rank": 16}, "groups"
    ),
    "GLM-5": Release("GlmMoeDsaForCausalLM", 2026, _SPARSE, _INDEXED, "groups"),
    "Qwen3.5": Release("Qwen3_5ForCausalLM", 2026, _GATED, {**_HEADS, **_LINEAR}),
    "Qwen3.5-MoE": Release("Qwen3_5MoeForCausalLM", 2026, _GATED, {**_HEADS, **_SHARED, **_LINEAR}, "groups"),
}
"""By the names under which they are known."""
