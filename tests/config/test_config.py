"""A key of a DeepSpeed JSON file is honoured, or named in a notice or an error, also in files of tutorials."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.config import OPTIMIZER_DEFAULTS, Aio, Config, ZeroOptimization, document, load_config, read_json
from offload.errors import ConfigError
from offload.sizes import GIB, align_up, count_of, format_count, format_size, parse_size
from tests import ROOT

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
    for key in ("buffer_count", "pin_memory", "dump_state"):
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


def test_null_means_the_default_too() -> None:
    nothing = dict.fromkeys(("train_batch_size", "optimizer", "scheduler", "fp16", "bf16", "zero_optimization", "amp"))
    assert load_config({**nothing, "offload": {"host_memory": None, "units": None, "nvme_path": None}}) == Config()
    assert load_config({"zero_optimization": {"offload_param": None, "leaf_module": None}}) == Config()


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


def test_floats_without_a_fraction_are_integers() -> None:
    config = load_config({"train_batch_size": 1e2, "offload": {"host_memory": 2e9, "seed": 7.0}})
    assert (config.train_batch_size, config.offload.host_memory, config.offload.seed) == (100, 2_000_000_000, 7)


def test_each_kind_of_key_without_effect_is_one_line() -> None:
    zero = {"stage": 2, "reduce_scatter": True, "offload_param": {"device": "cpu", "pin_memory": True}}
    tuning, unsupported, stage = load_config({"zero_optimization": zero, "comet": {"enabled": True}}).notices
    assert "zero_optimization.reduce_scatter" in tuning and "zero_optimization.offload_param.pin_memory" in tuning
    assert "comet" in unsupported and "stage 2" in stage
    assert load_config({"comet": {"enabled": False}, "activation_checkpointing": {"profile": False}}).notices == ()


def test_the_keys_of_a_mode_that_is_off_need_no_word() -> None:
    assert load_config({"fp16": {"enabled": False, "loss_scale": 0}, "bf16": {"enabled": "auto"}}).notices == ()
    on = load_config({"bf16": {"enabled": True, "immediate_grad_update": True}})
    assert "bf16.immediate_grad_update" in on.notices[0]


def test_adam_is_adamw_unless_the_config_disables_it() -> None:
    assert load_config({"optimizer": {"type": "adam"}}).optimizer.settings["adam_w_mode"]
    plain = {"type": "Adam", "params": {"adam_w_mode": False}}
    assert not load_config({"optimizer": plain}).optimizer.settings["adam_w_mode"]


@pytest.mark.parametrize("name", OPTIMIZER_DEFAULTS)
def test_states_in_fp32_may_be_asked_of_every_type(name: str) -> None:
    plain, asked = (
        load_config({"optimizer": {"type": name, "params": params}}).optimizer
        for params in ({}, {"fp32_optimizer_states": True})
    )
    assert plain is not None and asked is not None and asked.settings == plain.settings


def test_a_block_of_somebody_else_is_named_and_ignored() -> None:
    assert load_config({"my_own_note": 1}).notices == (
        "config keys that are not supported and are ignored: my_own_note",
    )


def test_an_unused_path_is_reported() -> None:
    content = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "nvme_path": "/x"}}}
    assert "nvme_path is used only if" in load_config(content).notices[0]


def test_the_documentation_is_up_to_date() -> None:
    written = ROOT / "docs" / "reference" / "configuration.md"
    assert written.read_text() == document(), "run `python -m offload.config`"


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
    found = load_config(content)
    assert found.optimizer is not None and found.optimizer.params.lr == 1e-3
    assert not any("comment" in notice or "wiki" in notice for notice in found.notices)


@pytest.mark.parametrize(
    ("zero", "size"),
    [
        ({"stage": 0}, 1),
        ({"stage": 0, "mics_shard_size": "auto"}, 1),
        (False, 1),
        ({"stage": 0, "mics_shard_size": -1}, -1),
        ({"stage": 0, "mics_shard_size": 2}, 2),
        ({"stage": "auto"}, -1),
        ({}, -1),
        ({"stage": 1}, -1),
        (True, -1),
    ],
)
def test_a_written_stage_0_is_whole_on_each_rank(zero: object, size: int) -> None:
    config = load_config({"train_batch_size": 4, "zero_optimization": zero})
    assert config.zero_optimization.mics_shard_size == size
    again = load_config(config.model_dump(include={"zero_optimization": {"stage", "mics_shard_size"}}))
    assert again.zero_optimization.mics_shard_size == size, "a config that is written out means what it meant"


# --------------------------------------------------------------------------------------------------
# Sizes and counts are parsed and formatted.


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("16GiB", 16 * GIB),
        ("16G", 16 * GIB),
        ("1.5 gib", GIB * 3 // 2),
        ("800MB", 800_000_000),
        (4096, 4096),
        ("1e9", 10**9),
    ],
)
def test_sizes_are_parsed(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "many", "-1", "1 XB", "1GiBB", True, "nan", "0x10"])
def test_text_that_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ConfigError, match="16GiB"):
        parse_size(text)  # type: ignore[arg-type]


def test_numbers_are_formatted() -> None:
    assert [format_size(n) for n in (0, 1023, 1536, 13314398618)] == ["0 B", "1023 B", "1.5 KiB", "12.4 GiB"]


def test_a_count_is_singular_or_plural() -> None:
    assert [count_of(number, "step") for number in (0, 1, 2, 2500)] == ["0 steps", "1 step", "2 steps", "2,500 steps"]
    assert [count_of(number, "batch is", "batches are") for number in (1, 3)] == ["1 batch is", "3 batches are"]


def test_counts_are_formatted() -> None:
    counts = {
        0: "0",
        999: "999",
        1000: "1k",
        100_000_000: "100M",
        1_234_567: "1.23M",
        999_999_999: "1B",
        2 * 10**12: "2T",
    }
    assert {number: format_count(number) for number in counts} == counts


@given(st.integers(0, 2**60), st.integers(1, 2**30))
def test_sizes_are_rounded_up_to_the_alignment(value: int, step: int) -> None:
    aligned = align_up(value, step)
    assert aligned % step == 0 and 0 <= aligned - value < step


# --------------------------------------------------------------------------------------------------
# A config is a dict, a path or base64, and may have comments; what cannot be read is an error with its path.


def test_comments_and_lists_of_paths(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(
        """{
        // weights and states
        "zero_optimization": {"stage": 3, /* both */ "offload_param": {"device": "nvme"}}, # end
        "offload": {"nvme_path": ["/a//b", "~/c"], "run": "x",},
        }"""
    )
    assert load_config(path).drives == ("/a//b", str(Path.home() / "c"))


def test_a_mark_of_a_comment_in_a_string_is_none(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('\ufeff{"offload": {"nvme_path": ["http://a#b/*c*/", "\\"d,]"]}}', encoding="utf-8")
    assert load_config(path).drives == ("http://a#b/*c*/", '"d,]')


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


def test_paths_are_strings_or_paths() -> None:
    given = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": Path("/x")}}
    given |= {"offload_optimizer": {"device": "nvme", "nvme_path": ["/y", "/x"]}}
    assert load_config({"zero_optimization": given, "offload": {"nvme_path": "/z"}}).drives == ("/y", "/x")


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


@pytest.mark.parametrize("source", [5, b"ds.json", None, [("train_batch_size", 1)]])
def test_what_is_neither_a_dict_nor_a_path(source: Any) -> None:
    with pytest.raises(ConfigError, match="a dict or the path"):
        load_config(source)


def test_a_config_of_holes_is_not_read_to_its_end(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(3 << 40)
    with pytest.raises(ConfigError, match=r"cannot read the config .*: it has more than 16777216 characters"):
        load_config(tmp_path / "config.json")
