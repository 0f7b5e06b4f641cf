"""trl's trainers as a user writes them: `trl_trainers.py FOLDER [ds.json|none [KIND ...]]`.

Rank 0 prints what each has logged, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import tokenizers
import torch
import transformers
import trl

FOLDER, CONFIG, CHOSEN = Path(sys.argv[1]), next(iter(sys.argv[2:]), "none"), sys.argv[3:]
TEXTS = ["abc def", "hello world", "one two three", "xyz", "lorem", "ipsum", "dolor", "sit amet"]
PAIRS = [{"prompt": text, "chosen": " yes", "rejected": " no"} for text in TEXTS]
LOGGED = ("loss", "grad_norm", "learning_rate", "reward")


def tokenizer() -> Any:
    """Letters, without any file."""
    words = {word: number for number, word in enumerate(["[PAD]", "[EOS]", *"abcdefghijklmnopqrstuvwxyz"])}
    letters = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[PAD]"))
    letters.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    letters.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="[PAD]", eos_token="[EOS]")


def saved(kind: Any, **more: Any) -> str:
    """Writes a model and its tokenizer: trl loads the reference from the folder of the model."""
    path = FOLDER / kind.__name__
    if not path.exists():
        torch.manual_seed(0)
        sizes = {"vocab_size": 28, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1}
        kind(transformers.LlamaConfig(**sizes, **heads, bos_token_id=None, **more)).save_pretrained(path)
        tokenizer().save_pretrained(path)
    return str(path)


def logs(kind: Any, settings: Any, model: str, rows: list[dict[str, Any]], config: dict[str, Any], **more: Any) -> Any:
    """Trains three steps, and returns what was logged of each."""
    place = {} if CONFIG == "none" else {"deepspeed": CONFIG}
    usual: dict[str, Any] = {
        "use_cpu": True,
        "output_dir": str(FOLDER / kind.__name__),
        "report_to": [],
        "disable_tqdm": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
    }
    trainer = kind(
        model=model,
        args=settings(**usual | config | place),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
        **more,
    )
    trainer.train()
    paged = type(trainer.model_wrapped).__name__ == "DeepSpeedEngine"
    references = [each for each in (getattr(trainer, "ref_model", None),) if each is not None]
    assert all((type(each).__name__ == "DeepSpeedEngine") == paged == bool(place) for each in references)
    return [{key: log[key] for key in LOGGED if key in log} for log in trainer.state.log_history if "loss" in log]


def letters_of(completions: list[str], **_: Any) -> list[float]:
    return [float(text.count("a") + len(set(text))) for text in completions]


def main() -> None:
    language, classifier = transformers.LlamaForCausalLM, transformers.LlamaForSequenceClassification
    marked = [{"prompt": text, "completion": " yes", "label": number % 2 == 0} for number, text in enumerate(TEXTS)]
    texts, prompts = [{"text": each} for each in TEXTS], [{"prompt": each} for each in TEXTS]
    groups = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6, "beta": 0.1}

    def grpo(**more: Any) -> Any:
        return logs(trl.GRPOTrainer, trl.GRPOConfig, saved(language), prompts, groups | more, reward_funcs=letters_of)

    kinds: dict[str, Callable[[], Any]] = {
        "SFT": lambda: logs(trl.SFTTrainer, trl.SFTConfig, saved(language), texts, {}),
        "DPO": lambda: logs(trl.DPOTrainer, trl.DPOConfig, saved(language), PAIRS, {}),
        "KTO": lambda: logs(trl.KTOTrainer, trl.KTOConfig, saved(language), marked, {}),
        "reward": lambda: logs(trl.RewardTrainer, trl.RewardConfig, saved(classifier, num_labels=1), PAIRS, {}),
        "GRPO": grpo,
        "GRPO, paged": lambda: grpo(ds3_gather_for_generation=False),
    }
    logged = {name: kinds[name]() for name in CHOSEN or kinds}
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(logged), flush=True)


if __name__ == "__main__":
    main()
