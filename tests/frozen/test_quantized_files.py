"""Folders that bitsandbytes has quantized are read unit by unit; checkpoints keep the bytes of quantized weights."""

from __future__ import annotations

import warnings
from pathlib import Path

import peft
import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

import offload
from offload import testing
from offload.errors import ConfigError, StoreError
from tests.frozen.quantized_models import WITH_BITSANDBYTES, folder, job, loaded
from tests.support.oracle import assert_same_tensors, start, train_step, trained, weights_of
from tests.support.ranks import rank_pool
from tests.support.ranks.rank_pool import RankPool

pytestmark = WITH_BITSANDBYTES

AREA = "Weights that another library has quantized"
DISK = ("nvme", "nvme")
FORMS = ("nf4", "nf4, scales quantized too", "nf4 in bf16", "int8")


def quantized_folder(path: Path, form: str) -> Path:
    """Writes a model as transformers saves a quantized one."""
    model = loaded(folder(path / "values"), form, "bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.unload().save_pretrained(path / "quantized")  # type: ignore[operator]
    return path / "quantized"


def adapted(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    adapters = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model.config.use_cache = False
    return peft.get_peft_model(model, adapters).train()  # type: ignore[arg-type]


def by_transformers(path: Path) -> nn.Module:
    auto = transformers.AutoModelForCausalLM
    return adapted(auto.from_pretrained(path, dtype=torch.bfloat16, device_map={"": "cpu"}))


def by_load_pretrained(path: Path) -> nn.Module:
    return adapted(offload.load_pretrained(transformers.AutoModelForCausalLM, path, dtype=torch.bfloat16))


def inside_of_init(path: Path) -> nn.Module:
    with offload.init():
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return adapted(model)


def bits(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Codes in elements of bf16 may be NaN, which equals nothing."""
    return {name: value.contiguous().view(-1).view(torch.uint8) for name, value in weights.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.works(AREA, "a folder of bitsandbytes: load_pretrained, and from_pretrained in offload.init", "right")
@pytest.mark.parametrize("form", FORMS)
def test_a_quantized_folder_trains_as_the_model_that_transformers_loads(form: str, tmp_path: Path) -> None:
    path = quantized_folder(tmp_path, form)
    found = []
    for number, make in enumerate((by_transformers, by_load_pretrained, inside_of_init)):
        this = job(path, form)._replace(model=lambda make=make: make(path))
        engine = start(this, DISK, tmp_path / str(number))
        found.append(trained(engine, this))
        engine.destroy(remove=True)
    for other in found[1:]:
        assert other.losses == found[0].losses and other.norms == found[0].norms
        assert_same_tensors(bits(found[0].weights), bits(other.weights))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.works(AREA, "a folder of bitsandbytes without training: its codes are read in place", "right")
@pytest.mark.parametrize("form", FORMS)
def test_a_quantized_folder_is_run_from_its_own_files(form: str, tmp_path: Path) -> None:
    path = quantized_folder(tmp_path, form)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    auto, ids = transformers.AutoModelForCausalLM, torch.arange(24).view(2, 12)
    model = auto.from_pretrained(path, dtype=torch.bfloat16, device_map={"": "cpu"})
    with torch.no_grad():
        # In evaluation bitsandbytes packs 4 bits anew for some processors, and multiplies 8 bits as integers.
        expected = model.train(form != "int8")(ids).logits
    config = {"offload": {"device": "cpu"}, "bf16": {"enabled": True}}
    with offload.inference(path, config, dtype=torch.bfloat16) as engine:
        assert not any("kept in host memory" in line for line in engine.notices), engine.notices
        units = len(testing.inspect(engine).layouts)
        assert any(f"{units} units of {units}" in line for line in engine.notices), engine.notices
        assert torch.equal(engine(ids).logits, expected)
        assert engine.io_bytes().read > 0 and engine.io_bytes().written == 0
        weights = engine.module.state_dict()
    assert_same_tensors(bits(model.state_dict()), bits(weights))
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before


@pytest.mark.filterwarnings("ignore")
def test_dora_reads_weights_that_are_still_in_the_folder(tmp_path: Path) -> None:
    path = quantized_folder(tmp_path, "nf4")
    found = []
    for number, by in enumerate(("transformers", "load_pretrained")):
        auto = transformers.AutoModelForCausalLM
        if by == "transformers":
            model = auto.from_pretrained(path, dtype=torch.bfloat16, device_map={"": "cpu"})
        else:
            model = offload.load_pretrained(auto, path, dtype=torch.bfloat16)
        model.config.use_cache = False
        torch.manual_seed(1)
        settings = peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)
        model = peft.get_peft_model(model, settings).train()
        this = job(path, "nf4")._replace(model=lambda model=model: model)
        engine = start(this, DISK, tmp_path / str(number))
        found.append(trained(engine, this))
        engine.destroy(remove=True)
    assert found[0].losses == found[1].losses and found[0].norms == found[1].norms


def test_a_folder_without_a_part_of_a_weight_is_refused(tmp_path: Path) -> None:
    path = quantized_folder(tmp_path, "nf4")
    whole = safetensors.torch.load_file(path / "model.safetensors")
    lost = next(name for name in whole if name.endswith("q_proj.weight.absmax"))
    safetensors.torch.save_file({n: v for n, v in whole.items() if n != lost}, path / "model.safetensors")
    with pytest.raises(StoreError, match=r"lacks codes or scales of model\.layers\.0\.self_attn\.q_proj\.weight"):
        offload.load_pretrained(transformers.AutoModelForCausalLM, path)


def test_a_module_is_no_place_for_a_quantized_folder(tmp_path: Path) -> None:
    path = quantized_folder(tmp_path, "nf4")
    model = by_transformers(path).unload()  # type: ignore[operator]
    with pytest.raises(ConfigError, match="of which load_pretrained reads those of bitsandbytes, for a model that it"):
        offload.load_pretrained(model, path)


# -- checkpoints --------------------------------------------------------------------------------------


@pytest.mark.works(AREA, "a checkpoint, into a model that is quantized in the same way", "right")
@pytest.mark.parametrize("form", ["nf4, scales quantized too", "int8"])
def test_a_checkpoint_keeps_the_bytes(form: str, tmp_path: Path) -> None:
    this = job(folder(tmp_path / "model"), form)
    first = start(this, DISK, tmp_path / "first")
    train_step(first, this, 0)
    first.save_checkpoint(tmp_path / "saved", "tag")
    expected = [train_step(first, this, step) for step in (1, 2)]
    first.destroy(remove=True)
    second = start(this, ("cpu", "nvme"), tmp_path / "second")
    second.load_checkpoint(tmp_path / "saved", "tag")
    assert [train_step(second, this, step) for step in (1, 2)] == expected
    second.destroy(remove=True)


def test_a_checkpoint_of_another_dtype_keeps_the_bytes(tmp_path: Path) -> None:
    """Codes and scales are no numbers to convert, where the weights around them are."""
    this = job(folder(tmp_path / "model"), "nf4, scales quantized too")
    first = start(this, DISK, tmp_path / "first")
    first.save_checkpoint(tmp_path / "saved", "tag")
    first.destroy(remove=True)
    second = start(this._replace(dtype="fp16"), DISK, tmp_path / "second")
    expected = {name: value for name, value in weights_of(second).items() if ".base_layer." in name}
    second.load_checkpoint(tmp_path / "saved", "tag", load_module_only=True)
    assert expected
    assert_same_tensors(expected, {name: value for name, value in weights_of(second).items() if name in expected})
    second.destroy(remove=True)


@pytest.mark.works(AREA, "a checkpoint or a run, into one that is quantized otherwise", "refused")
def test_another_form_is_refused_before_anything_changes(tmp_path: Path) -> None:
    values = folder(tmp_path / "model")
    this, other = job(values, "nf4, scales quantized too"), job(values, "nf4")
    first = start(this, DISK, tmp_path / "run", durability="step")
    train_step(first, this, 0)
    first.save_checkpoint(tmp_path / "saved", "whole")
    first.save_checkpoint(tmp_path / "saved", "adapters", exclude_frozen_parameters=True)
    adapters = {name: value for name, value in weights_of(first).items() if "lora_" in name}
    first.destroy()
    with pytest.raises(StoreError, match="a run of another model, layout or setting"):
        start(other, DISK, tmp_path / "run", durability="step", resume="auto")
    second = start(other, DISK, tmp_path / "other")
    with pytest.raises(StoreError, match=r"contains .*q_proj\.base_layer\.weight as Params4bit nf4 of data uint8"):
        second.load_checkpoint(tmp_path / "saved", "whole")
    second.destroy(remove=True)
    second = start(job(values, "fp4"), DISK, tmp_path / "other")
    first = start(other, DISK, tmp_path / "first")
    first.save_checkpoint(tmp_path / "saved", "of the same bytes")
    first.destroy(remove=True)
    with pytest.raises(StoreError, match=r"as Params4bit nf4 of .*, this engine as Params4bit fp4 of"):
        second.load_checkpoint(tmp_path / "saved", "of the same bytes")
    second.load_checkpoint(tmp_path / "saved", "adapters")
    assert_same_tensors(adapters, {n: v for n, v in weights_of(second).items() if "lora_" in n})
    second.destroy(remove=True)


def _saved_by_ranks(values: Path, path: Path) -> None:
    engine = rank_pool.start(job(values, "nf4, scales quantized too"), DISK, path / "run")
    engine.save_checkpoint(path / "saved", "tag")
    engine.destroy(remove=True)


def test_a_checkpoint_of_two_ranks_is_loaded_by_one(ranks: RankPool, tmp_path: Path) -> None:
    values = folder(tmp_path / "model")
    ranks.run(_saved_by_ranks, values, tmp_path)
    this = job(values, "nf4, scales quantized too")
    engine = start(this, DISK, tmp_path / "one")
    expected = weights_of(engine)
    engine.load_checkpoint(tmp_path / "saved", "tag")
    assert_same_tensors(expected, weights_of(engine))
    train_step(engine, this, 0)
    engine.destroy(remove=True)
