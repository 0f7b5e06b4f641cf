"""Frozen weights in 4 and 8 bits: values, files, budgets and processes."""

from __future__ import annotations

import logging
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
from offload.errors import StoreError, UsageError
from offload.layout.frozen import stored_as_blocks
from tests.support import models
from tests.support.frozen_blocks import deep, dequantized, through_blocks
from tests.support.oracle import (
    DTYPES,
    assert_same,
    assert_same_tensors,
    config,
    kill_and_resume,
    least_host_memory,
    run,
    same_bits,
    small_pieces,
    start,
    train_step,
    trained,
    weights_of,
)
from tests.support.pretrained_models import CAUSAL, written
from tests.support.ranks import rank_pool
from tests.support.ranks.rank_jobs import language_rows_loss, losses_and_weights
from tests.support.ranks.rank_pool import RankPool

DISK = ("nvme", "nvme")
JOB = models.LORA._replace(dtype="bf16", steps=3)
FORMS = ("nf4", "int8")
AREA = "Frozen weights in 4 and 8 bits"
BITS = {"nf4": 34 / 64 * 8, "int8": 130 / 128 * 8}


# -- which they are -----------------------------------------------------------------------------------


def names(model: nn.Module) -> set[str]:
    return set(stored_as_blocks(model, "nf4", torch.bfloat16))


@pytest.mark.works(AREA, "matrices of frozen linear layers; nothing that trains, no norm, no embedding", "right")
def test_matrices_of_frozen_linear_layers_are_stored_so_and_nothing_else() -> None:
    model = models.lora()
    matrices = names(model)
    assert matrices and all(not model.get_parameter(name).requires_grad for name in matrices)
    kinds = {name.removesuffix(".weight").removesuffix(".base_layer").rpartition(".")[2] for name in matrices}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert not names(models.llama()), "all of it trains"


def test_tied_and_untied_output_layers_stay() -> None:
    model = models.shallow().requires_grad_(False)  # its linear layers are of transformers' own class
    kinds = {name.split(".")[-2] for name in names(model)}
    assert kinds == {"c_attn", "c_proj", "c_fc"}


def test_an_adapter_that_does_not_train_stays() -> None:
    model = models.lora()
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["q_proj"]))  # type: ignore[operator]
    assert not any(parameter.requires_grad for name, parameter in model.named_parameters() if ".other." in name)
    assert not any("lora_" in name for name in names(model))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(3, 64, 64), requires_grad=False)
        self.thin = nn.Parameter(torch.randn(3, 8, 64), requires_grad=False)
        self.kernel = nn.Conv1d(64, 64, 64).requires_grad_(False)
        self.table = nn.Embedding(64, 64).requires_grad_(False)
        self.norm = nn.LayerNorm((64, 64)).requires_grad_(False)


@pytest.mark.works(AREA, "stacked experts; no convolution", "right")
def test_stacked_experts_are_matrices_and_kernels_and_tables_are_none() -> None:
    assert names(Experts()) == {"stack"}


# -- bits ---------------------------------------------------------------------------------------------


@pytest.mark.works(AREA, "LoRA of peft over nf4 and int8: the bits of the same values in memory", "right")
@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("form", FORMS)
def test_a_run_has_the_bits_of_one_over_the_values_in_memory(form: str, dtype: str, tmp_path: Path) -> None:
    job = JOB._replace(dtype=dtype, steps=2)
    expected = run(dequantized(job, form), ("none", "none"), tmp_path / "values")
    assert_same(expected, run(job, DISK, tmp_path / "blocks", frozen=form))
    plain = run(job._replace(steps=1), ("none", "none"), tmp_path / "plain")
    assert expected.losses[0] != plain.losses[0], "the codes round"


def dora() -> nn.Module:
    """Adapters that read the weights themselves: DoRA takes their norms."""
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=True, init_lora_weights=False)
    return peft.get_peft_model(models.llama(), adapters)  # type: ignore[arg-type]


def experts() -> nn.Module:
    """A mixture whose stacked experts are frozen while all else trains."""
    widths = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape = transformers.MixtralConfig(**widths, num_key_value_heads=2, num_local_experts=4, vocab_size=128)
    model = transformers.MixtralForCausalLM(shape)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name)
    assert any(parameter.ndim == 3 for parameter in model.parameters() if not parameter.requires_grad)
    return model


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "made",
    [
        pytest.param(dora, marks=pytest.mark.works(AREA, "DoRA, which reads the weights", "right")),
        pytest.param(experts, marks=pytest.mark.works(AREA, "frozen experts of a mixture that trains", "right")),
    ],
)
def test_other_models_have_the_bits_of_values_in_memory(made: Callable[[], nn.Module], tmp_path: Path) -> None:
    job = JOB._replace(model=made, steps=2)
    expected = run(dequantized(job, "nf4"), ("none", "none"), tmp_path / "values")
    assert_same(expected, run(job, DISK, tmp_path / "blocks", frozen="nf4"))
    assert names(made())


@pytest.mark.works(AREA, "the same bits wherever they are", "right")
@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FORMS)
def test_the_same_bits_wherever_they_are(form: str, tmp_path: Path) -> None:
    same_bits(JOB._replace(steps=2), tmp_path, frozen=form)


def test_units_are_streamed_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk begins and ends anywhere in a block."""
    job = JOB._replace(steps=2)
    unbroken = run(job, DISK, tmp_path / "whole", frozen="nf4")
    small_pieces(monkeypatch)
    least = least_host_memory(job, tmp_path / "least", frozen="nf4")
    assert_same(unbroken, run(job, DISK, tmp_path / "least", host_memory=least, frozen="nf4"))


@pytest.mark.slow
@pytest.mark.works(AREA, "several micro-batches, layer by layer too, with activations in host memory", "right")
def test_several_micro_batches_in_either_order(tmp_path: Path) -> None:
    job = JOB._replace(accumulation=2, steps=2)
    expected = run(dequantized(job, "nf4"), DISK, tmp_path / "values")
    for schedule in ("layer_major", "micro_batch_major"):
        result = run(job, DISK, tmp_path / schedule, frozen="nf4", schedule=schedule, activations="cpu")
        assert_same(expected, result, schedule)


@pytest.mark.works(AREA, "a run that is killed and resumed", "right")
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_run_that_was_killed_goes_on_with_them(form: str, tmp_path: Path) -> None:
    job = JOB._replace(steps=20)
    unbroken = run(job, DISK, tmp_path / "whole", frozen=form)
    (tmp_path / "killed").mkdir()
    assert_same(unbroken, kill_and_resume(job, DISK, tmp_path / "killed", kills=2, late=0.002, frozen=form))


# -- bytes --------------------------------------------------------------------------------------------


def stored_and_read(folder: Path, form: str | None) -> tuple[int, int]:
    """Bytes of the frozen partitions, and bytes that a step reads."""
    engine = start(JOB, DISK, folder, frozen=form, device_memory=1 << 20)
    inspected = testing.inspect(engine)
    train_step(engine, JOB, 0)
    testing.settle(engine, commit=False)
    assert inspected.queue is not None
    before = inspected.queue.read_bytes
    train_step(engine, JOB, 1)
    testing.settle(engine, commit=False)
    read = inspected.queue.read_bytes - before
    frozen = sum(len(behind) for _, behind in inspected.shares) * 2
    engine.destroy(remove=True)
    return frozen, read


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FORMS)
def test_matrices_take_the_bytes_of_their_codes_on_disk(form: str, tmp_path: Path) -> None:
    model = models.lora()
    matrices = sum(model.get_parameter(name).numel() for name in names(model))
    plain, _ = stored_and_read(tmp_path / "plain", None)
    nbytes, _ = stored_and_read(tmp_path / "blocks", form)
    units = 5
    saved = matrices * (2 - BITS[form] / 8)
    assert abs(plain - nbytes - saved) <= 4096 * 2 * units, "but for the padding of each unit"


@pytest.mark.slow
@pytest.mark.works(AREA, "codes that exceed both budgets", "right")
def test_codes_that_exceed_both_budgets_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model in 4 bits does not fit into what the engine may take of memory."""
    job = JOB._replace(model=deep, steps=2)
    expected = run(job, ("none", "none"), tmp_path / "memory", frozen="nf4")
    small_pieces(monkeypatch)
    device = 2 << 20  # two blocks with their values
    host = least_host_memory(job, tmp_path / "least", frozen="nf4", device_memory=device)
    engine = start(job, DISK, tmp_path / "disk", frozen="nf4", host_memory=host, device_memory=device)
    inspected = testing.inspect(engine)
    codes = 2 * sum(len(behind) for _, behind in inspected.shares)
    assert inspected.host_arena.nbytes + inspected.device_arena.nbytes < codes
    assert_same(expected, trained(engine, job))
    engine.destroy(remove=True)


# -- reading and editing ------------------------------------------------------------------------------


@pytest.mark.works(AREA, "state_dict, gathered, safe_get_full_fp32_param: values", "right")
def test_users_see_values(tmp_path: Path) -> None:
    torch.manual_seed(JOB.seed)
    given = {name: value.detach().clone() for name, value in models.lora().named_parameters()}
    engine = start(JOB, DISK, tmp_path, frozen="nf4")
    chosen = [name for name in given if "k_proj" in name]
    for name in chosen:
        parameter = engine.module.get_parameter(name)
        expected = through_blocks(given[name], "nf4", torch.bfloat16)
        master = offload.safe_get_full_fp32_param(parameter)
        assert master is not None and torch.equal(master.cpu(), expected.float())
        with offload.gathered(parameter):
            assert torch.equal(parameter.cpu(), expected)
        assert torch.equal(engine.module.state_dict()[name], expected)
        offload.safe_set_full_fp32_param(parameter, expected.float())  # equal values are no change
        with pytest.raises(offload.errors.UsageError, match="is frozen: its weights are stored once"):
            offload.safe_set_full_fp32_param(parameter, given[name])
    assert chosen
    engine.destroy(remove=True)


def test_a_config_without_frozen_matrices_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        engine = start(models.SHALLOW, DISK, tmp_path, frozen="nf4")
    assert any('"frozen": "nf4" has no effect' in line for line in engine.notices)
    engine.destroy(remove=True)


class Quantized(nn.Parameter):
    """A weight of bitsandbytes: codes in elements of some dtype, without the state to read them with."""

    quant_state: object = None


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_weights_of_others_without_their_state_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].weight = Quantized(torch.zeros(32, 1, dtype=dtype), requires_grad=False)
    with pytest.raises(offload.errors.ConfigError, match=r"not quantized yet, the first is 0\.weight"):
        offload.initialize(model=model, config=config(JOB, DISK, tmp_path, frozen="nf4"))
    assert not list(tmp_path.iterdir())


def test_a_run_says_what_it_stores(tmp_path: Path) -> None:
    engine = start(JOB, DISK, tmp_path, frozen="nf4")
    (line,) = [line for line in engine.notices if "in nf4" in line]
    assert line.startswith("14 frozen matrices are stored in nf4: ")
    engine.destroy(remove=True)


def trained_files(folder: Path, steps: int = 2, **options: Any) -> offload.Engine:
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


@pytest.mark.usefixtures("engines_end")
@pytest.mark.works(AREA, "export and save_16bit_model: values", "right")
@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp16"])
@pytest.mark.parametrize("form", FORMS)
def test_an_export_contains_values(form: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    testing.replace(monkeypatch, "size.block_chunk", 256)  # several chunks of each matrix, the last one shorter
    engine = trained_files(tmp_path / "run", frozen=form, durability="step")
    expected = {name: value for name, value in weights_of(engine).items() if "lora_" not in name}
    engine.save_16bit_model(tmp_path / "saved")
    engine.save_checkpoint(tmp_path / "checkpoint", "tag")
    engine.destroy()
    for number, source in enumerate((tmp_path / "run" / "default", tmp_path / "checkpoint" / "tag")):
        out = tmp_path / f"out{number}"
        result = CliRunner().invoke(app, ["export", str(source), str(out), "--dtype", dtype])
        assert result.exit_code == 0, result.output
        values = frozen_of(out)
        assert values
        for name, value in values.items():
            assert torch.equal(value, expected[name].to(DTYPES[dtype])), name
    saved = torch.load(next((tmp_path / "saved").glob("*.bin"))) if list((tmp_path / "saved").glob("*.bin")) else {}
    saved |= frozen_of(tmp_path / "saved")
    assert all(torch.equal(saved[name], expected[name]) for name in values)


@pytest.mark.usefixtures("engines_end")
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


@pytest.mark.usefixtures("engines_end")
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
    weights = weights_of(engine)
    engine.destroy(remove=True)
    changed = {name for name in values if not torch.equal(values[name], weights[name])}
    assert changed == {name for name in values if "_proj" in name}
    for name in changed:  # the blocks are of the fp32 values, of which the plain run keeps bf16
        assert (values[name].float() - weights[name].float()).abs().max() <= values[name].float().abs().max() / 100


# -- checkpoints --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("engines_end")
@pytest.mark.sample(1)
@pytest.mark.works(AREA, "a checkpoint, in a run of the same form", "right")
@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_is_loaded_into_a_run_of_the_same_form(form: str, tmp_path: Path) -> None:
    engine = trained_files(tmp_path / "one", frozen=form)
    engine.save_checkpoint(tmp_path / "checkpoint")
    expected = weights_of(engine)
    engine.destroy(remove=True)
    other_engine = start(JOB._replace(seed=5), DISK, tmp_path / "two", frozen=form)
    assert any(
        not torch.equal(value, expected[name]) for name, value in weights_of(other_engine).items() if "k_proj" in name
    )
    other_engine.load_checkpoint(tmp_path / "checkpoint")
    assert_same_tensors(expected, weights_of(other_engine))
    other_engine.destroy(remove=True)


@pytest.mark.usefixtures("engines_end")
def test_weights_of_a_checkpoint_in_another_dtype_of_16_bits(tmp_path: Path) -> None:
    engine = trained_files(tmp_path / "one", frozen="nf4")
    engine.save_checkpoint(tmp_path / "checkpoint")
    engine.destroy(remove=True)
    job = JOB._replace(dtype="fp16")
    expected = weights_of_frozen(start(dequantized(job, "nf4"), DISK, tmp_path / "values"))
    other_engine = start(job._replace(seed=5), DISK, tmp_path / "two", frozen="nf4")
    other_engine.load_checkpoint(tmp_path / "checkpoint", load_module_only=True)
    assert_same_tensors(expected, weights_of_frozen(other_engine))


def weights_of_frozen(engine: offload.Engine) -> dict[str, torch.Tensor]:
    weights = {name: value for name, value in weights_of(engine).items() if "_proj" in name and "lora_" not in name}
    engine.destroy(remove=True)
    return weights


@pytest.mark.usefixtures("engines_end")
@pytest.mark.sample(1)
@pytest.mark.works(AREA, "a checkpoint, in a run of another form", "refused")
@pytest.mark.parametrize(("saved", "here"), [("nf4", "int8"), ("nf4", None), (None, "nf4")])
def test_a_checkpoint_of_another_form_is_refused_before_anything_changes(
    saved: str | None, here: str | None, tmp_path: Path
) -> None:
    engine = trained_files(tmp_path / "one", frozen=saved)
    engine.save_checkpoint(tmp_path / "checkpoint")
    engine.destroy(remove=True)
    other_engine = start(JOB._replace(seed=5), DISK, tmp_path / "two", frozen=here)
    before = weights_of(other_engine)
    with pytest.raises(StoreError, match='train with the "frozen" and the dtype of the checkpoint'):
        other_engine.load_checkpoint(tmp_path / "checkpoint")
    assert_same_tensors(before, weights_of(other_engine))
    other_engine.destroy(remove=True)


@pytest.mark.usefixtures("engines_end")
def test_a_checkpoint_without_frozen_weights_is_of_no_form(tmp_path: Path) -> None:
    engine = trained_files(tmp_path / "one", frozen="nf4")
    engine.save_checkpoint(tmp_path / "checkpoint", exclude_frozen_parameters=True)
    expected = {name: value for name, value in weights_of(engine).items() if "lora_" in name}
    engine.destroy(remove=True)
    other_engine = start(JOB._replace(seed=5), DISK, tmp_path / "two", frozen="int8")
    other_engine.load_checkpoint(tmp_path / "checkpoint")
    assert_same_tensors(expected, {name: value for name, value in weights_of(other_engine).items() if "lora_" in name})
    other_engine.destroy(remove=True)


# -- runs ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("engines_end")
@pytest.mark.sample(1)
@pytest.mark.works(AREA, "a resume in another form", "refused")
@pytest.mark.parametrize(("before", "after"), [("nf4", "int8"), ("nf4", None), (None, "nf4")])
def test_a_run_goes_on_in_its_own_form_alone(before: str | None, after: str | None, tmp_path: Path) -> None:
    trained_files(tmp_path, frozen=before, durability="step").destroy()
    with pytest.raises(StoreError, match="belongs to a run of another model, layout or setting") as error:
        start(JOB, DISK, tmp_path, frozen=after, resume="must")
    assert 'resume with the "frozen" that the run had' in str(error.value)
    start(JOB, DISK, tmp_path, frozen=before, resume="must").destroy(remove=True)


ROWS = JOB._replace(loss=language_rows_loss)


def _rows(
    folder: Path, form: str | None, first: int, last: int, tiers: tuple[str, str] = ("nvme", "nvme")
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Some steps of two ranks: mean losses and weights. Without a form, over the values that nf4 makes."""
    job = ROWS if form is not None else dequantized(ROWS, "nf4")
    engine = rank_pool.start(job, tiers, folder, resume="auto", durability="step", frozen=form)
    return losses_and_weights(engine, job, first, last)


@pytest.mark.slow
@pytest.mark.works(AREA, "two ranks, resumed too", "right")
def test_two_ranks_divide_the_blocks_and_have_the_bits_of_values(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(_rows, tmp_path / "values", None, 0, 2)
    results = ranks.run(_rows, tmp_path / "blocks", "nf4", 0, 1)
    resumed = ranks.run(_rows, tmp_path / "blocks", "nf4", 1, 2)
    device = ranks.run(_rows, tmp_path / "device", "nf4", 0, 2, ("none", "cpu"))
    for rank, (losses, weights) in enumerate(expected):
        assert results[rank][0] + resumed[rank][0] == losses == device[rank][0]
        assert_same_tensors(weights, resumed[rank][1])
        assert_same_tensors(weights, device[rank][1])


def _looked_at(folder: Path) -> tuple[bool, str]:
    """Whether a whole parameter is that of the state dict, and the error of a look at a shard of it."""
    engine = rank_pool.start(ROWS, ("nvme", "nvme"), folder, frozen="nf4")
    name, parameter = next((n, p) for n, p in engine.module.named_parameters() if "k_proj" in n)
    whole = offload.safe_get_full_fp32_param(parameter)
    same = whole is not None and torch.equal(whole, engine.module.state_dict()[name].float())
    with pytest.raises(UsageError) as error:
        offload.safe_get_local_fp32_param(parameter)
    engine.destroy(remove=True)
    return same, str(error.value)


@pytest.mark.works(AREA, "a look at a shard of values: `safe_get_local_fp32_param` on several ranks", "refused")
def test_a_rank_has_no_values_of_its_own(ranks: RankPool, tmp_path: Path) -> None:
    for same, error in ranks.run(_looked_at, tmp_path):
        assert same and "read the whole parameter with safe_get_full_fp32_param" in error


def _exported_weights(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    engine = rank_pool.start(ROWS, ("nvme", "nvme"), folder, frozen="int8")
    engine.save_16bit_model(out)
    weights = weights_of(engine)
    engine.save_checkpoint(folder / "checkpoint")
    engine.destroy(remove=True)
    return weights


def _loaded(folder: Path, checkpoint: Path) -> dict[str, torch.Tensor]:
    engine = rank_pool.start(ROWS._replace(seed=5), ("nvme", "nvme"), folder, frozen="int8")
    engine.load_checkpoint(checkpoint)
    weights = weights_of(engine)
    engine.destroy(remove=True)
    return weights


@pytest.mark.slow
@pytest.mark.works(AREA, "a checkpoint of two ranks on one, and its export", "right")
def test_a_checkpoint_of_two_ranks_is_loaded_by_one_and_exported(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(_exported_weights, tmp_path / "two", tmp_path / "out")[0]
    assert_same_tensors(expected, _loaded(tmp_path / "one", tmp_path / "two" / "checkpoint"))
    (tag,) = (path for path in (tmp_path / "two" / "checkpoint").iterdir() if path.is_dir())
    assert CliRunner().invoke(app, ["export", str(tag), str(tmp_path / "exported")]).exit_code == 0
    for folder in ("out", "exported"):
        weights = {
            name: value
            for path in (tmp_path / folder).glob("*.safetensors")
            for name, value in safetensors.torch.load_file(path).items()
        }
        assert weights and all(torch.equal(value, expected[name]) for name, value in weights.items())
