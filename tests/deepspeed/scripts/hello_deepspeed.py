"""A masked language model of BERT's kind, trained on Python's own source by `deepspeed.initialize`: prints the losses.

It saves a checkpoint in the middle, and with --load_checkpoint_dir goes on from there.
"""

from __future__ import annotations

import argparse
import inspect
import json
import textwrap
from pathlib import Path

import deepspeed
import torch
from transformers import BertConfig, BertForMaskedLM

PAD, MASK, FIRST = 0, 1, 2
LENGTH, IGNORED = 24, -100


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="masked language modelling")
    parser.add_argument("--checkpoint_dir", type=Path, required=True)
    parser.add_argument("--load_checkpoint_dir", type=Path)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--num_iterations", type=int, default=6)
    parser.add_argument("--checkpoint_every", type=int, default=3)
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--offload", choices=("none", "cpu", "nvme"), default="none")
    parser.add_argument("--local_rank", type=int, default=-1)
    return parser.parse_args()


def config(args: argparse.Namespace) -> dict[str, object]:
    zero: dict[str, object] = {"stage": args.stage}
    if args.offload != "none":
        place = {"device": args.offload, "pin_memory": False, "nvme_path": str(args.checkpoint_dir / "swap")}
        zero["offload_optimizer"] = place
        if args.stage == 3:
            zero["offload_param"] = place
    return {
        "train_micro_batch_size_per_gpu": args.batch_size,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "fp16": {"enabled": args.dtype == "fp16", "initial_scale_power": 8},
        "bf16": {"enabled": args.dtype == "bf16"},
        "zero_optimization": zero,
    }


def make_model() -> BertForMaskedLM:
    """Makes the model: letters are its words."""
    torch.manual_seed(0)
    return BertForMaskedLM(
        BertConfig(
            vocab_size=FIRST + 128,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=48,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            pad_token_id=PAD,
        )
    )


def batch(step: int, size: int) -> dict[str, torch.Tensor]:
    """Returns the batch of a step: one in seven letters is hidden, and to be found."""
    text = [FIRST + ord(letter) for letter in inspect.getsource(textwrap) if ord(letter) < 128]
    random = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - LENGTH, (size,), generator=random)
    ids = torch.tensor([text[start : start + LENGTH] for start in starts.tolist()])
    hidden = torch.rand(ids.shape, generator=random) < 1 / 7
    hidden[:, 0] = True
    return {
        "input_ids": ids.masked_fill(hidden, MASK),
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(~hidden, IGNORED),
    }


def main(args: argparse.Namespace) -> None:
    deepspeed.init_distributed()
    (args.checkpoint_dir / "swap").mkdir(parents=True, exist_ok=True)
    model = make_model()
    model, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config(args), args=args
    )
    start_step = 0
    if args.load_checkpoint_dir is not None:
        _, client_state = model.load_checkpoint(load_dir=str(args.load_checkpoint_dir))
        start_step = client_state["checkpoint_step"] + 1
    losses = []
    for step in range(start_step, args.num_iterations):
        inputs = {key: value.to(model.device) for key, value in batch(step, args.batch_size).items()}
        loss = model(**inputs).loss
        model.backward(loss)
        model.step()
        losses.append(loss.item())
        if (step + 1) % args.checkpoint_every == 0 and step + 1 < args.num_iterations:
            model.save_checkpoint(save_dir=str(args.checkpoint_dir), client_state={"checkpoint_step": step})
    print(json.dumps({"losses": losses}))


if __name__ == "__main__":
    main(arguments())
