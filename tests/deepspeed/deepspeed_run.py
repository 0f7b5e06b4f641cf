"""Trains a tiny GPT-2 with DeepSpeed, saves, and goes on: makes `tests/data/deepspeed_checkpoints.tar.xz`.

It needs DeepSpeed 0.19.8 beside torch and transformers, in an environment of its own, and runs on the CPU:

    pip install torch==2.13.0 transformers ninja py-cpuinfo psutil
    DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.8
    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 tests/deepspeed/deepspeed_run.py OUT z3-bf16 z2-fp32-frozen

All ranks have the same batches, so that losses and gradients do not depend on their number. For each case a folder in
OUT receives the checkpoint in DeepSpeed's files, the same as a universal one, and `losses.json` with those of the steps
before and after it. With --universal FOLDER, that universal checkpoint is loaded in place of the training before.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

BEFORE, AFTER = 5, 20
"""Steps before the checkpoint, and after it."""
VOCABULARY, LENGTH, SAMPLES = 31, 8, 2


def model(frozen: bool = False) -> GPT2LMHeadModel:
    """Returns the model: 1,500 parameters in odd sizes, with a tied head; `frozen` freezes its position embedding."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=9, n_layer=1, n_head=3, bos_token_id=0, eos_token_id=0
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    made = GPT2LMHeadModel(config)
    made.transformer.wpe.weight.requires_grad_(not frozen)
    return made


def batch(step: int) -> torch.Tensor:
    """Returns the tokens of a step, (samples, length): each is the one before plus three."""
    first = torch.randint(0, VOCABULARY, (SAMPLES, 1), generator=torch.Generator().manual_seed(step))
    return (first + 3 * torch.arange(LENGTH)) % VOCABULARY


def config(stage: int, dtype: str) -> dict[str, Any]:
    """Returns the JSON, for DeepSpeed and for this library."""
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.99], "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-2, "warmup_num_steps": 12, "warmup_type": "linear"},
        },
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16", "initial_scale_power": 8},
        "zero_optimization": {"stage": stage},
    }


def losses(engine: Any, steps: range) -> list[float]:
    """Trains the steps and returns their losses."""
    losses = []
    for step in steps:
        tokens = batch(step)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def began(engine: Any, out: Path, frozen: bool) -> dict[str, Any]:
    """Trains, saves a checkpoint and converts it; returns the losses."""
    from deepspeed.checkpoint import ds_to_universal

    before = losses(engine, range(BEFORE))
    # What ds_to_universal asks for; stage 3 needs none.
    info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.4}}
    state = {"best": 0.25, "names": ["a", None]} | (info if engine.zero_optimization_stage() < 3 else {})
    engine.save_checkpoint(out, client_state=state)
    torch.distributed.barrier()
    # Of frozen weights DeepSpeed's converter makes no universal checkpoint that it could load.
    if torch.distributed.get_rank() == 0 and not frozen:
        folders = {"input_folder": f"{out}/global_step{BEFORE}", "output_folder": f"{out}/universal"}
        options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        ds_to_universal.main(argparse.Namespace(**folders, **options, inject_missing_state=False))
    return {"before": before}


def main() -> None:
    """Runs the cases."""
    import deepspeed

    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="+", metavar="zSTAGE-DTYPE[-frozen]")
    parser.add_argument("--universal", type=Path)
    given = parser.parse_args()
    # No operator of DeepSpeed is compiled: its AdamW and its transport through shared memory would be, at first use.
    deepspeed.ops.__compatible_ops__.update(dict.fromkeys(deepspeed.ops.__compatible_ops__, False))
    for case in given.cases:
        stage, dtype, *more = case.removeprefix("z").split("-")
        content = config(int(stage), dtype)
        content["optimizer"]["params"]["torch_adam"] = True
        content["checkpoint"] = {"load_universal": given.universal is not None}
        engine, *_ = deepspeed.initialize(model=model(bool(more)), config=content)
        size = torch.distributed.get_world_size()
        out = given.out / f"{case}-{size}"
        out.mkdir(parents=True, exist_ok=True)
        if given.universal is None:
            report = began(engine, out, bool(more))
        else:
            _, state = engine.load_checkpoint(given.universal)
            report = {"steps": engine.global_steps, "best": state.get("best")}
        report |= {"after": losses(engine, range(BEFORE, BEFORE + AFTER)), "lr": engine.get_lr()}
        if torch.distributed.get_rank() == 0:
            (out / "losses.json").write_text(json.dumps(report, indent=1))
        print(case, size, report, flush=True)


if __name__ == "__main__":
    main()
