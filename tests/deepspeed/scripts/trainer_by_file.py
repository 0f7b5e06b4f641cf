"""transformers' Trainer by a JSON as it is: `trainer_by_file.py FOLDER ds.json ARGUMENTS`. Prints losses as JSON.

First without the JSON, in fp32, then with it, where the numbers of the JSON are given as arguments too.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from transformers import Trainer, TrainingArguments

from tests.support.trainer_runs import Texts, seeded

FOLDER, FILE, GIVEN = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])


def losses(**arguments: Any) -> list[float]:
    """Returns the losses of two steps."""
    usual = {"report_to": [], "disable_tqdm": True, "max_steps": 2, "logging_steps": 1, "save_strategy": "no"}
    settings = TrainingArguments(FOLDER, dataloader_pin_memory=False, **usual | arguments)
    trainer = Trainer(model=seeded(), args=settings, train_dataset=Texts(64))
    trainer.train()
    if settings.deepspeed:
        assert type(trainer.model_wrapped).__name__ == "DeepSpeedEngine"
        trainer.model_wrapped.destroy()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


given = {key: value for key, value in GIVEN.items() if key != "fp16"}
print(json.dumps({"plain": losses(use_cpu=True, **given), "paged": losses(deepspeed=FILE, **GIVEN)}))
