"""Frozen weights in 4 or 8 bits leave a run as values, stay in checkpoints as they are, and keep their form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers
from typer.testing import CliRunner

import offload
from offload import testing
from offload.cli.main import app
from offload.errors import StoreError
from tests.support import models
from tests.support.frozen_blocks import dequantized, through_blocks
from tests.support.oracle import DTYPES, assert_same_tensors, config, start, train_step, weights_of
from tests.support.pretrained_models import CAUSAL, written

pytestmark = pytest.mark.usefixtures("engines_end")

DISK = ("nvme", "nvme")
JOB = models.LORA._replace(dtype="bf16")
AREA = "Frozen weights in 4 and 8 bits"
FORMS = ("nf4", "int8")


def trained(folder: Path, steps: int = 2, **options: Any) -> offload.Engine:
    engine = start(JOB, DISK, folder, **options)
    for step in range(steps):
        train_step(engine, JOB, step)
    return engine


def frozen_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for path in folder.glob("*.safetensors")
        for name, value in safetensors.torch.load_file(path).items()
        if "lora_" not in name
    }


# -- files of a model ---------------------------------------------------------------------------------


@pytest.mark.works(AREA, "export and save_16bit_model: values", "right")
@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp16"])
@pytest.mark.parametrize("form", FORMS)
def test_an_export_contains_values(form: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    testing.replace(monkeypatch, "size.block_chunk", 256)  # several chunks of each matrix, the last one shorter
    engine = trained(tmp_path / "run", frozen=form, durability="step")
    expected = {name: value for name, value in weights_of(engine).items() if "lora_" not in name}
    engine.save_16bit_model(tmp_path / "saved")
    engine.save_checkpoint(tmp_path / "checkpoint", "tag")
    engine.destroy()
    for number, source in enumerate((tmp_path / "run" / "default", tmp_path / "checkpoint" / "tag")):
        out = tmp_path / f"out{number}"
        result = CliRunner().invoke(app, ["export", str(source), str(out), "--dtype", dtype])
        assert result.exit_code == 0, result.output
        found = frozen_of(out)
        assert found
        for name, value in found.items():
            assert torch.equal(value, expected[name].to(DTYPES[dtype])), name
    saved = torch.load(next((tmp_path / "saved").glob("*.bin"))) if list((tmp_path / "saved").glob("*.bin")) else {}
    saved |= frozen_of(tmp_path / "saved")
    assert all(torch.equal(saved[name], expected[name]) for name in found)


@pytest.mark.works(AREA, "load_pretrained, and adapters saved for the model in its own dtype", "right")
def test_weights_come_from_a_folder_and_adapters_go_into_one(tmp_path: Path) -> None:
    job = JOB._replace(dtype="fp32")
    given = written(tmp_path / "given", models.llama())
    model = offload.load_pretrained(CAUSAL, tmp_path / "given")
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    engine = offload.initialize(model=model, config=config(job, DISK, tmp_path / "run", frozen="nf4")).engine
    state = engine.module.state_dict()
    compared = 0
    for name, value in given.items():
        mine = next(key for key in state if key.removeprefix("base_model.model.").replace(".base_layer", "") == name)
        if "_proj" in name:
            assert torch.equal(state[mine], through_blocks(value, "nf4", torch.float32)), name
            compared += 1
        else:
            assert torch.equal(state[mine], value)
    assert compared == 14
    for step in range(2):
        train_step(engine, job, step)
    engine.save_pretrained(tmp_path / "out")
    logits = engine.eval()(input_ids=models.tokens(0, 0, (1, 8))).logits
    engine.destroy(remove=True)
    base = CAUSAL.from_pretrained(tmp_path / "given")
    for name, parameter in base.named_parameters():
        if "_proj" in name:
            parameter.data = through_blocks(parameter, "nf4", torch.float32)
    back = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    assert torch.equal(back(input_ids=models.tokens(0, 0, (1, 8))).logits, logits)


def test_a_model_that_is_initialized_unit_by_unit_has_the_same_blocks(tmp_path: Path) -> None:
    def made() -> Any:
        return transformers.LlamaForCausalLM(models.llama().config)  # type: ignore[arg-type]

    with offload.init():
        model = made()
    model.model.layers.requires_grad_(False)
    engine = offload.initialize(model=model, config=config(JOB, DISK, tmp_path / "plain")).engine
    values = weights_of(engine)
    engine.destroy(remove=True)
    with offload.init():
        model = made()
    model.model.layers.requires_grad_(False)
    engine = offload.initialize(model=model, config=config(JOB, DISK, tmp_path / "blocks", frozen="int8")).engine
    found = weights_of(engine)
    engine.destroy(remove=True)
    changed = {name for name in values if not torch.equal(values[name], found[name])}
    assert changed == {name for name in values if "_proj" in name}
    for name in changed:  # the blocks are of the fp32 values, of which the plain run keeps bf16
        assert (values[name].float() - found[name].float()).abs().max() <= values[name].float().abs().max() / 100


# -- checkpoints --------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.works(AREA, "a checkpoint, in a run of the same form", "right")
@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_is_loaded_into_a_run_of_the_same_form(form: str, tmp_path: Path) -> None:
    engine = trained(tmp_path / "one", frozen=form)
    engine.save_checkpoint(tmp_path / "checkpoint")
    expected = weights_of(engine)
    engine.destroy(remove=True)
    other = start(JOB._replace(seed=5), DISK, tmp_path / "two", frozen=form)
    assert any(not torch.equal(value, expected[name]) for name, value in weights_of(other).items() if "k_proj" in name)
    other.load_checkpoint(tmp_path / "checkpoint")
    assert_same_tensors(expected, weights_of(other))
    other.destroy(remove=True)


def test_weights_of_a_checkpoint_in_another_dtype_of_16_bits(tmp_path: Path) -> None:
    engine = trained(tmp_path / "one", frozen="nf4")
    engine.save_checkpoint(tmp_path / "checkpoint")
    engine.destroy(remove=True)
    job = JOB._replace(dtype="fp16")
    expected = weights_of_frozen(start(dequantized(job, "nf4"), DISK, tmp_path / "values"))
    other = start(job._replace(seed=5), DISK, tmp_path / "two", frozen="nf4")
    other.load_checkpoint(tmp_path / "checkpoint", load_module_only=True)
    assert_same_tensors(expected, weights_of_frozen(other))


def weights_of_frozen(engine: offload.Engine) -> dict[str, torch.Tensor]:
    found = {name: value for name, value in weights_of(engine).items() if "_proj" in name and "lora_" not in name}
    engine.destroy(remove=True)
    return found


@pytest.mark.sample(1)
@pytest.mark.works(AREA, "a checkpoint, in a run of another form", "refused")
@pytest.mark.parametrize(("saved", "here"), [("nf4", "int8"), ("nf4", None), (None, "nf4")])
def test_a_checkpoint_of_another_form_is_refused_before_anything_changes(
    saved: str | None, here: str | None, tmp_path: Path
) -> None:
    engine = trained(tmp_path / "one", frozen=saved)
    engine.save_checkpoint(tmp_path / "checkpoint")
    engine.destroy(remove=True)
    other = start(JOB._replace(seed=5), DISK, tmp_path / "two", frozen=here)
    before = weights_of(other)
    with pytest.raises(StoreError, match='train with the "frozen" and the dtype of the checkpoint'):
        other.load_checkpoint(tmp_path / "checkpoint")
    assert_same_tensors(before, weights_of(other))
    other.destroy(remove=True)


def test_a_checkpoint_without_frozen_weights_is_of_no_form(tmp_path: Path) -> None:
    engine = trained(tmp_path / "one", frozen="nf4")
    engine.save_checkpoint(tmp_path / "checkpoint", exclude_frozen_parameters=True)
    expected = {name: value for name, value in weights_of(engine).items() if "lora_" in name}
    engine.destroy(remove=True)
    other = start(JOB._replace(seed=5), DISK, tmp_path / "two", frozen="int8")
    other.load_checkpoint(tmp_path / "checkpoint")
    assert_same_tensors(expected, {name: value for name, value in weights_of(other).items() if "lora_" in name})
    other.destroy(remove=True)


# -- runs ---------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.works(AREA, "a resume in another form", "refused")
@pytest.mark.parametrize(("before", "after"), [("nf4", "int8"), ("nf4", None), (None, "nf4")])
def test_a_run_goes_on_in_its_own_form_alone(before: str | None, after: str | None, tmp_path: Path) -> None:
    trained(tmp_path, frozen=before, durability="step").destroy()
    with pytest.raises(StoreError, match="belongs to a run of another model, layout or setting") as error:
        start(JOB, DISK, tmp_path, frozen=after, resume="must")
    assert 'resume with the "frozen" that the run had' in str(error.value)
    start(JOB, DISK, tmp_path, frozen=before, resume="must").destroy(remove=True)
