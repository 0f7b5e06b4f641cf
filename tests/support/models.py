"""Small real models, and jobs that train them; built from configs, so nothing is downloaded."""

from __future__ import annotations

import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.support.oracle import Job

WIDTHS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
"""Of a tiny transformer, by the names that most families have for them."""
DECODER = {**WIDTHS, "num_key_value_heads": 2, "vocab_size": 128}
IMAGES = {"image_size": 16, "patch_size": 8}


def gpt2(layers: int = 3, width: int = 64, heads: int = 4, words: int = 128, positions: int = 64) -> nn.Module:
    """Returns a GPT-2 of three blocks, with a tied embedding and without dropout."""
    sizes = {"n_layer": layers, "n_embd": width, "n_head": heads, "vocab_size": words, "n_positions": positions}
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **none, use_cache=False))


def gpt2_dropout(layers: int = 3) -> nn.Module:
    """Returns a GPT-2 with dropout, for which the random generators matter."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=layers, n_embd=64, n_head=4, vocab_size=128, n_positions=64, use_cache=False)
    )


def shallow() -> nn.Module:
    """Returns a GPT-2 of two blocks, for what a third one would not show."""
    return gpt2(layers=2)


def shallow_dropout() -> nn.Module:
    """Returns `gpt2_dropout` with two blocks."""
    return gpt2_dropout(layers=2)


def gpt2_tiny() -> nn.Module:
    """Returns the preset of the command line, without dropout."""
    return gpt2(layers=4, width=256, words=256, positions=1024)


def llama() -> nn.Module:
    sizes = DECODER | {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 64}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, use_cache=False))


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            vocab_size=128,
            dropout_rate=0.0,
            use_cache=False,
            decoder_start_token_id=0,
        )
    )


def swin() -> nn.Module:
    return transformers.SwinForImageClassification(
        transformers.SwinConfig(
            image_size=32, patch_size=2, embed_dim=16, depths=[1, 2], num_heads=[2, 4], window_size=4, num_labels=4
        )
    )


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**DECODER, num_local_experts=4, use_cache=False))


def llava() -> nn.Module:
    """Returns a vision-language model: a CLIP tower, a projector and a Llama."""
    vision, text = transformers.CLIPVisionConfig(**WIDTHS, **IMAGES), transformers.LlamaConfig(**DECODER)
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=127)
    )


def resnet() -> nn.Module:
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=16, hidden_sizes=[16, 32], depths=[1, 2], layer_type="basic", num_labels=4
        )
    )


def lora() -> nn.Module:
    """Returns a Llama of `peft`: all is frozen except nonzero adapters of two projections in each block."""
    import peft

    adapters = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(llama(), adapters)


class Mixture(nn.Module):
    """A model with a tied head, a frozen layer, a layer that no loss reaches, a scalar and an odd size."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 33)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(33, 70), nn.GELU(), nn.Linear(70, 33)) for _ in range(4))
        self.unused = nn.Linear(33, 5)
        self.head = nn.Linear(33, 61, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.blocks[1].requires_grad_(False)
        self.blocks[2][0].weight.requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        hidden = self.embedding(ids) * self.scale
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


class Recomputed(Mixture):
    """A mixture whose blocks run again in the backward."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids) * self.scale
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=False)
        return self.head(hidden)


def tokens(step: int, micro: int, size: tuple[int, ...] = (2, 32), vocabulary: int = 128) -> torch.Tensor:
    """Returns a batch of ids that depends on the arguments alone."""
    generator = torch.Generator().manual_seed(1_000 * step + micro)
    return torch.randint(vocabulary, size, generator=generator)


def language_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    ids = tokens(step, micro)
    return model(input_ids=ids, labels=ids).loss


def translation_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    ids = tokens(step, micro)
    return model(input_ids=ids, labels=ids.flip(1)).loss


def byte_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    ids = tokens(step, micro, (2, 64), 256)
    return model(input_ids=ids, labels=ids).loss


def token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Returns the cross entropy of logits, on whichever device they are."""
    return functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten().to(logits.device))


def mixture_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    ids = tokens(step, micro, (4, 16), 61)
    return token_loss(model(ids), ids)


def without_key_bias(name: str, value: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of a GPT-2 without the key biases, whose gradients are roundings of zero.

    Attention is invariant to the bias of its keys, so its true gradient is zero and what is computed is noise, which
    Adam scales up to the learning rate. A last-bit difference anywhere gives it other values, in PyTorch against itself
    too; it is compared by its effect, the losses, alone.
    """
    if not name.endswith("attn.c_attn.bias"):
        return value
    query, _, values = value.chunk(3)
    return torch.cat((query, values))


GPT2 = Job(gpt2, language_loss)
DROPOUT = Job(gpt2_dropout, language_loss)
SHALLOW = Job(shallow, language_loss)
SHALLOW_DROPOUT = Job(shallow_dropout, language_loss)
MIXTURE = Job(Mixture, mixture_loss, accumulation=2, logits=64.0)  # products of rows of 33 numbers of about one
LORA = Job(lora, language_loss)
TINY = Job(gpt2_tiny, byte_loss, steps=6, accumulation=4, clip=0.5)
