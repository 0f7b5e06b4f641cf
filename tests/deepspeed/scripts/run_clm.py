"""Trains a causal language model on text files by transformers' Trainer, from a folder with a model and a tokenizer.

run_clm.py --model_name_or_path FOLDER --train_files a.py b.py --output_dir OUT --do_train --do_eval ...
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class ModelArguments:
    """The model to train."""

    model_name_or_path: str = field(metadata={"help": "folder with config, weights and tokenizer"})
    torch_dtype: str | None = field(default=None, metadata={"help": "dtype of the weights: auto, float32, bfloat16"})


@dataclass
class DataArguments:
    """The text to train on."""

    train_files: list[str] = field(metadata={"help": "text files"})
    block_size: int = field(default=32, metadata={"help": "tokens of a sample"})
    validation_percentage: int = field(default=10, metadata={"help": "share of the samples that are for evaluation"})
    max_samples: int | None = field(default=None, metadata={"help": "number of samples, for trials"})


def blocks(tokenizer: Any, data: DataArguments) -> list[dict[str, torch.Tensor]]:
    """Returns the text of all files, joined and cut into samples of equal length."""
    texts = [Path(name).read_text() for name in data.train_files]
    ids = list(itertools.chain.from_iterable(tokenizer(texts)["input_ids"]))
    cut = torch.tensor(ids[: len(ids) // data.block_size * data.block_size]).view(-1, data.block_size)
    return [{"input_ids": row, "labels": row.clone()} for row in cut[: data.max_samples]]


def accuracy(predictions: Any) -> dict[str, float]:
    """Returns the share of the tokens that were predicted; the sample's first token has no prediction."""
    choices, wanted = predictions.predictions[:, :-1], predictions.label_ids[:, 1:]
    return {"accuracy": float((choices == wanted).mean())}


def main() -> None:
    parser = transformers.HfArgumentParser((ModelArguments, DataArguments, transformers.TrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        model_args, data_args, training_args = parser.parse_json_file(json_file=sys.argv[1])
    else:
        model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    transformers.set_seed(training_args.seed)
    checkpoint = training_args.resume_from_checkpoint
    if checkpoint == "last":
        checkpoint = get_last_checkpoint(training_args.output_dir)

    tokenizer = transformers.AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    dtype = {} if model_args.torch_dtype is None else {"dtype": model_args.torch_dtype}
    model = transformers.AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, **dtype)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))

    with training_args.main_process_first(desc="tokenizing"):
        samples = blocks(tokenizer, data_args)
    held_back = max(1, len(samples) * data_args.validation_percentage // 100)
    trainer = transformers.Trainer(
        model=model,
        args=training_args,
        train_dataset=samples[held_back:] if training_args.do_train else None,
        eval_dataset=samples[:held_back] if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=transformers.default_data_collator,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
    )
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()
        metrics = {**result.metrics, "train_samples": len(samples) - held_back}
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if trainer.is_world_process_zero():
        trainer.create_model_card()
        print(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main()
