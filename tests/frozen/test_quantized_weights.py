"""Weights that other libraries have quantized train their adapters and keep their bytes."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers
from torch import nn
from typer.testing import CliRunner

import offload
from offload import testing
from offload.cli.main import app
from offload.errors import ConfigError, StoreError, UsageError
from offload.finetune.model import adapt, find_folder, parse_lora
from offload.layout.flat_layout import layouts_of
from offload.layout.frozen import stored_weights
from offload.layout.units import find_units
from offload.planner.model_shape import BY_BLOCKS, from_adapted, from_name, from_training
from offload.planner.options import Adapters
from offload.presets import quantized_bits
from offload.torch_internals import tree_map
from tests.support import models
from tests.support.model_folders import llama_config, make_folder, write_lines
from tests.support.oracle import (
    DTYPES,
    PLACEMENTS,
    Job,
    PlainEngine,
    Result,
    accumulated_step,
    assert_same,
    assert_same_tensors,
    config,
    kill_and_resume,
    least_host_memory,
    rounded,
    run,
    same_bits,
    small_pieces,
    start,
    train_step,
    trained,
    weights_of,
)
from tests.support.ranks import rank_pool
from tests.support.ranks.rank_jobs import language_rows_loss, losses_and_weights
from tests.support.ranks.rank_pool import RankPool

WITH_BITSANDBYTES = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)

FOUR_BITS: dict[str, dict[str, Any]] = {
    "nf4": {"bnb_4bit_quant_type": "nf4"},
    "fp4": {"bnb_4bit_quant_type": "fp4"},
    "nf4, scales quantized too": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "nf4 in bf16": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "bfloat16"},
}
"""Forms of bitsandbytes' 4 bits, as transformers configures them."""


def settings(form: str, dtype: str) -> transformers.BitsAndBytesConfig:
    """Returns the settings of a form by its name; "int8" for 8 bits."""
    if form == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=DTYPES[dtype], **FOUR_BITS[form])


def folder(path: Path, **shape: Any) -> Path:
    """Writes a model in values."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(llama_config(**shape)) if shape else models.llama()
    model.save_pretrained(path)
    return path


def loaded(path: Path, form: str, dtype: str, **adapters: Any) -> nn.Module:
    """Returns a quantized model as transformers loads it, with adapters of peft."""
    return _adapted(path, {"quantization_config": settings(form, dtype), "device_map": {"": "cpu"}}, dtype, adapters)


def in_values(path: Path, dtype: str = "bf16", **adapters: Any) -> nn.Module:
    """Returns the model before quantization, with the same adapters."""
    return _adapted(path, {}, dtype, adapters)


def _adapted(path: Path, more: dict[str, Any], dtype: str, adapters: dict[str, Any]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], **more)
        model.config.use_cache = False
        torch.manual_seed(1)
        wanted = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **adapters}
        return peft.get_peft_model(model, peft.LoraConfig(**wanted)).train()  # type: ignore[arg-type]


def job(path: Path, form: str, dtype: str = "bf16", **adapters: Any) -> Job:
    """Returns a job over the model of a folder, quantized."""
    made = functools.partial(loaded, path, form, dtype, **adapters)
    return Job(made, models.language_loss, steps=3, dtype=dtype)


class InMemory(PlainEngine):
    """The job in memory by bitsandbytes and peft; what is not quantized has the dtype of the weights."""

    def __init__(self, job: Job) -> None:
        torch.manual_seed(job.seed)
        self.module = job.model()
        for parameter in self.module.parameters():
            if type(parameter) is nn.Parameter and parameter.is_floating_point():
                parameter.data = rounded(parameter.data.float(), DTYPES[job.dtype])

    def gradients(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the gradients of adapters."""
        loss.backward()
        gradients = {}
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                gradients[name], parameter.grad = parameter.grad, None
        return gradients

    @torch.no_grad()
    def follow(self, engine: offload.Engine) -> None:
        """Copies the weights that train from an engine."""
        theirs = engine.module.state_dict()
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(theirs[name])


AREA = "Weights that another library has quantized"
DISK = ("nvme", "nvme")
FORMS = (*FOUR_BITS, "int8")


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("model"))


def as_in_memory(case: Job, placement: tuple[str, str], path: Path, steps: int = 3, **options: object) -> None:
    """Asserts that losses and gradients of some steps are those in memory, bit for bit."""
    engine, memory = start(case, placement, path, **options), InMemory(case)
    for step in range(steps):
        memory.follow(engine)
        loss, expected = case.loss(engine, step, 0), case.loss(memory, step, 0)
        assert torch.equal(loss, expected)
        engine.backward(loss)
        gradients = memory.gradients(expected)
        assert gradients
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                gradient = offload.safe_get_full_grad(parameter)
                assert gradient is not None and torch.equal(gradient, gradients[name].float()), name
        engine.step()
    engine.destroy(remove=True)


@WITH_BITSANDBYTES
@pytest.mark.works(AREA, "`Params4bit` (nf4, fp4, double quantization, storage in bf16) and `Int8Params`", "right")
@pytest.mark.sample(2)
@pytest.mark.parametrize("form", FORMS)
def test_losses_and_gradients_are_those_of_bitsandbytes_in_memory(form: str, values: Path, tmp_path: Path) -> None:
    as_in_memory(job(values, form), DISK, tmp_path)


@WITH_BITSANDBYTES
@pytest.mark.works(AREA, "DoRA, which reads the weights", "right")
@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["nf4", "nf4, scales quantized too"])  # in 8 bits peft's own fails on the CPU
def test_dora_reads_the_weights(form: str, values: Path, tmp_path: Path) -> None:
    as_in_memory(job(values, form, use_dora=True), DISK, tmp_path, 2)


@WITH_BITSANDBYTES
@pytest.mark.works(AREA, "any tier, and budgets of a few units", "right")
@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["nf4, scales quantized too", "int8"])
def test_all_placements_have_the_same_bits(form: str, values: Path, tmp_path: Path) -> None:
    same_bits(job(values, form), tmp_path)


@WITH_BITSANDBYTES
@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["nf4, scales quantized too", "int8"])
def test_the_least_budgets_have_the_same_bits(
    form: str, values: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pieces(monkeypatch)
    case = job(values, form)
    expected = run(case, ("none", "none"), tmp_path / "plenty")
    least = least_host_memory(case, tmp_path / "least")
    assert_same(expected, run(case, DISK, tmp_path / "tight", host_memory=least, device_memory=least_device(case)))


def least_device(case: Job) -> int:
    """Bytes of a device that holds the two largest units."""
    units = layouts_of(model := case.model(), find_units(model), stored=stored_weights(model, None, torch.bfloat16))
    return 2 * sum(sorted(unit.device_numel * 2 for unit in units)[-2:])


@WITH_BITSANDBYTES
@pytest.mark.works(AREA, "killed and resumed", "right")
def test_a_killed_run_resumes_with_the_same_bits(values: Path, tmp_path: Path) -> None:
    case = job(values, "nf4, scales quantized too")._replace(steps=8)
    expected = run(case, DISK, tmp_path / "unbroken")
    result = kill_and_resume(case, DISK, tmp_path, 1)
    assert_same(expected, result)


# -- looks from outside ---------------------------------------------------------------------------------


@WITH_BITSANDBYTES
def test_a_state_dict_and_a_copy_are_those_of_the_model_in_memory(values: Path, tmp_path: Path) -> None:
    for form in ("nf4, scales quantized too", "int8"):
        case = job(values, form)
        expected = case.model()
        engine = start(case, DISK, tmp_path / form)
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


@WITH_BITSANDBYTES
def test_adapters_are_saved_and_the_rest_is_refused(values: Path, tmp_path: Path) -> None:
    case = job(values, "nf4")
    engine = start(case, DISK, tmp_path / "run")
    train_step(engine, case, 0)
    engine.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(case.model().unload(), tmp_path / "adapter")  # type: ignore[operator]
    theirs = engine.module.state_dict()
    for name, value in again.state_dict().items():
        if "lora_" in name:
            assert torch.equal(value.bfloat16(), theirs[name])
    with pytest.raises(ConfigError, match=r"q_proj\.base_layer\.weight is quantized by another library"):
        engine.save_16bit_model(tmp_path / "whole")
    engine.destroy(remove=True)


@WITH_BITSANDBYTES
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


@WITH_BITSANDBYTES
def test_weights_are_packed_for_the_cpu_again_once_the_engine_has_ended(values: Path, tmp_path: Path) -> None:
    case = job(values, "nf4")
    model = case.model()
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "support_avx512bf16_for_cpu")]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = True  # as bitsandbytes finds it on a processor with these instructions
    engine = start(case._replace(model=lambda: model), DISK, tmp_path)
    assert layers and not any(layer.support_avx512bf16_for_cpu for layer in layers)
    engine.destroy(remove=True)
    assert all(layer.support_avx512bf16_for_cpu for layer in layers)


@WITH_BITSANDBYTES
def test_a_model_that_is_not_quantized_yet_is_refused(tmp_path: Path) -> None:
    import bitsandbytes

    model = torch.nn.Sequential(bitsandbytes.nn.Linear4bit(64, 64), torch.nn.Linear(64, 64))
    content = config(models.SHALLOW, DISK, tmp_path)
    with pytest.raises(ConfigError, match=r"not quantized yet, the first is 0\.weight"):
        offload.initialize(model=model, config=content)
    with torch.no_grad():
        model.to("cpu").eval()(torch.ones(1, 64))
    if hasattr(model[0].weight.quant_state, "packing_format_for_cpu"):
        with pytest.raises(ConfigError, match="packed for the CPU by bitsandbytes"):
            offload.initialize(model=model, config=content)


@WITH_BITSANDBYTES
@pytest.mark.works(AREA, "blocks that are computed again, their inputs in host memory; several micro-batches", "right")
@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["micro_batch_major", "layer_major"])
def test_blocks_that_are_computed_again_have_the_same_bits(schedule: str, values: Path, tmp_path: Path) -> None:
    case = job(values, "nf4, scales quantized too")._replace(accumulation=2)
    by = accumulated_step if schedule == "layer_major" else train_step
    expected = run(case, ("none", "none"), tmp_path / "memory")
    result = run(case, DISK, tmp_path / "disk", by, activations="cpu", schedule=schedule, device_memory=1 << 20)
    assert_same(expected, result)


LORA = "r=4,targets=all-linear"


def says(path: Path, **quantization: object) -> Path:
    """Lets the config of a folder say how its weights are quantized."""
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**content, "quantization_config": quantization}))
    return path


def adapters(path: Path, frozen: str | None = None) -> int:
    """Returns the elements that a plan of adapters counts."""
    make = Adapters(lambda model: adapt(model, parse_lora(LORA)), frozen)
    return sum(layout.numel for layout in from_adapted(str(path), make, 16, torch.bfloat16).layouts)


def test_bits_are_those_that_the_config_says(tmp_path: Path) -> None:
    assert quantized_bits({"model_type": "llama"}) is None
    assert quantized_bits({"quantization_config": {"quant_method": "gptq", "bits": 4}}) == 4
    assert quantized_bits({"quantization_config": {"quant_method": "fp8"}}) == 8


def test_a_quantized_folder_does_not_train_without_adapters(tmp_path: Path) -> None:
    models.llama().save_pretrained(tmp_path)
    assert find_folder(str(tmp_path)) == tmp_path
    says(tmp_path, quant_method="bitsandbytes", load_in_4bit=True)
    with pytest.raises(ConfigError, match="are quantized, and quantized weights do not train; train adapters on them"):
        find_folder(str(tmp_path))
    assert find_folder(str(tmp_path), adapters=True) == tmp_path
    with pytest.raises(ConfigError, match="are quantized, and quantized weights do not train; plan adapters on them"):
        from_name(str(tmp_path), 16)


@WITH_BITSANDBYTES
@pytest.mark.filterwarnings("ignore")
@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_a_prediction_counts_the_products_of_the_values_and_the_bytes_of_the_codes(form: str, tmp_path: Path) -> None:
    values = folder(tmp_path)
    plain = from_training(in_values(values), 16, torch.bfloat16, BY_BLOCKS, {})
    model = loaded(values, form, "bf16")
    shape = from_training(model, 16, torch.bfloat16, BY_BLOCKS, {})
    assert [use.flops for use in shape.uses] == [use.flops for use in plain.uses]
    assert sum(layout.numel for layout in shape.layouts) < sum(layout.numel for layout in plain.layouts)
    model(input_ids=torch.arange(8).view(1, 8))  # the model itself is as it was


@WITH_BITSANDBYTES
@pytest.mark.filterwarnings("ignore")
def test_train_makes_adapters_for_a_quantized_folder(tmp_path: Path) -> None:
    make_folder(tmp_path / "values", hidden_size=64, intermediate_size=128)
    auto = transformers.AutoModelForCausalLM
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = auto.from_pretrained(
            tmp_path / "values",
            dtype=torch.bfloat16,
            device_map={"": "cpu"},
            quantization_config=settings("nf4", "bf16"),
        )
        model.save_pretrained(tmp_path / "quantized")
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "values")
        tokenizer.save_pretrained(tmp_path / "quantized")
    write_lines(tmp_path / "data.jsonl", [{"text": "a sentence of some words " * 6}] * 8)
    arguments = ["train", "--model", str(tmp_path / "quantized"), "--data", str(tmp_path / "data.jsonl")]
    arguments += ["--steps", "1", "--seq-len", "32", "--nvme-path", str(tmp_path / "run")]
    refused = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "whole")])
    assert refused.exit_code == 2 and "quantized weights do not train" in refused.output.replace("\n", " ")
    done = CliRunner().invoke(app, [*arguments, "--lora", LORA, "--output", str(tmp_path / "adapter")])
    assert done.exit_code == 0, done.output
    assert "quantized weights are stored as the model has them" in done.output
    saved = safetensors.torch.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert saved and all("lora_" in name for name in saved)


FILES_FORMS = ("nf4", "nf4, scales quantized too", "nf4 in bf16", "int8")


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


@WITH_BITSANDBYTES
@pytest.mark.filterwarnings("ignore")
@pytest.mark.works(AREA, "a folder of bitsandbytes: load_pretrained, and from_pretrained in offload.init", "right")
@pytest.mark.sample(2)
@pytest.mark.parametrize("form", FILES_FORMS)
def test_a_quantized_folder_trains_as_the_model_that_transformers_loads(form: str, tmp_path: Path) -> None:
    path = quantized_folder(tmp_path, form)
    results = []
    for number, make in enumerate((by_transformers, by_load_pretrained, inside_of_init)):
        case = job(path, form)._replace(model=lambda make=make: make(path))
        engine = start(case, DISK, tmp_path / str(number))
        results.append(trained(engine, case))
        engine.destroy(remove=True)
    for result in results[1:]:
        assert result.losses == results[0].losses and result.norms == results[0].norms
        assert_same_tensors(bits(results[0].weights), bits(result.weights))


@WITH_BITSANDBYTES
@pytest.mark.filterwarnings("ignore")
@pytest.mark.works(AREA, "a folder of bitsandbytes without training: its codes are read in place", "right")
@pytest.mark.sample(2)
@pytest.mark.parametrize("form", FILES_FORMS)
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


@WITH_BITSANDBYTES
def test_a_folder_without_a_part_of_a_weight_is_refused(tmp_path: Path) -> None:
    path = quantized_folder(tmp_path, "nf4")
    whole = safetensors.torch.load_file(path / "model.safetensors")
    lost = next(name for name in whole if name.endswith("q_proj.weight.absmax"))
    safetensors.torch.save_file({n: v for n, v in whole.items() if n != lost}, path / "model.safetensors")
    with pytest.raises(StoreError, match=r"lacks codes or scales of model\.layers\.0\.self_attn\.q_proj\.weight"):
        offload.load_pretrained(transformers.AutoModelForCausalLM, path)


@WITH_BITSANDBYTES
def test_a_module_is_no_place_for_a_quantized_folder(tmp_path: Path) -> None:
    path = quantized_folder(tmp_path, "nf4")
    model = by_transformers(path).unload()  # type: ignore[operator]
    with pytest.raises(ConfigError, match="of which load_pretrained reads those of bitsandbytes, for a model that it"):
        offload.load_pretrained(model, path)


# -- checkpoints --------------------------------------------------------------------------------------


@WITH_BITSANDBYTES
@pytest.mark.works(AREA, "a checkpoint, into a model that is quantized in the same way", "right")
@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["nf4, scales quantized too", "int8"])
def test_a_checkpoint_keeps_the_bytes(form: str, tmp_path: Path) -> None:
    case = job(folder(tmp_path / "model"), form)
    first = start(case, DISK, tmp_path / "first")
    train_step(first, case, 0)
    first.save_checkpoint(tmp_path / "saved", "tag")
    expected = [train_step(first, case, step) for step in (1, 2)]
    first.destroy(remove=True)
    second = start(case, ("cpu", "nvme"), tmp_path / "second")
    second.load_checkpoint(tmp_path / "saved", "tag")
    assert [train_step(second, case, step) for step in (1, 2)] == expected
    second.destroy(remove=True)


@WITH_BITSANDBYTES
@pytest.mark.works(AREA, "a checkpoint or a run, into one that is quantized otherwise", "refused")
def test_another_form_is_refused_before_anything_changes(tmp_path: Path) -> None:
    values = folder(tmp_path / "model")
    case, other_case = job(values, "nf4, scales quantized too"), job(values, "nf4")
    first = start(case, DISK, tmp_path / "run", durability="step")
    train_step(first, case, 0)
    first.save_checkpoint(tmp_path / "saved", "whole")
    first.save_checkpoint(tmp_path / "saved", "adapters", exclude_frozen_parameters=True)
    adapters = {name: value for name, value in weights_of(first).items() if "lora_" in name}
    first.destroy()
    with pytest.raises(StoreError, match="a run of another model, layout or setting"):
        start(other_case, DISK, tmp_path / "run", durability="step", resume="auto")
    second = start(other_case, DISK, tmp_path / "other")
    with pytest.raises(StoreError, match=r"contains .*q_proj\.base_layer\.weight as Params4bit nf4 of data uint8"):
        second.load_checkpoint(tmp_path / "saved", "whole")
    second.destroy(remove=True)
    second = start(job(values, "fp4"), DISK, tmp_path / "other")
    first = start(other_case, DISK, tmp_path / "first")
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


@WITH_BITSANDBYTES
def test_a_checkpoint_of_two_ranks_is_loaded_by_one(ranks: RankPool, tmp_path: Path) -> None:
    values = folder(tmp_path / "model")
    ranks.run(_saved_by_ranks, values, tmp_path)
    case = job(values, "nf4, scales quantized too")
    engine = start(case, DISK, tmp_path / "one")
    expected = weights_of(engine)
    engine.load_checkpoint(tmp_path / "saved", "tag")
    assert_same_tensors(expected, weights_of(engine))
    train_step(engine, case, 0)
    engine.destroy(remove=True)


def _rows(
    values: Path, path: Path, form: str, first: int, last: int, tiers: tuple[str, str] = DISK
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Some steps of two ranks: mean losses and weights."""
    case = job(values, form)._replace(loss=language_rows_loss)
    engine = rank_pool.start(case, tiers, path, resume="auto", durability="step")
    return losses_and_weights(engine, case, first, last)


def _first_loss(values: Path, form: str) -> float:
    case = job(values, form)._replace(loss=language_rows_loss)
    return float(case.loss(InMemory(case), 0, 0).detach())


@WITH_BITSANDBYTES
@pytest.mark.works(AREA, "two ranks, resumed too", "right")
@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["nf4, scales quantized too", "int8"])
def test_two_ranks_divide_the_bytes(ranks: RankPool, form: str, tmp_path: Path) -> None:
    values = folder(tmp_path / "model")
    expected = ranks.run(_rows, values, tmp_path / "unbroken", form, 0, 3)
    results = ranks.run(_rows, values, tmp_path / "broken", form, 0, 2)
    resumed = ranks.run(_rows, values, tmp_path / "broken", form, 2, 3)
    device = ranks.run(_rows, values, tmp_path / "device", form, 0, 3, ("none", "cpu"))
    first = ranks.run(_first_loss, values, form)
    assert expected[0][0][0] == pytest.approx(sum(first) / 2, rel=1e-6)
    for rank, (losses, weights) in enumerate(expected):
        assert results[rank][0] + resumed[rank][0] == losses == device[rank][0]
        assert_same_tensors(weights, resumed[rank][1])
        assert_same_tensors(weights, device[rank][1])


def _frozen_and_read(case: Job, path: Path, host: int, device: int) -> tuple[int, int, Result]:
    """Returns the bytes of frozen weights, those that a step reads, and the whole run."""
    engine = start(case, DISK, path, host_memory=host, device_memory=device)
    inspected = testing.inspect(engine)
    frozen = 2 * sum(len(behind) for _, behind in inspected.shares)
    assert inspected.queue is not None
    reads, losses = [], []
    for step in range(case.steps):
        before = inspected.queue.read_bytes
        losses.append(train_step(engine, case, step))
        testing.settle(engine, commit=False)
        reads.append(inspected.queue.read_bytes - before)
    assert inspected.host_arena.nbytes + inspected.device_arena.nbytes < frozen
    weights = weights_of(engine)
    engine.destroy(remove=True)
    return frozen, reads[-1], Result(losses, [], weights)


@WITH_BITSANDBYTES
@pytest.mark.works(
    AREA, "codes of 4 bits that exceed both budgets; a step reads less than a third of bf16's bytes", "right"
)
def test_codes_that_exceed_both_budgets_train_and_a_step_reads_a_third(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = folder(tmp_path / "model", num_hidden_layers=24, hidden_size=128, intermediate_size=512)
    one_layer = {"r": 1, "target_modules": ["q_proj"]}
    four = job(values, "nf4, scales quantized too", **one_layer)._replace(steps=2)
    plain = four._replace(model=functools.partial(in_values, values, **one_layer))
    small_pieces(monkeypatch)
    results = {}
    for name, case, room in (("four", four, 1 << 20), ("plain", plain, 4 << 20)):
        host = least_host_memory(case, tmp_path / name, device_memory=room)
        results[name] = _frozen_and_read(case, tmp_path / name, host, room)
    expected = run(four, ("none", "none"), tmp_path / "memory")
    assert results["four"][2].losses == expected.losses
    assert_same_tensors(expected.weights, results["four"][2].weights)
    # 4 bits, and a byte of scale for each 64 values: 0.516 of 2 bytes; norms, embeddings and states come on top.
    assert results["plain"][0] / results["four"][0] > 3.4
    assert results["plain"][1] / results["four"][1] > 3.0


class Halves(torch.Tensor):
    """A weight as codes and scales, and inside of another wrapper: all that a library of quantization may do."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Halves:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Halves:
        return Halves(inner["codes"], inner["scale"], context)

    def value(self) -> torch.Tensor:
        return (self.codes.to(torch.float32) * self.scale).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return Halves(func(args[0].codes), func(args[0].scale), args[0].dtype)
        args, kwargs = tree_map(lambda leaf: leaf.value() if isinstance(leaf, Halves) else leaf, (args, kwargs or {}))
        return func(*args, **kwargs)


def halves(weight: torch.Tensor) -> nn.Parameter:
    scale = weight.abs().amax(1, keepdim=True).float() / 127
    inner = Halves((weight.float() / scale).round().to(torch.int8), scale, weight.dtype)
    return nn.Parameter(inner, requires_grad=False)


class Outer(torch.Tensor):
    """A wrapper of a wrapper."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Outer:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Outer:
        return Outer(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return Outer(func(args[0].inner))
        args, kwargs = tree_map(lambda leaf: leaf.inner if isinstance(leaf, Outer) else leaf, (args, kwargs or {}))
        return func(*args, **kwargs)


class Packed(nn.Module):
    """A layer as those of GPTQ and AWQ, all of buffers: eight codes in an int32, zero points, scales, an index."""

    def __init__(self, linear: nn.Linear, group: int = 32) -> None:
        super().__init__()
        weight = linear.weight.detach().float().t().contiguous()  # (in, out)
        rows = weight.view(-1, group, weight.shape[1])
        low, high = rows.amin(1), rows.amax(1)
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(0, 15).to(torch.int32)
        codes = ((rows / scales.float()[:, None]).round() + zeros[:, None]).clamp(0, 15).to(torch.int32)
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        self.register_buffer("qweight", (codes.view(-1, 8, weight.shape[1]) << shifts[None, :, None]).sum(1).int())
        self.register_buffer("qzeros", (zeros.view(len(zeros), -1, 8) << shifts).sum(2).int())
        self.register_buffer("scales", scales)
        self.register_buffer("g_idx", torch.arange(weight.shape[0], dtype=torch.int32) // group)
        self.register_buffer("bias", linear.bias.detach().half())
        self.shifts, self.out_features, self.in_features = shifts, weight.shape[1], weight.shape[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = ((self.qweight[:, None] >> self.shifts[None, :, None]) & 15).view(-1, self.qweight.shape[1])
        zeros = ((self.qzeros[:, :, None] >> self.shifts) & 15).view(len(self.qzeros), -1)
        groups = self.g_idx.long()
        weight = self.scales[groups] * (codes - zeros[groups])
        return torch.matmul(x, weight.to(x.dtype)) + self.bias.to(x.dtype)


class Adapted(nn.Module):
    """Frozen layers, each with an adapter that trains."""

    def __init__(self, quantize: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)]) for _ in range(3))
        self.bfloat16()
        for layer in self.layers:
            layer[0] = quantize(layer[0].requires_grad_(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for frozen, adapter in self.layers:
            x = torch.tanh(frozen(x) + adapter(x))
        return x


def wrapped(linear: nn.Linear) -> nn.Module:
    linear.weight = halves(linear.weight.detach())
    return linear


def nested(linear: nn.Linear) -> nn.Module:
    linear.weight = nn.Parameter(Outer(halves(linear.weight.detach()).detach()), requires_grad=False)
    return linear


class Integers(nn.Module):
    """A layer with codes in a parameter of integers, and its scale beside it in fp32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        self.scale = nn.Parameter(weight.abs().amax(1, keepdim=True) / 127, requires_grad=False)
        self.codes = nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.codes.float() * self.scale).to(x.dtype).t()


KINDS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "wrapper": wrapped,
    "wrapper of a wrapper": nested,
    "buffers of GPTQ and AWQ": Packed,
    "parameters of integers": Integers,
}


def loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(step), dtype=torch.bfloat16)
    loss: torch.Tensor = model(values).float().square().mean()
    return loss


def job_subclasses(quantize: Callable[[nn.Linear], nn.Module]) -> Job:
    return Job(functools.partial(Adapted, quantize), loss, steps=3, dtype="bf16")


def as_in_memory_subclasses(case: Job, path: Path) -> None:
    """Asserts that the first losses and gradients are those in memory, bit for bit."""
    engine = start(case, DISK, path)
    torch.manual_seed(case.seed)
    memory = case.model()
    for step in range(2):
        loss, expected = case.loss(engine, step, 0), case.loss(memory, step, 0)
        assert torch.equal(loss, expected)
        engine.backward(loss)
        expected.backward()
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                gradient, theirs = offload.safe_get_full_grad(parameter), memory.get_parameter(name)
                assert gradient is not None and theirs.grad is not None
                assert torch.equal(gradient, theirs.grad.float()), name
        engine.step()
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                memory.get_parameter(name).data, memory.get_parameter(name).grad = parameter.detach().clone(), None
    engine.destroy(remove=True)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            "wrapper", marks=pytest.mark.works(AREA, "any tensor subclass that wraps others, nested too", "right")
        ),
        "wrapper of a wrapper",
        pytest.param(
            "buffers of GPTQ and AWQ",
            marks=pytest.mark.works(AREA, "layers of the structure of GPTQ and AWQ: integers in buffers", "right"),
        ),
        pytest.param(
            "parameters of integers", marks=pytest.mark.works(AREA, "codes in integer parameters or in float8", "right")
        ),
    ],
)
def test_losses_and_gradients_are_those_in_memory(kind: str, tmp_path: Path) -> None:
    as_in_memory_subclasses(job_subclasses(KINDS[kind]), tmp_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_all_placements_have_the_same_bits_subclasses(kind: str, tmp_path: Path) -> None:
    same_bits(job_subclasses(KINDS[kind]), tmp_path, PLACEMENTS[::4])


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_and_copies_are_those_in_memory(kind: str, tmp_path: Path) -> None:
    case = job_subclasses(KINDS[kind])
    torch.manual_seed(case.seed)
    memory = case.model()
    engine = start(case, DISK, tmp_path)
    theirs, mine = memory.state_dict(), engine.module.state_dict()
    assert theirs.keys() == mine.keys()
    values = torch.ones(2, 64, dtype=torch.bfloat16)
    for name, value in theirs.items():
        assert type(value) is type(mine[name]) and value.dtype == mine[name].dtype
        assert torch.equal(value * 1, mine[name] * 1), name
    with torch.no_grad():
        alone, expected = copy.deepcopy(engine.module), memory(values)
        assert torch.equal(engine(values), expected) and torch.equal(alone(values), expected)
    engine.destroy(remove=True)
    assert torch.equal(alone(values), expected)


def test_buffers_are_buffers_again_if_the_engine_cannot_start(tmp_path: Path) -> None:
    model = Adapted(Packed)
    before = list(model.state_dict())
    with pytest.raises(offload.errors.BudgetError):
        offload.initialize(model=model, config=config(job_subclasses(Packed), DISK, tmp_path, host_memory=1))
    assert list(dict(model.layers[0][0].named_buffers())) == ["qweight", "qzeros", "scales", "g_idx", "bias"]
    assert list(model.state_dict()) == before


def test_a_quantized_weight_that_shall_train_is_refused(tmp_path: Path) -> None:
    model = Adapted(wrapped)
    model.layers[0][0].weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"shall train is quantized, the first is layers\.0\.0\.weight"):
        offload.initialize(model=model, config=config(job_subclasses(wrapped), DISK, tmp_path))


# -- torchao ------------------------------------------------------------------------------------------


def of_torchao(name: str, arguments: dict[str, Any], linear: nn.Linear) -> nn.Module:
    import torchao.quantization

    held = nn.ModuleList([linear])
    torchao.quantization.quantize_(held, getattr(torchao.quantization, name)(**arguments))
    return held[0]


TORCHAO: dict[str, dict[str, Any]] = {
    "Int8WeightOnlyConfig": {},
    "Float8WeightOnlyConfig": {},
    "IntxWeightOnlyConfig": {"weight_dtype": torch.int4},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.works(AREA, "torchao: int8, int4 (in int8) and float8 weights", "right")
@pytest.mark.parametrize("name", TORCHAO)
def test_torchao_trains_as_in_memory(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    case = job_subclasses(functools.partial(of_torchao, name, TORCHAO[name]))
    as_in_memory_subclasses(case, tmp_path / "memory")
    first = run(case, ("none", "none"), tmp_path / "device")
    result = run(case, ("cpu", "nvme"), tmp_path / "host")
    assert (result.losses, result.norms) == (first.losses, first.norms)
