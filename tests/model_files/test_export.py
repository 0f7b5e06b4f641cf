"""`offload export` writes what transformers loads: the engine's weights, bit for bit, in bounded memory, or nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import offload
from offload import kernels, testing
from offload.aio import IoQueue
from offload.cli.main import app
from offload.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from offload.errors import UsageError
from offload.model_io.grid import strips
from offload.model_io.source import StoreSource
from offload.runs.export import export, make_plan
from offload.states import State
from tests.support import models
from tests.support.exported_runs import DISK, FROZEN, LLAMA, ended, exported, run, tensors, trained
from tests.support.oracle import Job, assert_same_tensors, processes, train_step, weights_of
from tests.support.ranks import pipelines, rank_pool
from tests.support.ranks import tensor_parallel as tp
from tests.support.ranks.pipelines import Plan
from tests.support.ranks.rank_pool import RankPool, shared_pool


def image_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    pixels = torch.randn(2, 3, 32, 32, generator=generator)
    return model(pixels, labels=torch.tensor([step % 4, 1])).loss


RESNET = Job(models.resnet, image_loss, steps=2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("job", [models.SHALLOW, LLAMA, FROZEN], ids=["tied", "llama", "frozen"])
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


def test_persistent_buffers_come_along(tmp_path: Path) -> None:
    state = ended(RESNET, tmp_path / "swap")
    exported(tmp_path / "swap" / "default", tmp_path / "out")
    written = tensors(tmp_path / "out")
    assert written.keys() == state.keys() and any("running_mean" in name for name in written)
    assert_same_tensors(written, state)
    loaded = transformers.ResNetForImageClassification.from_pretrained(tmp_path / "out")
    assert_same_tensors(loaded.state_dict(), state)


def masters(engine: offload.Engine) -> dict[str, torch.Tensor]:
    """The engine's own fp32 masters, from its memory: of a bf16 run whose states live in RAM."""
    testing.settle(engine, commit=False)
    residents = testing.inspect(engine).residents
    state = engine.module.state_dict()
    masters: dict[str, torch.Tensor] = {}
    for unit, layout in enumerate(testing.inspect(engine).layouts):
        for segment in layout.segments:
            weight = state[segment.name].clone().view(-1)
            masters[segment.name] = weight.float().view(segment.shape)
            if segment.trainable:
                residual = residents[unit, State.MASTER_LOW_BITS][segment.start : segment.stop].clone()
                kernels.join_master(weight, residual, masters[segment.name].view(-1))
    return masters


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_fp32_gives_the_exact_masters(name: str, tmp_path: Path) -> None:
    """A frozen weight has no residual; fp16 is rounded once, from the master."""
    engine = trained(FROZEN._replace(dtype="bf16"), tmp_path / "swap", ("nvme", "cpu"), durability="step")
    expected = masters(engine)
    weights = weights_of(engine)
    assert any(not torch.equal(expected[n], weights[n].float()) for n in expected), "there is something to join"
    engine.destroy()
    export_report = exported(tmp_path / "swap" / "default", tmp_path / "out", "--dtype", name)
    written = tensors(tmp_path / "out")
    want = {n: value.half() for n, value in expected.items()} if name == "fp16" else expected
    want = weights if name == "bf16" else want
    assert export_report["dtype"] == name and written.keys() == want.keys()
    assert_same_tensors(written, want)
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["dtype"]
        == str(written[n0 := next(iter(written))].dtype)[6:]
    ), n0


def test_values_beyond_fp16_are_reported(tmp_path: Path) -> None:
    engine = trained(models.SHALLOW, tmp_path / "swap")
    with torch.no_grad():
        engine.module.transformer.wpe.weight.data[0, :3] = 1e6
    engine.destroy()
    export_report = exported(tmp_path / "swap" / "default", tmp_path / "out", "--dtype", "fp16")
    assert any(notice.startswith("3 values are out of the range") for notice in export_report["notices"])


def test_shards_and_their_index(tmp_path: Path) -> None:
    state = ended(models.SHALLOW, tmp_path / "swap")
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
    written = tensors(tmp_path / "out")
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in written.values()) == export_report["nbytes"]
    for name, file in index["weight_map"].items():
        assert torch.equal(safetensors.torch.load_file(tmp_path / "out" / file)[name], state[name])
    for file in files:
        loaded = safetensors.torch.load_file(tmp_path / "out" / file)
        assert len(loaded) == 1 or sum(t.nbytes for t in loaded.values()) <= 100_000
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same_tensors(state, model.state_dict())


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
    written = tensors(tmp_path / "out")
    del state["head.weight"]  # tied
    assert_same_tensors(state, written)
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
    assert any(not torch.equal(value, written[name]) for name, value in tensors(tmp_path / "before").items())
    shutil.rmtree(run_folder / "rank1")
    result = run(run_folder, tmp_path / "other")
    assert result.exit_code == 2 and "no folder of rank 1 of 2" in result.stderr
    result = CliRunner().invoke(app, ["verify", str(run_folder)])
    assert result.exit_code == 2 and "no folder of rank 1 of 2" in result.stderr


GRID_DISK = ("nvme", "nvme")
TENSOR = Job(tp.Net, tp.one_loss, steps=1, lr=3e-4, dtype="bf16")
GRID_LLAMA = TENSOR._replace(model=tp.llama)
PIPELINE = pipelines.JOB._replace(accumulation=2, steps=1, dtype="bf16")


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with shared_pool(4) as ranks:
        yield ranks


def start(kind: str, folder: Path) -> offload.Engine:
    """An engine that has trained a step."""
    if kind in ("sequence", "transformers"):
        engine = tp.start(GRID_LLAMA if kind == "transformers" else TENSOR, kind, 2, GRID_DISK, folder)
        tp.steps(engine, TENSOR, 2, 0, 1)
        return engine
    plan = Plan(tensor=2 if kind == "both" else 1)
    engine = pipelines.start(PIPELINE, plan, GRID_DISK, folder)
    pipelines.steps(engine, PIPELINE, plan, 0, 1)
    return engine


def save(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """Writes the weights in each way, and returns those of this rank, whole, by their names in the whole model."""
    engine = start(kind, folder / "run")
    weights = {name: tp.whole(value) for name, value in engine.module.state_dict().items()}
    engine.save_checkpoint(folder / "saved")
    engine.save_pretrained(folder / "model")
    engine.save_pretrained(folder / "small", max_shard_size=8192, dtype="fp32")
    assert engine.save_16bit_model(folder / "one", "weights.safetensors")
    engine.destroy(remove=True)
    if kind in ("sequence", "transformers"):
        return weights
    return {name.partition(".")[2]: value for name, value in weights.items()}


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def command(*arguments: object, code: int = 0) -> Any:
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if code in (0, 1) and result.stdout else result.output


@pytest.mark.works("Several ranks", "`save_pretrained` and exports of tensor parallelism, and of a pipeline", "right")
@pytest.mark.parametrize(
    "kind", ["pipeline", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("sequence", "transformers"))]
)
def test_the_weights_are_those_of_one_process(kind: str, ranks: RankPool, tmp_path: Path) -> None:
    check(kind, ranks.run(save, kind, tmp_path), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sequence", "pipeline", "both"])
def test_beside_zero_too(kind: str, four: RankPool, tmp_path: Path) -> None:
    check(kind, four.run(save, kind, tmp_path), tmp_path)


def check(kind: str, tensors_of_ranks: list[dict[str, torch.Tensor]], folder: Path) -> None:
    weights = {name: value for rank in tensors_of_ranks for name, value in rank.items()}
    assert_same_tensors(read(folder / "model"), weights)
    assert_same_tensors(read(folder / "one"), weights)
    masters = read(folder / "small")
    assert masters.keys() == weights.keys()
    for name, value in masters.items():
        # A master halfway between two weights may be split into either.
        torch.testing.assert_close(value.bfloat16(), weights[name], rtol=2**-7, atol=0)
    assert any(not torch.equal(value, weights[name].float()) for name, value in masters.items())
    assert len(list((folder / "small").glob("*.safetensors"))) > 2
    # Files made without an engine, from the parts of the checkpoint.
    command("export", folder / "saved", folder / "exported")
    assert_same_tensors(read(folder / "exported"), weights)
    with pytest.MonkeyPatch.context() as patch:
        testing.replace(patch, "size.export_chunk", 1000)  # chunks begin and end within rows
        command("export", folder / "saved", folder / "in chunks")
    assert_same_tensors(read(folder / "in chunks"), weights)
    assert_same_tensors(get_fp32_state_dict_from_zero_checkpoint(folder / "saved"), masters)
    if kind == "transformers":
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(folder / "exported", dtype="auto")
        assert_same_tensors(loaded.state_dict(), weights)
    # All of it is verified, and a part alone is no model.
    report = command("verify", folder / "saved")
    inspected = command("inspect", folder / "saved")["checkpoints"][0]
    assert inspected["model"]["parameters"] == sum(value.numel() for value in weights.values())
    assert report["whole"] and report["bytes"] >= sum(12 * value.numel() for value in weights.values())
    part = next(path for path in (folder / "saved" / "global_step1").iterdir() if path.is_dir())
    assert "give the folder of the whole checkpoint" in command("export", part, folder / "part", code=2)
    refused = command("export", folder / "saved", folder / "states", "--format", "dcp", code=2)
    assert "weights alone are put together" in refused
    flip(part / "states.rank0.safetensors")
    assert not command("verify", folder / "saved", code=1)["whole"]
    assert "use 0.weight" in command("export", folder / "saved", folder / "damaged", code=1)


def flip(path: Path) -> None:
    """Change a byte of the weights: they are the first tensor of the file."""
    data = bytearray(path.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1
    path.write_bytes(data)


def refuse_a_pickle(folder: Path) -> None:
    import offload.deepspeed as deepspeed

    model = pipelines.stages_of(PIPELINE, Plan())
    content = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "optimizer": {"type": "AdamW"}}
    content["optimizer"]["params"] = {"lr": 1e-3}  # type: ignore[index]
    engine = deepspeed.initialize(model=model, config=content)[0]
    with pytest.raises(UsageError, match=r"knows nothing of pipeline parallelism.*model\.safetensors"):
        engine.save_16bit_model(str(folder))
    engine.save_16bit_model(str(folder), "model.safetensors")
    engine.destroy(remove=True)


def test_a_pickle_of_a_grid_is_refused_for_a_file_of_safetensors(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(refuse_a_pickle, tmp_path)
    assert read(tmp_path).keys() == pipelines.whole().state_dict().keys()


def test_strips_are_the_elements_of_the_whole() -> None:
    """Any range of a tensor that is cut along any dimension, into pieces of any size, also of none."""
    chance = random.Random(0)
    for _ in range(300):
        shape = [chance.randint(1, 4) for _ in range(chance.randint(1, 3))]
        dim = chance.randrange(len(shape))
        cuts = sorted(chance.randint(0, shape[dim]) for _ in range(chance.randint(0, 2)))
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, shape[dim]], strict=True)]
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        pieces = [piece.reshape(-1) for piece in whole.split(sizes, dim)]
        widths = [torch.Size([size, *shape[dim + 1 :]]).numel() for size in sizes]
        start = chance.randrange(whole.numel())
        stop = chance.randint(start + 1, whole.numel())
        out = torch.full((stop - start,), -1)
        for strip in strips(widths, start, stop):
            width = (strip.stop - strip.start) // strip.rows
            rows = pieces[strip.piece][strip.start : strip.stop].view(strip.rows, width)
            out[strip.at :].as_strided((strip.rows, width), (sum(widths), 1)).copy_(rows)
        assert out.tolist() == list(range(start, stop))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A run's folder."""
    ended(models.SHALLOW, tmp_path / "swap")
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
    engine = trained(models.SHALLOW, tmp_path / "swap")
    for command in (
        ["export", str(tmp_path / "swap/default"), str(tmp_path / "out")],
        ["verify", str(tmp_path / "swap/default")],
    ):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2 and f"in use by process {os.getpid()}" in result.stderr
        assert '"run"' not in result.stderr and "wait until it has ended" in result.stderr
    train_step(engine, models.SHALLOW, 2)
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
    trained(models.SHALLOW, tmp_path / "swap").finish({})
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


def test_a_run_of_one_slot_cannot_be_exported(tmp_path: Path) -> None:
    engine = trained(models.SHALLOW, tmp_path / "swap", durability="none")
    shutil.copytree(tmp_path / "swap", tmp_path / "left")  # as a kill leaves it
    engine.destroy()
    result = run(tmp_path / "left" / "default", tmp_path / "out")
    assert result.exit_code == 2 and '"durability": "none"' in result.stderr
