"""`initialize` without a config: keywords that say the same, for a loop of plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.errors import ConfigError, UsageError
from tests.support.processes.device_process import engine_device


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
    first, rest = [*model[0].parameters()], [*model[1:].parameters()]
    groups = [{"params": first, "lr": 1e-3}, {"params": rest, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1)


def trained(**options: Any) -> list[float]:
    model, optimizer = made()
    engine = offload.initialize(model, optimizer=optimizer, **options).engine
    batches = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(4):
        loss = 100 * engine(torch.randn(8, 16, generator=batches).to(engine.device)).square().mean()
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    found = [(group["lr"], group["betas"], group["weight_decay"]) for group in engine.optimizer.param_groups]
    assert found == [(1e-3, (0.8, 0.9), 0.1), (1e-2, (0.8, 0.9), 0.0)]
    engine.destroy(remove=True)
    return losses


@pytest.mark.cpu_only("the keywords choose the device by themselves")
def test_the_keywords_train_as_the_config_that_says_the_same(tmp_path: Path) -> None:
    config = {
        "gradient_clipping": 0,
        "zero_optimization": {"offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}},
        "offload": {"nvme_path": str(tmp_path), "host_memory": "64MiB", "device": engine_device()},
    }
    keywords: dict[str, Any] = {"weights": "nvme", "states": "nvme", "path": tmp_path, "host_memory": "64MiB"}
    expected = trained(config=config)
    assert trained(**keywords) == expected
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert trained(**keywords, config=str(file)) == expected


def test_keywords_that_contradict_the_config_are_an_error_that_names_both(tmp_path: Path) -> None:
    model, optimizer = made()
    config = {"zero_optimization": {"offload_param": {"device": "cpu"}}, "bf16": {"enabled": True}}
    before = json.dumps(config)
    with pytest.raises(ConfigError, match=r"got weights='nvme' and .* zero_optimization.offload_param.device is 'cpu'"):
        offload.initialize(model, optimizer=optimizer, config=config, weights="nvme", path=tmp_path)
    with pytest.raises(ConfigError, match=r"got dtype='fp32' and a config in which bf16.enabled is True"):
        offload.initialize(model, optimizer=optimizer, config=config, dtype=torch.float32)
    assert json.dumps(config) == before
    with pytest.raises(ConfigError, match='dtype must be "bf16", "fp16" or "fp32"'):
        offload.initialize(model, optimizer=optimizer, dtype="int8")
    with pytest.raises(ConfigError, match=r'dtype must be "bf16", "fp16" or "fp32", got torch\.float64'):
        offload.initialize(model, optimizer=optimizer, dtype=torch.float64)
    for tiers in ({"weights": "disk"}, {"states": "disk"}):
        with pytest.raises(ConfigError, match=f"""{next(iter(tiers))} must be "none", "cpu" or "nvme", got 'disk'"""):
            offload.initialize(model, optimizer=optimizer, **tiers)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r'states="nvme" needs path='):
        offload.initialize(model, optimizer=optimizer, states="nvme")
    with pytest.raises(UsageError, match="got the keyword 'weight', expected some of weights, states, path"):
        offload.initialize(model, optimizer=optimizer, weight="cpu")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"expected one of config.*or keywords such as states"):
        offload.initialize(model, optimizer=optimizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_dtype_is_the_models_and_nothing_is_clipped(dtype: torch.dtype) -> None:
    model, _ = made()
    model.to(dtype)
    engine = offload.initialize(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), weights="cpu", gradient_accumulation_steps=2
    ).engine
    assert engine.bfloat16_enabled() is (dtype is torch.bfloat16)
    assert engine.config["gradient_clipping"] == 0 and engine.gradient_accumulation_steps() == 2
    engine.destroy(remove=True)


def test_a_parameter_says_after_destroy_what_to_call() -> None:
    model, optimizer = made()
    offload.initialize(model, optimizer=optimizer, weights="cpu").engine.destroy(remove=True)
    for use in (lambda: model[0].weight.sum(), lambda: model(torch.ones(16)), lambda: model[0].weight.detach().numpy()):
        with pytest.raises(
            UsageError, match=r"engine was destroyed: call state_dict\(\) before destroy\(\), or resume"
        ):
            use()
