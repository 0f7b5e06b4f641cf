"""Frozen weights that are stored in 4 or 8 bits train adapters as their values in memory do, wherever they are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
import transformers
from torch import nn

import offload
from offload import testing
from offload.layout.frozen import stored_as_blocks
from offload.states import State
from tests.support import models
from tests.support.frozen_blocks import deep, dequantized, through_blocks
from tests.support.oracle import (
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

DISK = ("nvme", "nvme")
JOB = models.LORA._replace(dtype="bf16")
FORMS = ("nf4", "int8")
AREA = "Frozen weights in 4 and 8 bits"
BITS = {"nf4": 34 / 64 * 8, "int8": 130 / 128 * 8}


# -- which they are -----------------------------------------------------------------------------------


def names(model: nn.Module) -> set[str]:
    return set(stored_as_blocks(model, "nf4", torch.bfloat16))


@pytest.mark.works(AREA, "matrices of frozen linear layers; nothing that trains, no norm, no embedding", "right")
def test_matrices_of_frozen_linear_layers_are_stored_so_and_nothing_else() -> None:
    model = models.lora()
    found = names(model)
    assert found and all(not model.get_parameter(name).requires_grad for name in found)
    kinds = {name.removesuffix(".weight").removesuffix(".base_layer").rpartition(".")[2] for name in found}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert not names(models.llama()), "all of it trains"


def test_tied_and_untied_output_layers_stay() -> None:
    model = models.gpt2().requires_grad_(False)  # its linear layers are of transformers' own class
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
    job = JOB._replace(dtype=dtype)
    expected = run(dequantized(job, form), ("none", "none"), tmp_path / "values")
    assert_same(expected, run(job, DISK, tmp_path / "blocks", frozen=form))
    assert expected.losses != run(job, ("none", "none"), tmp_path / "plain").losses, "the codes round"


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
    job = JOB._replace(model=made, steps=3)
    expected = run(dequantized(job, "nf4"), ("none", "none"), tmp_path / "values")
    assert_same(expected, run(job, DISK, tmp_path / "blocks", frozen="nf4"))
    assert names(made())


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_adapters_are_those_of_torch(form: str, tmp_path: Path) -> None:
    engine = start(JOB, DISK, tmp_path, frozen=form)
    torch.manual_seed(JOB.seed)
    model = dequantized(JOB, form).model()
    for parameter in model.parameters():  # buffers stay in fp32, as the engine leaves them
        parameter.data = rounded(parameter.data, torch.bfloat16)
    JOB.loss(model, 0, 0).backward()
    engine.backward(JOB.loss(engine, 0, 0))
    compared = 0
    for (name, parameter), mine in zip(model.named_parameters(), engine.module.parameters(), strict=True):
        if parameter.requires_grad:
            found = offload.safe_get_full_grad(mine)
            assert parameter.grad is not None and found is not None
            assert torch.equal(found.to(torch.bfloat16), parameter.grad), name
            compared += 1
    assert compared == 8
    engine.destroy(remove=True)


@pytest.mark.works(AREA, "the same bits wherever they are", "right")
@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FORMS)
def test_the_same_bits_wherever_they_are(form: str, tmp_path: Path) -> None:
    placements = [("none", "none"), ("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "cpu"), DISK]
    same_bits(JOB, tmp_path, placements, frozen=form)


def test_units_are_streamed_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk begins and ends anywhere in a block."""
    unbroken = run(JOB, DISK, tmp_path / "whole", frozen="nf4")
    small_pieces(monkeypatch)
    least = least_host_memory(JOB, tmp_path / "least", frozen="nf4")
    assert_same(unbroken, run(JOB, DISK, tmp_path / "least", host_memory=least, frozen="nf4"))


@pytest.mark.works(AREA, "several micro-batches, layer by layer too, with activations in host memory", "right")
def test_several_micro_batches_in_either_order(tmp_path: Path) -> None:
    job = JOB._replace(accumulation=2)
    expected = run(dequantized(job, "nf4"), DISK, tmp_path / "values")
    for schedule in ("layer_major", "micro_batch_major"):
        found = run(job, DISK, tmp_path / schedule, frozen="nf4", schedule=schedule, activations="cpu")
        assert_same(expected, found, schedule)


@pytest.mark.works(AREA, "a run that is killed and resumed", "right")
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_run_that_was_killed_goes_on_with_them(form: str, tmp_path: Path) -> None:
    job = JOB._replace(steps=40)  # so many that a busy machine does not end them between two kills
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
    found, _ = stored_and_read(tmp_path / "blocks", form)
    units = 5
    saved = matrices * (2 - BITS[form] / 8)
    assert abs(plain - found - saved) <= 4096 * 2 * units, "but for the padding of each unit"


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
        found = offload.safe_get_full_fp32_param(parameter)
        assert found is not None and torch.equal(found.cpu(), expected.float())
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
        engine = start(models.GPT2, DISK, tmp_path, frozen="nf4")
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


def test_weights_of_the_moment_are_values(tmp_path: Path) -> None:
    expected = run(dequantized(JOB, "int8"), ("cpu", "cpu"), tmp_path / "values")
    engine = start(JOB, ("cpu", "cpu"), tmp_path / "blocks", frozen="int8")
    for step in range(JOB.steps):
        train_step(engine, JOB, step)
    assert_same_tensors(expected.weights, weights_of(engine))
    tiers = testing.inspect(engine).state_bytes
    assert all(State.WEIGHT in row for row in tiers)
    engine.destroy(remove=True)
