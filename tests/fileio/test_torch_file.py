"""Files of torch.save and of records are read and written as torch does, and a hostile one harms nothing."""

from __future__ import annotations

import functools
import json
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import tempfile
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from offload.checkpoint.foreign import is_foreign, look_foreign
from offload.errors import OffloadError, StoreError, UsageError, printable
from offload.fileio.safetensors_stream import Tensor
from offload.fileio.torch_file import (
    Global,
    Record,
    StoredTensor,
    TorchFileWriter,
    read_pickle,
    read_torch_file,
    write_torch_file,
)
from offload.launch.environment import parse_environment_file
from offload.launch.hosts import expand_counts, expand_nodelist, parse_hostfile, select
from offload.model_io.folder import stored_tensors
from offload.records import DEEPEST, fields, flag, maybe, number, parse, read, rows, table, text, whole

_SPARSE = 10 * 2**40
_DEEP = "[" * 100_000
_NUMBERS = (-1, -(2**63), 0, 1, 2, 3, 2**31, 2**40, 2**62, 2**63, 10**30, 1.0, -0.5, float("inf"), True, None)
_ODD: tuple[Any, ...] = (
    *_NUMBERS,
    "",
    "a",
    "\x1b[31m",
    "..",
    "/etc",
    "\0",
    [],
    {},
    [[]],
    [-1, -1],
    [1.0],
    [True],
    "9" * 5000,
)


class Reader(NamedTuple):
    """A reader, and what makes a file for it."""

    make: Callable[[random.Random, Path], None]
    """Writes one file, or a folder, into an empty folder."""
    read: Callable[[Path], Any]
    """Reads what is in that folder."""


def _flip(dice: random.Random, data: bytes) -> bytes:
    """Returns bytes some of which are changed, left out, or there twice."""
    for _ in range(dice.choice((0, 1, 1, 3, 10))):
        at, end = sorted((dice.randrange(len(data) + 1), dice.randrange(len(data) + 1)))
        middle = dice.choice((bytes([dice.randrange(256)]), data[at:end], b"", b"\0\0\0\0", b"\xff\xff\xff\xff"))
        data = data[:at] + middle + data[at + dice.choice((0, 1, len(middle))) :]
    return data


def _odd(dice: random.Random, value: Any, chance: float = 0.1) -> Any:
    """Returns nested plain values of which some are replaced by others, left out, or there in another's place."""
    if dice.random() < chance:
        return dice.choice(_ODD)
    if isinstance(value, dict):
        items = [(dice.choice(_ODD[-6:]) if dice.random() < chance / 4 else key, each) for key, each in value.items()]
        kept = [item for item in items if dice.random() > chance / 2]
        return type(value)(
            (str(key), _odd(dice, each, chance)) if isinstance(key, list) else (key, _odd(dice, each, chance))
            for key, each in kept
            if not isinstance(key, dict)
        )
    if isinstance(value, list):
        return [_odd(dice, each, chance) for each in value if dice.random() > chance / 2]
    return value


# -- safetensors ---------------------------------------------------------------------------------------


def _make_safetensors(dice: random.Random, folder: Path) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}} if dice.random() < 0.5 else {}
    end = 0
    for index in range(dice.randrange(1, 4)):
        shape = [dice.randrange(4) for _ in range(dice.randrange(3))]
        nbytes = 4 * int(torch.Size(shape).numel())
        begin = end if dice.random() < 0.9 else dice.randrange(8)
        header[f"w{index}"] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, begin + nbytes]}
        end = max(end, begin + nbytes)
    text = json.dumps(_odd(dice, header, dice.choice((0.0, 0.1, 0.3)))).encode()
    if dice.random() < 0.2:
        text = dice.choice(
            (
                text[:-1] + b', "w0": ' + json.dumps(dice.choice([*header.values()])).encode() + b"}",
                _DEEP.encode(),
                b'{"a": ' + _DEEP.encode(),
                b'{"a": ' * 9999,
            )
        )
    text = _flip(dice, text) if dice.random() < 0.3 else text
    length = dice.choice((0, 1, len(text) - 1, 10**8, 2**63, 2**64 - 1)) if dice.random() < 0.2 else len(text)
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + text + bytes(end))
    if dice.random() < 0.1:
        os.truncate(path, dice.choice((0, 7, _SPARSE)))
    if dice.random() < 0.2:
        index = {"weight_map": {name: "part.safetensors" for name in header if name != "__metadata__"}}
        path.rename(folder / "part.safetensors")
        whole = (
            json.dumps(_odd(dice, index)) if dice.random() < 0.8 else dice.choice((_DEEP, '{"weight_map": ' + _DEEP))
        )
        (folder / "model.safetensors.index.json").write_text(whole)


def _read_weights(folder: Path) -> None:
    for stored in stored_tensors(folder).values():
        stored.whole()


# -- torch.save -----------------------------------------------------------------------------------------

_NAMES = (
    *("torch._utils _rebuild_tensor_v2", "torch FloatStorage", "collections OrderedDict", "builtins set", "torch Size"),
    *("builtins bytearray", "builtins range", "torch Tensor", "os system", "builtins eval", "builtins getattr"),
    *("torch._tensor _rebuild_from_type_v2", "torch._utils _rebuild_parameter", "operator mul", "copy deepcopy"),
)


def _instruction(dice: random.Random) -> bytes:
    """Returns one instruction, which may follow any other."""
    number = dice.choice((0, 1, 2, 3, 255, 2**31 - 1))
    return dice.choice(
        (
            *(
                b")",
                b"]",
                b"}",
                b"\x8f",
                b"N",
                b"\x88",
                b"K\x00",
                b"K\x07",
                b"(",
                b"(",
                b"t",
                b"\x85",
                b"\x86",
                b"\x87",
            ),
            *(b"a", b"e", b"s", b"u", b"b", b"R", b"\x81", b"\x92", b"Q", b"0", b"1", b"2", b"\x90", b"\x91", b"\x94"),
            *(
                b"h\x00",
                b"h\x01",
                b"h\x02",
                b"q\x00",
                b"q\x01",
                b"q\x02",
                b"h\x00h\x00\x86q\x00",
                b"h\x00h\x00h\x00\x87q\x00",
            ),
            b"r" + struct.pack("<I", number % 2**32),
            b"j" + struct.pack("<I", number % 2**32),
            b"J" + struct.pack("<i", number),
            b"\x8a\x09" + dice.randbytes(9),
            b"\x8b" + struct.pack("<i", dice.choice((-1, 5, 2**31 - 1))) + b"12345",
            b"X" + struct.pack("<I", dice.choice((1, 1, 1, 2**31))) + b"a",
            b"\x8d" + struct.pack("<Q", dice.choice((1, 2**62))) + b"a",
            b"B" + struct.pack("<I", dice.choice((1, 2**32 - 1))) + b"a",
            b"c" + dice.choice(_NAMES).replace(" ", "\n").encode() + b"\n",
            b"X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ",
            dice.choice(
                (b"I01\n", b"L9L\n", b"F1\n", b"S'a'\n", b"Va\n", b"g0\n", b"p0\n", b"i\n\n", b"o", b"\x82\x01")
            ),
        )
    )


def _program(dice: random.Random) -> bytes:
    """Returns a pickle of any instructions, or one that doubles something often enough to fill any memory."""
    if dice.random() < 0.1:
        begin, double = dice.choice(
            (
                (b")", b"q\x00h\x00\x86"),
                (b"]", b"q\x000]h\x00ah\x00a"),
                (b"]", b"q\x000](h\x00h\x00e"),
                (b"}", b"q\x000}K\x01h\x00sK\x02h\x00s"),
            )
        )
        end = dice.choice(
            (b"", b"q\x00}h\x00K\x01s", b"q\x00cbuiltins\nset\n(h\x00l\x85R", b"q\x00cbuiltins\nset\nh\x00\x85\x85R")
        )
        return b"\x80\x02" + begin + double * dice.choice((40, 60, 300, 3000)) + end + b"."
    return b"\x80\x02" + b"".join(_instruction(dice) for _ in range(dice.randrange(1, 40))) + b"."


def _content(dice: random.Random) -> Any:
    shared = torch.arange(6.0)
    value = {"a": shared.view(2, 3), "b": shared[2:5], "step": torch.tensor(3.0), "plain": [1, (2, "x"), {"y": {1}}]}
    if dice.random() < 0.5:
        del value["plain"]
    return OrderedDict(value) if dice.random() < 0.5 else value


def _torch_file(dice: random.Random, path: Path, content: Any) -> None:
    """Writes what torch.save writes, of which the pickle, a record or the index of records may be changed."""
    torch.save(content, path)
    kind = dice.choice(("program", "pickle", "zip", "records", "sparse"))
    if kind in ("program", "pickle", "records"):
        with zipfile.ZipFile(path) as archive:
            records = [(info.filename, archive.read(info)) for info in archive.infolist()]
        compression = zipfile.ZIP_DEFLATED if kind == "records" and dice.random() < 0.3 else zipfile.ZIP_STORED
        with zipfile.ZipFile(path, "w", compression) as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # two records of one name
            for name, data in records:
                if name.endswith("data.pkl") and kind != "records":
                    data = _program(dice) if kind == "program" else _flip(dice, data)
                if kind == "records" and dice.random() < 0.3:
                    name, data = dice.choice(
                        ((name, b""), (records[0][0], data), ("archive/" + "x" * 999, data), (name, bytes(2**20)))
                    )
                archive.writestr(name, data)
    if kind == "zip":
        data = bytearray(path.read_bytes())
        begin = data.find(b"PK\x01\x02")
        # Numbers of the index and of the end, of which the sizes and offsets of records are four bytes each.
        for _ in range(dice.choice((1, 2, 5))):
            at = dice.randrange(begin, len(data) - 4)
            data[at : at + 4] = dice.choice(
                (b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x40\0\0\0", data[begin + 42 : begin + 46])
            )
        path.write_bytes(data)
    if kind == "sparse":
        os.truncate(path, dice.choice((0, 30, 2**40, _SPARSE)))


def _make_torch(dice: random.Random, folder: Path) -> None:
    if dice.random() < 0.2:
        content = pickle.dumps(_content(dice), dice.choice((2, 4, 5)))
        (folder / ".metadata").write_bytes(_program(dice) if dice.random() < 0.5 else _flip(dice, content))
    else:
        _torch_file(dice, folder / "pytorch_model.bin", _content(dice))


def _read_torch(folder: Path) -> None:
    (path,) = folder.iterdir()
    if path.name == ".metadata":
        read_pickle(path)
        return
    content = read_torch_file(path)
    for value in content.values() if isinstance(content, dict) else ():
        if isinstance(value, StoredTensor):
            value.read()
    _read_weights(folder)


# -- checkpoints of other programs ---------------------------------------------------------------------------


def _make_universal(dice: random.Random, folder: Path) -> None:
    chance = dice.choice((0.02, 0.1, 0.3))
    (folder / "zero" / "w").mkdir(parents=True)
    inner = {"state": {0: {"step": 3}}, "param_groups": [{"lr": 0.1, "betas": [0.9, 0.99]}]}
    optimizer = {"optimizer_state_dict": inner, "param_groups": [{"lr": 0.1}], "loss_scaler": None}
    model = {"module": {}, "param_shapes": [{"w": torch.Size([2, 4])}], "global_steps": 3, "ds_config": {}, "mine": 1}
    files: dict[str, Any] = {"zero/optimizer_state.pt": optimizer, "mp_rank_00_model_states.pt": model}
    files |= {f"zero/w/{name}.pt": {"param": torch.arange(8.0)} for name in ("fp32", "exp_avg", "exp_avg_sq")}
    files["zero/w/step.pt"] = torch.tensor(3.0)
    for name, content in files.items():
        if dice.random() < 0.1:
            _torch_file(dice, folder / name, content)
        else:
            torch.save(_odd(dice, content, chance), folder / name)


@functools.cache
def _saved_by_dcp() -> dict[str, bytes]:
    """Returns the files of a checkpoint of torch.distributed.checkpoint by name."""
    w = torch.arange(8.0).view(2, 4)
    optimizer = {
        "state": {"w": {"exp_avg": w, "exp_avg_sq": w, "step": 3}},
        "param_groups": [{"params": ["w"], "lr": 0.1}],
    }
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a save without a process group
        dcp.save({"model": {"w": w}, "optim": optimizer}, checkpoint_id=folder, no_dist=True)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _make_dcp(dice: random.Random, folder: Path) -> None:
    for name, data in _saved_by_dcp().items():
        (folder / name).write_bytes(_flip(dice, data) if dice.random() < 0.1 else data)
    if dice.random() < 0.1:
        return
    metadata = pickle.loads(_saved_by_dcp()[".metadata"])
    for entry in metadata.state_dict_metadata.values():
        for part in (entry, *getattr(entry, "chunks", ())):
            for name, value in [*vars(part).items()]:
                if dice.random() < 0.1:
                    odd = (
                        dice.choice((list(value), value[:1], [2**40, 1, 8], [dice.choice(_ODD)]))
                        if isinstance(value, tuple)
                        else dice.choice(_ODD)
                    )
                    object.__setattr__(part, name, odd)
    for place in metadata.storage_data.values():
        for name in ("relative_path", "offset", "length"):
            if dice.random() < 0.05:
                object.__setattr__(place, name, dice.choice(_ODD))
    metadata.planner_data = _odd(dice, metadata.planner_data, 0.02)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _make_foreign(dice: random.Random, folder: Path) -> None:
    dice.choice((_make_deepspeed, _make_universal, _make_dcp))(dice, folder)


def _make_deepspeed(dice: random.Random, folder: Path) -> None:
    flat = {name: torch.arange(8.0) for name in ("exp_avg", "exp_avg_sq")}
    optimizer = {
        "zero_stage": 3,
        "partition_count": 1,
        "fp32_flat_groups": [torch.arange(8.0)],
        "optimizer_state_dict": {
            "state": {0: {**flat, "step": 3}},
            "param_groups": [{"lr": 0.1, "betas": [0.9, 0.99]}],
        },
        "loss_scaler": None,
    }
    model = {
        "module": OrderedDict(buffer=torch.ones(2)),
        "buffer_names": ["buffer"],
        "param_shapes": [OrderedDict(w=torch.Size([2, 4]))],
        "shared_params": {},
        "global_steps": 3,
        "ds_config": {"gradient_accumulation_steps": 1, "optimizer": {"type": "Adam"}},
        "ds_version": "0.18",
        "lr_scheduler": {"last_epoch": 3},
        "mine": {"epoch": 1},
    }
    chance = dice.choice((0.02, 0.1))
    for name, content in (
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", _odd(dice, model, chance)),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", {"optimizer_state_dict": _odd(dice, optimizer, chance)}),
    ):
        torch.save(content, folder / name)


def _read_foreign(folder: Path) -> None:
    if is_foreign(folder):
        look_foreign(folder, True, {})


# -- hostfiles and variables ------------------------------------------------------------------------------


def _make_text(dice: random.Random, folder: Path) -> None:
    words = (
        "alpha",
        " ",
        " slots=",
        "=",
        "\n",
        "#",
        "1",
        "9" * 12,
        "9" * 5000,
        "-oProxyCommand=x",
        "user@",
        ":",
        "0,2",
        "@",
    )
    more = (
        "[",
        "]",
        "-",
        "(x",
        ")",
        ",",
        "\x1b[31m",
        "\0",
        "é",
        "٣",
        "HF_TOKEN",
        "export ",
        "\r",
        "\u2028",
        "$(id)",
        "slots=4\n",
    )
    (folder / "text").write_text("".join(dice.choice(words + more) for _ in range(dice.randrange(1, 30))))


def _read_text(folder: Path) -> None:
    text = (folder / "text").read_text()
    for act in (
        lambda: parse_environment_file(text, "text"),
        lambda: select(parse_hostfile("alpha slots=4\nbeta slots=2", "hosts"), text, ""),
        lambda: parse_hostfile(text, "text"),
    ):
        try:
            act()
        except UsageError:
            pass
    for expand in (expand_nodelist, expand_counts):
        try:
            expand(text)
        except ValueError:
            pass


READERS = {
    "safetensors": Reader(_make_safetensors, _read_weights),
    "torch": Reader(_make_torch, _read_torch),
    "foreign": Reader(_make_foreign, _read_foreign),
    "hosts": Reader(_make_text, _read_text),
}


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
    tensors = read_torch_file(tmp_path / "file.pt")
    for name, tensor in CONTENT.items():
        stored = tensors[name]
        assert isinstance(stored, StoredTensor) and stored.shape == tensor.shape and stored.dtype is tensor.dtype
        assert torch.equal(stored.read(), tensor), name
        assert stored.contiguous is tensor.is_contiguous(), name
    assert tensors["view"].offset == tensors["view"].storage.offset + 12


def test_plain_values_are_themselves_and_other_objects_are_records(tmp_path: Path) -> None:
    plain = {"a": [1, 2.5, None, True], ("t",): {"set"}, "o": OrderedDict(x=1), "size": torch.Size([2, 3])}
    torch.save([plain, nn.Linear(2, 2), torch.float32], tmp_path / "file.pt")
    tensors, module, dtype = read_torch_file(tmp_path / "file.pt")
    assert tensors == {**plain, "size": (2, 3)}
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
    tensors = read_torch_file(tmp_path / "file.pt")["x"]
    assert isinstance(tensors, Record) and tensors.args == ("no", "arguments")


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
    for content in (torch.load(tmp_path / "file.pt", weights_only=True), read_torch_file(tmp_path / "file.pt")):
        tensor = content["param"]
        assert torch.equal(tensor.read() if isinstance(tensor, StoredTensor) else tensor, values.view(10, 100))
        assert content["more"] == ["x"]


def test_a_file_of_tensors_in_memory_is_what_torch_reads(tmp_path: Path) -> None:
    plain = {name: tensor for name, tensor in CONTENT.items() if name not in ("parameter", "attributes")}
    write_torch_file(tmp_path / "file.pt", {**plain, "size": torch.Size([2, 3])})
    content = torch.load(tmp_path / "file.pt", weights_only=True)
    assert content["size"] == torch.Size([2, 3])
    for name, tensor in plain.items():
        assert torch.equal(content[name], tensor) and content[name].dtype is tensor.dtype, name


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
    tensors = read_torch_file(tmp_path / "file.pt")
    assert not tensors["a"].contiguous and torch.equal(tensors["b"].read(), torch.ones(2))
    with pytest.raises(StoreError, match=r"a tensor of shape \[1099511627776\] over 4 bytes, which is not read"):
        tensors["a"].read()


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


_LONGEST = 5
"""Seconds that no file may take, by far: the others take a thousandth."""
_MOST_NBYTES = 100_000_000


def _hang(*_: object) -> NoReturn:
    raise AssertionError(f"a file has taken {_LONGEST} s")


def _read(name: str, numbers: range, folder: Path) -> int:
    """Reads made-up files, and returns how many were refused."""
    reader, refused = READERS[name], 0
    before = signal.signal(signal.SIGALRM, _hang)
    try:
        for number in numbers:
            path = folder / str(number)
            path.mkdir()
            reader.make(random.Random(number), path)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            signal.alarm(_LONGEST)
            try:
                reader.read(path)
            except OffloadError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{name} {number} has raised {type(error).__name__}") from error
            finally:
                signal.alarm(0)
            grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak)
            assert grown < _MOST_NBYTES, f"{name} {number} has taken {grown} bytes"
            shutil.rmtree(path)
    finally:
        signal.signal(signal.SIGALRM, before)
    return refused


@pytest.mark.parametrize("name", READERS)
def test_a_made_up_file_is_read_or_refused(name: str, tmp_path: Path) -> None:
    refused = _read(name, range(100), tmp_path)
    # Neither all, which would be refused at the door, nor none.
    assert name == "hosts" or 5 < refused < 100


CHECK = fields(
    {"step": whole(), "name": text("[a-z]+", "a name"), "sizes": rows(whole(1, 9), 1)},
    {"rate": maybe(number(0)), "on": flag, "sums": table(whole())},
)
RIGHT: dict[str, Any] = {
    "step": 3,
    "name": "ab",
    "sizes": [1, 9],
    "rate": None,
    "on": True,
    "sums": {"a": 0},
    "new": [],
}


def test_a_record_that_is_as_expected_comes_back() -> None:
    assert read(b'{"step": 0, "name": "a", "sizes": [1]}', CHECK) == {"step": 0, "name": "a", "sizes": [1]}
    CHECK(RIGHT, "")


def test_another_kind_or_range_is_named() -> None:
    change: dict[str, Any]
    for change, message in (
        ({"step": -1}, "expected a whole number from 0 on as step, got -1"),
        ({"step": True}, "got true"),
        ({"step": 3.0}, r"got 3\.0"),
        ({"step": 1 << 63}, "as step, got 9223372036854775808"),
        ({"name": "A"}, 'expected a name as name, got "A"'),
        ({"sizes": []}, "as sizes, got"),
        ({"sizes": [1, 10]}, r"expected 1 to 9 as sizes\[1\], got 10"),
        ({"sizes": {"0": 1}}, "as sizes, got"),
        ({"rate": float("nan")}, "expected a number from 0 on as rate, got NaN"),
        ({"on": 1}, "expected true or false as on, got 1"),
        ({"sums": {"a": None}}, "as sums/a, got null"),
        ({"sums": [["deep"] * 99]}, "as sums, got .*…"),
    ):
        print(message)
        with pytest.raises(ValueError, match=message):
            CHECK({**RIGHT, **change}, "")


def test_a_field_that_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="the record has no 'step'"):
        CHECK({"name": "a", "sizes": [1]}, "")


def test_json_that_is_too_deep_or_none_is_an_error_at_once() -> None:
    for data in (
        b"[" * 1_000_000,
        b'{"a":' * 300_000,
        b"[" * 2000 + b"]" * 2000,
        b"[{}," * 2000 + b"1" + b"]" * 2000,
        b'"\\"' * 1_000_000,
        b"[" * (DEEPEST + 1) + b"]" * (DEEPEST + 1),
        b"\xff",
        b"",
        b"9" * 10_000,
    ):
        print(data)
        with pytest.raises(ValueError, match=r".+"):
            parse(data)


def test_what_moves_a_terminal_is_shown_as_an_escape() -> None:
    for given, shown in (
        ("plain\ntext\t", "plain\ntext\t"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("\x9b2J\x7f\0", "\\x9b2J\\x7f\\x00"),
        ("a\u202eb\u2028\udc80", "a\\u202eb\\u2028\\udc80"),
        ("Grüße, 模型", "Grüße, 模型"),
    ):
        print(given)
        assert printable(given) == shown and str(OffloadError(given)) == shown
        assert printable("a\nb", lines=False) == "a\\nb"
