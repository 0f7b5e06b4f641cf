"""docs/reference/store-format.md is enough to read a run: this reader knows nothing else, nothing of the package."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offload
from offload import kernels, testing
from offload.aio import Bandwidth
from offload.aio import crc32c as their_crc32c
from offload.states import State
from offload.swapper.store import drives as drives_module
from tests.support import models
from tests.support.oracle import start, train_step, weights_of
from tests.support.ranks import rank_pool

STATES = ("weight", "residual", "exp_avg", "exp_avg_sq")
NUMBERED = (*STATES, "master", "sum", "momentum_buffer", "packed", "moment_scales")
ITEMSIZE = {"bf16": (2, 2, 4, 4), "fp32": (4, 0, 4, 4)}


# -- the reader: json, struct and numpy ----------------------------------------------------------------


def _table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1)
    return table


TABLE = [int(value) for value in _table()]


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def read_safetensors(data: bytes) -> dict[str, np.ndarray]:
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    dtypes = {"U8": "<u1", "I64": "<i8", "F32": "<f4", "I16": "<i2", "BF16": "<u2", "BOOL": "?"}
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            found[name] = np.frombuffer(data[start:end], dtypes[entry["dtype"]]).reshape(entry["shape"])
    return found


class Rank:
    """A rank's commits, by serial: the slots and the blob of each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commits: dict[int, tuple[list[int], dict[str, np.ndarray], int]] = {}
        pages = (folder / "commit").read_bytes()
        for number in (0, 1):
            page = pages[number * 4096 : (number + 1) * 4096]
            magic, version, blob, serial, epoch, _, nbytes, blob_crc, units = struct.unpack_from("<8sIIQQQQII", page)
            if magic != b"OFFLDREC" or version != 3 or crc32c(page[:4092]) != struct.unpack("<I", page[4092:])[0]:
                continue
            assert blob == number
            data = (folder / f"blob.{blob}").read_bytes()[:nbytes]
            if len(data) == nbytes and crc32c(data) == blob_crc:
                slots = [page[56 + unit // 8] >> unit % 8 & 1 for unit in range(units)]
                self.commits[serial] = slots, read_safetensors(data), epoch

    def take(self, serial: int) -> None:
        self.slots, self.blob, self.epoch = self.commits[serial]
        self.manifest = json.loads(self.blob["store.manifest"].tobytes())
        assert self.manifest["format"] == 3 and self.manifest["slots"] == 2

    def states(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the states over all drives, one after the other."""
        stripe, weights = self.manifest["stripes"]["bytes"], self.manifest["stripes"]["weights"]
        row_nbytes, found = stripe * sum(weights), b""
        while nbytes:
            row, within = divmod(offset, row_nbytes)
            drive = 0
            while within >= stripe * sum(weights[: drive + 1]):
                drive += 1
            into = within - stripe * sum(weights[:drive])
            count = min(nbytes, stripe * weights[drive] - into)
            path = Path(self.manifest["drives"][drive], self.manifest["run"], f"rank{self.manifest['rank']}", "states")
            with path.open("rb") as file:
                file.seek(row * stripe * weights[drive] + into)
                found += file.read(count)
            offset, nbytes = offset + count, nbytes - count
        return found

    def extent(self, unit: int, state: str) -> bytes | None:
        """What the commit names, compared with its checksums."""
        extents = self.manifest["extents"][unit].get(state)
        if extents is None:
            return None
        data = b"".join(self.states(*extent) for extent in extents[self.slots[unit]])
        sums = [row for row in self.blob["store.sums"].tolist() if row[:2] == [unit, NUMBERED.index(state)]]
        position = 0
        for _, _, first, nbytes, crc in sums:
            assert first == position and crc32c(data[first : first + nbytes]) == crc
            position += nbytes
        assert position == len(data)
        return data


class Reader:
    """A run at the last commit that all of its ranks hold."""

    def __init__(self, run: Path) -> None:
        self.ranks = [Rank(run / f"rank{rank}") for rank in range(len(list(run.glob("rank*"))))]
        serial = max(set.intersection(*(set(rank.commits) for rank in self.ranks)))
        for rank in self.ranks:
            rank.take(serial)
        assert len({rank.manifest["run_id"] for rank in self.ranks if "run_id" in rank.manifest}) <= 1, "two runs"
        self.layout = self.ranks[0].manifest["layout"]
        assert self.layout["world_size"] == len(self.ranks)
        self.about = self.ranks[0].manifest["about"]

    def flat(self, unit: int, state: str) -> np.ndarray | None:
        """A state of a unit in its flat layout, all ranks together, as raw integers; frozen elements are zero."""
        entry, size = self.layout["units"][unit], len(self.ranks)
        itemsize = ITEMSIZE[self.layout["mode"]][STATES.index(state)]
        complete = np.zeros(entry["numel"], {2: "<u2", 4: "<u4"}[itemsize])
        trainable, frozen = entry["trainable"], entry["numel"] - entry["trainable"]
        for rank in self.ranks:
            data = rank.extent(unit, state)
            if data is None:
                return None
            part, r = np.frombuffer(data, complete.dtype), rank.manifest["rank"]
            cut = trainable // size
            complete[r * cut : (r + 1) * cut] = part[:cut]
            if state == "weight":
                share = frozen // size
                complete[trainable + r * share : trainable + (r + 1) * share] = part[cut:]
        return complete

    def parameters(self) -> dict[str, dict[str, np.ndarray]]:
        """Name to state to array; "master" is the fp32 value of every weight."""
        found: dict[str, dict[str, np.ndarray]] = {}
        for unit, entry in enumerate(self.layout["units"]):
            flats = {
                state: self.flat(unit, state) for state in STATES if ITEMSIZE[self.layout["mode"]][STATES.index(state)]
            }
            for each in entry["parameters"]:
                numel = int(np.prod(each["shape"], dtype=np.int64))
                place = slice(each["start"], each["start"] + numel)
                of = {s: f[place] for s, f in flats.items() if f is not None and (each["trainable"] or s == "weight")}
                master = of["weight"].astype(np.uint32)
                if self.layout["mode"] == "bf16":
                    master = master << 16
                    if each["trainable"]:
                        master = master + of["residual"].view("<i2").astype(np.int32).view(np.uint32)
                of["master"] = master
                found[each["name"]] = {
                    state: (v.view("<f4") if v.dtype == np.uint32 else v).reshape(each["shape"])
                    for state, v in of.items()
                }
        return found

    def facts(self) -> dict[str, Any]:
        return json.loads(self.ranks[0].blob["facts"].tobytes())  # type: ignore[no-any-return]

    def buffers(self) -> dict[str, np.ndarray]:
        blob = self.ranks[0].blob
        return {name.removeprefix("buffer."): value for name, value in blob.items() if name.startswith("buffer.")}


# -- held against the engine ---------------------------------------------------------------------------


def test_the_checksum_is_that_of_the_rfc() -> None:
    assert crc32c(b"123456789") == 0xE3069283 == their_crc32c(b"123456789")


def test_moments_in_8_bits_are_codes_and_scales_of_blocks(tmp_path: Path) -> None:
    job = models.GPT2._replace(dtype="bf16")
    engine = start(job, ("nvme", "nvme"), tmp_path, moments="int8")
    train_step(engine, job, 0)
    train_step(engine, job, 1)
    expected = {
        (name, key): offload.safe_get_full_optimizer_state(parameter, key)
        for name, parameter in engine.module.named_parameters()
        for key in ("exp_avg", "exp_avg_sq")
    }
    engine.destroy()
    reader = Reader(tmp_path / "default")
    (rank,) = reader.ranks
    assert reader.layout["mode"] == "bf16 int8-moments"
    for unit, entry in enumerate(reader.layout["units"]):
        scales = np.frombuffer(rank.extent(unit, "moment_scales") or b"", "<f4").reshape(-1, 2)
        assert entry["trainable"] % 4096 == 0 and not scales[entry["trainable"] // 256 :].any()
        for number, (key, kind) in enumerate((("exp_avg", "<i1"), ("exp_avg_sq", "<u1"))):
            codes = np.frombuffer(rank.extent(unit, key) or b"", kind).astype(np.float32)
            values = codes * np.repeat(scales[:, number], 256)[: len(codes)]
            values = values * values if key == "exp_avg_sq" else values
            for each in entry["parameters"]:
                assert each["start"] % 256 == 0
                found = values[each["start"] : each["start"] + int(np.prod(each["shape"]))]
                moment = expected.pop((each["name"], key))
                assert moment is not None and moment.cpu().numpy().tobytes() == found.tobytes()
    assert not expected


def bits(tensor: torch.Tensor) -> np.ndarray:
    flat: np.ndarray = tensor.detach().contiguous().view(torch.uint8 if tensor.ndim else tensor.dtype).numpy()
    return flat


def of_the_engine(dtype: str, folder: Path) -> tuple[dict[str, torch.Tensor], dict[tuple[str, str], torch.Tensor]]:
    """Train two steps on two drives with states in RAM; weights and states of the end, the latter of this rank."""
    drives_module._STRIPE_BYTES = 16 << 10
    drives_module._measured = lambda folders, nbytes: [Bandwidth(2e9, 2e9), Bandwidth(1e9, 1e9)]
    drives = [str(folder / "a"), str(folder / "b")]
    job = models.MIXTURE._replace(dtype=dtype)
    engine = rank_pool.start(job, ("nvme", "cpu"), folder, nvme_path=drives, durability="step")
    for step in range(3):
        train_step(engine, job, step)
    weights = weights_of(engine)
    states = _states(engine)
    engine.destroy()
    return weights, states


def _states(engine: offload.Engine) -> dict[tuple[str, str], torch.Tensor]:
    """This rank's partitions of every state but the weight, by unit, from the engine's memory."""
    testing.settle(engine, commit=False)
    return {
        (testing.inspect(engine).layouts[unit].name, state.value): resident.clone()
        for (unit, state), resident in testing.inspect(engine).residents.items()
        if state is not State.GRAD
    }


@pytest.fixture
def put_back() -> Any:
    before = drives_module._STRIPE_BYTES, drives_module._measured
    yield
    drives_module._STRIPE_BYTES, drives_module._measured = before


def compare(run: Path, dtype: str, found: list[Any]) -> None:
    """What was read is what the engine had, bit for bit."""
    reader = Reader(run)
    weights, size = found[0][0], len(found)
    parameters = reader.parameters()
    assert parameters.keys() | {"head.weight", "calls"} == weights.keys() and reader.about["tied"] == {
        "head.weight": "embedding.weight"
    }
    frozen = 0
    for unit, entry in enumerate(reader.layout["units"]):
        for state in STATES[1:]:
            parts = [states.get((entry["name"], state)) for _, states in found]
            flat = None if ITEMSIZE[dtype][STATES.index(state)] == 0 else reader.flat(unit, state)
            if flat is None:
                assert parts == [None] * size
            else:
                expected = torch.cat(parts)
                assert flat[: entry["trainable"]].tobytes() == bits(expected).tobytes()
        for each in entry["parameters"]:
            mine = parameters[each["name"]]
            frozen += not each["trainable"]
            assert mine["weight"].shape == tuple(weights[each["name"]].shape)
            assert (
                mine["weight"].tobytes()
                == weights[each["name"]].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
            master = weights[each["name"]].float().contiguous()
            if dtype == "bf16" and each["trainable"]:
                residual = torch.cat([states[entry["name"], "residual"] for _, states in found])
                place = slice(each["start"], each["start"] + master.numel())
                weight = weights[each["name"]].contiguous().view(-1)
                kernels.join_master(weight, residual[place].clone(), master.view(-1))
            assert mine["master"].tobytes() == master.view(-1).view(torch.uint8).numpy().tobytes()
            assert ("exp_avg" in mine) is each["trainable"]
    assert frozen == 5, "both kinds are there"
    if dtype == "bf16":
        off = [name for name, each in parameters.items() if (each["master"].view(np.uint32) & 0xFFFF).any()]
        assert len(off) == len(parameters) - frozen, "masters have more than their weights"
    assert reader.facts()["global_steps"] == 3 == reader.ranks[0].epoch
    assert reader.buffers()["calls"] == weights["calls"].item()


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_run_on_two_drives(dtype: str, tmp_path: Path, put_back: Any) -> None:
    found = [of_the_engine(dtype, tmp_path)]
    sizes = [(tmp_path / drive / "default" / "rank0" / "states").stat().st_size for drive in "ab"]
    assert min(sizes) > 64 << 10 and sizes[0] > 1.5 * sizes[1]
    compare(tmp_path / "a" / "default", dtype, found)


def test_a_run_of_two_ranks(tmp_path: Path) -> None:
    with rank_pool.pool(2) as ranks:
        found = ranks.run(of_the_engine, "bf16", tmp_path)
    compare(tmp_path / "a" / "default", "bf16", found)
