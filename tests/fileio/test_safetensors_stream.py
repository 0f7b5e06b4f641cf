"""safetensors files that are written in chunks can be read by the library; damaged ones are refused."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import IoError, StoreError
from offload.fileio.safetensors_stream import DTYPES, SafetensorsWriter, Tensor, read_header, shard
from offload.layout.flat_layout import ParameterSegment, UnitLayout, segment_shards
from offload.sizes import PAGE
from tests.support.oracle import assert_same_tensors


def test_safetensors_reads_what_was_written_in_chunks(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    values = {
        "w": torch.randn(7, 5),
        "b": torch.randn(3).to(torch.bfloat16),
        "n": torch.tensor(5),
        "none": torch.empty(0, 4),
    }
    kinds = {name: Tensor(value.dtype, tuple(value.shape)) for name, value in values.items()}
    with SafetensorsWriter(path, kinds, {"format": "pt"}) as file:
        data = memoryview(values["w"].numpy()).cast("B")
        file.write("w", 60, data[60:])
        file.write("w", 0, data[:60])
        for name in ("b", "n", "none"):
            file.write_tensor(name, values[name])
    tensors = safetensors.torch.load_file(path)
    assert list(tensors) == sorted(tensors) or set(tensors) == set(values)
    assert_same_tensors(tensors, values)
    with safetensors.safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    places, metadata = read_header(path)
    assert places["w"].offset % PAGE == 0 and metadata == {"format": "pt"}
    assert {name: place.tensor for name, place in places.items()} == kinds


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_that_is_named(dtype: torch.dtype, tmp_path: Path) -> None:
    value = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    with SafetensorsWriter(tmp_path / "x", {"x": Tensor(dtype, (5,))}) as file:
        file.write_tensor("x", value)
    assert torch.equal(safetensors.torch.load_file(tmp_path / "x")["x"], value)


@pytest.mark.parametrize("cut", [0, 7, 100, PAGE, PAGE + 10])
def test_a_file_that_is_cut_is_refused(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "x"
    with SafetensorsWriter(path, {"x": Tensor(torch.float32, (5,))}) as file:
        file.write_tensor("x", torch.ones(5))
    os.truncate(path, cut)
    with pytest.raises(StoreError, match="not a complete safetensors file"):
        read_header(path)


@pytest.mark.parametrize("content", [b"\x80\x04pickle.", b"\xff" * 16, b"\x02\0\0\0\0\0\0\0[]"])
def test_what_is_no_such_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(StoreError, match="not a complete safetensors file"):
        read_header(tmp_path / "x")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("precious")
    with pytest.raises(IoError, match="cannot make"):
        SafetensorsWriter(tmp_path / "x", {})
    assert (tmp_path / "x").read_text() == "precious"


@pytest.mark.parametrize("call", ["ftruncate", "posix_fallocate", "pwrite"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_file_that_cannot_be_made_leaves_nothing(
    call: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise error

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch, pytest.raises((IoError, KeyboardInterrupt)) as caught:
        patch.setattr(os, call, fails)
        SafetensorsWriter(tmp_path / "x", {"x": Tensor(torch.float32, (5,))})
    assert getattr(caught.value, "errno", errno.ENOSPC) == errno.ENOSPC
    assert os.listdir("/proc/self/fd") == before and not (tmp_path / "x").exists()


def test_a_dtype_that_torch_has_not_is_named(tmp_path: Path) -> None:
    header = json.dumps({"scale": {"dtype": "F8_E9M9", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    with pytest.raises(StoreError, match=f"{tmp_path / 'x'}: dtype 'F8_E9M9' of 'scale' is not supported"):
        read_header(tmp_path / "x")


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 100))
def test_shards_hold_all_in_order_and_keep_the_size(sizes: list[int], most: int) -> None:
    kinds = {str(i): Tensor(torch.uint8, (size,)) for i, size in enumerate(sizes)}
    shards = shard(kinds, most)
    assert [name for each in shards for name in each] == list(kinds)
    for header in shards:
        assert sum(tensor.nbytes for tensor in header.values()) <= most or len(header) == 1


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 70), st.booleans()), min_size=1, max_size=6), st.data())
def test_chunks_make_up_a_parameter(world_size: int, sizes: list[tuple[int, bool]], data: st.DataObject) -> None:
    """Against the definition: each rank's partition is its cut of the trainable and its cut of the frozen stretch."""
    step = 8 * world_size
    segments: list[ParameterSegment] = []
    end = trainable_stop = 0
    for wanted in (True, False):
        for numel, trainable in sizes:
            if trainable is wanted:
                segments.append(ParameterSegment(str(len(segments)), (numel,), end, numel, trainable))
                end += numel + 3
        end = -(-end // step) * step
        if wanted:
            trainable_stop = end
    layout = UnitLayout("unit", tuple(segments), max(end, step), trainable_stop)
    flat = torch.arange(layout.numel)
    partitions = [
        torch.cat([flat[s.start : s.stop] for s in (layout.trainable(r, world_size), layout.frozen(r, world_size))])
        for r in range(world_size)
    ]
    for segment in segments:
        start = data.draw(st.integers(0, segment.numel))
        stop = data.draw(st.integers(start, segment.numel))
        pieces = list(segment_shards(layout, world_size, segment, start, stop))
        values = [partitions[p.rank][p.start : p.start + p.numel] for p in pieces]
        whole = torch.cat(values) if values else flat[:0]
        assert torch.equal(whole, flat[segment.start + start : segment.start + stop])
        assert [p.position for p in pieces] == [start + sum(q.numel for q in pieces[:i]) for i in range(len(pieces))]


def write_header(path: Path, header: str, nbytes: int = 16) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(nbytes))
    return path


def entry(shape: str = "[4]", begin: str = "0", end: str = "16") -> str:
    return f'{{"dtype": "F32", "shape": {shape}, "data_offsets": [{begin}, {end}]}}'


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("[" * 100_000, "is not a complete safetensors file"),
        ('{"a": ' + "[" * 100_000, "is not a complete safetensors file"),
        (f'{{"a": {entry("[-4, -1]")}}}', "expected numbers from 0 on"),
        (f'{{"a": {entry("[4.0]")}}}', "expected numbers from 0 on"),
        (f'{{"a": {entry("[4, true]")}}}', "expected numbers from 0 on"),
        (f'{{"a": {entry(begin="-0.0")}}}', "expected numbers from 0 on"),
        (f'{{"a": {entry(begin="-16", end="0")}}}', "expected numbers from 0 on"),
        (f'{{"a": {entry("[0, 1" + "0" * 30 + "]", end="0")}}}', "expected numbers from 0 on"),
        (f'{{"a": {entry("[0, 4000000000, 4000000000]", end="0")}}}', "which no tensor has"),
        (f'{{"a": {entry("[[4]]")}}}', "expected numbers from 0 on"),
        (f'{{"a": {entry()}, "b": {entry()}}}', "'b' and 'a' share bytes"),
        (f'{{"a": {entry("[3]", end="12")}, "b": {entry("[2]", begin="8")}}}', "'b' and 'a' share bytes"),
        (f'{{"a": {entry()}, "a": {entry("[2, 2]")}}}', "the key 'a' is there twice"),
        (f'{{"a": {entry()[:-1]}, "shape": [2, 2]}}}}', "the key 'shape' is there twice"),
        ('{"__metadata__": {"format": 1}}', "__metadata__ is not an object of strings"),
        ("7", "is not a complete safetensors file"),
    ],
)
def test_a_header_that_no_writer_makes_is_an_error(header: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=message):
        read_header(write_header(tmp_path / "x", header))


def test_a_sparse_file_of_terabytes_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes((10**8).to_bytes(8, "little") + b"{")
    os.truncate(tmp_path / "x", 10 * 2**40)
    with pytest.raises(StoreError, match="its header is no text"):
        read_header(tmp_path / "x")
