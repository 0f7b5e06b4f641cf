"""`offload export` writes what transformers loads: the weights of the engine, bit for bit, from any number of ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from torch import nn
from typer.testing import CliRunner

import offload
from offload import kernels, testing
from offload.cli.main import app
from offload.states import State
from tests.support import models
from tests.support.exported_runs import DISK, FROZEN, LLAMA, ended, exported, run, tensors, tied_by_hand, trained
from tests.support.oracle import Job, assert_same_tensors, train_step, weights_of
from tests.support.ranks import rank_pool
from tests.support.ranks.rank_pool import RankPool


def image_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    pixels = torch.randn(2, 3, 32, 32, generator=generator)
    return model(pixels, labels=torch.tensor([step % 4, 1])).loss


RESNET = Job(models.resnet, image_loss, steps=2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("job", [models.GPT2, LLAMA, FROZEN], ids=["tied", "llama", "frozen"])
def test_transformers_loads_it_and_gives_the_same_logits(job: Job, dtype: str, tmp_path: Path) -> None:
    engine = trained(job._replace(dtype=dtype), tmp_path / "swap")
    ids = models.tokens(9, 9)
    engine.eval()
    with torch.no_grad():
        expected = engine(input_ids=ids).logits.clone()
    names = set(engine.module.state_dict())
    engine.destroy()
    exported(tmp_path / "swap" / "default", tmp_path / "out")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert {p.dtype for p in model.parameters()} == {{"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]}
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, expected.cpu())
    assert set(model.state_dict()) == names and model.config.architectures == [type(model).__name__]


def test_it_writes_the_names_that_save_pretrained_writes(tmp_path: Path) -> None:
    ended(models.GPT2, tmp_path / "swap")
    exported(tmp_path / "swap" / "default", tmp_path / "out")
    models.gpt2().save_pretrained(tmp_path / "theirs")
    assert tensors(tmp_path / "out").keys() == tensors(tmp_path / "theirs").keys()
    ours, theirs = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "theirs"))
    assert ours == theirs


def test_persistent_buffers_come_along(tmp_path: Path) -> None:
    state = ended(RESNET, tmp_path / "swap")
    exported(tmp_path / "swap" / "default", tmp_path / "out")
    found = tensors(tmp_path / "out")
    assert found.keys() == state.keys() and any("running_mean" in name for name in found)
    assert_same_tensors(found, state)
    loaded = transformers.ResNetForImageClassification.from_pretrained(tmp_path / "out")
    assert_same_tensors(loaded.state_dict(), state)


def masters(engine: offload.Engine) -> dict[str, torch.Tensor]:
    """The engine's own fp32 masters, from its memory: of a bf16 run whose states live in RAM."""
    testing.settle(engine, commit=False)
    residents = testing.inspect(engine).residents
    state = engine.module.state_dict()
    found: dict[str, torch.Tensor] = {}
    for unit, layout in enumerate(testing.inspect(engine).layouts):
        for segment in layout.segments:
            weight = state[segment.name].clone().view(-1)
            found[segment.name] = weight.float().view(segment.shape)
            if segment.trainable:
                residual = residents[unit, State.MASTER_LOW_BITS][segment.start : segment.stop].clone()
                kernels.join_master(weight, residual, found[segment.name].view(-1))
    return found


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_fp32_gives_the_exact_masters(name: str, tmp_path: Path) -> None:
    """A frozen weight has no residual; fp16 is rounded once, from the master."""
    engine = trained(FROZEN._replace(dtype="bf16"), tmp_path / "swap", ("nvme", "cpu"), durability="step")
    expected = masters(engine)
    weights = weights_of(engine)
    assert any(not torch.equal(expected[n], weights[n].float()) for n in expected), "there is something to join"
    engine.destroy()
    export_report = exported(tmp_path / "swap" / "default", tmp_path / "out", "--dtype", name)
    found = tensors(tmp_path / "out")
    want = {n: value.half() for n, value in expected.items()} if name == "fp16" else expected
    want = weights if name == "bf16" else want
    assert export_report["dtype"] == name and found.keys() == want.keys()
    assert_same_tensors(found, want)
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["dtype"]
        == str(found[n0 := next(iter(found))].dtype)[6:]
    ), n0


def test_values_beyond_fp16_are_reported(tmp_path: Path) -> None:
    engine = trained(models.GPT2, tmp_path / "swap")
    with torch.no_grad():
        engine.module.transformer.wpe.weight.data[0, :3] = 1e6
    engine.destroy()
    export_report = exported(tmp_path / "swap" / "default", tmp_path / "out", "--dtype", "fp16")
    assert any(notice.startswith("3 values are out of the range") for notice in export_report["notices"])


def test_shards_and_their_index(tmp_path: Path) -> None:
    state = ended(models.GPT2, tmp_path / "swap")
    export_report = exported(tmp_path / "swap" / "default", tmp_path / "out", "--max-shard-size", "100KB")
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    count = len(files)
    assert files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)] and count > 3
    assert set(export_report["files"]) == {
        *files,
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
    }
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found = tensors(tmp_path / "out")
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values()) == export_report["nbytes"]
    for name, file in index["weight_map"].items():
        assert torch.equal(safetensors.torch.load_file(tmp_path / "out" / file)[name], state[name])
    for file in files:
        loaded = safetensors.torch.load_file(tmp_path / "out" / file)
        assert len(loaded) == 1 or sum(t.nbytes for t in loaded.values()) <= 100_000
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same_tensors(state, model.state_dict())


def test_a_model_without_a_config_has_weights_alone(tmp_path: Path) -> None:
    state = ended(models.MIXTURE, tmp_path / "swap")
    result = run(tmp_path / "swap" / "default", tmp_path / "out")
    assert result.exit_code == 0 and "no transformers config" in result.output
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    model = models.Mixture()
    safetensors.torch.load_model(model, tmp_path / "out" / "model.safetensors")
    assert_same_tensors(state, model.state_dict())


def test_a_tie_that_the_config_does_not_know_is_written_twice(tmp_path: Path) -> None:
    state = ended(LLAMA._replace(model=tied_by_hand), tmp_path / "swap")
    exported(tmp_path / "swap" / "default", tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.lm_head.weight, state["lm_head.weight"])


def _on_ranks(job: Job, folder: Path) -> dict[str, torch.Tensor]:
    engine = rank_pool.start(job, DISK, folder)
    for step in range(2):
        train_step(engine, job, step)
    state = weights_of(engine)
    engine.destroy()
    return state


def test_the_shards_of_all_ranks_are_merged(ranks: RankPool, tmp_path: Path) -> None:
    state = ranks.run(_on_ranks, models.MIXTURE._replace(dtype="bf16"), tmp_path / "swap")[0]
    run_folder = tmp_path / "swap" / "default"
    exported(run_folder, tmp_path / "out")
    found = tensors(tmp_path / "out")
    del state["head.weight"]  # tied
    assert_same_tensors(state, found)
    # One rank that was killed after its commit is one ahead: what all hold is what counts.
    result = CliRunner().invoke(app, ["verify", str(run_folder), "--json"])
    assert result.exit_code == 0 and len(json.loads(result.stdout)["ranks"]) == 2
    with (run_folder / "rank0" / "commit").open("r+b") as file:
        newest = json.loads(CliRunner().invoke(app, ["inspect", str(run_folder), "--json"]).stdout)
        serial = newest["ranks"][0]["commits"][0]["serial"]
        file.seek((serial - 1) % 2 * 4096)
        file.write(bytes(4096))
    export_report = exported(run_folder, tmp_path / "before")
    assert export_report["epoch"] == 1
    assert any(not torch.equal(value, found[name]) for name, value in tensors(tmp_path / "before").items())
    shutil.rmtree(run_folder / "rank1")
    result = run(run_folder, tmp_path / "other")
    assert result.exit_code == 2 and "no folder of rank 1 of 2" in result.stderr
    result = CliRunner().invoke(app, ["verify", str(run_folder)])
    assert result.exit_code == 2 and "no folder of rank 1 of 2" in result.stderr
