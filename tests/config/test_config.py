"""The config as a whole: keys, files, edits, and what an engine makes of them."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.config import OPTIMIZER_DEFAULTS, Aio, Config, ZeroOptimization, load_config, read_json
from offload.config.edit import set_in_block
from offload.errors import ConfigError, UsageError
from offload.sizes import GIB, count_of, parse_size
from tests.pages.configuration_page import PAGE, document
from tests.support.processes.device_process import engine_device

ZERO3 = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True, "check_grad_overflow": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/fast", "pin_memory": True, "buffer_count": 4},
        "offload_param": {"device": "nvme", "nvme_path": "/slow", "buffer_size": 1e8, "max_in_cpu": 1e9},
        "sub_group_size": 1e9,
        "stage3_prefetch_bucket_size": "auto",
        "overlap_comm": True,
    },
    "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1},
    "steps_per_print": 2000,
    "dump_state": True,
    "wall_clock_breakdown": False,
}


def test_a_usual_deepspeed_file_loads() -> None:
    config = load_config(ZERO3)
    assert (config.weight_tier, config.optimizer_tier, config.dtype) == ("nvme", "nvme", "bf16")
    assert config.drives == ("/fast", "/slow"), "the optimizer's first"
    assert config.gradient_clipping == 0.5
    settings = config.optimizer.settings
    assert config.optimizer.params.lr == 1e-5
    assert (settings["betas"], settings["eps"], settings["weight_decay"]) == ((0.8, 0.99), 1e-7, 0.0)
    notices = "\n".join(config.notices)
    for key in ("buffer_count", "dump_state"):
        assert key in notices, key
    assert "wall_clock_breakdown" not in notices and "steps_per_print" not in notices
    assert len(config.notices) == 2
    assert (config.aio.block_size, config.aio.queue_depth, config.aio.intra_op_parallelism) == (262144, 32, 1)


def test_the_io_block_is_read() -> None:
    assert load_config({"aio": {"block_size": "auto", "queue_depth": None}}).aio.block_size is None
    assert load_config({"aio": {"block_size": 1048576.0, "queue_depth": 8.0}}).aio.queue_depth == 8
    notices = load_config({"aio": {"single_submit": True, "overlap_events": True}}).notices
    assert "aio.single_submit" in notices[0] and "aio.overlap_events" in notices[0]
    for aio, message in (
        ({"block_size": 1024}, "aio.block_size"),
        ({"queue_depth": 0}, "aio.queue_depth"),
        ({"depth": 4}, 'did you mean "queue_depth"'),
        ({"thread_count": 1, "intra_op_parallelism": 1}, "older name"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config({"aio": aio})
    with pytest.raises(ConfigError, match="io_backend"):
        load_config({"offload": {"io_backend": "gds"}})


def test_an_empty_config_has_the_defaults() -> None:
    config = load_config({})
    assert (config.weight_tier, config.optimizer_tier, config.dtype, config.drives) == ("none", "none", "fp32", ())
    assert config.gradient_clipping == 1.0 and config.optimizer is None and config.notices == ()
    assert config.offload.resume == "never" and config.offload.durability == "auto"


def test_auto_means_the_default_but_in_our_own_block() -> None:
    config = load_config({"bf16": {"enabled": "auto"}, "train_batch_size": "auto", "offload": {"resume": "auto"}})
    assert not config.bf16.enabled and config.train_batch_size is None and config.offload.resume == "auto"


TUTORIALS: dict[str, tuple[dict[str, Any], str | None]] = {
    "stage 2 with fp16": (
        {
            "zero_optimization": {"stage": 2, "allgather_bucket_size": 2e8, "reduce_bucket_size": 2e8},
            "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
            "train_batch_size": "auto",
        },
        None,
    ),
    "stage 2 with a warm-up": (
        {
            "train_batch_size": 32,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1000}},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        },
        None,
    ),
    "stage 3 on the CPU, by Trainer": (
        {
            "bf16": {"enabled": "auto"},
            "fp16": {"enabled": "auto", "loss_scale": 0},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
            },
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "offload_param": {"device": "cpu", "pin_memory": True},
                "sub_group_size": 1e9,
                "reduce_bucket_size": "auto",
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "steps_per_print": float("inf"),
            "wall_clock_breakdown": False,
        },
        None,
    ),
    "everything in its own words": (
        {
            "zero_optimization": {
                "stage": 2,
                "cpu_offload": True,
                "zero_quantized_weights": False,
                "mics_shard_size": -1,
                "leaf_module": {"classes": "Experts", "name_suffixes": []},
                "offload_param": {"device": "none"},
            },
            "bfloat16": {"enabled": True},
            "amp": {"enabled": False, "opt_level": "O1"},
            "compile": {"deepcompile": False, "double_buffer": True},
            "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False, "groups": 64}}},
        },
        None,
    ),
}


@pytest.mark.parametrize("name", TUTORIALS)
def test_what_tutorials_have_loads_or_gives_one_clear_error(name: str) -> None:
    content, message = TUTORIALS[name]
    if message is None:
        load_config(content)
        return
    with pytest.raises(ConfigError, match=message):
        load_config(content)


def test_older_names_are_honoured() -> None:
    config = load_config(TUTORIALS["everything in its own words"][0])
    assert (config.weight_tier, config.optimizer_tier, config.dtype) == ("none", "cpu", "bf16")
    assert config.units == ("Experts",)
    assert load_config({"zero_optimization": True}).zero_optimization.stage == 1
    assert load_config({"zero_optimization": {"cpu_offload_params": True}}).weight_tier == "cpu"
    assert load_config({"zero_optimization": {"cpu_offload": 1}}).optimizer_tier == "cpu"


def test_each_kind_of_key_without_effect_is_one_line() -> None:
    zero = {"stage": 2, "reduce_scatter": False, "offload_param": {"device": "cpu", "pin_memory": False}}
    tuning, unsupported, stage = load_config({"zero_optimization": zero, "comet": {"enabled": True}}).notices
    assert "zero_optimization.reduce_scatter" in tuning and "zero_optimization.offload_param.pin_memory" in tuning
    assert "comet" in unsupported and "stage 2" in stage
    assert load_config({"comet": {"enabled": False}, "activation_checkpointing": {"profile": False}}).notices == ()


def test_adam_is_adamw_unless_the_config_disables_it() -> None:
    assert load_config({"optimizer": {"type": "adam"}}).optimizer.settings["adam_w_mode"]
    plain = {"type": "Adam", "params": {"adam_w_mode": False}}
    assert not load_config({"optimizer": plain}).optimizer.settings["adam_w_mode"]


def test_states_in_fp32_may_be_asked_of_every_type() -> None:
    for name in OPTIMIZER_DEFAULTS:
        print(name)
        plain, asked = (
            load_config({"optimizer": {"type": name, "params": params}}).optimizer
            for params in ({}, {"fp32_optimizer_states": True})
        )
        assert plain is not None and asked is not None and asked.settings == plain.settings


def test_a_block_of_somebody_else_is_named_and_ignored() -> None:
    assert load_config({"my_own_note": 1}).notices == (
        "config keys that are not supported and are ignored: my_own_note",
    )


def test_the_documentation_is_up_to_date() -> None:
    assert PAGE.read_text() == document(), "run `python -m tests.pages.configuration_page`"


def test_every_key_is_documented() -> None:
    text = document()

    def keys(content: dict[str, Any]) -> set[str]:
        return set(content).union(*(keys(value) for value in content.values() if isinstance(value, dict)))

    for key in keys(ZERO3) - {"block_size", "queue_depth", "thread_count"}:
        assert f"`{key}`" in text, key
    for name, model in (("", Config), ("aio.", Aio), ("zero_optimization.", ZeroOptimization)):
        for old, new in model.OLD_NAMES.items():
            assert f"* `{name}{old}`: `{new}`" in text, old
    assert "`zero_optimization.cpu_offload_param`, if true: `offload_param`" in text


def test_keys_that_are_notes_mean_nothing() -> None:
    notes = {"_comment": "for the large machine", "//": "see the wiki", "#lr": 1}
    content = {
        **notes,
        "optimizer": {"type": "AdamW", **notes, "params": {"lr": 1e-3, **notes}},
        "offload": dict(notes),
    }
    config = load_config(content)
    assert config.optimizer is not None and config.optimizer.params.lr == 1e-3
    assert not any("comment" in notice or "wiki" in notice for notice in config.notices)


def test_a_written_stage_0_is_whole_on_each_rank() -> None:
    zero: object
    for zero, size in (
        ({"stage": 0}, 1),
        ({"stage": 0, "mics_shard_size": "auto"}, 1),
        (False, 1),
        ({"stage": 0, "mics_shard_size": -1}, -1),
        ({"stage": 0, "mics_shard_size": 2}, 2),
        ({"stage": "auto"}, -1),
        ({}, -1),
        ({"stage": 1}, -1),
        (True, -1),
    ):
        print(size)
        config = load_config({"train_batch_size": 4, "zero_optimization": zero})
        assert config.zero_optimization.mics_shard_size == size
        again = load_config(config.model_dump(include={"zero_optimization": {"stage", "mics_shard_size"}}))
        assert again.zero_optimization.mics_shard_size == size, "a config that is written out means what it meant"


# --------------------------------------------------------------------------------------------------
# Sizes and counts are parsed and formatted.


def test_sizes_are_parsed() -> None:
    text: str | int
    for text, nbytes in (
        ("16GiB", 16 * GIB),
        ("16G", 16 * GIB),
        ("1.5 gib", GIB * 3 // 2),
        ("800MB", 800_000_000),
        (4096, 4096),
        ("1e9", 10**9),
        (".5TB", 5 * 10**11),
    ):
        print(nbytes)
        assert parse_size(text) == nbytes


def test_text_that_is_no_size_is_refused() -> None:
    text: object
    for text in ("", "many", "-1", "1 XB", "1GiBB", ".", "1.5.5GB", True, "nan", "0x10"):
        print(text)
        with pytest.raises(ConfigError, match="16GiB"):
            parse_size(text)  # type: ignore[arg-type]


def test_a_count_is_singular_or_plural() -> None:
    assert [count_of(number, "step") for number in (0, 1, 2, 2500)] == ["0 steps", "1 step", "2 steps", "2,500 steps"]
    assert [count_of(number, "batch is", "batches are") for number in (1, 3)] == ["1 batch is", "3 batches are"]


# --------------------------------------------------------------------------------------------------
# A config is a dict, a path or base64, and may have comments; what cannot be read is an error with its path.


def test_a_config_may_come_in_base64(tmp_path: Path) -> None:
    content = {"train_batch_size": 7, "offload": {"run": "\u00ff\u00fe?>"}}
    text = json.dumps(content, ensure_ascii=False)
    safe, plain = (encode(text.encode()).decode() for encode in (base64.urlsafe_b64encode, base64.b64encode))
    assert safe != plain
    assert read_json(safe) == read_json(plain) == content
    twice = base64.b64encode(b'{"train_batch_size": 1, "train_batch_size": 2}').decode()
    for wrong, message in ((twice, "config that came in base64: .* twice"), (plain[:-1], "cannot read the config eyJ")):
        with pytest.raises(ConfigError, match=message):
            load_config(wrong)


@pytest.mark.parametrize(
    "text", ["{train_batch_size: 8}", '{"zero_optimization": {"stage": 3}\n"fp16": {}}', "stage: 3"]
)
def test_the_error_for_hjson_says_what_json_needs(text: str, tmp_path: Path) -> None:
    (tmp_path / "ds.hjson").write_text(text)
    with pytest.raises(ConfigError, match=r"not JSON: .* column \d+\. Comments and .* strings in quotes, and commas"):
        load_config(tmp_path / "ds.hjson")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "'a' appears twice"),
        ('{"bf16": {"enabled": true, "enabled": false}}', "'enabled' appears twice"),
        ('{\n "a": }', "line 2"),
        ("[]", "JSON object"),
        ("\x00", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"train_batch_size": ' + "1" * 5000 + "}", "not a config"),
    ],
)
def test_a_bad_file_is_an_error_with_its_path(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "bad.json")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.json"):
        load_config(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config("\0")


def test_what_is_neither_a_dict_nor_a_path() -> None:
    source: Any
    for source in (5, b"ds.json", None, [("train_batch_size", 1)]):
        print(source)
        with pytest.raises(ConfigError, match="a dict or the path"):
            load_config(source)


def test_a_config_of_holes_is_not_read_to_its_end(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(3 << 40)
    with pytest.raises(ConfigError, match=r"cannot read the config .*: it has more than 16777216 characters"):
        load_config(tmp_path / "config.json")


AIO = {"block_size": 4096, "queue_depth": 8}
OLDER = {"thread_count": "intra_op_parallelism"}


def test_what_is_new_has_the_style_of_the_file() -> None:
    for text, wanted in (
        ("{}\n", '{\n  "aio": {\n    "block_size": 4096,\n    "queue_depth": 8\n  }\n}\n'),
        ('{"a": 1}', '{"a": 1, "aio": {"block_size": 4096, "queue_depth": 8}}'),
        ('{"a": 1,}', '{"a": 1, "aio": {"block_size": 4096, "queue_depth": 8}}'),
        ('{"a": 1 // one\n}', '{"a": 1, "aio": {"block_size": 4096, "queue_depth": 8} // one\n}'),
        ('{"aio": null}', '{"aio": {"block_size": 4096, "queue_depth": 8}}'),
        ('{\n\t"a": 1\n}', '{\n\t"a": 1,\n\t"aio": {\n\t\t"block_size": 4096,\n\t\t"queue_depth": 8\n\t}\n}'),
        ('{\n "aio": {\n }\n}', '{\n "aio": {\n   "block_size": 4096,\n   "queue_depth": 8\n }\n}'),
        (
            '\ufeff{\r\n "aio": {"queue_depth": 1}\r\n}',
            '\ufeff{\r\n "aio": {"queue_depth": 8, "block_size": 4096}\r\n}',
        ),
    ):
        print(text)
        assert set_in_block(text, "aio", AIO) == wanted


def test_an_older_name_of_a_key_is_replaced_by_the_newer_one() -> None:
    text = '{"aio": {"thread_count": 4, "block_size": 1}}'
    wanted = '{"aio": {"intra_op_parallelism": 1, "block_size": 1}}'
    assert set_in_block(text, "aio", {"intra_op_parallelism": 1}, OLDER) == wanted


@pytest.mark.parametrize("seed", range(20))
def test_the_file_then_contains_what_it_did_and_the_keys(seed: int, tmp_path: Path) -> None:
    """Over files of random style: each is read as its content with the new values, in the order that it had."""
    chance = random.Random(seed)
    for number in range(20):
        path = tmp_path / f"{number}.json"
        path.write_text(written(content(chance), chance), encoding="utf-8", newline="")
        before = read_json(path)
        wanted = {**before, "aio": {**(before.get("aio") or {}), **AIO}}
        text = path.read_bytes().decode()
        path.write_text(set_in_block(text, "aio", AIO), encoding="utf-8", newline="")
        after = read_json(path)
        assert after == wanted and list(after) == list(wanted), text
        assert list(after["aio"])[: len(before.get("aio") or {})] == list(before.get("aio") or {}), text


def content(chance: random.Random) -> dict[str, Any]:
    """Returns the content of a file, with or without the block."""
    blocks: list[tuple[str, Any]] = [("a", 1), ("b", [1, {"aio": 2}]), ("ü", "x, } // y"), ("c", {}), ("d", None)]
    if chance.random() < 0.8:
        keys = [("queue_depth", 1), ("single_submit", False), ("block_size", 1e6)]
        blocks.append(("aio", chance.choice([None, dict(chance.sample(keys, chance.randrange(4)))])))
    chance.shuffle(blocks)
    return dict(blocks[: chance.randrange(1, len(blocks) + 1)])


def written(value: Any, chance: random.Random, depth: int = 1) -> str:
    """Returns `value` as JSON with the liberties that a config has: comments, commas, spaces, lines."""

    def gap(lines: bool) -> str:
        comments = ["/* , } */", "// it, }\n", "# {\n"] if chance.random() < 0.3 else [""]
        return f"{chance.choice(['', ' '])}{chance.choice(comments)}" + ("\n" + "  " * depth if lines else "")

    if not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=chance.random() < 0.5)
    lines = chance.random() < 0.6
    items = [
        f"{json.dumps(key)}{gap(False)}:{gap(False)}{written(each, chance, depth + 1)}" for key, each in value.items()
    ]
    text = gap(lines).join(f"{item}{',' if number + 1 < len(items) else ''}" for number, item in enumerate(items))
    last = "," if items and chance.random() < 0.3 else ""
    return f"{{{gap(lines)}{text}{last}{gap(lines)}}}"


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
    groups = [(group["lr"], group["betas"], group["weight_decay"]) for group in engine.optimizer.param_groups]
    assert groups == [(1e-3, (0.8, 0.9), 0.1), (1e-2, (0.8, 0.9), 0.0)]
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
