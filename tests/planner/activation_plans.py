"""A small decoder in round numbers, machines, and ways to keep activations, for tests of plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from offload.layout.flat_layout import lay_out
from offload.planner import memory
from offload.planner.activations import Wish
from offload.planner.hardware import Hardware, described, parse_drive
from offload.planner.model_shape import Shape, Use
from offload.sizes import GIB

KEPT, DEVICE, CPU, NVME, AUTO = (Wish(tier) for tier in (None, "device", "cpu", "nvme", "auto"))
TOKENS, HIDDEN, WORDS = 4096, 1024, 30000
INPUT = 2 * TOKENS * HIDDEN
BLOCKS = 4
MACHINE = ("--gpu", "24GB", "--ram", "64GB", "--drive", "7GB/s,4GB/s")
# Blocks of the size of 13B's, few enough to simulate a step at once.
COUNT = ("--parameters", "2.6B", "--layers", "8", "--seq-len", "2048")


def small() -> Shape:
    """Returns a decoder whose blocks save 20 inputs, 12 of them in the MLP, in round numbers."""
    block = Use(
        0, 1e9, 1e6, 20 * INPUT, INPUT, largest=2 * INPUT, mlp_flops=2.0 * TOKENS * 8 * HIDDEN**2,
        mlp_saved=12 * INPUT, mlp_largest=3 * INPUT,
    )  # fmt: skip
    logits = 4 * TOKENS * WORDS
    uses = (
        Use(0, 0.0, 1e6, 0, 8 * TOKENS, lookup=True),
        *(block._replace(unit=1 + index) for index in range(BLOCKS)),
        Use(BLOCKS + 1, 0.0, 1e6, 3 * INPUT, INPUT, largest=2 * INPUT),
        Use(BLOCKS + 2, 1e9, 1e6, INPUT + logits, INPUT, largest=logits),
    )
    names = ["embedding", *(f"layers.{index}" for index in range(BLOCKS)), "norm", "head"]
    sizes = [WORDS * HIDDEN, *[12 * HIDDEN**2] * BLOCKS, HIDDEN, WORDS * HIDDEN]
    layouts = tuple(
        lay_out(name, [(f"{name}.weight", nn.Parameter(torch.empty(size, device="meta")))], 1)
        for name, size in zip(names, sizes, strict=True)
    )
    return Shape("small", layouts, uses, logits, TOKENS)


def card(**changes: Any) -> Hardware:
    return replace(described("RTX 4090", 128 * GIB, [parse_drive("7GB/s,5GB/s,4TB")]), **changes)


def config(tier: str | None = None, tile: int | str | None = None, **options: Any) -> dict[str, Any]:
    return memory.settings("nvme", "nvme", activations=tier, tile_mlp=tile, **options)


def llama(folder: Path, **changes: int) -> str:
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_hidden_layers": 3}
    text = transformers.LlamaConfig(**sizes | {"vocab_size": 512, "max_position_embeddings": 8192} | changes)
    text.save_pretrained(folder)
    return str(folder)
