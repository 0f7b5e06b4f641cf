"""A script with DeepSpeed's names trains, inspects and saves as one with this library's."""

from __future__ import annotations

import argparse
import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
import offload.deepspeed as deepspeed
from offload import testing
from offload.errors import ConfigError, UsageError

DATA = [(torch.randn(4, generator=torch.Generator().manual_seed(row)), torch.ones(1)) for row in range(4)]


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """A group of ranks is the process's, and the tests of other files begin without one."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def config(folder: Path | None = None, **blocks: Any) -> dict[str, Any]:
    tier = {"device": "none"} if folder is None else {"device": "nvme", "nvme_path": str(folder / "drive")}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "offload_param": tier, "offload_optimizer": tier},
        "offload": {"device": "cpu"},
        **blocks,
    }


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def trained(initialize: Callable[..., Any], folder: Path, make: Callable[[nn.Module], Any] = adamw) -> Any:
    """The weights after two steps."""
    model = net()
    engine, *_ = initialize(model=model, optimizer=make(model), config=config(folder))
    for x, y in DATA:
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
    weights = engine.state_dict()
    engine.destroy()
    return weights


MAKE: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any] | dict[str, Any]]] = {
    "FusedAdam": (
        lambda params: deepspeed.ops.adam.FusedAdam(params, lr=1e-2, weight_decay=0.1),
        {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    ),
    "DeepSpeedCPUAdam": (
        lambda params: deepspeed.ops.adam.DeepSpeedCPUAdam(params, lr=1e-2, weight_decay=0.1, adamw_mode=False),
        {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False}},
    ),
    "FusedLamb": (
        lambda params: deepspeed.ops.lamb.FusedLamb(params, lr=1e-2),
        {"type": "Lamb", "params": {"lr": 1e-2}},
    ),
    "FusedLion": (
        lambda params: deepspeed.ops.lion.FusedLion(params, lr=1e-2),
        {"type": "Lion", "params": {"lr": 1e-2, "betas": [0.9, 0.999]}},
    ),
    "DeepSpeedCPULion": (
        lambda params: deepspeed.ops.lion.DeepSpeedCPULion([{"params": list(params)}], lr=1e-2),
        {"type": "Lion", "params": {"lr": 1e-2, "betas": [0.9, 0.999]}},
    ),
    "DeepSpeedCPUAdagrad": (
        lambda params: deepspeed.ops.adagrad.DeepSpeedCPUAdagrad(params, lr=1e-2),
        {"type": "Adagrad", "params": {"lr": 1e-2}},
    ),
}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_has_the_bits_of_offload_initialize(tmp_path: Path) -> None:
    assert same(trained(deepspeed.initialize, tmp_path / "there"), trained(offload.initialize, tmp_path / "here"))
    # Nothing is committed: the script saves checkpoints.
    assert not any(path.is_file() for path in (tmp_path / "there" / "drive").rglob("*"))


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", MAKE)
def test_an_optimizer_of_deepspeed_has_the_bits_of_the_configs(kind: str, tmp_path: Path) -> None:
    make, block = MAKE[kind]
    mine = trained(deepspeed.initialize, tmp_path / "mine", lambda model: make(model.parameters()))

    def by_config(model: nn.Module, optimizer: None, config: dict[str, Any]) -> Any:
        return offload.initialize(model=model, config={**config, "optimizer": block})

    assert same(mine, trained(by_config, tmp_path / "theirs", lambda model: None))


def test_the_cpu_adam_steps_alone_and_the_others_refuse() -> None:
    alone, other = net(), net()
    mine = deepspeed.ops.adam.DeepSpeedCPUAdam(alone.parameters(), lr=1e-2, weight_decay=0.1)
    theirs = offload.kernels.CPUAdamW(other.parameters(), lr=1e-2, weight_decay=0.1)
    for model, optimizer in ((alone, mine), (other, theirs)):
        for x, y in DATA:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    assert same(alone.state_dict(), other.state_dict())
    assert mine.state_dict()["state"][0].keys() == theirs.state_dict()["state"][0].keys()
    with pytest.raises(UsageError, match="no engine yet"):
        deepspeed.ops.adam.FusedAdam(net().parameters()).step()
    with pytest.raises(ConfigError, match="FusedAdam: this value of amsgrad"):
        deepspeed.ops.adam.FusedAdam(net().parameters(), amsgrad=True)
    # As a script would that knows offload.initialize, whose first argument may be the model.
    with pytest.raises(ConfigError, match=r"expects model, a torch\.nn\.Module, got dict"):
        deepspeed.initialize(net(), config(), config=config())


def test_zero_init_takes_values_in_gathered_parameters(tmp_path: Path) -> None:
    """As a script loads a model, module by module; what it does not load is initialized."""
    given = net().state_dict()
    with deepspeed.zero.Init(config_dict_or_path=config(tmp_path), remote_device="nvme", pin_memory=True):
        model = net()
    first, last = model[0], model[2]
    number = first.weight.ds_id
    assert first.weight.is_meta and deepspeed.comm.get_world_size() == 1
    with deepspeed.zero.GatheredParameters(list(first.parameters()), modifier_rank=0):
        first._load_from_state_dict(given, "0.", {}, True, [], [], [])
    with deepspeed.zero.GatheredParameters(last.bias, modifier_rank=0):
        last.bias.data.fill_(3.0)
    assert first.weight.ds_id == number and first.weight.ds_status is not last.weight.ds_status
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config(tmp_path))
    weights = engine.state_dict()
    assert torch.equal(weights["0.weight"], given["0.weight"]) and torch.equal(weights["0.bias"], given["0.bias"])
    assert weights["2.bias"].item() == 3.0 and not weights["2.weight"].isnan().any()
    engine.destroy()
    for refused in ({"mpu": object()}, {"param_swapper": object()}, {"remote_device": "disk"}):
        with pytest.raises(UsageError, match=next(iter(refused))):
            deepspeed.zero.Init(**refused)
    with pytest.raises(ConfigError, match=r"dtype=torch\.float16, and the config asks for torch\.float32"):
        deepspeed.zero.Init(config_dict_or_path=config(), dtype=torch.float16)


def test_the_dtype_of_zero_init_without_a_config_is_compared_with_that_of_initialize(tmp_path: Path) -> None:
    adam = {"type": "AdamW", "params": {"lr": 1e-3}}
    with deepspeed.zero.Init(dtype=torch.bfloat16):
        model = net()
    with pytest.raises(ConfigError, match=r"dtype=torch\.bfloat16, and the config asks for torch\.float32"):
        deepspeed.initialize(model=model, config=config(tmp_path, optimizer=adam))
    engine, *_ = deepspeed.initialize(model=model, config=config(tmp_path, optimizer=adam, bf16={"enabled": True}))
    engine.destroy()


def test_parameters_are_gathered_between_steps_and_are_there_in_a_forward(tmp_path: Path) -> None:
    available = deepspeed.zero.ZeroParamStatus.AVAILABLE

    class Shared(nn.Module):
        """The second layer computes with the weight of the first, as in DeepSpeed's documentation."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.one(x)
            with deepspeed.zero.GatheredParameters(self.one.weight, fwd_module=self):
                assert self.one.weight.ds_status is available
                return self.two(x) @ self.one.weight

    model = Shared()
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config(tmp_path))
    weight = model.one.weight
    with deepspeed.zero.GatheredParameters([weight, weight], modifier_rank=0):
        assert weight.ds_status is available
        weight.data.fill_(0.5)
    with deepspeed.zero.GatheredParameters(weight, enabled=False):
        assert weight.ds_status is not available
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    assert deepspeed.utils.safe_get_full_grad(weight).abs().sum() > 0
    deepspeed.utils.safe_update_full_grad_vectorized([weight], lambda gradient, _: gradient * 0 + 2)
    assert bool((deepspeed.utils.safe_get_full_grad(weight) == 2).all())
    with (
        pytest.raises(UsageError, match=r"was changed inside of gathered.*modifier_rank=0"),
        deepspeed.zero.GatheredParameters(weight),
    ):
        weight.data.zero_()
    assert bool((engine.state_dict()["one.weight"] == 0.5).all())
    engine.destroy()


def test_weights_that_a_backward_has_saved_are_available(tmp_path: Path) -> None:
    """As trl's head asks; and the keys with a dot that trl adds to a config have no effect."""
    available = deepspeed.zero.ZeroParamStatus.AVAILABLE

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, weight = ctx.saved_tensors
            assert weight.ds_status is available
            return gradients[0] @ weight, gradients[0].t() @ x

    class Layer(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return Product.apply(input, self.weight)  # type: ignore[no-any-return]

    model = nn.Sequential(Layer(4, 4, bias=False), Layer(4, 4, bias=False))
    dotted = {"zero_optimization.reduce_bucket_size": 16}
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config(tmp_path, **dotted))
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    assert deepspeed.utils.safe_get_full_grad(model[0].weight).abs().sum() > 0
    engine.destroy()


def test_parameters_have_deepspeeds_attributes_and_copies_have_none(tmp_path: Path) -> None:
    model, other = net(), net()
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config(tmp_path))
    first = model[0].weight
    assert (first.ds_shape, first.ds_numel, first.ds_persist) == (torch.Size([8, 4]), 32, False)
    assert len({parameter.ds_id for parameter in model.parameters()}) == 4
    assert first.ds_status is deepspeed.zero.ZeroParamStatus.NOT_AVAILABLE
    assert torch.equal(first.ds_tensor, engine.state_dict()["0.weight"].flatten())
    assert deepspeed.runtime.zero.partition_parameters.is_zero_param(first)
    loaded = torch.load(io.BytesIO(_saved(first)), weights_only=True)
    for plain in (other[0].weight, copy.deepcopy(first), loaded, pickle.loads(pickle.dumps(first))):
        assert not hasattr(plain, "ds_id") and not hasattr(plain, "ds_tensor")
        assert torch.equal(plain, engine.state_dict()["0.weight"])
    engine.destroy()
    assert not hasattr(first, "ds_tensor") and hasattr(first, "ds_id")


def _saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def test_a_checkpoint_becomes_fp32_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    model[2].bias.requires_grad_(False)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adamw(model), config=config(tmp_path, bf16={"enabled": True})
    )
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.save_checkpoint(tmp_path / "saved", tag="one")
    wanted = {name: deepspeed.utils.safe_get_full_fp32_param(each) for name, each in model.named_parameters()}
    tools = deepspeed.utils.zero_to_fp32
    assert same(tools.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved"), wanted)
    assert "2.bias" not in tools.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved", "one", True)
    assert same(tools.load_state_dict_from_zero_checkpoint(net(), tmp_path / "saved").state_dict(), wanted)
    tools.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", tmp_path / "files", max_shard_size=64)
    parts = [torch.load(path, weights_only=True) for path in sorted((tmp_path / "files").glob("*.bin"))]
    assert len(parts) > 1 and same({name: value for part in parts for name, value in part.items()}, wanted)
    tools.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", tmp_path / "safe", safe_serialization=True)
    assert (tmp_path / "safe" / "model.safetensors").is_file()
    with pytest.raises(offload.StoreError, match="contains no checkpoint of an engine"):
        tools.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    # As a program, with the arguments of DeepSpeed's.
    tools.main([str(tmp_path / "saved"), str(tmp_path / "program"), "-t", "one", "-d"])
    assert same(torch.load(tmp_path / "program" / "pytorch_model.bin", weights_only=True), wanted)
    assert capsys.readouterr().out == f"the fp32 weights of {tmp_path / 'saved'} are in {tmp_path / 'program'}\n"
    with pytest.raises(SystemExit, match="1"):
        tools.main([str(tmp_path), str(tmp_path / "program")])
    assert "error: " in capsys.readouterr().err
    assert engine.save_16bit_model(tmp_path / "files")
    assert same(torch.load(tmp_path / "files" / "pytorch_model.bin", weights_only=True), engine.state_dict())
    engine.destroy()


def test_a_model_without_an_optimizer_evaluates(tmp_path: Path) -> None:
    model = net()
    engine, optimizer, _, schedule = deepspeed.initialize(
        argparse.Namespace(deepspeed_config=config(tmp_path, scheduler={"type": "WarmupLR"})), model
    )
    assert optimizer is None and schedule is None and not any(p.requires_grad for p in model.parameters())
    assert engine(DATA[0][0]).shape == (1,)
    engine.destroy()


def test_two_engines_of_a_process_have_swap_files_beside_each_other(tmp_path: Path) -> None:
    first, *_ = deepspeed.initialize(model=net(), config=config(tmp_path))
    second, *_ = deepspeed.initialize(model=net(), config=config(tmp_path))
    assert torch.equal(first(DATA[0][0]), second(DATA[0][0]))
    first.destroy()
    second.destroy()


def test_an_evaluation_is_of_as_many_micro_batches_as_a_step() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.dropout = net(), nn.Dropout(0.5)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(self.dropout(self.net(x)), y)

    model = WithLoss()
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config())
    rows = iter(DATA)
    wanted = torch.stack([nn.functional.mse_loss(net()(x), y) for x, y in DATA[:2]]).mean()
    assert torch.allclose(engine.eval_batch(rows), wanted) and len(list(rows)) == 2 and model.training
    assert engine.get_batch_info() == (2, 1, 2) and engine.gradient_clipping() == 1.0
    engine.destroy()


def test_leaf_modules_are_units(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Sequential(net(), net()), nn.Linear(1, 4), net())
    utils = deepspeed.utils
    assert utils.set_z3_leaf_modules(model[0], [nn.Linear]) and len(utils.get_z3_leaf_modules(model)) == 4
    utils.unset_z3_leaf_modules(model, ["Linear"])
    assert utils.get_z3_leaf_modules(model) == []
    assert utils.set_z3_leaf_modules_by_name(model, ["0.1", "7"], raise_if_not_found=False) == ([model[0][1]], ["7"])
    with pytest.raises(ValueError, match="no module of Sequential"):
        utils.set_z3_leaf_modules(model, [nn.Conv2d])
    engine, *_ = deepspeed.initialize(model=model, config=config(tmp_path))
    assert "0.1" in [layout.name for layout in testing.inspect(engine).layouts]
    engine.destroy()


def test_options_of_schedules_become_a_block_of_the_config() -> None:
    schedules = deepspeed.runtime.lr_schedules
    parser = deepspeed.add_config_arguments(schedules.add_tuning_arguments(argparse.ArgumentParser()))
    args = parser.parse_args(["--deepspeed", "--lr_schedule", "WarmupLR", "--warmup_num_steps", "3"])
    block, reason = schedules.get_config_from_args(args)
    assert args.deepspeed and block["params"]["warmup_num_steps"] == 3 and reason is None
    assert schedules.get_lr_from_config(block) == (0.001, "")
    engine, _, _, schedule = deepspeed.initialize(
        model=(model := net()), optimizer=adamw(model), config=config(scheduler=block)
    )
    assert type(schedule).__name__ in schedules.VALID_LR_SCHEDULES
    engine.destroy()
    args = parser.parse_args(["--lr_schedule", "OneCycle"])
    assert offload.config.load_config({"scheduler": schedules.get_config_from_args(args)[0]}).scheduler is not None
    assert schedules.get_config_from_args(parser.parse_args([]))[0] is None


def test_a_backward_without_an_optimizer_says_that_the_model_is_frozen() -> None:
    engine, optimizer, *_ = deepspeed.initialize(model=net(), config=config())
    x, y = DATA[0]
    with pytest.raises(
        UsageError, match=r"none of this model trains\. Give an optimizer, by the config or as optimizer="
    ):
        engine.backward(nn.functional.mse_loss(engine(x), y))
    assert optimizer is None
    engine.destroy()


def test_calls_of_the_log_of_collectives_warn_and_go_on(caplog: pytest.LogCaptureFixture) -> None:
    deepspeed.comm.configure(enabled=False)
    assert not caplog.messages
    deepspeed.comm.configure(enabled=True, prof_all=True)
    deepspeed.comm.log_summary(show_straggler=True)
    assert [line.partition(" has no effect: single collectives")[0] for line in caplog.messages] == [
        "deepspeed.comm.configure",
        "deepspeed.comm.log_summary",
    ]


# --------------------------------------------------------------------------------------------------
# `deepspeed.init_inference` computes what the model does; what it cannot do is refused before the model changes.


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "bf16", None], ids=str)
def test_outputs_are_those_of_the_model_in_that_dtype(dtype: Any) -> None:
    model = _model()
    plain = copy.deepcopy(model).to(torch.float32 if dtype in (None, torch.float32) else torch.bfloat16)
    batch = torch.randn(3, 8, dtype=next(plain.parameters()).dtype)
    keys = {} if dtype is None else {"dtype": dtype}
    with deepspeed.init_inference(model, {"zero": {"stage": 3}}, **keys, mp_size=1) as engine:
        assert isinstance(engine, deepspeed.InferenceEngine)
        assert torch.equal(engine(batch), plain(batch))


def test_a_key_about_deepspeeds_layers_is_named_as_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    with deepspeed.init_inference(_model(), {"replace_with_kernel_inject": True, "max_out_tokens": 64}):
        assert "without effect: replace_with_kernel_inject, max_out_tokens" in caplog.text


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tensor_parallel": {"tp_size": 2}}, "tensor_parallel is 2"),
        ({"mp_size": 4}, "mp_size is 4"),
        ({"dtype": torch.int8}, "got torch.int8"),
        ({"enable_cuda_graph": True}, "CUDA graphs"),
        ({"dtyp": "fp16"}, "has no key 'dtyp'"),
        ({"checkpoint": "files.json"}, "the folder of the model"),
        ({"config": {"dtype": "fp16"}, "dtype": "bf16"}, "'fp16' in config and 'bf16' as a keyword"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_an_error_and_the_model_is_as_it_was(keys: dict[str, Any], message: str) -> None:
    model = _model()
    with pytest.raises(UsageError, match=message):
        deepspeed.init_inference(model, **keys)
    assert all(parameter.requires_grad and parameter.device.type == "cpu" for parameter in model.parameters())
