"""Two steps of adapters over a folder whose matrices are stored in 4 bits, and the same in memory over their values.

python -m tests.frozen.limited_training MODEL SWAP OUT     the engine: OUT has losses, gradients and adapters
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

import offload
from offload.layout.frozen import stored_as_blocks
from tests.support.frozen_blocks import through_blocks

HOST, DEVICE = "96MiB", "160MiB"
STEPS = 2


def ids(step: int) -> torch.Tensor:
    """Returns the tokens of a step."""
    return torch.randint(32_000, (1, 8), generator=torch.Generator().manual_seed(step))


def adapted(model: Any) -> Any:
    """Returns a model with adapters on all matrices, of which none is zero."""
    model.config.use_cache = False
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(model, settings).train()


def train(folder: Path, swap: Path, out: Path) -> None:
    """Trains with the engine; each step is written into `out`: its loss, and gradients and adapters before it."""
    disk = {"device": "nvme", "nvme_path": str(swap)}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": disk, "offload_optimizer": disk},
        "offload": {"device": "cpu", "host_memory": HOST, "device_memory": DEVICE, "frozen": "nf4"},
    }
    model = adapted(offload.load_pretrained(transformers.AutoModelForCausalLM, folder, dtype=torch.bfloat16))
    engine = offload.initialize(model=model, config=config)[0]
    print(*engine.notices, sep="\n")
    for step in range(STEPS):
        named = [(name, each) for name, each in engine.module.named_parameters() if each.requires_grad]
        before = {name: offload.safe_get_full_fp32_param(each).bfloat16() for name, each in named}  # type: ignore[union-attr]
        read = engine.io_bytes().read
        loss = engine(input_ids=ids(step), labels=ids(step)).loss
        engine.backward(loss)
        gradients = {name: offload.safe_get_full_grad(each).bfloat16() for name, each in named}  # type: ignore[union-attr]
        engine.step()
        content = {"loss": loss.detach(), "gradients": gradients, "adapters": before}
        torch.save(content | {"read": engine.io_bytes().read - read}, out / f"{step}.pt")
    engine.destroy(remove=True)


def in_memory(folder: Path, out: Path) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Returns loss and gradients of each step by torch and peft, over the values that the codes stand for."""
    model = adapted(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    for name in stored_as_blocks(model, "nf4", torch.bfloat16):
        parameter = model.get_parameter(name)
        parameter.data = through_blocks(parameter, "nf4", torch.bfloat16)
    results = []
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    for step in range(STEPS):
        given = torch.load(out / f"{step}.pt")["adapters"]
        for name, parameter in trained.items():
            parameter.data, parameter.grad = given[name], None
        loss = model(input_ids=ids(step), labels=ids(step)).loss
        loss.backward()
        results.append((loss.detach(), {name: each.grad for name, each in trained.items()}))
    return results


if __name__ == "__main__":
    train(*map(Path, sys.argv[1:]))
