"""Models that bitsandbytes has quantized train adapters bit for bit as in memory, wherever their bytes are."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import offload
from offload.errors import ConfigError, UsageError
from offload.layout.flat_layout import layouts_of
from offload.layout.frozen import stored_weights
from offload.layout.units import find_units
from tests.frozen.quantized_models import FOUR_BITS, WITH_BITSANDBYTES, InMemory, folder, job
from tests.support import models
from tests.support.oracle import (
    Job,
    accumulated_step,
    assert_same,
    config,
    kill_and_resume,
    least_host_memory,
    run,
    same_bits,
    small_pieces,
    start,
    train_step,
)

pytestmark = WITH_BITSANDBYTES

AREA = "Weights that another library has quantized"
DISK = ("nvme", "nvme")
FORMS = (*FOUR_BITS, "int8")


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("model"))


def as_in_memory(this: Job, placement: tuple[str, str], path: Path, steps: int = 3, **options: object) -> None:
    """Asserts that losses and gradients of some steps are those in memory, bit for bit."""
    engine, memory = start(this, placement, path, **options), InMemory(this)
    for step in range(steps):
        memory.follow(engine)
        loss, expected = this.loss(engine, step, 0), this.loss(memory, step, 0)
        assert torch.equal(loss, expected)
        engine.backward(loss)
        gradients = memory.gradients(expected)
        assert gradients
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                found = offload.safe_get_full_grad(parameter)
                assert found is not None and torch.equal(found, gradients[name].float()), name
        engine.step()
    engine.destroy(remove=True)


@pytest.mark.works(AREA, "`Params4bit` (nf4, fp4, double quantization, storage in bf16) and `Int8Params`", "right")
@pytest.mark.parametrize("form", FORMS)
def test_losses_and_gradients_are_those_of_bitsandbytes_in_memory(form: str, values: Path, tmp_path: Path) -> None:
    as_in_memory(job(values, form), DISK, tmp_path)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("form", ["nf4, scales quantized too", "int8"])
def test_other_dtypes_of_compute_keep_the_bits(form: str, dtype: str, values: Path, tmp_path: Path) -> None:
    as_in_memory(job(values, form, dtype)._replace(loss_scale=1.0), DISK, tmp_path, 2)


@pytest.mark.works(AREA, "DoRA, which reads the weights", "right")
@pytest.mark.parametrize("form", ["nf4", "nf4, scales quantized too"])  # in 8 bits peft's own fails on the CPU
def test_dora_reads_the_weights(form: str, values: Path, tmp_path: Path) -> None:
    as_in_memory(job(values, form, use_dora=True), DISK, tmp_path, 2)


@pytest.mark.works(AREA, "any tier, and budgets of a few units", "right")
@pytest.mark.parametrize("form", ["nf4, scales quantized too", "int8"])
def test_all_placements_have_the_same_bits(form: str, values: Path, tmp_path: Path) -> None:
    same_bits(job(values, form), tmp_path)


@pytest.mark.parametrize("form", ["nf4, scales quantized too", "int8"])
def test_the_least_budgets_have_the_same_bits(
    form: str, values: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pieces(monkeypatch)
    this = job(values, form)
    expected = run(this, ("none", "none"), tmp_path / "plenty")
    least = least_host_memory(this, tmp_path / "least")
    assert_same(expected, run(this, DISK, tmp_path / "tight", host_memory=least, device_memory=least_device(this)))


def least_device(this: Job) -> int:
    """Bytes of a device that holds the two largest units."""
    units = layouts_of(model := this.model(), find_units(model), stored=stored_weights(model, None, torch.bfloat16))
    return 2 * sum(sorted(unit.device_numel * 2 for unit in units)[-2:])


@pytest.mark.works(AREA, "killed and resumed", "right")
def test_a_killed_run_resumes_with_the_same_bits(values: Path, tmp_path: Path) -> None:
    this = job(values, "nf4, scales quantized too")._replace(steps=60)
    expected = run(this, DISK, tmp_path / "unbroken")
    found = kill_and_resume(this, DISK, tmp_path, 2)
    assert_same(expected, found)


# -- looks from outside ---------------------------------------------------------------------------------


def test_a_state_dict_and_a_copy_are_those_of_the_model_in_memory(values: Path, tmp_path: Path) -> None:
    for form in ("nf4, scales quantized too", "int8"):
        this = job(values, form)
        expected = this.model()
        engine = start(this, DISK, tmp_path / form)
        theirs, mine = expected.state_dict(), engine.module.state_dict()
        assert theirs.keys() == mine.keys()
        for name, value in mine.items():
            assert type(value) in (torch.Tensor, torch.nn.Parameter), name
            if "lora_" not in name:
                assert torch.equal(value.to(theirs[name].dtype), theirs[name]), name
        alone = copy.deepcopy(engine.module)
        ids = torch.arange(16).view(1, 16)
        with torch.no_grad():
            assert torch.equal(alone(input_ids=ids).logits, engine(input_ids=ids).logits)
        kinds = {type(parameter).__module__ for parameter in alone.parameters()}
        assert kinds == {"torch.nn.parameter", "bitsandbytes.nn.modules"}
        engine.destroy(remove=True)


def test_adapters_are_saved_and_the_rest_is_refused(values: Path, tmp_path: Path) -> None:
    this = job(values, "nf4")
    engine = start(this, DISK, tmp_path / "run")
    train_step(engine, this, 0)
    engine.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(this.model().unload(), tmp_path / "adapter")  # type: ignore[operator]
    theirs = engine.module.state_dict()
    for name, value in again.state_dict().items():
        if "lora_" in name:
            assert torch.equal(value.bfloat16(), theirs[name])
    with pytest.raises(ConfigError, match=r"q_proj\.base_layer\.weight is quantized by another library"):
        engine.save_16bit_model(tmp_path / "whole")
    engine.destroy(remove=True)


def test_nobody_writes_quantized_weights(values: Path, tmp_path: Path) -> None:
    engine = start(job(values, "nf4"), DISK, tmp_path)
    name, weight = next((n, p) for n, p in engine.module.named_parameters() if "q_proj.base_layer" in n)
    before = weight.clone()
    with pytest.raises(UsageError, match=f"{name} is frozen: its weights are stored once"):
        weight.zero_()
    with pytest.raises(UsageError, match="precision and device are set in the config"):
        weight.to("meta")
    assert weight.to("cpu") is weight and torch.equal(before, weight.clone())
    engine.destroy(remove=True)
    with pytest.raises(UsageError, match="its engine was destroyed"):
        weight.clone()


def test_weights_are_packed_for_the_cpu_again_once_the_engine_has_ended(values: Path, tmp_path: Path) -> None:
    this = job(values, "nf4")
    model = this.model()
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "support_avx512bf16_for_cpu")]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = True  # as bitsandbytes finds it on a processor with these instructions
    engine = start(this._replace(model=lambda: model), DISK, tmp_path)
    assert layers and not any(layer.support_avx512bf16_for_cpu for layer in layers)
    engine.destroy(remove=True)
    assert all(layer.support_avx512bf16_for_cpu for layer in layers)


def test_a_model_that_is_not_quantized_yet_is_refused(tmp_path: Path) -> None:
    import bitsandbytes

    model = torch.nn.Sequential(bitsandbytes.nn.Linear4bit(64, 64), torch.nn.Linear(64, 64))
    content = config(models.GPT2, DISK, tmp_path)
    with pytest.raises(ConfigError, match=r"not quantized yet, the first is 0\.weight"):
        offload.initialize(model=model, config=content)
    with torch.no_grad():
        model.to("cpu").eval()(torch.ones(1, 64))
    if hasattr(model[0].weight.quant_state, "packing_format_for_cpu"):
        with pytest.raises(ConfigError, match="packed for the CPU by bitsandbytes"):
            offload.initialize(model=model, config=content)


@pytest.mark.works(AREA, "blocks that are computed again, their inputs in host memory; several micro-batches", "right")
@pytest.mark.parametrize("schedule", ["micro_batch_major", "layer_major"])
def test_blocks_that_are_computed_again_have_the_same_bits(schedule: str, values: Path, tmp_path: Path) -> None:
    this = job(values, "nf4, scales quantized too")._replace(accumulation=2)
    by = accumulated_step if schedule == "layer_major" else train_step
    expected = run(this, ("none", "none"), tmp_path / "memory")
    found = run(this, DISK, tmp_path / "disk", by, activations="cpu", schedule=schedule, device_memory=1 << 20)
    assert_same(expected, found)
