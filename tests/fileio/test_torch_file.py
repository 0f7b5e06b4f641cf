"""Files of `torch.save` are read as torch reads them, and nothing in them is imported, called or executed."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload.errors import StoreError
from offload.fileio.safetensors_stream import Tensor
from offload.fileio.torch_file import Global, Record, StoredTensor, TorchFileWriter, read_torch_file, write_torch_file


def with_attributes() -> torch.Tensor:
    """Returns a tensor that has an attribute, which torch saves in a way of its own."""
    tensor = torch.ones(3)
    tensor.mine = "value"  # type: ignore[attr-defined]
    return tensor


CONTENT: dict[str, Any] = {
    "fp32": torch.arange(12.0).view(3, 4),
    "bf16": torch.ones(3, dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(5),
    "none": torch.empty(0, 3),
    "view": torch.arange(10.0)[3:7],
    "columns": torch.arange(6.0).view(2, 3).t(),
    "parameter": nn.Parameter(torch.ones(2)),
    "attributes": with_attributes(),
}


def test_tensors_are_those_that_torch_reads(tmp_path: Path) -> None:
    torch.save(CONTENT, tmp_path / "file.pt")
    found = read_torch_file(tmp_path / "file.pt")
    for name, tensor in CONTENT.items():
        stored = found[name]
        assert isinstance(stored, StoredTensor) and stored.shape == tensor.shape and stored.dtype is tensor.dtype
        assert torch.equal(stored.read(), tensor), name
        assert stored.contiguous is tensor.is_contiguous(), name
    assert found["view"].offset == found["view"].storage.offset + 12


def test_plain_values_are_themselves_and_other_objects_are_records(tmp_path: Path) -> None:
    plain = {"a": [1, 2.5, None, True], ("t",): {"set"}, "o": OrderedDict(x=1), "size": torch.Size([2, 3])}
    torch.save([plain, nn.Linear(2, 2), torch.float32], tmp_path / "file.pt")
    found, module, dtype = read_torch_file(tmp_path / "file.pt")
    assert found == {**plain, "size": (2, 3)}
    assert isinstance(module, Record) and module.name == "torch.nn.modules.linear.Linear"
    assert module.state["in_features"] == 2 and dtype == Global("torch.float32")


class Calls:
    """An object that an ordinary unpickler would make by a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    "function", [os.system, eval, exec, __import__, getattr, open, torch.load, pickle.loads], ids=lambda f: f.__name__
)
def test_a_call_is_a_record(function: Any, tmp_path: Path) -> None:
    torch.save({"x": Calls(function, "no", "arguments")}, tmp_path / "file.pt")
    found = read_torch_file(tmp_path / "file.pt")["x"]
    assert isinstance(found, Record) and found.args == ("no", "arguments")


def test_what_a_pickle_does_to_a_class_ends_with_its_file(tmp_path: Path) -> None:
    """BUILD on the class that stands for a name, instead of on an object."""
    program = b"\x80\x02cmine\nName\n}X\x04\x00\x00\x00evilI1\nsb."
    for name in ("one.pt", "two.pt"):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("archive/data.pkl", program if name == "one.pt" else b"\x80\x02cmine\nName\n)R.")
    with pytest.raises(StoreError, match="not a complete file"):
        read_torch_file(tmp_path / "one.pt")
    assert read_torch_file(tmp_path / "two.pt").state == {} and not hasattr(Record, "evil")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: data[:-30], "not a complete file of torch.save"),
        (lambda data: data[: len(data) // 2], "saved by a torch older than 1.6"),
        (lambda data: b"\x80\x02]q\x00.", "saved by a torch older than 1.6"),
        (lambda data: data.replace(b"FloatStorage", b"OtherStorage"), "not a complete file of torch.save"),
        (lambda data: b"", "not a complete file of torch.save"),
    ],
)
def test_a_file_that_is_not_whole_is_an_error(spoil: Any, message: str, tmp_path: Path) -> None:
    torch.save({"a": torch.arange(100.0)}, tmp_path / "file.pt")
    (tmp_path / "file.pt").write_bytes(spoil((tmp_path / "file.pt").read_bytes()))
    with pytest.raises(StoreError, match=message):
        read_torch_file(tmp_path / "file.pt")


def test_a_tensor_that_reaches_beyond_its_storage_is_an_error(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(99.0)}, tmp_path / "file.pt")
    with zipfile.ZipFile(tmp_path / "file.pt") as archive, zipfile.ZipFile(tmp_path / "longer.pt", "w") as longer:
        for info in archive.infolist():
            # A shape of (100,) in place of (99,): a pickle has such numbers as one byte.
            longer.writestr(info.filename, archive.read(info).replace(b"K\x63\x85", b"K\x64\x85"))
    with pytest.raises(StoreError, match="reaches beyond its storage"):
        read_torch_file(tmp_path / "longer.pt")


def test_a_file_written_in_chunks_is_what_torch_reads(tmp_path: Path) -> None:
    values = torch.arange(1000.0)
    writer = TorchFileWriter(tmp_path / "file.pt", {"param": Tensor(torch.float32, (10, 100)), "more": ["x"]})
    writer.begin()
    for start, stop in ((0, 300), (300, 999), (999, 1000)):
        writer.write(memoryview(values[start:stop].numpy()).cast("B"))
    writer.close()
    for found in (torch.load(tmp_path / "file.pt", weights_only=True), read_torch_file(tmp_path / "file.pt")):
        tensor = found["param"]
        assert torch.equal(tensor.read() if isinstance(tensor, StoredTensor) else tensor, values.view(10, 100))
        assert found["more"] == ["x"]


def test_a_file_of_tensors_in_memory_is_what_torch_reads(tmp_path: Path) -> None:
    plain = {name: tensor for name, tensor in CONTENT.items() if name not in ("parameter", "attributes")}
    write_torch_file(tmp_path / "file.pt", {**plain, "size": torch.Size([2, 3])})
    found = torch.load(tmp_path / "file.pt", weights_only=True)
    assert found["size"] == torch.Size([2, 3])
    for name, tensor in plain.items():
        assert torch.equal(found[name], tensor) and found[name].dtype is tensor.dtype, name


def write_pickle(path: Path, program: bytes) -> Path:
    """Writes a file of torch.save with this pickle, and a storage 0 of four bytes."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/data/0", b"\0\0\x80\x3f")
    return path


_STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ"
_DOUBLE_TUPLE, _DOUBLE_LIST = b"q\x00h\x00\x86", b"q\x010]h\x01ah\x01a"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (b"})" + _DOUBLE_TUPLE * 60 + b"K\x01s", "a tuple as a key"),
        (b"cbuiltins\nset\n]" + b")" + _DOUBLE_TUPLE * 60 + b"a\x85R", "a tuple as a key"),
        (b"}\x8a\x09" + (2**61 - 1).to_bytes(9, "little") + b"K\x01s", "a large number"),
        (b"]" + _DOUBLE_LIST * 60, "contain one another too often"),
        (b")" + _DOUBLE_TUPLE * 60, "contain one another too often"),
        (b"]q\x00h\x00a", "contain one another too often"),
        (b")" + b"\x85" * 200, "contain one another too often"),
        (b"](" + b"K\x01" * 1000 + b"eq\x00(" + b"cbuiltins\nset\nh\x00\x85R" * 300 + b"t", "copies a container"),
        (b"X" + (2**31).to_bytes(4, "little"), "a value of 2147483648 bytes"),
        (b"cbuiltins\nbytearray\n}b", "attributes of Global"),
        (
            b"ctorch._utils\n_rebuild_tensor_v2\n(" + _STORAGE + b"K\x00(K\x02t(J\xff\xff\xff\xfft\x89}tR",
            "the number -1",
        ),
        (b"ctorch._utils\n_rebuild_tensor_v2\n(" + _STORAGE + b"K\x00(\x88t(K\x01t\x89}tR", "the number True"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n(" + _STORAGE + b"K\x00(K\x01K\x01t(K\x01t\x89}tR", "a stride for none"),
        (b"I99\n", "the instruction INT"),
    ],
)
def test_a_pickle_that_would_take_hours_or_gigabytes_is_refused(program: bytes, message: str, tmp_path: Path) -> None:
    path = write_pickle(tmp_path / "file.pt", b"\x80\x02" + program + b".")
    assert path.stat().st_size < 16_000
    with pytest.raises(StoreError, match=message):
        read_torch_file(path)


def test_a_number_of_the_memo_takes_no_memory(tmp_path: Path) -> None:
    """An ordinary unpickler makes a table of 2**31 entries."""
    assert read_torch_file(write_pickle(tmp_path / "file.pt", b"\x80\x02K\x07r\xff\xff\xff\x7f.")) == 7


def test_a_tensor_of_more_elements_than_its_storage_is_not_read(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1).expand(2**40), "b": torch.ones(2)}, tmp_path / "file.pt")
    found = read_torch_file(tmp_path / "file.pt")
    assert not found["a"].contiguous and torch.equal(found["b"].read(), torch.ones(2))
    with pytest.raises(StoreError, match=r"a tensor of shape \[1099511627776\] over 4 bytes, which is not read"):
        found["a"].read()


def test_records_that_share_bytes_are_refused(tmp_path: Path) -> None:
    torch.save([torch.ones(9), torch.zeros(9)], tmp_path / "file.pt")
    data = bytearray((tmp_path / "file.pt").read_bytes())
    places = [data.index(b"file/data/" + name, data.index(b"PK\x01\x02")) - 4 for name in (b"0", b"1")]
    data[places[1] : places[1] + 4] = data[places[0] : places[0] + 4]
    (tmp_path / "file.pt").write_bytes(data)
    with pytest.raises(StoreError, match="reaches beyond its place"):
        read_torch_file(tmp_path / "file.pt")


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file.pt")
    with pytest.raises(StoreError, match="it is no regular file"):
        read_torch_file(tmp_path / "file.pt")
