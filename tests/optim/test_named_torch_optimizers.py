"""A config names any optimizer of torch by its class, which trains as the same object that is passed as optimizer=."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import testing
from offload.config import load_config
from offload.engine.build_optimizer import from_config
from offload.errors import ConfigError
from offload.planner.memory import Memory, Room, settings, settle
from offload.planner.model_shape import from_training
from offload.states import State
from tests.optim.test_torch_optimizers import make_model, train
from tests.support.models import gpt2
from tests.support.oracle import assert_same_tensors, weights_of

CLASSES: dict[str, dict[str, Any]] = {
    "Adafactor": {"lr": 1e-2, "weight_decay": 0.1},
    "NAdam": {"lr": 1e-2, "betas": [0.8, 0.99]},
    "RMSprop": {"lr": 1e-2, "momentum": 0.9, "centered": True},
    "Adamax": {"lr": 1e-2},
    "RAdam": {"lr": 1e-2, "decoupled_weight_decay": True},
    "Rprop": {"lr": 1e-3, "etas": [0.5, 1.2]},
    "AdamW": {"lr": 1e-2, "amsgrad": True},
}


def _settings(folder: Path, optimizer: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    return {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        "offload": {"device": "cpu", **options},
        **({"optimizer": optimizer} if optimizer is not None else {}),
    }


def _named(name: str, params: dict[str, Any]) -> dict[str, Any]:
    return {"type": f"torch.optim.{name}", "params": params}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CLASSES)
def test_the_name_stands_for_the_object(name: str, tmp_path: Path) -> None:
    engine = offload.initialize(model=make_model(), config=_settings(tmp_path / "a", _named(name, CLASSES[name])))[0]
    losses, mine = train(engine, range(3)), weights_of(engine)
    engine.destroy(remove=True)
    model = make_model()
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in CLASSES[name].items()}
    optimizer = getattr(torch.optim, name)(model.parameters(), **given)
    engine = offload.initialize(model=model, optimizer=optimizer, config=_settings(tmp_path / "b"))[0]
    assert train(engine, range(3)) == losses
    assert_same_tensors(weights_of(engine), mine)
    engine.destroy(remove=True)


def test_a_class_with_a_kernel_uses_the_kernel(tmp_path: Path) -> None:
    def begin(optimizer: dict[str, Any], folder: str) -> offload.Engine:
        return offload.initialize(model=make_model(), config=_settings(tmp_path / folder, optimizer))[0]

    engine = begin(_named("AdamW", {"lr": 1e-2, "weight_decay": 0.1}), "a")
    assert engine.optimizer.rule.name == "adam" and testing.inspect(engine).mode.name == "fp32"
    losses = train(engine, range(2))
    engine.destroy(remove=True)
    engine = begin({"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}, "b")
    assert train(engine, range(2)) == losses
    engine.destroy(remove=True)


def test_a_run_is_resumed(tmp_path: Path) -> None:
    block = _named("Adafactor", {"lr": 1e-2})
    engine = offload.initialize(model=make_model(), config=_settings(tmp_path / "a", block))[0]
    losses = train(engine, range(4))
    engine.destroy(remove=True)
    engine = offload.initialize(model=make_model(), config=_settings(tmp_path / "b", block))[0]
    first = train(engine, range(2))
    engine.destroy()
    engine = offload.initialize(model=make_model(), config=_settings(tmp_path / "b", block, resume="must"))[0]
    assert first + train(engine, range(2, 4)) == losses
    engine.destroy(remove=True)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("Adafacto", {"lr": 1}, r"torch\.optim\.Adafacto is no optimizer of torch .*, which has ASGD, Adadelta.*SGD$"),
        ("lr_scheduler.StepLR", {"lr": 1}, "is no optimizer of torch"),
        ("Optimizer", {"lr": 1}, "is no optimizer of torch"),
        ("LBFGS", {"lr": 1}, "LBFGS is not supported: it computes the loss again and again by a closure.*use AdamW"),
        ("SparseAdam", {"lr": 1}, "SparseAdam is not supported: it takes sparse gradients"),
        (
            "NAdam",
            {"lr": 1, "momentum": 0.9},
            r"params contains momentum, and torch\.optim\.NAdam takes lr, betas, eps",
        ),
        ("NAdam", {"lr": 1, "params": []}, "params contains params"),
        ("NAdam", {"lr": -1}, r"params do not make a torch\.optim\.NAdam: Invalid learning rate"),
        ("NAdam", {"lr": "auto"}, "the learning rate is"),
        ("NAdam", {}, "the learning rate is"),
    ],
)
def test_what_torch_has_not_is_an_error(name: str, params: dict[str, Any], message: str) -> None:
    block = load_config({"optimizer": _named(name, params)}).optimizer
    assert block is not None
    model = make_model()
    with pytest.raises(ConfigError, match=message):
        from_config(list(model.parameters()), block, model)


def test_the_key_behind_it_is_none_of_a_file() -> None:
    with pytest.raises(ConfigError, match=r'unknown key optimizer\.torch_params; did you mean "params"\?'):
        load_config({"optimizer": {"type": "AdamW", "torch_params": {"lr": 1}}})
    with pytest.raises(ConfigError, match=r"optimizer\.params should be a block"):
        load_config({"optimizer": {"type": "torch.optim.NAdam", "params": 3}})


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CLASSES)
def test_a_plan_has_the_bytes_of_the_run(name: str, tmp_path: Path) -> None:
    content = _settings(tmp_path, _named(name, CLASSES[name]))
    engine = offload.initialize(model=gpt2(), config=content)[0]
    layouts = testing.inspect(engine).layouts
    engine.destroy(remove=True)
    plan = _plan(name)
    assert [layout.packed_numel() for layout in plan.layouts] == [layout.packed_numel() for layout in layouts]
    assert plan.nbytes_on_disk(State.PACKED) == 4 * sum(layout.packed_numel() for layout in layouts)


def _plan(name: str) -> Memory:
    shape = from_training(gpt2(), 16, torch.float32, (), {})
    content = settings(dtype="fp32") | {"optimizer": _named(name, CLASSES[name])}
    return settle(shape.layouts, content, Room(host=8 << 30, device=0, disk=None))
