"""Files that somebody has made to harm whoever reads them: each number is another file, the same one every time.

Half of them are files as they are written, in which something is replaced by what it must not be; the others are put
together of what a reader may meet at that place, such as instructions of a pickle in any order.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import random
import struct
import tempfile
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp

from offload.checkpoint.foreign import is_foreign, look_foreign
from offload.errors import UsageError
from offload.fileio.torch_file import StoredTensor, read_pickle, read_torch_file
from offload.launch.environment import parse_environment_file
from offload.launch.hosts import expand_counts, expand_nodelist, parse_hostfile, select
from offload.model_io.folder import stored_tensors

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
    for number in range(dice.randrange(1, 4)):
        shape = [dice.randrange(4) for _ in range(dice.randrange(3))]
        nbytes = 4 * int(torch.Size(shape).numel())
        begin = end if dice.random() < 0.9 else dice.randrange(8)
        header[f"w{number}"] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, begin + nbytes]}
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
