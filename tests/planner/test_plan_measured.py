"""`offload plan --measure`: the compute of a prediction is what the model itself took on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

from offload.cli.main import app
from offload.errors import ConfigError
from offload.hardware.probe import DTYPES, DtypeRates, Probed, Rates, keep
from offload.planner import request
from offload.planner.activations import Load
from offload.planner.hardware import Hardware, described
from offload.planner.model_shape import Shape, from_name
from offload.sizes import GIB

TOKENS = 16
BF16 = torch.bfloat16


def save_config(folder: Path, layers: int = 4, **more: Any) -> str:
    transformers.Qwen2Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        tie_word_embeddings=False,
        **more,
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def shape(tmp_path: Path) -> Shape:
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

        monkeypatch.setattr(request, "_seconds", timed)
        return layers

    return take


def test_the_rates_come_to_what_was_timed(
    shape: Shape, machine: Hardware, taking: Callable[[float], list[int]]
) -> None:
    layers = taking(2.5)
    found = request.measured(machine, shape, Load(3), BF16)
    assert layers == [4]
    assert request.compute_seconds(shape, found, 3) == pytest.approx(2.5)
    assert found.measured is not None and found.measured[:3] == (4, 4, 2.5)
    assert found.measured.by_probe_seconds == request.compute_seconds(shape, machine, 3)
    same = ("matmul", "weights", "fresh", "elementwise", "measured")
    assert replace(found, **{name: getattr(machine, name) for name in same}) == machine, "nothing else has changed"


@pytest.mark.slow
def test_a_model_without_room_is_measured_by_some_layers(
    shape: Shape, machine: Hardware, taking: Callable[[float], list[int]], tmp_path: Path
) -> None:
    layers = taking(1.0)
    one = from_name(shape.name, TOKENS, layers=1)
    least = 2 * request._nbytes(one, 1, BF16)
    each = (2 * request._nbytes(shape, 1, BF16) - least) // 3
    for more, taken in ((0, 1), (each - 1000, 1), (each + 1000, 2), (2 * each + 1000, 3), (3 * each + 1000, 4)):
        found = request.measured(replace(machine, ram=least + more), shape, Load(1), BF16)
        assert layers[-1] == taken, more
        part = from_name(shape.name, TOKENS, layers=taken)
        assert request.compute_seconds(part, found, 1) == pytest.approx(1.0)
    with pytest.raises(ConfigError, match=r"the smallest part of .* give a smaller --batch-size or --seq-len"):
        request.measured(replace(machine, ram=least - 1000), shape, Load(1), BF16)


def test_a_model_that_takes_long_is_measured_by_some_layers(
    shape: Shape, machine: Hardware, taking: Callable[[float], list[int]]
) -> None:
    layers = taking(1.0)
    complete = request.compute_seconds(shape, machine, 1)
    slow = 1.5 * request._PASS_SECONDS / complete  # all layers together take half as long again as they may
    rates = {name: getattr(machine, name) / slow for name in ("matmul", "weights", "fresh", "elementwise")}
    request.measured(replace(machine, **rates), shape, Load(1), BF16)
    assert 1 <= layers[-1] < 4


def test_what_is_free_now_counts(
    shape: Shape, machine: Hardware, taking: Callable[[float], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan may be for more memory than there is (--ram)."""
    layers = taking(1.0)
    one = from_name(shape.name, TOKENS, layers=1)
    monkeypatch.setattr(request, "free_host_memory", lambda: 2 * request._nbytes(one, 1, BF16))
    request.measured(machine, shape, Load(1), BF16)
    assert layers == [1]


def test_one_layer_that_takes_long_is_run(
    tmp_path: Path, machine: Hardware, taking: Callable[[float], list[int]]
) -> None:
    layers = taking(1.0)
    single = from_name(save_config(tmp_path / "single", layers=1), TOKENS)
    rates = {name: getattr(machine, name) / 1e9 for name in ("matmul", "weights", "fresh", "elementwise")}
    request.measured(replace(machine, **rates), single, Load(1), BF16)
    assert layers == [1]


def test_a_model_that_cannot_be_cut_is_run_where_it_fits(
    tmp_path: Path, machine: Hardware, taking: Callable[[float], list[int]]
) -> None:
    transformers.MambaConfig(hidden_size=32, num_hidden_layers=4, vocab_size=128, state_size=4).save_pretrained(
        tmp_path
    )
    layers = taking(1.0)
    mamba = from_name(str(tmp_path), TOKENS)
    request.measured(machine, mamba, Load(1), BF16)
    assert layers == [4]
    with pytest.raises(ConfigError, match=r"too large to run, and cannot be cut.*cannot cut .*leave out --measure"):
        request.measured(replace(machine, ram=1000), mamba, Load(1), BF16)


def test_layers_of_two_kinds_are_cut_together(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention"] * 2
    name = save_config(tmp_path / "two", layer_types=kinds, use_sliding_window=True, sliding_window=4)
    complete, part = from_name(name, TOKENS), from_name(name, TOKENS, layers=3)
    assert len(part.layouts) == len(complete.layouts) - 1


def test_a_real_model_is_run_and_leaves_nothing(shape: Shape, machine: Hardware) -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    found = request.measured(machine, shape, Load(2), BF16)
    assert torch.equal(before, torch.random.get_rng_state())
    seconds = request.compute_seconds(shape, found, 2)
    assert 0 < seconds < 60 and seconds != request.compute_seconds(shape, machine, 2)


def test_the_hand_over_of_weights_is_not_the_models(shape: Shape, machine: Hardware) -> None:
    """What a model takes alone has none; a step has it once for each use in the forward and in the backward."""
    free = replace(machine, handed_seconds=0.0)
    assert request.compute_seconds(shape, machine, 1) == request.compute_seconds(shape, free, 1)
    first, second = (sum(each.seconds for each in request.forward(shape, on, Load(1))) for on in (machine, free))
    assert first - second == pytest.approx(len(shape.uses) * 1e-3)


def test_a_model_that_cannot_run_is_a_clear_error(
    shape: Shape, machine: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> float:
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(request, "_seconds", fail)
    with pytest.raises(ConfigError, match=r"cannot run .* to measure it .*no kernel for this.*leave out --measure"):
        request.measured(machine, shape, Load(1), BF16)


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


def test_the_command_reports_what_was_measured(probed: None, tmp_path: Path) -> None:
    name = save_config(tmp_path / "model", layers=2)
    done = plan("--model", name, "--measure", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["machine"]["measured"]["layers"], report["machine"]["measured"]["of"]) == (2, 2)
    plain = json.loads(plan("--model", name, "--json").stdout)
    assert plain["machine"]["measured"] is None
    assert plain["tiers"] == report["tiers"], "bytes do not depend on it"
    assert (
        "measured: forward and backward of a micro-batch with 2 of 2 layers"
        in plan("--model", name, "--measure").stdout
    )


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
