"""transformers' Trainer with a DeepSpeed config, as a user writes it, beside the stock Trainer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from tests.support.trainer_runs import Texts, assert_close, result, seeded

FOLDER, ROWS = Path(sys.argv[1]), Texts(10)


def config(tier: str, **blocks: Any) -> str:
    """Writes the config of transformers' documentation."""
    (FOLDER / "drive").mkdir(exist_ok=True)
    place = {"device": tier, "pin_memory": True, **({"nvme_path": str(FOLDER / "drive")} if tier == "nvme" else {})}
    auto = dict.fromkeys(
        ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
    )
    gathers = {"stage3_gather_16bit_weights_on_model_save": True}
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    content = {
        **dict.fromkeys(batch, "auto"),
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "stage3_max_live_parameters": 1e9,
            "offload_param": place,
            "offload_optimizer": place,
            **auto,
            **gathers,
        },
        **blocks,
    }
    path = FOLDER / f"{tier}.json"
    path.write_text(json.dumps(content))
    return str(path)


def trainer(folder: str, model: Any = None, steps: int = 3, **more: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(FOLDER / folder),
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        learning_rate=1e-3,
        weight_decay=0.1,
        max_grad_norm=0.5,
        warmup_steps=2,
        save_steps=2,
        max_steps=steps,
        dataloader_pin_memory=False,
        **more,
    )
    return Trainer(model=model or seeded(), args=arguments, train_dataset=ROWS, eval_dataset=ROWS)


def trained(mine: Trainer, checkpoint: str | None = None) -> Any:
    mine.train(resume_from_checkpoint=checkpoint)
    return result(mine)


stock = trained(trainer("stock"))
on_disk = trainer("disk", deepspeed=config("nvme"))
run = trained(on_disk)
assert_close(run, stock)
on_disk.save_model(str(FOLDER / "saved"))
again = trained(trainer("disk", deepspeed=config("nvme")), str(FOLDER / "disk" / "checkpoint-2"))
assert again.logs == run.logs
assert all(torch.equal(again.weights[name], value) for name, value in run.weights.items())

# The config's own optimizer and schedule, in memory.
optimizer = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
rates = ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
schedule = {"type": "WarmupDecayLR", "params": dict.fromkeys(rates, "auto")}
by_config = trained(trainer("memory", steps=1, deepspeed=config("cpu", optimizer=optimizer, scheduler=schedule)))
assert by_config.logs[0]["loss"] == run.logs[0]["loss"] and len(by_config.logs) == 1

# What was saved is loaded under ZeRO-3, and evaluated without an optimizer.
loaded = AutoModelForCausalLM.from_pretrained(str(FOLDER / "saved"))
assert all(hasattr(parameter, "ds_id") for parameter in loaded.parameters())
wanted = on_disk.evaluate()["eval_loss"]
evaluating = trainer("evaluate", loaded, deepspeed=config("cpu"))
assert evaluating.evaluate()["eval_loss"] == wanted
