"""A wrong value is an error that names the key; all errors of a config are told at once."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from offload.cli.main import app
from offload.config import Aio, Batch, Block, Config, ZeroOptimization, load_config, resolve_batch
from offload.errors import ConfigError

BATCH = "train_batch_size must be"
WHOLE = "train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks, but it is"


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **keys}}


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


def schedule(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


def batch(total: int, micro: int | None = None, accumulation: int | None = None) -> dict[str, Any]:
    return {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }


WRONG: dict[str, tuple[dict[str, Any] | str, str]] = {
    # the three batch sizes, on 4 ranks
    "three that contradict": (
        batch(32, 4, 4),
        f"{BATCH} {WHOLE} 32, and 4 * 4 * 4 is 64; change one of the three, or leave one out",
    ),
    "a micro-batch that does not divide": (
        batch(30, micro=4),
        f"{BATCH} a multiple of train_micro_batch_size_per_gpu * ranks, but it is 30, and 4 * 4 is 16; change one",
    ),
    "a micro-batch above the whole": (batch(4, micro=8), "but it is 4, and 8 * 4 is 32; change one of them"),
    "an accumulation that does not divide": (
        batch(10, accumulation=4),
        f"{BATCH} a multiple of gradient_accumulation_steps * ranks, but it is 10, and 4 * 4 is 16; change one",
    ),
    "fewer samples than ranks": (batch(6), "but it is 6, and 1 * 4 is 4; change one of them"),
    # wrong types
    "a word for a number": (batch("many"), "train_batch_size should be a whole number, got 'many'"),  # type: ignore[arg-type]
    "a list for a number": (batch([32]), "train_batch_size should be a whole number, got [32]"),  # type: ignore[arg-type]
    "a fraction of an element": (
        zero(sub_group_size=1.5),
        "zero_optimization.sub_group_size should be a whole number, got 1.5",
    ),
    "a device that is none": (
        zero(offload_param={"device": "disk"}),
        "zero_optimization.offload_param.device should be",
    ),
    "a batch of none": (batch(0), "train_batch_size should be greater than 0, got 0"),
    "zero micro-batches": (
        {"train_micro_batch_size_per_gpu": 0},
        "train_micro_batch_size_per_gpu should be greater than 0, got 0",
    ),
    "a word for a switch": ({"fp16": {"enabled": "maybe"}}, "fp16.enabled should be true or false, got 'maybe'"),
    "a word for a rate": (optimizer("AdamW", lr="high"), "optimizer.params.lr should be a number, got 'high'"),
    "a switch for a block": (
        {"bf16": True},
        'bf16 should be a block, as {...}, got True; write "bf16": {"enabled": true}',
    ),
    "a switch off for a block": ({"fp16": False}, 'got False; write "fp16": {"enabled": false}'),
    "a word for tiles": (
        {"offload": {"tile_mlp": "always"}},
        "offload.tile_mlp should be 'auto', false or a number of chunks of at least 1, got 'always'",
    ),
    "a switch for tiles": ({"offload": {"tile_mlp": True}}, "a number of chunks of at least 1, got True"),
    "no tiles": ({"offload": {"tile_mlp": 0}}, "a number of chunks of at least 1, got 0"),
    "a word for a mode": ({"fp16": "O2"}, """got 'O2'; write "fp16": {"enabled": true}"""),
    "a stage for a block": (
        {"zero_optimization": 2},
        'zero_optimization should be a block, as {...}, got 2; write "zero_optimization": {"stage": 2}',
    ),
    "a word for a stage": (
        {"zero_optimization": "ZeRO-3"},
        """got 'ZeRO-3'; write "zero_optimization": {"stage": 3}""",
    ),
    "a rate for the params": (
        {"optimizer": {"type": "Lion", "params": 0.01}},
        'optimizer.params should be a block, as {...}, got 0.01; write "params": {"lr": 0.01}',
    ),
    "a dtype for a block": ({"data_types": "bf16"}, """write "data_types": {"grad_accum_dtype": "bf16"}"""),
    "weights of another dtype than the mode": (
        {"data_types": {"param_dtype": "bf16"}},
        'data_types.param_dtype is bf16, but the weights are fp32; set "bf16": {"enabled": true}, or leave it out',
    ),
    "fp32 weights in a mode of 16 bits": (
        {"data_types": {"param_dtype": "float32"}, "fp16": {"enabled": True}},
        "data_types.param_dtype is fp32, but the weights are fp16; switch bf16 and fp16 off, or leave it out",
    ),
    "sums of gradients": (
        {"gradient_allreduce_op": "sum"},
        "gradient_allreduce_op should be 'mean', got 'sum'; for a sum multiply the loss by the number of ranks",
    ),
    "steps that the caller ends": (
        {"managed_gradient_accumulation": False},
        "managed_gradient_accumulation should be True, got False; to mark the end of a step, call "
        "engine.set_gradient_accumulation_boundary",
    ),
    "a word for a clip": (
        {"gradient_clipping": "off"},
        "gradient_clipping should be a number, got 'off'; 0 switches clipping off",
    ),
    "no percentage of a budget": (
        {"offload": {"device_memory": "120%"}},
        "offload.device_memory should be a percentage above 0% and up to 100%, such as '50%', got '120%'",
    ),
    "a word for a budget": (
        {"offload": {"host_memory": "16 GB of RAM"}},
        "offload.host_memory should be a size such as '16GiB', '800MB' or a number of bytes, got '16 GB of RAM'",
    ),
    "an empty folder": (
        {"offload": {"nvme_path": ""}},
        "offload.nvme_path should be a folder on the drive, or a list of folders, one for each drive, got ''",
    ),
    # unknown keys
    "a plural of ours": ({"offload": {"nvme_paths": "/x"}}, 'offload.nvme_paths; did you mean "nvme_path"?'),
    "deep in ours": ({"offload": {"debug": {"poisn": True}}}, 'offload.debug.poisn; did you mean "poison"?'),
    "beside every": (
        {"offload": {"durability": {"every": 10, "seconds": 1}}},
        "unknown key offload.durability.seconds; remove it; keys with an effect are every",
    ),
    "another spelling": (
        {"zero_optimisation": {"stage": 3}},
        'unknown key zero_optimisation; did you mean "zero_optimization"?',
    ),
    "a block at the wrong level": (
        {"offload_param": {"device": "cpu"}},
        "unknown key offload_param; did you mean zero_optimization.offload_param?",
    ),
    "a rate at the wrong level": (
        {"optimizer": {"type": "AdamW", "lr": 1e-4}},
        "unknown key optimizer.lr; did you mean optimizer.params.lr?",
    ),
    "a device at the wrong level": (
        zero(device="cpu"),
        "unknown key zero_optimization.device; did you mean zero_optimization.offload_param.device or "
        "zero_optimization.offload_optimizer.device?",
    ),
    "a block of the top level in another": (
        zero(aio={"queue_depth": 8}),
        'unknown key zero_optimization.aio; "aio" belongs at the top level, beside the other blocks',
    ),
    # older spellings
    "a bucket by both names": (
        zero(prefetch_bucket_size=1, stage3_prefetch_bucket_size=2),
        '"zero_optimization.prefetch_bucket_size" is the older name of '
        '"zero_optimization.stage3_prefetch_bucket_size", which is set too; keep one of them',
    ),
    "weights by both names": (
        zero(cpu_offload_params=True, offload_param={"device": "nvme", "nvme_path": "/x"}),
        "zero_optimization contains both cpu_offload_params and offload_param; leave cpu_offload_params out",
    ),
    "two modes, one by its older name": (
        {"fp16": {"enabled": True}, "bfloat16": {"enabled": True}},
        "fp16 and bf16 are both enabled; leave one of them on",
    ),
    # optimizers
    "another's moments": (
        optimizer("SGD", lr=0.1, betas=[0.9, 0.99]),
        "optimizer contains params.betas, and SGD takes lr, momentum, dampening, weight_decay, nesterov",
    ),
    "a beta too many": (
        optimizer("AdamW", betas=[0.9, 0.99, 0.999]),
        "optimizer.params.betas should have at most 2 items, not 3, got [0.9, 0.99, 0.999]",
    ),
    "a beta alone": (optimizer("AdamW", betas=0.9), "optimizer.params.betas should be a list, got 0.9"),
    "a switched-off correction": (
        optimizer("Adam", bias_correction=False),
        "optimizer contains params.bias_correction false, and Adam corrects the bias of its moments; leave it out",
    ),
    "one of 8 bits": (
        optimizer("AdamW8bit"),
        "optimizer.type should be 'Adam', 'AdamW', 'Lamb', 'Adagrad', 'Lion', 'SGD', 'Muon', 'SinkGD', "
        "'OneBitAdam', 'ZeroOneAdam' or 'OneBitLamb', or an optimizer of torch, as 'torch.optim.NAdam', got "
        "'AdamW8bit'; set one of these, or pass optimizer= to offload.initialize",
    ),
    "an optimizer that is a word": (
        {"optimizer": "Lion"},
        """optimizer should be a block, as {...}, got 'Lion'; write "optimizer": {"type": "Lion", "params": {"lr":""",
    ),
    # schedules
    "a schedule that is a word": (
        {"scheduler": "WarmupDecayLR"},
        """scheduler should be a block, as {...}, got 'WarmupDecayLR'; write "scheduler": {"type": "WarmupDecayLR", """,
    ),
    "half a cycle": (schedule("OneCycle", cycle_min_lr=0.1), "scheduler.params.cycle_max_lr is required"),
    "a schedule by its name": (
        {"scheduler": {"name": "WarmupLR"}},
        "unknown key scheduler.name; remove it; keys with an effect are type, params",
    ),
    "a schedule of another library": (schedule("cosine"), "got 'cosine'; did you mean \"WarmupCosineLR\"?"),
    "Trainer's name of the block": (
        {"lr_scheduler": {"type": "WarmupLR"}},
        'unknown key lr_scheduler; did you mean "scheduler"?',
    ),
    # tiers
    "a fourth stage": (
        {"zero_optimization": {"stage": 4}},
        "zero_optimization.stage should be less than or equal to 3, got 4",
    ),
    "a tier as a word": (
        zero(offload_param="cpu"),
        """zero_optimization.offload_param should be a block, as {...}, got 'cpu'; write "offload_param": {"device":""",
    ),
    "weights on nvme without a path": (
        zero(offload_param={"device": "nvme"}),
        'zero_optimization.offload_param.device is nvme, but no "nvme_path" is given; set it beside the device, or '
        'once in the "offload" block',
    ),
    "states on nvme with a path of null": (
        zero(offload_optimizer={"device": "nvme", "nvme_path": None}),
        'zero_optimization.offload_optimizer.device is nvme, but no "nvme_path" is given',
    ),
    "more than all": (
        zero(offload_optimizer={"device": "cpu", "ratio": 1.5}),
        "zero_optimization.offload_optimizer.ratio should be less than or equal to 1, got 1.5",
    ),
    "one of several GPUs": (
        {"offload": {"device": "cuda:1"}},
        "offload.device should be 'auto', 'cpu', 'cuda' or the type of another accelerator, as 'xpu', got 'cuda:1'",
    ),
    "a resume of true": (
        {"offload": {"resume": True}},
        "offload.resume should be 'never', 'auto', 'must' or 'restart', got True",
    ),
    # files
    "a block twice": (
        '{"fp16": {"enabled": true}, "zero_optimization": {}, "fp16": {"enabled": false}}',
        "ds.json: the key 'fp16' appears twice in one block; keep one of them",
    ),
    "a key twice, far in": (
        '{"zero_optimization": {"offload_param": {"device": "cpu", "pin_memory": true, "device": "nvme"}}}',
        "ds.json: the key 'device' appears twice in one block; keep one of them",
    ),
    "Python for JSON": (
        '{\n  "fp16": {"enabled": True}\n}',
        "ds.json is not JSON: Expecting value at line 2, column 23",
    ),
    "a comma that is missing": (
        '{\n  "train_batch_size": 4\n  "gradient_clipping": 1\n}',
        "ds.json is not JSON: Expecting ',' delimiter at line 3, column 3",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_message_names_the_place_the_value_and_the_fix(case: str, tmp_path: Path) -> None:
    content, message = WRONG[case]
    source: Any = content
    if isinstance(content, str):
        source = tmp_path / "ds.json"
        source.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve_batch(load_config(source), 4)


def test_the_error_for_a_misplaced_key_names_its_block() -> None:
    """Somebody else's keys may lie there, so it is no error, and a line names it."""
    notices = load_config({"lr": 1e-4, "host_memory": "1GiB", "note": "x", "enabled": True}).notices
    assert notices == (
        "config keys that are not supported and are ignored: enabled, host_memory (did you mean offload.host_memory?), "
        "lr (did you mean optimizer.params.lr?), note",
    )


# --------------------------------------------------------------------------------------------------
# Any value of any key is a config or a ConfigError that names the key.


def _places(model: type[Block], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key in (*model.model_fields, *model.TUNING, *model.UNSUPPORTED, *model.REFUSED, *model.OLD_NAMES, "unheard_of"):
        yield (*path, key)
    for name, field in model.model_fields.items():
        for inner in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, Block):
                yield from _places(inner, (*path, name))


ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        10**400,
        0.5,
        1e308,
        float("inf"),
        float("nan"),
        "",
        "auto",
        "\0",
        "~",
        "1e400",
        b"x",
    ),
    *(
        [],
        [None],
        [1],
        ["x", "x"],
        [[]],
        {},
        {"enabled": 5},
        {"x": {"enabled": "auto"}},
        {None: 1},
        object(),
        Path("/x"),
    ),
)


def test_any_value_of_any_key_is_a_config_or_a_config_error() -> None:
    for place, value in itertools.product(_places(Config), ODD):
        content: Any = value
        for key in reversed(place):
            content = {key: content}
        if place[0] == "scheduler":
            content = {"scheduler": {"type": "WarmupLR", **content["scheduler"]}} if place[1:] else content
        try:
            config = load_config(content)
        except ConfigError as error:
            named = {**Config.OLD_NAMES, **Aio.OLD_NAMES, **ZeroOptimization.OLD_NAMES}.get(place[-1], place[-1])
            assert named in str(error) or isinstance(value, dict), f"{place}, {value!r}: not named: {error}"
        else:
            assert all("\n" not in line for line in config.notices), f"{place}, {value!r}"


# --------------------------------------------------------------------------------------------------
# A wrong value of a key, and batch sizes that do not fit, are errors that name the key.


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a typo": ({"train_batchsize": 1}, 'did you mean "train_batch_size"'),
    "a typo inside": ({"zero_optimization": {"offload_param": {"devise": "cpu"}}}, r'offload_param\.devise.*"device"'),
    "a typo of what has no effect": ({"zero_optimization": {"sub_group_sise": 1}}, '"sub_group_size"'),
    "a typo under an older name": ({"bfloat16": {"enable": True}}, r'bfloat16\.enable; did you mean "enabled"'),
    "a key that nobody knows": ({"offload": {"zzz": 1}}, r"unknown key offload\.zzz; remove it.*host_memory"),
    "a key that is a number": ({1: 2}, "unknown key 1"),
    "an older name beside the new one": ({"bf16": {"enabled": True}, "bfloat16": {"enabled": False}}, "older name"),
    "an older switch beside its block": (
        {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}},
        "cpu_offload and offload_optimizer",
    ),
    "the clip in the wrong place": ({"optimizer": {"params": {"max_grad_norm": 1.0}}}, "gradient_clipping"),
    "true for a number": ({"train_batch_size": True}, "train_batch_size should be a number, got True"),
    "a learning rate of inf": ({"optimizer": {"params": {"lr": float("inf")}}}, r"optimizer\.params\.lr.*finite"),
    "a clip of null": ({"gradient_clipping": None}, "gradient_clipping.*0 switches clipping off"),
    "a durability that is none": ({"offload": {"durability": "always"}}, r'offload\.durability.*always.*"every": 10'),
    "no step between commits": (
        {"offload": {"durability": {"every": 0}}},
        r"offload\.durability.*every.*greater than 0",
    ),
    "a durability misspelt": (
        {"offload": {"durability": {"evry": 3}}},
        r'unknown key offload\.durability\.evry.*"every"',
    ),
    "no percent": ({"offload": {"device_memory": "0%"}}, r"offload\.device_memory.*percentage above 0%.*'0%'"),
    "two signs of percent": ({"offload": {"device_memory": "50 %%"}}, r"offload\.device_memory.*percentage.*'50 %%'"),
    "a percentage of RAM": ({"offload": {"host_memory": "50%"}}, r"offload\.host_memory should be a size"),
    "a size without an end": ({"offload": {"host_memory": "1e400"}}, r"offload\.host_memory"),
    "a seed without an end": ({"offload": {"seed": 1e300}}, r"offload\.seed"),
    "a path that is a number": ({"zero_optimization": {"offload_param": {"nvme_path": 5}}}, "nvme_path.*list.*5"),
    "quantized gradients in bf16": (
        {"communication_data_type": "bf16", "zero_optimization": {"zero_quantized_gradients": True}},
        "zero_quantized_gradients.*communication_data_type in bf16; leave one of them out",
    ),
    "compression": ({"compression_training": {"pruning": {"shared": {"enabled": True}}}}, "compression_training"),
    "sparse attention": ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention"),
    "amsgrad": ({"optimizer": {"params": {"amsgrad": True}}}, "amsgrad"),
    "nesterov alone": (
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "nesterov": True}}},
        "needs a momentum above 0",
    ),
    "a loss scale below zero": ({"fp16": {"enabled": True, "loss_scale": -1}}, r"fp16\.loss_scale.*greater"),
    "a window of no steps": ({"fp16": {"loss_scale_window": 0}}, r"fp16\.loss_scale_window.*greater than 0"),
    "a loss scale that begins below its bound": (
        {"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 16}},
        r"fp16 contains min_loss_scale 16, and initial_scale_power 2, whose scale of 4 is below it: raise the power",
    ),
    "a beta of one": ({"optimizer": {"params": {"betas": [0.9, 1.0]}}}, r"betas\.1 should be less than 1, got 1\.0"),
    "a beta too few": ({"optimizer": {"params": {"betas": [0.9]}}}, "betas"),
    "a run that leaves its folder": ({"offload": {"run": "../x"}}, r"offload\.run"),
    "amp": ({"amp": {"enabled": True}}, "amp"),
    "a clip below zero": ({"gradient_clipping": -1}, "gradient_clipping"),
}


def test_a_bad_key_is_named() -> None:
    for case in BAD:
        print(case)
        content, message = BAD[case]
        with pytest.raises(ConfigError, match=message):
            load_config(content)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 8), st.sampled_from(["total", "micro", "accumulation"]))
def test_any_two_batch_sizes_give_the_third(micro: int, accumulation: int, world_size: int, left_out: str) -> None:
    batch = Batch(micro, accumulation, micro * accumulation * world_size)
    keys = {
        "total": "train_batch_size",
        "micro": "train_micro_batch_size_per_gpu",
        "accumulation": "gradient_accumulation_steps",
    }
    content = {keys[name]: value for name, value in batch._asdict().items() if name != left_out}
    assert resolve_batch(load_config(content), world_size) == batch


ERRORS_WRONG: dict[str, Any] = {
    "amp": {"enabled": True},
    "train_batch_size": "four",
    "fp16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 1.5]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_stps": 3}},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "offload_param": {"device": "cpu", "speed": 1}},
    "autotuning": {"enabled": True},
}
MESSAGES = (
    '"amp" is apex\'s mixed precision',
    "train_batch_size should be a whole number, got 'four'",
    "optimizer.params.betas.1 should be less than 1, got 1.5",
    "unknown key scheduler.params.warmup_num_stps; did you mean",
    "unknown key zero_optimization.offload_param.speed; remove it",
)


def check(content: Any, folder: Path, *options: str) -> Any:
    file = folder / "ds.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return CliRunner().invoke(app, ["check-config", str(file), *options])


def test_every_wrong_key_is_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(ERRORS_WRONG)
    first, *lines = str(caught.value).split("\n* ")
    assert first == "5 things are wrong with the config:" and len(lines) == len(MESSAGES)
    for message in MESSAGES:
        assert sum(line.startswith(message) for line in lines) == 1, message


def test_two_contradictions_are_one_error() -> None:
    both = {"fp16": {"enabled": True}, "bf16": {"enabled": True}, "torch_autocast": {"enabled": True}}
    with pytest.raises(ConfigError, match=r"(?s)fp16 and bf16 are both enabled.*torch_autocast and bf16 are both"):
        load_config(both)


def test_a_contradiction_between_keys_of_ranks_hides_no_other() -> None:
    zero = {"stage": 3, "zero_quantized_gradients": True, "offload_param": {"device": "nvme"}}
    with pytest.raises(ConfigError, match=r"(?s)^2 things are wrong.*send gradients as int8 codes.*no \"nvme_path\""):
        load_config({"communication_data_type": "bf16", "zero_optimization": zero})


def test_the_command_lists_keys_by_what_becomes_of_them(tmp_path: Path) -> None:
    done = check(ERRORS_WRONG, tmp_path, "--json")
    assert done.exit_code == 2
    report = json.loads(done.stdout)
    assert [any(each.startswith(message) for each in report["errors"]) for message in MESSAGES] == [True] * 5
    assert report["honoured"] == [
        "fp16.enabled",
        "optimizer.type",
        "scheduler.type",
        "zero_optimization.offload_param.device",
        "zero_optimization.overlap_comm",
        "zero_optimization.stage",
    ]
    assert (report["auto"], report["ignored"]) == (["optimizer.params.lr"], ["autotuning"])
    text = check(ERRORS_WRONG, tmp_path).stdout
    assert ': 5 wrong or refused, 6 honoured, 1 left to "auto", 1 ignored\n' in text
    assert "\nhonoured:\n  fp16.enabled\n" in text and "\nignored: not supported, or of another tool:\n" in text


def test_a_batch_that_no_number_of_ranks_makes_is_found(tmp_path: Path) -> None:
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    done = check({"train_batch_size": 9, **sizes}, tmp_path)
    assert done.exit_code == 2 and "train_batch_size is 9, no multiple of train_micro" in done.stdout
    assert check({"train_batch_size": 8, **sizes}, tmp_path).exit_code == 0
    assert check({"train_batch_size": 9, "train_micro_batch_size_per_gpu": "auto"}, tmp_path).exit_code == 0


OFF: dict[str, Any] = {
    "_comment": "of a colleague",
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0, "hysteresis": 2},
    "amp": {"enabled": False},
    "autotuning": {"enabled": False},
    "gradient_clipping": "auto",
    "steps_per_print": None,
    "checkpoint": {},
    "zero_optimization": {"stage": 3, "cpu_offload": False, "reduce_bucket_size": 5e8, "round_robin_gradients": True},
}


def test_each_key_of_a_file_is_in_one_list(tmp_path: Path) -> None:
    report = json.loads(check(OFF, tmp_path, "--json").stdout)
    listed = [name for kind in ("honoured", "auto", "without_effect", "ignored", "off") for name in report[kind]]
    keys = {
        f"{block}.{key}" if isinstance(content, dict) and block not in ("amp", "autotuning", "checkpoint") else block
        for block, content in OFF.items()
        for key in (content if isinstance(content, dict) and content else [""])
    }
    assert sorted(listed) == sorted(keys)


TRAINER: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}},
    "zero_optimization": {"stage": 3},
}


def test_what_a_trainer_fills_in_is_not_wrong_and_has_no_default(tmp_path: Path) -> None:
    done = check(TRAINER, tmp_path)
    assert done.exit_code == 0 and 'ds.json: 3 honoured, 4 left to "auto"\n' in done.stdout
    reason = ": it has no default, so a start without a Trainer needs a number\n"
    for name in ("optimizer.params.lr", "scheduler.params.total_num_steps"):
        assert f"  {name}{reason}" in done.stdout
    assert done.stdout.count(reason) == 2
    without = {**TRAINER, "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto"}}}
    done = check(without, tmp_path)
    assert done.exit_code == 2 and "scheduler.params.total_num_steps is required" in done.stdout
