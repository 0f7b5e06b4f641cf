"""transformers' Trainer: a small language model on bytes, with weights and states in swap files.

    python examples/trainer.py

Needs `pip install '.[hf]'`, and nothing is downloaded. Stop it by Ctrl-C and run it again: it goes on from its
last checkpoint in ./trainer-output.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.trainer_utils import get_last_checkpoint

import offload
from offload.hf import OffloadTrainer

CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme"},
        "offload_optimizer": {"device": "nvme"},
    },
    "offload": {"nvme_path": "./swap", "run": "trainer"},
}


class Bytes(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Pieces of 64 bytes of this very file."""

    def __init__(self) -> None:
        self._data = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self._data) // 64

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        ids = self._data[64 * row : 64 * row + 64]
        return {"input_ids": ids, "labels": ids}


def model() -> Any:
    settings = transformers.GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=256, n_positions=64)
    return transformers.GPT2LMHeadModel(settings)


def main() -> None:
    folder = Path("./trainer-output")
    last = get_last_checkpoint(folder) if folder.is_dir() else None
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=4,
        learning_rate=3e-3,
        warmup_steps=4,
        bf16=offload.auto_dtype(CONFIG, last)["bf16"]["enabled"],  # where it is as fast as fp32
        logging_steps=6,
        save_steps=8,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = OffloadTrainer(model=model(), args=args, train_dataset=Bytes(), offload_config=CONFIG)
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model("./trainer-output/final")
    loaded = transformers.AutoModelForCausalLM.from_pretrained("./trainer-output/final")
    print(f"saved: {sum(parameter.numel() for parameter in loaded.parameters()):,} parameters in {loaded.dtype}")


if __name__ == "__main__":
    main()
