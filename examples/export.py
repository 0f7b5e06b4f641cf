"""Take the weights out of swap files, when training is over or in between, without the model's code.

    python examples/export.py

trains a tiny model for a few steps, keeps the swap files, writes the exact fp32 weights by `offload export`, and loads
them with transformers. Needs `pip install '.[hf]'`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

import tiny_model
import torch
from finetune import CONFIG, Sums
from transformers import AutoModelForCausalLM, AutoTokenizer

import offload


def train(folder: str) -> None:
    """Four steps; what they have committed stays in ./swap/export."""
    run = {"nvme_path": "./swap", "run": "export", "durability": "step"}
    config = offload.auto_dtype(CONFIG | {"offload": run})
    model = offload.load_pretrained(AutoModelForCausalLM, folder, config)
    data = Sums(AutoTokenizer.from_pretrained(folder))
    engine, _, loader, _ = offload.initialize(model=model, config=config, training_data=data)
    for batch, _ in zip(loader, range(4), strict=False):
        engine.backward(engine(**batch).loss)
        engine.step()
    engine.destroy()


def main() -> None:
    folder = str(tiny_model.make())
    train(folder)
    arguments = ["export", "swap/export", "exported", "--dtype", "fp32", "--tokenizer", folder]
    subprocess.run([sys.executable, "-m", "offload", *arguments], check=True)
    model, tokenizer = AutoModelForCausalLM.from_pretrained("exported"), AutoTokenizer.from_pretrained("exported")
    ids = tokenizer("1 and one are 2", return_tensors="pt").input_ids
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss
    print(f"exported: {model.dtype}, loss {loss.item():.4f}")
    shutil.rmtree("swap/export")  # or: offload rm swap/export


if __name__ == "__main__":
    main()
