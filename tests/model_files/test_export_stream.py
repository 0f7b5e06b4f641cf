"""An export reads ahead and writes behind: the same files whatever order I/O ends in, one error, bounded memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload import testing
from offload.aio import IoQueue
from offload.errors import IoError
from offload.fileio.safetensors_stream import Tensor
from offload.layout.flat_layout import ParameterSegment, UnitLayout
from offload.layout.modes import MODES
from offload.model_io import save
from offload.model_io.save import ExportPlan, FilePlace, SavedRange, WeightChunk, arranged, make_plan
from offload.model_io.source import StoreSource
from offload.runs.export import export
from offload.sizes import PAGE
from offload.states import State
from tests.support.drives.fault_injection import LateQueue
from tests.support.exported_runs import FROZEN, ended
from tests.support.processes.process_measures import CountedBuffers


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The swap files of a model with trainable and frozen weights in one unit."""
    folder = tmp_path_factory.mktemp("stream")
    ended(FROZEN, folder / "swap")
    return folder / "swap" / "default"


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks and few buffers, so that each buffer is used again and again."""
    testing.replace(monkeypatch, "size.export_chunk", 2048)
    testing.replace(monkeypatch, "size.export_reads", 3)
    testing.replace(monkeypatch, "size.export_writes", 3)


def written(run: Path, out: Path, dtype: str, queue: Any, shard_nbytes: int = 100_000) -> dict[str, bytes]:
    """The files of an export, by name."""
    with closing(StoreSource(run, queue)) as source:
        export(source, out, make_plan(source, dtype, shard_nbytes), queue)
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_requests_that_end_late_and_in_any_order_give_the_same_files(dtype: str, run: Path, tmp_path: Path) -> None:
    with IoQueue() as queue:
        expected = written(run, tmp_path / "out", dtype, queue)
    assert len(expected) > 3, "several files"
    with closing(LateQueue(3, 0.003)) as late:
        assert written(run, tmp_path / "late", dtype, late) == expected


def test_a_file_system_without_direct_io_gives_the_same_files(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with IoQueue() as queue:
        expected = written(run, tmp_path / "out", "fp32", queue)

        def refuses(*_: Any) -> int:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

        testing.replace(monkeypatch, "file.open_again", refuses)
        assert written(run, tmp_path / "cached", "fp32", queue) == expected


@pytest.mark.sample(2)
@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("at", [1, 9, 40])
def test_a_request_that_fails_in_the_middle_is_the_error_and_leaves_nothing(
    operation: str, at: int, run: Path, tmp_path: Path
) -> None:
    flying: list[Any] = []
    calls = [0]

    def fails(name: str, *_: Any) -> bool:
        calls[0] += name == operation
        return calls[0] == at and name == operation

    late = LateQueue(at, 0.002, fails)
    begin: Callable[..., Any] = late._later
    late._later = lambda *request: flying.append(begin(*request)) or flying[-1]  # type: ignore[method-assign,func-returns-value]
    with closing(late), pytest.raises(IoError) as caught:
        written(run, tmp_path / "out", "fp32", late)
    assert caught.value.errno == errno.EIO and f"cannot {operation}" in str(caught.value)
    assert ("out.partial" in str(caught.value)) == (operation == "write"), "the file that failed is named"
    assert flying and all(request.done() for request in flying), "no request has a buffer that is gone"
    assert not list(tmp_path.iterdir())
    with IoQueue() as queue:
        assert written(run, tmp_path / "out", "fp32", queue)


def test_memory_is_that_of_the_buffers_for_any_model(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    buffers = CountedBuffers(save.aligned_empty)
    testing.replace(monkeypatch, "export.buffer", buffers)
    with IoQueue() as queue:
        written(run, tmp_path / "out", "fp32", queue)
    numel, gaps = save._CHUNK_NUMEL, save._GAPS
    values = 4 * save.VALUES  # of a chunk of blocks, which a model without blocks does not use
    assert buffers.most == save._READS * 4 * numel + save._WRITES * (4 * numel + gaps) + values
    assert buffers.most < 104 << 20 and buffers.now == 0


# -- where the bytes of a chunk go --------------------------------------------------------------------


def cuts_of(segment: ParameterSegment, written_twice: set[int], parted: Collection[int]) -> tuple[SavedRange, ...]:
    """Returns what the files have of a parameter: all, or two parts without the element before the last one."""
    name, numel = segment.name, segment.numel
    whole = [SavedRange(0, numel, name)]
    if int(name) in parted and numel > 4:
        whole = [
            SavedRange(numel - 1, numel, f"{name}.last"),
            SavedRange(0, numel // 3, name),
            SavedRange(numel // 3, numel - 2, f"{name}.b"),
        ]
    again = [cut._replace(name=f"{cut.name}.again") for cut in whole]
    return (*whole, *(again if int(name) in written_twice else ()))


def a_plan(
    sizes: list[int], gaps: list[int], written_twice: set[int], shards: int, parted: Collection[int] = ()
) -> ExportPlan:
    segments, end = [], 0
    for index, (numel, gap) in enumerate(zip(sizes, gaps, strict=True)):
        segments.append(ParameterSegment(str(index), (numel,), end + gap, numel, True))
        end += gap + numel
    cuts = {segment.name: cuts_of(segment, written_twice, parted) for segment in segments}
    files: dict[str, dict[str, Tensor]] = {}
    for count, cut in enumerate(cut for segment in segments for cut in cuts[segment.name]):
        files.setdefault(f"file{count % shards}", {})[cut.name] = Tensor(torch.float32, (cut.stop - cut.start,))
    layout = UnitLayout("unit", tuple(segments), -(-max(end, 1) // 8) * 8, -(-max(end, 1) // 8) * 8)
    return ExportPlan(
        layouts=(layout,),
        mode=MODES["fp32"],
        world_size=1,
        frozen=True,
        dtype=torch.float32,
        cuts=cuts,
        buffers={},
        shards=files,
        config=None,
        generation=None,
        metadata={},
        left_out=(),
        unconverted=False,
    )


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 20)), min_size=1, max_size=12),
    st.sets(st.integers(0, 11)),
    st.sets(st.integers(0, 11)),
    st.integers(1, 3),
    st.data(),
)
def test_each_byte_of_a_chunk_goes_to_its_place_in_each_file(
    segments: list[tuple[int, int]], written_twice: set[int], parted: set[int], shards: int, data: st.DataObject
) -> None:
    plan = a_plan([numel for numel, _ in segments], [gap for _, gap in segments], written_twice, shards, parted)
    places, layout = plan.places(), plan.layouts[0]
    start = data.draw(st.integers(0, layout.numel - 1))
    numel = data.draw(st.integers(1, layout.numel - start))
    pieces, runs = arranged(plan, places, WeightChunk(0, 0, start, start, numel, (State.WEIGHT,)))
    room = numel * 4 + save._GAPS
    buffer: list[int | None] = [None] * (room // 4)
    for first, stop, at in pieces:
        for index in range(stop - first):
            assert buffer[at // 4 + index] is None, "pieces do not overlap"
            buffer[at // 4 + index] = start + first + index
    contents = {
        FilePlace(run.place.file, run.place.offset + at): buffer[(run.at + at) // 4]
        for run in runs
        for at in range(0, run.nbytes, 4)
    }
    expected = {
        FilePlace(places[cut.name].file, places[cut.name].offset + 4 * (element - segment.start - cut.start)): element
        for segment in layout.segments
        for cut in plan.cuts[segment.name]
        for element in range(max(start, segment.start + cut.start), min(start + numel, segment.start + cut.stop))
    }
    assert contents == expected
    firsts = [run for run in runs if any(run.at <= at < run.at + run.nbytes for _, _, at in pieces)]
    assert bool(firsts) == bool(pieces) and all(run.at + run.nbytes <= room for run in runs)
    if len(runs) <= save._GAPS // PAGE and not written_twice:
        assert all((run.at - run.place.offset) % PAGE == 0 for run in runs), "O_DIRECT can write them"
