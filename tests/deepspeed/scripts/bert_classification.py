"""BERT fine-tuned to tell comments from code, with DeepSpeed's loop and a JSON: prints losses and accuracy.

The lines are of Python's own library. The config is a file, `--deepspeed_config`, as a launcher gives it.
"""

from __future__ import annotations

import argparse
import inspect
import json
import typing

import deepspeed
import torch
from deepspeed.runtime.lr_schedules import WarmupLR
from transformers import BertConfig, BertForSequenceClassification

LENGTH, ROWS = 24, 48


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="classification")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--seed", type=int, default=3)
    return deepspeed.add_config_arguments(parser).parse_args()


def rows() -> list[dict[str, torch.Tensor]]:
    """Returns as many comments as lines of code: their letters, and 1 for a comment."""
    lines = [line.strip() for line in inspect.getsource(typing).splitlines()]
    kinds = [[line.lstrip("# ") for line in lines if line.startswith("#")], [line for line in lines if "=" in line]]
    result = []
    for number in range(ROWS):
        text = kinds[number % 2][number // 2][:LENGTH].ljust(LENGTH)
        ids = torch.tensor([min(ord(letter), 127) for letter in text])
        result.append(
            {"input_ids": ids, "attention_mask": (ids != ord(" ")).long(), "labels": torch.tensor(1 - number % 2)}
        )
    return result


def make_model(seed: int) -> BertForSequenceClassification:
    torch.manual_seed(seed)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=128,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=48,
            max_position_embeddings=LENGTH,
            num_labels=2,
        )
    )


def groups(model: torch.nn.Module) -> list[dict[str, object]]:
    """Returns the two groups of BERT's recipe: no decay of biases and norms."""
    plain = ("bias", "LayerNorm.weight")
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if not name.endswith(plain)], "weight_decay": 0.01},
        {"params": [p for name, p in named if name.endswith(plain)], "weight_decay": 0.0},
    ]


def main(args: argparse.Namespace) -> None:
    data = rows()
    model = make_model(args.seed)
    optimizer = deepspeed.ops.adam.FusedAdam(groups(model), lr=1e-3)
    schedule = WarmupLR(optimizer, warmup_min_lr=0.0, warmup_max_lr=1e-3, warmup_num_steps=4, warmup_type="linear")
    engine, optimizer, loader, schedule = deepspeed.initialize(
        args=args,
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedule,
        training_data=data,
        collate_fn=torch.utils.data.default_collate,
    )
    losses, norms, rates = [], [], []
    torch.manual_seed(args.seed)  # of the dropout
    for _ in range(args.epochs):
        engine.train()
        for batch in loader:
            batch = {key: value.to(engine.device) for key, value in batch.items()}
            loss = engine(**batch)[0]
            engine.backward(loss)
            boundary = engine.is_gradient_accumulation_boundary()
            engine.step()
            losses.append(loss.item())
            if boundary:
                norms.append(float(engine.get_global_grad_norm()))
                rates.append(engine.get_lr()[0])
    engine.eval()
    right = 0
    with torch.no_grad():
        for row in data:
            logits = engine(**{key: value[None].to(engine.device) for key, value in row.items()}).logits
            right += int(logits.argmax(-1).item() == row["labels"].item())
    print(json.dumps({"losses": losses, "norms": norms, "rates": rates, "right": right}))


if __name__ == "__main__":
    main(arguments())
