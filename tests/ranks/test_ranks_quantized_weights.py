"""Ranks gather weights as codes of 8 bits (`zero_quantized_weights`): all compute with the values of these codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.distributed.gathers import WeightGathers
from offload.distributed.process_group import Mesh
from offload.errors import RankError
from offload.kernels.blocks import BLOCK_FORMATS, dequantize, quantize
from offload.layout.tiers import CodedGathers
from tests.ranks.int8_collectives import BLOCK, BYTES, HOST, JOB, MEMORY, flat, through_codes, train_and_look
from tests.ranks.streamed_device import Streamed
from tests.support.oracle import DTYPES, assert_same_tensors, rounded
from tests.support.ranks.rank_jobs import JOBS
from tests.support.ranks.rank_pool import RankPool, pool, rank_and_size, start


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_of_codes_have_the_codes_of_these_values(dtype: torch.dtype) -> None:
    """Every code beside every scale of a binade: a unit that is gathered again keeps its bits."""
    form = BLOCK_FORMATS["int8"]
    scales = torch.arange(128, 256) / 128 * 2.0 ** torch.tensor([-9.0, 0.0, 5.0])[:, None]
    codes = torch.arange(-127, 128, dtype=torch.float32)
    values = torch.zeros(scales.numel(), 2, 2, BLOCK)
    values[:, 0, :, 0] = values[:, 1, :, 0] = scales.view(-1, 1)
    values[:, 0, 0, 1:] = codes[:127] * scales.view(-1, 1) / 127
    values[:, 1, 1, 1:] = codes[128:] * scales.view(-1, 1) / 127
    once, twice = torch.empty(values.numel(), dtype=dtype), torch.empty(values.numel(), dtype=dtype)
    stored = torch.empty(form.stored_nbytes(values.numel()), dtype=torch.uint8)
    quantize(form, values.view(-1).to(dtype), stored)
    dequantize(form, stored, once)
    again = torch.empty_like(stored)
    quantize(form, once, again)
    dequantize(form, again, twice)
    assert torch.equal(once, twice) and torch.equal(stored, again)
    assert len(set(stored.view(-1, BYTES)[:, :BLOCK].reshape(-1).tolist())) == 255


class TwoShards:
    """Ranks on GPUs as the second of them sees both: the first has the same values."""

    on_gpu, mesh, shard = True, Mesh(shards=2), 1

    def __init__(self, device: Streamed) -> None:
        self.device = device

    def gather(self, whole: torch.Tensor, shard_ranges: list[range], uploaded: Any) -> None:
        assert shard_ranges == [range(3 * 512, 4 * 512)], "the frozen region is gathered as it is"

    def gather_parts(self, everyone: torch.Tensor, mine: torch.Tensor) -> TwoShards:
        assert self.device.uploads
        everyone.view(2, -1)[0].copy_(mine)
        return self

    def order_compute(self) -> None:
        assert self.device.uploads


def test_on_a_gpu_all_work_on_codes_is_submitted_to_the_upload_stream() -> None:
    """Behind the copy of the shard, before what waits for the upload; the host waits for nothing."""
    device = Streamed()
    coded = CodedGathers(torch.float32, (range(256),), 256)
    gathers = WeightGathers(TwoShards(device), device, coded, torch.empty(coded.nbytes, dtype=torch.uint8))  # type: ignore[arg-type]
    whole = torch.randn(512)
    mine = whole[128:256].clone()
    end = gathers.gather(0, whole.view(torch.uint8), [range(512, 1024), range(3 * 512, 4 * 512)], None)  # type: ignore[arg-type]
    assert end is device.end  # type: ignore[comparison-overlap]
    assert torch.equal(whole[:256], through_codes(mine, torch.float32).repeat(2))


@pytest.mark.numeric
@pytest.mark.works("Several ranks", "weights gathered as int8 codes (`zero_quantized_weights`), in any tier", "right")
@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("gpt2", "bf16", "weights"),
        ("adapters", "fp32", "weights"),
        ("adapters", "fp32", "nontrainable_weights"),
        ("adapters", "bf16", "weights nontrainable_weights"),
    ],
)
def test_every_rank_computes_with_the_values_of_the_codes(
    name: str, dtype: str, words: str, ranks: RankPool, tmp_path: Path
) -> None:
    """Those of its own shard too; masters, and a state dict, stay exact."""
    job = JOBS[name]._replace(dtype=dtype, quantized=words)
    one, other = ranks.run(train_and_look, job, tmp_path)
    assert_same_tensors(one.used, other.used)
    kind, changed = DTYPES[dtype], 0
    exact = {name: rounded(values, kind) for name, values in one.stored.items()}
    assert_same_tensors({name: one.state_dict[name] for name in exact}, exact, "a state dict")
    for layout in one.layouts:
        memory, stop = flat(layout, exact), layout.trainable_stop
        expected = memory.clone()
        if "weights" in words.split():
            expected[:stop] = through_codes(memory[:stop], kind)
        if "nontrainable_weights" in words:
            expected[stop:] = through_codes(memory[stop:], kind)
        changed += int((expected != memory).sum())
        for segment in (each for each in layout.segments if each.name in one.used):
            values = expected[segment.start : segment.stop].view(segment.shape)
            assert torch.equal(one.used[segment.name], values), segment.name
    assert changed and len(one.used) > len(one.layouts)


def read_alone(folder: Path) -> str:
    """Rank 0 reads weights while the other makes a step. Returns this rank's error."""
    engine = start(JOB._replace(quantized="weights"), MEMORY, folder)
    try:
        if rank_and_size()[0] == 0:
            engine.module.state_dict()
        else:
            engine.backward(JOB.loss(engine, 0, 0))
            engine.step()
    except RankError as error:
        return str(error)
    return ""


def test_a_rank_that_reads_stored_weights_alone_is_an_error_on_all(tmp_path: Path) -> None:
    with pool(2) as ranks:
        messages = ranks.run(read_alone, tmp_path)
    assert any("accesses a state of a parameter" in message for message in messages) and all(messages)


def edit_one(folder: Path, words: str) -> dict[str, torch.Tensor]:
    """Changes one element of a matrix. Returns masters."""
    job = JOB._replace(quantized=words, dtype="bf16")
    engine = start(job, HOST, folder)
    parameter = engine.module.get_parameter("transformer.h.0.mlp.c_fc.weight")
    with offload.gathered(parameter, modify=True):
        parameter.data.view(-1)[7] = 3.0
    engine.module.load_state_dict(engine.module.state_dict())
    masters = {name: offload.safe_get_full_fp32_param(each) for name, each in engine.module.named_parameters()}
    engine.destroy(remove=True)
    return {name: values for name, values in masters.items() if values is not None}


def test_an_edit_changes_what_the_user_changed_alone(ranks: RankPool, tmp_path: Path) -> None:
    exact = ranks.run(edit_one, tmp_path, "")[0]
    for masters in ranks.run(edit_one, tmp_path, "weights"):
        assert_same_tensors(masters, exact)
