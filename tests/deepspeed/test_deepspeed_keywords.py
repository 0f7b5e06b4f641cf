"""Keywords of DeepSpeed that this library lacks accept None; any other value is an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.engine.deferred import DeferredParameter
from offload.errors import ConfigError, OffloadError, UsageError

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "offload": {"device": "cpu"},
}


def begin(**keywords: Any) -> offload.Engine:
    return offload.initialize(model=nn.Linear(2, 2), config=CONFIG, **keywords).engine


def built(**keywords: Any) -> nn.Linear:
    with offload.init(**keywords):
        return nn.Linear(2, 2)


TAKEN: dict[str, dict[str, Any]] = {
    "initialize": {"mpu": None, "dist_init_required": None, "distributed_port": 29500, "mesh_param": None},
    "initialize, ranks of torchrun": {"dist_init_required": True},
}


@pytest.mark.parametrize("given", TAKEN.values(), ids=TAKEN)
def test_taken_by_initialize(given: dict[str, Any]) -> None:
    begin(**given).destroy()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mpu": object()}, "mpu= expects Megatron's parallel_state"),
        ({"mesh_param": (2, 2)}, "mesh_param=.*not split over ranks"),
        ({"distributed_port": 1}, "distributed_port=1: the launcher connects"),
        ({"dist_init_required": "yes"}, "expected None, True or False"),
    ],
)
def test_refused_by_initialize(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        begin(**given)


def test_keywords_of_zero_init() -> None:
    assert isinstance(
        built(config_dict_or_path=CONFIG, remote_device=None, dtype=None, mpu=None).weight, DeferredParameter
    )
    assert not isinstance(built(enabled=False).weight, DeferredParameter)
    for given in ({"remote_device": "nvme"}, {"dtype": torch.float16}, {"mpu": object()}):
        with pytest.raises(UsageError, match=next(iter(given))):
            built(**given)


def test_keywords_of_gathered_parameters() -> None:
    engine = begin()
    weight = engine.module.weight
    with offload.gathered(weight, modifier_rank=0):
        weight.data.fill_(3.0)
    with offload.gathered(weight, modifier_rank=None):
        assert bool((weight == 3).all())
    with pytest.raises(UsageError, match="modifier_rank=1"), offload.gathered(weight, modifier_rank=1):
        pass
    engine.destroy()


def test_backward_and_step() -> None:
    engine = begin()
    loss = engine(torch.ones(1, 2)).square().mean()
    for given in ({"allreduce_gradients": False}, {"release_loss": True}):
        with pytest.raises(UsageError, match=next(iter(given))):
            engine.backward(loss, **given)
    engine.backward(loss, allreduce_gradients=True, release_loss=False)
    with pytest.raises(UsageError, match=r"lr_kwargs=\{'epoch': 1\}: the schedule's step\(\)"):
        engine.step(lr_kwargs={"epoch": 1})
    engine.step(lr_kwargs=None)
    assert engine.global_steps == 1
    engine.destroy()


def test_keywords_of_load_checkpoint(tmp_path: Path) -> None:
    engine = begin()
    engine.save_checkpoint(tmp_path)
    assert engine.load_checkpoint(tmp_path, custom_load_fn=None)[0] is not None
    with pytest.raises(UsageError, match="custom_load_fn"):
        engine.load_checkpoint(tmp_path, custom_load_fn=print)
    engine.destroy()


@pytest.mark.parametrize("given", [{}, {"backend": "inductor", "compile_kwargs": {}}], ids=["plain", "DeepSpeed's"])
def test_compile_raises_an_error_with_the_fix_and_leaves_the_model(given: dict[str, Any]) -> None:
    engine = begin()
    with pytest.raises(UsageError, match=r"block\.compile\(\) for each block .*before offload\.initialize"):
        engine.compile(**given)
    assert engine.module._compiled_call_impl is None
    assert engine(torch.ones(1, 2)).shape == (1, 2)
    engine.destroy()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zero", r"offload\.init is zero\.Init, offload\.gathered"),
        ("comm", r"torch\.distributed"),
        ("init_distributed", "call nothing: initialize"),
        ("add_config_arguments", "config= of initialize takes the path"),
    ],
)
def test_names_that_are_not_here_say_what_is(name: str, message: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{name}': .*{message}"):
        getattr(offload, name)


COLD: dict[str, Callable[..., None]] = {
    "zero2": lambda total, largest: offload.estimate_zero2_model_states_mem_needs_all_cold(total_params=total),
    "zero3": lambda total, largest: offload.estimate_zero3_model_states_mem_needs_all_cold(
        total_params=total, largest_layer_params=largest, num_gpus_per_node=1, num_nodes=1
    ),
}


@pytest.mark.parametrize("name", COLD)
def test_counts_of_an_estimate_may_be_floats(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    COLD[name](2851e6, 32e6)
    output = capsys.readouterr().out
    COLD[name](2_851_000_000, 32_000_000)
    assert output == capsys.readouterr().out and "GiB" in output
    for wrong in (1.5, float("inf"), float("nan"), "13B", -1e6, True):
        with pytest.raises(ConfigError, match="expected a whole number of parameters"):
            COLD[name](wrong, 32e6)
    assert issubclass(ConfigError, OffloadError)
