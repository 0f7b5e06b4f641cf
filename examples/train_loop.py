"""A loop of your own: a small language model on bytes, with weights and states in swap files.

    python examples/train_loop.py

Nothing but torch is needed. Stop it by Ctrl-C and run it again: it goes on where it was.
"""

from __future__ import annotations

import logging

import torch
from torch import nn
from torch.nn import functional

import offload

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme"},
        "offload_optimizer": {"device": "nvme"},
    },
    "offload": {"nvme_path": "./swap", "run": "example", "resume": "auto"},
}


class Model(nn.Module):
    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def batch(step: int) -> torch.Tensor:
    """(8, 64) ids of this very file, chosen by the step."""
    with open(__file__, "rb") as file:
        data = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
    starts = torch.randint(len(data) - 64, (8,), generator=torch.Generator().manual_seed(step))
    return torch.stack([data[start : start + 64] for start in starts])


def main(steps: int = 20) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(0)
    config = offload.auto_dtype(CONFIG)  # bf16 where this machine multiplies it as fast as fp32
    try:
        engine, _, _, _ = offload.initialize(model=Model(), config=config)
    except offload.StoreError as error:  # the run has ended, or another process has it
        raise SystemExit(str(error)) from None
    while engine.global_steps < steps:
        for micro in range(engine.gradient_accumulation_steps()):
            ids = batch(2 * engine.global_steps + micro)
            logits = engine(ids)[:, :-1].float()
            loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
        print(f"step {engine.global_steps}  loss {loss.item():.4f}", flush=True)
    engine.destroy(remove=True)


if __name__ == "__main__":
    main()
