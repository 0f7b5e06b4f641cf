"""Fine-tune a causal language model of transformers from a folder, in a loop of your own.

    python examples/finetune.py [FOLDER]

The weights are read from safetensors a layer at a time, trained from swap files, and written to ./finetuned, so the
model may be larger than the RAM. Without FOLDER it is a tiny one. Kill it and run it again: it goes on where it was.
Needs `pip install '.[hf]'`. `offload train --model FOLDER --data FILE --output finetuned` does the same.
"""

from __future__ import annotations

import sys
from typing import Any

import tiny_model
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import offload

EPOCHS = 3
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {"enabled": "auto"},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "weight_decay": 0.0}},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme"},
        "offload_optimizer": {"device": "nvme"},
    },
    "offload": {"nvme_path": "./swap", "run": "finetune", "resume": "auto"},
}


class Sums(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A question and its answer; only the answer is learned."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return 96

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        prompt = self._tokenizer(f"{row} and one are").input_ids
        answer = [*self._tokenizer(f" {row + 1}", add_special_tokens=False).input_ids, self._tokenizer.eos_token_id]
        ids, labels = prompt + answer, [-100] * len(prompt) + answer
        room = 32 - len(ids)
        return {"input_ids": torch.tensor(ids + [0] * room), "labels": torch.tensor(labels + [-100] * room)}


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else tiny_model.make()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = offload.auto_dtype(CONFIG)  # bf16 where this machine multiplies it as fast as fp32
    model = offload.load_pretrained(AutoModelForCausalLM, folder, config)
    try:
        engine, _, loader, _ = offload.initialize(model=model, config=config, training_data=Sums(tokenizer))
    except offload.StoreError as error:  # the run has ended, or another process has it
        raise SystemExit(str(error)) from None
    for _ in range(loader.epoch, EPOCHS):  # a run that goes on begins in the middle of an epoch
        for batch in loader:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            print(f"step {engine.global_steps}  loss {loss.item():.4f}", flush=True)
    engine.save_pretrained("finetuned", tokenizer=tokenizer)
    engine.destroy(remove=True)
    loaded = AutoModelForCausalLM.from_pretrained("finetuned")
    print(f"saved: {sum(parameter.numel() for parameter in loaded.parameters()):,} parameters in {loaded.dtype}")


if __name__ == "__main__":
    main()
