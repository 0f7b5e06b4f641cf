"""Train LoRA adapters of peft over a model from a folder, in a loop of your own.

    python examples/lora.py [FOLDER]

The model's weights are paged from disk and never written: they have neither gradients nor optimizer states. ./adapter
gets the adapter, as peft writes it. Without FOLDER it is a tiny model. Needs `pip install '.[hf]'`.
"""

from __future__ import annotations

import sys
import warnings

import peft
import tiny_model
import torch
from finetune import CONFIG, Sums
from transformers import AutoModelForCausalLM, AutoTokenizer

import offload

STEPS = 24
warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # peft asks transformers


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else tiny_model.make()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = offload.auto_dtype(CONFIG | {"offload": {"nvme_path": "./swap", "run": "lora"}})
    base = offload.load_pretrained(AutoModelForCausalLM, folder, config)
    settings = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, settings)
    engine, _, loader, _ = offload.initialize(model=model, config=config, training_data=Sums(tokenizer))
    before = engine.io_bytes()
    while engine.global_steps < STEPS:
        for batch in loader:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
        print(f"step {engine.global_steps}  loss {loss.item():.4f}")
    written = (engine.io_bytes().written - before.written) // engine.global_steps
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    print(f"{trained:,} of {engine.parameter_count:,} parameters train; {written:,} bytes are written a step")
    engine.save_pretrained("adapter", tokenizer=tokenizer)
    engine.destroy(remove=True)
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), "adapter")
    print(
        f"saved: adapters {', '.join(loaded.peft_config)} for {loaded.peft_config['default'].base_model_name_or_path}"
    )


if __name__ == "__main__":
    main()
