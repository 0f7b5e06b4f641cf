"""Fine-tunes a classifier of one sentence or two by transformers' Trainer, evaluates, and writes predictions.

    run_glue.py --model_name_or_path FOLDER --train_file train.json --validation_file valid.json --output_dir OUT ...

A line of a file is a JSON object with "sentence1", perhaps "sentence2", and "label".
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import transformers


@dataclass
class ModelArguments:
    """The model to train."""

    model_name_or_path: str = field(metadata={"help": "folder with config, weights and tokenizer"})


@dataclass
class DataArguments:
    """The sentences."""

    train_file: str = field(metadata={"help": "lines of JSON"})
    validation_file: str = field(metadata={"help": "lines of JSON"})
    max_seq_length: int = field(default=48, metadata={"help": "tokens of a sample at most"})
    pad_to_max_length: bool = field(default=False, metadata={"help": "pad all samples, instead of each batch"})


def samples(name: str, tokenizer: Any, data: DataArguments) -> list[dict[str, Any]]:
    result = []
    for line in Path(name).read_text().splitlines():
        row = json.loads(line)
        texts = [row[key] for key in ("sentence1", "sentence2") if key in row]
        padding = "max_length" if data.pad_to_max_length else False
        encoded = tokenizer(*texts, padding=padding, max_length=data.max_seq_length, truncation=True)
        result.append({**encoded, "label": row["label"]})
    return result


def metrics_of(predictions: transformers.EvalPrediction) -> dict[str, float]:
    logits = predictions.predictions[0] if isinstance(predictions.predictions, tuple) else predictions.predictions
    return {"accuracy": float((np.argmax(logits, axis=1) == predictions.label_ids).mean())}


def main() -> None:
    parser = transformers.HfArgumentParser((ModelArguments, DataArguments, transformers.TrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        model_args, data_args, training_args = parser.parse_json_file(json_file=sys.argv[1])
    else:
        model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    transformers.set_seed(training_args.seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    with training_args.main_process_first(desc="tokenizing"):
        train, valid = (
            samples(name, tokenizer, data_args) for name in (data_args.train_file, data_args.validation_file)
        )
    config = transformers.AutoConfig.from_pretrained(
        model_args.model_name_or_path, num_labels=len({row["label"] for row in train})
    )
    # The head is new; the rest is the folder's.
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        model_args.model_name_or_path, config=config
    )
    model.config.label2id = {f"kind {label}": label for label in range(config.num_labels)}
    model.config.id2label = {label: name for name, label in model.config.label2id.items()}
    collator: Any = transformers.default_data_collator
    if not data_args.pad_to_max_length:
        collator = transformers.DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)
    trainer = transformers.Trainer(
        model=model,
        args=training_args,
        train_dataset=train if training_args.do_train else None,
        eval_dataset=valid if training_args.do_eval else None,
        compute_metrics=metrics_of,
        processing_class=tokenizer,
        data_collator=collator,
    )
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate(eval_dataset=valid)
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if training_args.do_predict:
        logits = trainer.predict([{key: row[key] for key in row if key != "label"} for row in valid]).predictions
        if trainer.is_world_process_zero():
            Path(training_args.output_dir, "predictions.json").write_text(
                json.dumps(np.argmax(logits, axis=1).tolist())
            )
    if trainer.is_world_process_zero():
        print(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main()
