"""`offload export` writes what transformers loads: the weights of the engine, bit for bit, from any number of ranks."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import nn
from typer.testing import CliRunner

import offload
from offload import kernels
from offload.aio import IoQueue
from offload.cli.main import app
from offload.engine.model_io import weight_stream
from offload.engine.model_io.weight_source import StoreSource
from offload.runs.export import export, make_plan, read_nbytes
from offload.states import State
from tests.support import models, rank_pool
from tests.support.oracle import Job, assert_same_tensors, config, processes, start, train_step, weights_of
from tests.support.process_measures import peak_memory, peak_rss
from tests.support.rank_pool import RankPool

DISK = ("nvme", "nvme")


def frozen_llama() -> nn.Module:
    """The first block and the head frozen, in one unit with trainable weights and alone."""
    model = models.llama()
    model.model.layers[0].requires_grad_(False)
    model.model.layers[1].mlp.requires_grad_(False)
    model.lm_head.requires_grad_(False)
    return model


LLAMA = Job(models.llama, models.language_loss, steps=2)
FROZEN = Job(frozen_llama, models.language_loss, steps=2)


def image_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    pixels = torch.randn(2, 3, 32, 32, generator=generator)
    return model(pixels, labels=torch.tensor([step % 4, 1])).loss


RESNET = Job(models.resnet, image_loss, steps=2)


def trained(job: Job, folder: Path, placement: tuple[str, str] = DISK, **options: Any) -> offload.Engine:
    engine = start(job, placement, folder, **options)
    for step in range(2):
        train_step(engine, job, step)
    return engine


def ended(job: Job, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Train and close; the weights and buffers of the end."""
    engine = trained(job, folder, **options)
    state = weights_of(engine)
    engine.destroy()
    return state


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def exported(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def tensors(out: Path) -> dict[str, torch.Tensor]:
    """Everything in all files."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(out.glob("*.safetensors")):
        loaded = safetensors.torch.load_file(path)
        assert not found.keys() & loaded.keys()
        found |= loaded
    return found


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
    engine._core.await_updates()
    residents = engine._core.components.shards.residents
    state = engine.module.state_dict()
    found: dict[str, torch.Tensor] = {}
    for unit, layout in enumerate(engine._core.components.layouts):
        for segment in layout.segments:
            weight = state[segment.name].clone().view(-1)
            found[segment.name] = weight.float().view(segment.shape)
            if segment.trainable:
                residual = residents[unit, State.MASTER_LOW_BITS].tensor[segment.start : segment.stop].clone()
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


def tied_by_hand() -> nn.Module:
    """Tied by the user, in a model whose config says nothing of it."""
    model = models.llama()
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


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


# -- what is not written over -------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A run's folder."""
    ended(models.GPT2, tmp_path / "swap")
    return tmp_path / "swap" / "default"


def test_a_folder_that_holds_something_is_refused(small: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis").write_text("dear")
    (tmp_path / "file").write_text("dear")
    for out, words in (("full", "exists already"), ("file", "exists already"), ("no/where", "there is no folder")):
        result = run(small, tmp_path / out)
        assert result.exit_code == 2 and words in result.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "full", "swap"]
    (tmp_path / "empty").mkdir()
    exported(small, tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").is_file()


def test_a_run_that_is_held_is_refused_with_its_holder(tmp_path: Path) -> None:
    engine = trained(models.GPT2, tmp_path / "swap")
    for command in (
        ["export", str(tmp_path / "swap/default"), str(tmp_path / "out")],
        ["verify", str(tmp_path / "swap/default")],
    ):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2 and f"in use by process {os.getpid()}" in result.stderr
    train_step(engine, models.GPT2, 2)
    engine.destroy()
    assert not (tmp_path / "out").exists()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for path in (tmp_path / "photos", tmp_path / "none"):
        for command in (["export", str(path), str(tmp_path / "out")], ["verify", str(path)]):
            result = CliRunner().invoke(app, command)
            assert result.exit_code == 2 and result.stderr.startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_a_run_without_its_files_is_refused_with_the_option_that_keeps_them(tmp_path: Path) -> None:
    trained(models.GPT2, tmp_path / "swap").finish({})
    run_folder = tmp_path / "swap" / "default"
    for command in (
        ["export", str(run_folder), str(tmp_path / "out")],
        ["convert", str(run_folder), "--moments", "int8"],
    ):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2 and "removed at the end" in result.stderr and "--keep" in result.stderr


def test_no_room_is_an_error_before_anything_is_written(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100_000))
    result = run(small, tmp_path / "out")
    assert result.exit_code == 2 and "has 97.7 KiB free" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["swap"]


def test_damage_ends_it_and_leaves_nothing(small: Path, tmp_path: Path) -> None:
    states = small / "rank0" / "states"
    data = bytearray(states.read_bytes())
    for position in range(0, len(data), 4096):
        data[position] ^= 1
    states.write_bytes(data)
    result = run(small, tmp_path / "out")
    assert result.exit_code == 1 and "checksum" in result.stderr and "weight" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["swap"]


def _stalled(run: Path, out: Path) -> None:
    """An export that stops in the middle, until it is killed."""

    def stop(_: int) -> None:
        print("middle", flush=True)
        time.sleep(60)

    with IoQueue() as queue:
        source = StoreSource(run, queue)
        export(source, out, make_plan(source, None, 5_000_000), queue, stop)


def test_a_kill_leaves_a_partial_folder_that_the_next_export_removes(small: Path, tmp_path: Path) -> None:
    process = processes().Process(target=_stalled, args=(small, tmp_path / "out"))
    process.start()
    partial = tmp_path / "out.partial"
    deadline = time.monotonic() + 60
    while not (partial / "model.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    result = run(small, tmp_path / "out")
    assert result.exit_code == 2 and f"in use by process {process.pid}" in result.stderr
    process.kill()
    process.join()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".out.lock", "out.partial", "swap"]
    export_report = exported(small, tmp_path / "out")
    assert any(f"removed {partial}" in notice for notice in export_report["notices"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "swap"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_a_partial_folder_that_is_not_ours_stays(small: Path, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis").write_text("dear")
    result = run(small, tmp_path / "out")
    assert result.exit_code == 2 and "thesis" in result.stderr
    assert (tmp_path / "out.partial" / "thesis").read_text() == "dear"


# -- memory -------------------------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4096, 16384, bias=False)


@pytest.mark.slow
def test_a_large_parameter_is_never_completely_in_memory(tmp_path: Path) -> None:
    """256 MiB of fp32 from 64 Mi elements: what torch and our buffers take is counted, and what is read ahead."""
    engine = offload.initialize(
        model=Wide().bfloat16(), config=config(Job(Wide, models.language_loss, dtype="bf16"), DISK, tmp_path / "swap")
    )[0]
    engine.destroy()
    (grown, nbytes), _ = peak_memory(_growth, tmp_path / "swap" / "default", tmp_path / "out")
    assert nbytes == 256 << 20
    assert grown < 160 << 20, f"{grown / 2**20:.0f} MiB, of which libraries are up to 80 in a process that is new"


def _growth(run: Path, out: Path) -> tuple[int, int]:
    """How far the peak RSS grew, and how many bytes were written."""
    small = torch.ones(8, dtype=torch.bfloat16)
    kernels.join_master(small, torch.zeros(8, dtype=torch.int16), torch.empty(8))
    before = peak_rss()
    with IoQueue() as queue:
        source = StoreSource(run, queue)
        done = export(source, out, make_plan(source, "fp32", 5_000_000_000), queue)
        source.close()
    return peak_rss() - before, done.nbytes


def test_what_is_read_is_what_was_planned(small: Path, tmp_path: Path) -> None:
    """So that a progress bar ends at its end."""
    export_report: list[int] = []
    with IoQueue() as queue:
        source = StoreSource(small, queue)
        plan = make_plan(source, "fp32", 5_000_000)
        export(source, tmp_path / "out", plan, queue, export_report.append)
        source.close()
    assert sum(export_report) == read_nbytes(plan) > 0


def test_small_chunks_give_the_same(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported(small, tmp_path / "out")
    monkeypatch.setattr(weight_stream, "_CHUNK_NUMEL", 2048)
    exported(small, tmp_path / "again")
    assert tensors(tmp_path / "out").keys() == tensors(tmp_path / "again").keys()
    assert_same_tensors(tensors(tmp_path / "again"), tensors(tmp_path / "out"))


def test_a_run_of_one_slot_cannot_be_exported(tmp_path: Path) -> None:
    engine = trained(models.GPT2, tmp_path / "swap", durability="none")
    shutil.copytree(tmp_path / "swap", tmp_path / "left")  # as a kill leaves it
    engine.destroy()
    result = run(tmp_path / "left" / "default", tmp_path / "out")
    assert result.exit_code == 2 and '"durability": "none"' in result.stderr
