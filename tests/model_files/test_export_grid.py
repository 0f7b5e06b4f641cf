"""The weights of a grid are written as those of one process: by its engine, and from its checkpoints."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import offload
from offload import testing
from offload.cli.main import app
from offload.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from offload.errors import UsageError
from offload.model_io.grid import strips
from tests.support.oracle import Job, assert_same_tensors
from tests.support.ranks import pipelines
from tests.support.ranks import tensor_parallel as tp
from tests.support.ranks.pipelines import Plan
from tests.support.ranks.rank_pool import RankPool, shared_pool

DISK = ("nvme", "nvme")
TENSOR = Job(tp.Net, tp.one_loss, steps=1, lr=3e-4, dtype="bf16")
LLAMA = TENSOR._replace(model=tp.llama)
PIPELINE = pipelines.JOB._replace(accumulation=2, steps=1, dtype="bf16")


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with shared_pool(4) as ranks:
        yield ranks


def start(kind: str, folder: Path) -> offload.Engine:
    """An engine that has trained a step."""
    if kind in ("sequence", "transformers"):
        engine = tp.start(LLAMA if kind == "transformers" else TENSOR, kind, 2, DISK, folder)
        tp.steps(engine, TENSOR, 2, 0, 1)
        return engine
    plan = Plan(tensor=2 if kind == "both" else 1)
    engine = pipelines.start(PIPELINE, plan, DISK, folder)
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
@pytest.mark.parametrize("kind", ["sequence", "pipeline", pytest.param("transformers", marks=pytest.mark.slow)])
def test_the_weights_are_those_of_one_process(kind: str, ranks: RankPool, tmp_path: Path) -> None:
    check(kind, ranks.run(save, kind, tmp_path), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sequence", "pipeline", "both"])
def test_beside_zero_too(kind: str, four: RankPool, tmp_path: Path) -> None:
    check(kind, four.run(save, kind, tmp_path), tmp_path)


def check(kind: str, found: list[dict[str, torch.Tensor]], folder: Path) -> None:
    weights = {name: value for each in found for name, value in each.items()}
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
