"""Shapes of models: from presets, counts and descriptions, or measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from typer.testing import CliRunner

from offload import testing
from offload.cli.main import app
from offload.errors import ConfigError
from offload.hardware.info import rated_bytes
from offload.hardware.probe import DTYPES, DtypeRates, Probed, Rates, keep
from offload.layout.memory_plan import Division
from offload.planner import memory, recommend, request
from offload.planner.activations import Load
from offload.planner.hardware import Hardware, described, find_gpu, parse_drive
from offload.planner.model_shape import BY_BLOCKS, Shape, from_count, from_name, from_preset, from_training, repeated
from offload.presets import DECODERS, PRESETS
from offload.sizes import GIB, MIB, parse_count, parse_size
from tests.planner.test_plan_activations import llama
from tests.support.models import DECODER


def test_a_shape_of_another_length_is_that_of_a_count_of_it() -> None:
    counted, scaled = from_count(10**9, 16, 2048), from_count(10**9, 16, 512).at(2048)
    assert counted._replace(uses=()) == scaled._replace(uses=())
    for left, right in zip(counted.uses, scaled.uses, strict=True):
        assert right.choice == left.choice
        assert right[:-1] == pytest.approx(left[:-1])


def test_a_model_shows_its_blocks_its_mlps_and_its_attention(tmp_path: Path) -> None:
    """No matrix of tokens times tokens is counted: bytes grow with the tokens."""
    short, long = (from_name(llama(tmp_path), tokens) for tokens in (512, 2048))
    assert [block.name for block in short.blocks] == [f"model.layers.{index}" for index in range(3)]
    assert short.positions == 8192 and short.itemsize == 2
    for single, four in zip(short.uses[2:], long.uses[2:], strict=True):
        assert four.saved == pytest.approx(4 * single.saved, rel=1e-3)
    layer, tokens = short.uses[2], 512
    assert layer.attention == 4 * tokens * tokens * 256 and long.uses[2].attention == 16 * layer.attention
    assert layer.mlp_flops == 2 * tokens * 3 * 256 * 768
    assert layer.mlp_saved == 2 * tokens * (256 + 4 * 768), "its input, and four tensors of its width"
    assert layer.mlp_largest == 2 * tokens * 768 and layer.largest == 4 * tokens * 256, "of a norm, in fp32"


_DECODERS = sorted(name for name, preset in PRESETS.items() if preset.config in DECODERS)
_LAYERS = 3
"""The first layer differs from the others, which are alike."""


def _counted(name: str, sequence: int, dtype: torch.dtype) -> Shape:
    """Returns the shape that a forward counts: a model that is cut has no closed form."""
    return from_name(name, sequence, dtype, layers=_LAYERS)


@pytest.fixture(params=_DECODERS)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a preset, which has fewer layers for the test."""
    preset = PRESETS[request.param]._replace(settings={**PRESETS[request.param].settings, "num_hidden_layers": _LAYERS})
    monkeypatch.setitem(PRESETS, request.param, preset)
    return str(request.param)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("sequence", "dtype"), [(2, torch.bfloat16), (1023, torch.float16), (3, torch.float32), (4096, torch.bfloat16)]
)
def test_the_closed_form_is_what_is_counted(name: str, sequence: int, dtype: torch.dtype) -> None:
    assert from_preset(name, sequence, dtype.itemsize) == _counted(name, sequence, dtype)


@pytest.mark.sample(1)
def test_a_length_at_which_the_mask_has_the_shape_of_another_tensor_is_counted(name: str) -> None:
    settings = PRESETS[name].settings
    for sequence in (1, settings.get("head_dim", settings["hidden_size"] // settings["num_attention_heads"])):
        assert from_preset(name, sequence, 2) is None
        assert from_name(name, sequence) == _counted(name, sequence, torch.bfloat16)


def test_experts_that_a_sequence_visits_anyway_are_counted_in_groups(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
    transformers.Qwen3MoeConfig(**sizes, **experts, head_dim=16, vocab_size=4096).save_pretrained(tmp_path)
    fine = from_name(str(tmp_path), 64).by_expert()
    groups = fine.in_groups()
    assert groups.parameters == fine.parameters and len(groups.layouts) < len(fine.layouts) - 16
    assert [layer.number for layer in groups.experts] == [16, 16] and not groups.chooses and not fine.chooses
    machine = described("RTX 4090", GIB, [parse_drive("7GB/s")])
    of_fine, of_groups = (
        recommend.plan(shape, machine, Load(1), memory.settings(device_memory=4 * MIB)) for shape in (fine, groups)
    )
    assert of_groups.memory.stored == pytest.approx(of_fine.memory.stored, rel=0.02)
    assert of_groups.memory.device == of_fine.memory.device and of_groups.activations == of_fine.activations
    assert of_groups.timing.moved.written == pytest.approx(of_fine.timing.moved.written, rel=0.02)
    few = from_name(str(tmp_path), 2)
    single, counted = groups.by_expert(), fine.layouts
    assert [layout.name for layout in single.layouts] == [layout.name for layout in counted]
    assert few.in_groups() is few, "two tokens leave experts out"


def test_what_is_no_decoder_or_too_long_is_left_to_the_forward_or_refused() -> None:
    assert from_preset("gpt2-tiny", 64, 2) is None and from_preset("/a/folder", 64, 2) is None
    with pytest.raises(ConfigError, match="--seq-len 4097 is more than the 4096 positions of this model"):
        from_preset("llama-1b", 4097, 2)


def test_counts_are_parsed() -> None:
    for message, count in (
        ("13B", 13e9),
        ("13b", 13e9),
        ("1.5e9", 1.5e9),
        (".5B", 5e8),
        ("2T", 2e12),
        ("64Mi", 64 * 2**20),
        ("7", 7),
    ):
        assert parse_count(message) == count
    for message in ("", "nan", "inf", "-3", "0", "0.1", "3 apples", "Mi", ".", "1e999", "9" * 400, "9" * 300 + "T"):
        with pytest.raises(ConfigError, match="expected a number"):
            parse_count(message)


def test_machines_are_parsed() -> None:
    assert find_gpu("24.5GB")[0].memory == 24.5 * GIB
    assert find_gpu("4090")[0].name == "RTX 4090" and find_gpu("4090")[1] is None
    for smi, name in (
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti SUPER"),
        ("NVIDIA GeForce RTX 4060", "RTX 4060"),
        ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA H200", "H200"),
    ):
        assert find_gpu(smi)[0].name == name, "as nvidia-smi and torch write it"
    with pytest.raises(ConfigError, match="there is no GPU 'NVIDIA GeForce RTX 4070 Laptop GPU' here"):
        find_gpu("NVIDIA GeForce RTX 4070 Laptop GPU")  # a slower card with less memory
    assert find_gpu("a100-80gb")[0].memory == 80 * GIB and find_gpu("A100")[0].memory == 80 * GIB
    assert find_gpu("16GB")[0].memory == 16 * GIB and "as fast as" in (find_gpu("16GB")[1] or "")
    drive = parse_drive("7GB/s,5GB/s,2TB")
    assert (drive.read, drive.write, drive.free) == (7e9, 5e9, parse_size("2TB"))
    assert parse_drive("3GB/s").write == 3e9
    with pytest.raises(ConfigError, match="expected a --drive"):
        parse_drive("1,2,3,4")


def test_smart_tells_what_a_drive_is_rated_for() -> None:
    log = {"percentage_used": 5, "data_units_written": 2_000_000}
    assert rated_bytes({"nvme_smart_health_information_log": log}) == 20 * 2_000_000 * 512_000
    assert rated_bytes({"nvme_smart_health_information_log": log | {"percentage_used": 0}}) is None


TOKENS = 16
BF16 = torch.bfloat16


def save_config(folder: Path, layers: int = 4, **more: Any) -> str:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": layers, "vocab_size": 512}
    transformers.Qwen2Config(**DECODER | sizes, tie_word_embeddings=False, **more).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def shape_measured(tmp_path: Path) -> Shape:
    return from_name(save_config(tmp_path / "model"), TOKENS)


@pytest.fixture
def machine() -> Hardware:
    """One whose compute is the CPU's, and whose rates are those of a GPU."""
    return replace(described("24GB", 64 * GIB), gpu_memory=0, handed_seconds=1e-3)


@pytest.fixture
def taking(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[int]]:
    """Has runs take so many seconds; gives how many layers each had."""

    def take(seconds: float) -> list[int]:
        layers: list[int] = []

        def timed(config: Any, *_: Any) -> float:
            layers.append(config.num_hidden_layers)
            return seconds

        testing.replace(monkeypatch, "clock.model_pass", timed)
        return layers

    return take


def test_the_rates_come_to_what_was_timed(
    shape_measured: Shape, machine: Hardware, taking: Callable[[float], list[int]]
) -> None:
    layers = taking(2.5)
    figures = request.measured(machine, shape_measured, Load(3), BF16, BY_BLOCKS)
    assert layers == [4]
    assert request.compute_seconds(shape_measured, figures, 3) == pytest.approx(2.5)
    assert figures.measured is not None and figures.measured[:3] == (4, 4, 2.5)
    assert figures.measured.by_probe_seconds == request.compute_seconds(shape_measured, machine, 3)
    same = ("matmul", "weights", "fresh", "elementwise", "measured")
    assert replace(figures, **{name: getattr(machine, name) for name in same}) == machine, "nothing else has changed"


@pytest.mark.slow
def test_a_model_without_room_is_measured_by_some_layers(
    shape_measured: Shape, machine: Hardware, taking: Callable[[float], list[int]], tmp_path: Path
) -> None:
    layers = taking(1.0)
    single = from_name(shape_measured.name, TOKENS, layers=1)
    least = 2 * request._nbytes(single, 1, BF16)
    layer_nbytes = (2 * request._nbytes(shape_measured, 1, BF16) - least) // 3
    for more, taken in (
        (0, 1),
        (layer_nbytes - 1000, 1),
        (layer_nbytes + 1000, 2),
        (2 * layer_nbytes + 1000, 3),
        (3 * layer_nbytes + 1000, 4),
    ):
        figures = request.measured(replace(machine, ram=least + more), shape_measured, Load(1), BF16, BY_BLOCKS)
        assert layers[-1] == taken, more
        part = from_name(shape_measured.name, TOKENS, layers=taken)
        assert request.compute_seconds(part, figures, 1) == pytest.approx(1.0)
    with pytest.raises(ConfigError, match=r"the smallest part of .* give a smaller --batch-size or --seq-len"):
        request.measured(replace(machine, ram=least - 1000), shape_measured, Load(1), BF16, BY_BLOCKS)


def test_a_model_that_takes_long_is_measured_by_some_layers(
    shape_measured: Shape, machine: Hardware, taking: Callable[[float], list[int]]
) -> None:
    layers = taking(1.0)
    complete = request.compute_seconds(shape_measured, machine, 1)
    slow = 1.5 * request._PASS_SECONDS / complete  # all layers together take half as long again as they may
    rates = {name: getattr(machine, name) / slow for name in ("matmul", "weights", "fresh", "elementwise")}
    request.measured(replace(machine, **rates), shape_measured, Load(1), BF16, BY_BLOCKS)
    assert 1 <= layers[-1] < 4


def test_what_is_free_now_counts(
    shape_measured: Shape, machine: Hardware, taking: Callable[[float], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan may be for more memory than there is (--ram)."""
    layers = taking(1.0)
    single = from_name(shape_measured.name, TOKENS, layers=1)
    testing.replace(monkeypatch, "memory.free_for_plan", lambda: 2 * request._nbytes(single, 1, BF16))
    request.measured(machine, shape_measured, Load(1), BF16, BY_BLOCKS)
    assert layers == [1]


def test_one_layer_that_takes_long_is_run(
    tmp_path: Path, machine: Hardware, taking: Callable[[float], list[int]]
) -> None:
    layers = taking(1.0)
    single = from_name(save_config(tmp_path / "single", layers=1), TOKENS)
    rates = {name: getattr(machine, name) / 1e9 for name in ("matmul", "weights", "fresh", "elementwise")}
    request.measured(replace(machine, **rates), single, Load(1), BF16, BY_BLOCKS)
    assert layers == [1]


def test_a_model_that_cannot_be_cut_is_run_where_it_fits(
    tmp_path: Path, machine: Hardware, taking: Callable[[float], list[int]]
) -> None:
    transformers.MambaConfig(hidden_size=32, num_hidden_layers=4, vocab_size=128, state_size=4).save_pretrained(
        tmp_path
    )
    layers = taking(1.0)
    mamba = from_name(str(tmp_path), TOKENS)
    request.measured(machine, mamba, Load(1), BF16, BY_BLOCKS)
    assert layers == [4]
    with pytest.raises(ConfigError, match=r"too large to run, and cannot be cut.*cannot cut .*leave out --measure"):
        request.measured(replace(machine, ram=1000), mamba, Load(1), BF16, BY_BLOCKS)


def test_a_model_that_cannot_run_is_a_clear_error(
    shape_measured: Shape, machine: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> float:
        raise RuntimeError("no kernel for this")

    testing.replace(monkeypatch, "clock.model_pass", fail)
    with pytest.raises(ConfigError, match=r"cannot run .* to measure it .*no kernel for this.*leave out --measure"):
        request.measured(machine, shape_measured, Load(1), BF16, BY_BLOCKS)


# -- the command --------------------------------------------------------------------------------------


@pytest.fixture
def probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine, as if it had been probed."""
    from offload.hardware.info import machine as about_machine

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    about = about_machine() | {"name": "here", "gpu": None, "gpu_memory_bytes": 0}
    rates = Rates(*(1e10,) * 5, dict.fromkeys(DTYPES, DtypeRates(*(1e10,) * 5)))
    keep(Probed(about, rates, (), "2026-11-22", 1.0))


def plan(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments, "--seq-len", str(TOKENS)])


def test_only_a_model_on_this_machine_can_be_measured(probed: None, tmp_path: Path) -> None:
    name = save_config(tmp_path / "model", layers=2)
    described = ("--gpu", "24GB", "--ram", "64GB")
    for wrong in (("--parameters", "1B", "--layers", "2"), ("--model", name, *described)):
        done = plan(*wrong, "--measure")
        assert done.exit_code == 2 and "--measure runs the model on this machine" in done.stderr


def test_names_and_folders_are_checked_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        from_name(str(tmp_path), TOKENS)
    (tmp_path / "config.json").write_text('{"model_type": "nothing-known"}')
    with pytest.raises(ConfigError, match=r"nothing-known', which transformers .* does not know"):
        from_name(str(tmp_path), TOKENS)


def _adapted(config: Callable[..., Any], layers: int, **settings: Any) -> Shape:
    """Returns the shape of a small model with adapters of attention, whose other matrices are in 4 bits."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "head_dim": 16}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config(num_hidden_layers=layers, **sizes, **settings))
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    shape = from_training(model, 64, torch.bfloat16, Division(), {}, "nf4")
    return shape._replace(filed=frozenset(name for name, _ in model.named_parameters()))


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (transformers.LlamaConfig, {"intermediate_size": 128}),
        (transformers.Qwen3Config, {"intermediate_size": 128, "tie_word_embeddings": True}),
        (transformers.Qwen3MoeConfig, {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}),
    ],
)
def test_a_model_whose_layers_are_alike_is_counted_by_four_of_them(config: Any, settings: dict[str, Any]) -> None:
    assert repeated(_adapted(config, 4, **settings), 7) == _adapted(config, 7, **settings)


def test_a_model_whose_layers_differ_is_counted_itself() -> None:
    settings = {"moe_intermediate_size": 32, "num_experts": 8, "intermediate_size": 128, "mlp_only_layers": [1]}
    assert repeated(_adapted(transformers.Qwen3MoeConfig, 4, **settings), 7) is None
