"""The files of a run: format, manifest, drives, folders, removal."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import offload
from offload import kernels, testing
from offload.aio import Bandwidth, IoQueue
from offload.aio import crc32c as crc32c_manifest
from offload.errors import ConfigError, StoreError
from offload.hardware import info
from offload.hardware.system import Mount, folder_notices, mount_of
from offload.model_io.source import StoreSource
from offload.notices import Remark
from offload.runs.verify import RunChecking
from offload.sizes import GIB, MIB, PAGE
from offload.states import State
from offload.swapper.store import Store, StoreSpec, remove_run, run_status
from offload.swapper.store import drives as drives_module
from offload.swapper.store import folder as rank_folder
from offload.swapper.store import format as store_format
from offload.swapper.store.drives import new_manifest, shares
from offload.swapper.store.folder import Lock
from offload.swapper.store.format import read_manifest
from offload.swapper.store.inspection import look
from offload.swapper.store.store import SwapFiles
from tests.store.test_store import PAGE as AWAY_PAGE
from tests.store.test_store import SIZES, TRAINABLE, Contents, Run, blob, created, opened, text_of, update, weight
from tests.store.test_store import STORE_SPEC as AWAY_SPEC
from tests.store.test_store import STORE_SPEC as SPEC
from tests.support import models
from tests.support.drives.filesystems import mounted
from tests.support.oracle import start, train_step, weights_of
from tests.support.processes.cli_in_process import call, run_folder
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
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            tensors[name] = np.frombuffer(data[start:end], dtypes[entry["dtype"]]).reshape(entry["shape"])
    return tensors


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
                nbytes_of_units = -(-units // 8)
                bitmaps = page[56 : 56 + nbytes_of_units], page[56 + nbytes_of_units : 56 + 2 * nbytes_of_units]
                low, high = ([bitmap[unit // 8] >> unit % 8 & 1 for unit in range(units)] for bitmap in bitmaps)
                slots = [one + 2 * two for one, two in zip(low, high, strict=True)]
                self.commits[serial] = slots, read_safetensors(data), epoch

    def take(self, serial: int) -> None:
        self.slots, self.blob, self.epoch = self.commits[serial]
        self.manifest = json.loads(self.blob["store.manifest"].tobytes())
        assert self.manifest["format"] == 3 and self.manifest["slots"] == 2

    def states(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the states over all drives, one after the other."""
        stripe, weights = self.manifest["stripes"]["bytes"], self.manifest["stripes"]["weights"]
        row_nbytes, content = stripe * sum(weights), b""
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
                content += file.read(count)
            offset, nbytes = offset + count, nbytes - count
        return content

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
        values: dict[str, dict[str, np.ndarray]] = {}
        for unit, entry in enumerate(self.layout["units"]):
            flats = {
                state: self.flat(unit, state) for state in STATES if ITEMSIZE[self.layout["mode"]][STATES.index(state)]
            }
            for parameter in entry["parameters"]:
                numel = int(np.prod(parameter["shape"], dtype=np.int64))
                place = slice(parameter["start"], parameter["start"] + numel)
                of = {
                    s: f[place] for s, f in flats.items() if f is not None and (parameter["trainable"] or s == "weight")
                }
                master = of["weight"].astype(np.uint32)
                if self.layout["mode"] == "bf16":
                    master = master << 16
                    if parameter["trainable"]:
                        master = master + of["residual"].view("<i2").astype(np.int32).view(np.uint32)
                of["master"] = master
                values[parameter["name"]] = {
                    state: (v.view("<f4") if v.dtype == np.uint32 else v).reshape(parameter["shape"])
                    for state, v in of.items()
                }
        return values

    def facts(self) -> dict[str, Any]:
        return json.loads(self.ranks[0].blob["facts"].tobytes())  # type: ignore[no-any-return]

    def buffers(self) -> dict[str, np.ndarray]:
        blob = self.ranks[0].blob
        return {name.removeprefix("buffer."): value for name, value in blob.items() if name.startswith("buffer.")}


# -- held against the engine ---------------------------------------------------------------------------


def test_moments_in_8_bits_are_codes_and_scales_of_blocks(tmp_path: Path) -> None:
    """Two steps after a commit, those of units that are on the drive alone are in third slots."""
    job = models.GPT2._replace(dtype="bf16")
    engine = start(job, ("nvme", "nvme"), tmp_path, moments="int8", durability={"every": 2}, speculate=True)
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
    assert reader.layout["mode"] == "bf16 int8-moments" and 2 in rank.slots
    for unit, entry in enumerate(reader.layout["units"]):
        scales = np.frombuffer(rank.extent(unit, "moment_scales") or b"", "<f4").reshape(-1, 2)
        assert entry["trainable"] % 4096 == 0 and not scales[entry["trainable"] // 256 :].any()
        for number, (key, kind) in enumerate((("exp_avg", "<i1"), ("exp_avg_sq", "<u1"))):
            codes = np.frombuffer(rank.extent(unit, key) or b"", kind).astype(np.float32)
            values = codes * np.repeat(scales[:, number], 256)[: len(codes)]
            values = values * values if key == "exp_avg_sq" else values
            for row in entry["parameters"]:
                assert row["start"] % 256 == 0
                section = values[row["start"] : row["start"] + int(np.prod(row["shape"]))]
                moment = expected.pop((row["name"], key))
                assert moment is not None and moment.cpu().numpy().tobytes() == section.tobytes()
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


def compare(run: Path, dtype: str, results: list[Any]) -> None:
    """What was read is what the engine had, bit for bit."""
    reader = Reader(run)
    weights, size = results[0][0], len(results)
    parameters = reader.parameters()
    assert parameters.keys() | {"head.weight", "calls"} == weights.keys() and reader.about["tied"] == {
        "head.weight": "embedding.weight"
    }
    frozen = 0
    for unit, entry in enumerate(reader.layout["units"]):
        for state in STATES[1:]:
            parts = [states.get((entry["name"], state)) for _, states in results]
            flat = None if ITEMSIZE[dtype][STATES.index(state)] == 0 else reader.flat(unit, state)
            if flat is None:
                assert parts == [None] * size
            else:
                expected = torch.cat(parts)
                assert flat[: entry["trainable"]].tobytes() == bits(expected).tobytes()
        for parameter in entry["parameters"]:
            mine = parameters[parameter["name"]]
            frozen += not parameter["trainable"]
            assert mine["weight"].shape == tuple(weights[parameter["name"]].shape)
            assert (
                mine["weight"].tobytes()
                == weights[parameter["name"]].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
            master = weights[parameter["name"]].float().contiguous()
            if dtype == "bf16" and parameter["trainable"]:
                residual = torch.cat([states[entry["name"], "residual"] for _, states in results])
                place = slice(parameter["start"], parameter["start"] + master.numel())
                weight = weights[parameter["name"]].contiguous().view(-1)
                kernels.join_master(weight, residual[place].clone(), master.view(-1))
            assert mine["master"].tobytes() == master.view(-1).view(torch.uint8).numpy().tobytes()
            assert ("exp_avg" in mine) is parameter["trainable"]
    assert frozen == 5, "both kinds are there"
    if dtype == "bf16":
        off = [name for name, each in parameters.items() if (each["master"].view(np.uint32) & 0xFFFF).any()]
        assert len(off) == len(parameters) - frozen, "masters have more than their weights"
    assert reader.facts()["global_steps"] == 3 == reader.ranks[0].epoch
    assert reader.buffers()["calls"] == weights["calls"].item()


def test_a_run_on_two_drives(tmp_path: Path, put_back: Any) -> None:
    results = [of_the_engine("fp32", tmp_path)]
    sizes = [(tmp_path / drive / "default" / "rank0" / "states").stat().st_size for drive in "ab"]
    assert min(sizes) > 64 << 10 and sizes[0] > 1.5 * sizes[1]
    compare(tmp_path / "a" / "default", "fp32", results)


@pytest.mark.slow
def test_a_run_of_two_ranks(tmp_path: Path) -> None:
    with rank_pool.pool(2) as ranks:
        results = ranks.run(of_the_engine, "bf16", tmp_path)
    compare(tmp_path / "a" / "default", "bf16", results)


@pytest.mark.parametrize("damage", [None, b"{", b"\xff\x00"])
def test_a_manifest_that_is_lost_comes_back_from_the_commit(
    damage: bytes | None, tmp_path: Path, queue: IoQueue
) -> None:
    store = created(tmp_path, queue)
    update(store, 1, 5)
    store.commit(1, blob("one"))
    store.close()
    path = tmp_path / "run" / "rank0" / "manifest.json"
    before = path.read_bytes()
    path.unlink() if damage is None else path.write_bytes(damage)
    store, text = opened(tmp_path, queue)
    assert (text, weight(store, 1)) == ("one", 5)
    assert "manifest.json" in store.notices[0] and path.read_bytes() == before
    store.close()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (SPEC._replace(fingerprint={"model": "other"}), r'layout/model is "test" in the run and "other" here'),
        (SPEC._replace(fingerprint={"model": "test", "more": 1}), "layout/more exists in only one of the run"),
        (SPEC._replace(slots=1), "was step, or every N in the run and is none here"),
        (
            SPEC._replace(partitions=(SIZES, {**SIZES, State.EXP_AVG: 4096}, {State.WEIGHT: 4096})),
            "partitions/1/exp_avg",
        ),
        (SPEC._replace(frozen=(0, 4096, 4096)), "shared/1 is 0 in the run and 4096 here"),
        (SPEC._replace(partitions=(SIZES, SIZES), frozen=()), "another model: the run contains 3 units, this model 2"),
    ],
)
def test_another_model_is_refused_with_the_difference(
    spec: StoreSpec, message: str, tmp_path: Path, queue: IoQueue
) -> None:
    store = created(tmp_path, queue)
    store.commit(1, blob("one"))
    store.close()
    with pytest.raises(StoreError, match=message):
        opened(tmp_path, queue, spec)
    opened(tmp_path, queue)[0].close()


@pytest.mark.parametrize(
    ("column", "advice"),
    [
        ({}, "; to change them, call save_checkpoint in the run and load_checkpoint here"),
        ({"tensor_parallel": {"size": 2, "coordinate": 0}}, ""),
    ],
)
def test_a_store_of_another_number_of_ranks_is_an_error_with_the_fix(
    column: dict[str, dict[str, int]], advice: str, tmp_path: Path, queue: IoQueue
) -> None:
    store = created(tmp_path, queue, SPEC._replace(fingerprint={"world_size": 2, **column}))
    store.commit(1, blob("one"))
    store.close()
    asked = "resume with as many ranks as the run had, and with its mics_shard_size"
    with pytest.raises(StoreError, match=rf"world_size is 2 in the run and 1 here; {asked}{advice}$"):
        opened(tmp_path, queue, SPEC._replace(fingerprint={"world_size": 1, **column}))


def test_a_run_id_that_an_older_version_has_left_out_of_its_commits_is_no_damage(
    tmp_path: Path, queue: IoQueue
) -> None:
    """Such a version reads no id and writes none; the file is that of the start."""
    store = created(tmp_path, queue)
    store.commit(1, blob("one"))
    store.close()
    path = tmp_path / "run" / "rank0" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"run_id": "the id"}))
    assert read_manifest(path).run_id == "the id"
    with contextlib.closing(RunChecking(tmp_path / "run")) as checking:
        assert checking.run(queue).whole
    store, text = opened(tmp_path, queue)
    assert text == "one"
    store.close()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"run_id": 7}))
    with pytest.raises(StoreError, match="expected the id of a run as run_id, got 7"):
        read_manifest(path)


@pytest.mark.parametrize("commits", [1, 2])
def test_a_run_of_another_format_is_refused_and_left_as_it_is(commits: int, tmp_path: Path, queue: IoQueue) -> None:
    """As an earlier version has left it: its records and its manifest say so."""
    store = created(tmp_path, queue)
    for number in range(commits):
        store.commit(number, blob("one"))
    store.close()
    rank = tmp_path / "run" / "rank0"
    pages = bytearray((rank / "commit").read_bytes())
    for page in range(0, commits * PAGE, PAGE):
        pages[page + 8 : page + 12] = (2).to_bytes(4, "little")
        pages[page + PAGE - 4 : page + PAGE] = crc32c_manifest(bytes(pages[page : page + PAGE - 4])).to_bytes(
            4, "little"
        )
    (rank / "commit").write_bytes(pages)
    path = rank / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2, "about": {"offload": "0.0.9"}}))
    assert run_status([tmp_path], "run").exists
    with pytest.raises(StoreError, match=r"has store format 2; this version of offload reads format 3 to 5"):
        read_manifest(path)
    store = Store([tmp_path], "run", 0, SPEC, queue)
    message = r"this version of offload reads format 3 to 5: resume with the version that made the run \(0.0.9\)"
    for refused in (store.newest_serial, store.open):
        with pytest.raises(StoreError, match=message):
            refused()
    with pytest.raises(StoreError, match="holds a run that did not end"):
        Store([tmp_path], "run", 0, SPEC, queue).create()
    assert (rank / "commit").read_bytes() == pages and (rank / "states").stat().st_size == SPEC.nbytes


def test_only_pieces_of_tables_raise_the_format(
    tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier version, which would take a piece for the row of an expert, refuses such a store, and no other."""
    parameter = {"name": "table", "shape": [4, 8], "start": 0, "trainable": True, "stack": "table"}
    for number, key in ((3, {"row": 1}), (4, {"rows": [0, 4]})):
        unit = {"name": "unit", "numel": 2048, "trainable": 2048, "parameters": [parameter | key]}
        spec = SPEC._replace(fingerprint={"units": [unit] * 3})
        for folder in (tmp_path / "earlier" / str(number), tmp_path / str(number)):
            store = created(folder, queue, spec)
            store.commit(1, blob("one"))
            store.close()
        rank = folder / "run" / "rank0"
        assert json.loads((rank / "manifest.json").read_text())["format"] == number
        assert struct.unpack_from("<I", (rank / "commit").read_bytes(), 8) == (number,)
        store, text = opened(folder, queue, spec)
        assert text == "one"
        store.close()
        with monkeypatch.context() as earlier:
            earlier.setattr(store_format, "FORMATS", (3,))
            store = Store([tmp_path / "earlier" / str(number)], "run", 0, spec, queue)
            with contextlib.nullcontext() if number == 3 else pytest.raises(StoreError, match="has store format 4"):
                store.open()
            store.close()


def test_a_store_over_three_drives_comes_back(tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    testing.replace(monkeypatch, "size.stripe", 4096)
    paths = [tmp_path / name for name in "abc"]
    store = Store(paths, "run", 0, SPEC, queue)
    store.create()
    for value in (1, 2):
        update(store, 0, value)
        update(store, 1, 10 + value)
        store.commit(value, blob(str(value)))
    store.close()
    sizes = [(path / "run" / "rank0" / "states").stat().st_size for path in paths]
    assert sum(sizes) == SPEC.nbytes and min(sizes) > 0
    store = Store(paths, "run", 0, SPEC, queue)
    assert text_of(store.open()) == "2" and (weight(store, 0), weight(store, 1)) == (2, 12)
    store.close()
    store = Store([paths[0], paths[2], paths[1]], "run", 0, SPEC, queue)
    with pytest.raises(StoreError, match=r"holds drive 2 of store .* expected drive 1"):
        store.open()
    with pytest.raises(StoreError, match="is stored on 3 drives"):
        Store(paths[:2], "run", 0, SPEC, queue).open()


@pytest.mark.parametrize(("nbytes", "moved"), [(3 * MIB, 8 * MIB), (50 * MIB + 1, 50 * MIB), (GIB, 128 * MIB)])
def test_a_small_store_moves_few_bytes_to_measure_its_drives(
    nbytes: int, moved: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []

    def measured(folders: Sequence[Path], nbytes: int, rounds: int) -> list[Bandwidth]:
        passes.append(nbytes)
        return [Bandwidth(1e9, 1e9) for _ in folders]

    testing.replace(monkeypatch, "drives.bandwidths", measured)
    folders = [tmp_path / drive / "run" / "rank0" for drive in "ab"]
    manifest = new_manifest("run", 0, folders, StoreSpec(({State.WEIGHT: nbytes},), 1, {}), None)
    assert len(manifest.weights) == 2 and passes == [moved]


def test_drives_share_by_speed_as_far_as_their_room_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def given(free: list[tuple[int, int]], speeds: list[float], need: int) -> list[int]:
        testing.replace(monkeypatch, "drives.free", lambda _: free)
        return [round(share) for share in shares(["x"] * len(free), speeds, need)]

    assert given([(1, 9 * GIB), (2, 9 * GIB)], [3e9, 1e9], 4 * GIB) == [3 * GIB, GIB]
    assert given([(1, GIB), (2, 9 * GIB)], [3e9, 1e9], 4 * GIB) == [GIB, 3 * GIB]
    assert given([(1, 4 * GIB), (1, 4 * GIB), (2, 4 * GIB)], [1e9, 1e9, 1e9], 8 * GIB) == [2 * GIB, 2 * GIB, 4 * GIB]


# -- drives that are mounted elsewhere ----------------------------------------------------------------


def _moved(root: Path, queue: IoQueue) -> list[Path]:
    """Returns the new places of two drives with a run of one commit, which lie beside each other no more."""
    before, after = [root / "da" / "swap", root / "db" / "swap"], [root / "x" / "da", root / "y" / "deep" / "db"]
    store = Store(before, "run", 0, SPEC, queue)
    store.create()
    store.commit(1, blob("one"))
    store.close()
    for old, new in zip(before, after, strict=True):
        new.parent.mkdir(parents=True)
        old.parent.rename(new.parent / "away")
        (new.parent / "away" / "swap").rename(new)
    return after


def _resumed(paths: Sequence[Path], queue: IoQueue) -> Store:
    store = Store(paths, "run", 0, SPEC, queue)
    store.open()
    return store


def test_drives_that_are_mounted_elsewhere_are_known_from_the_next_start(tmp_path: Path, queue: IoQueue) -> None:
    after = _moved(tmp_path, queue)
    store = _resumed(after, queue)
    store.close()
    rank_files = look(after[0] / "run" / "rank0")
    assert rank_files.wrong == () and rank_files.folders == tuple(path / "run" / "rank0" for path in after)
    assert remove_run(after[0] / "run").not_found == ()
    assert not any((path / "run").exists() for path in after)


@pytest.mark.parametrize("written", [0, 1])
def test_a_kill_while_the_new_places_are_written_loses_nothing(
    written: int, tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = _moved(tmp_path, queue)

    def cut_short(write: Callable[[SwapFiles], None], files: SwapFiles) -> None:
        files.folders, folders = files.folders[:written], files.folders
        write(files)
        files.folders = folders
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        testing.intercept(patch, "store.write_manifests", cut_short)
        _resumed(after, queue)
    if written:
        assert look(after[0] / "run" / "rank0").wrong == ()
    _resumed(after, queue).close()
    for path in after:
        assert look(path / "run" / "rank0").manifest.drives == tuple(map(str, after))  # type: ignore[union-attr]


def test_a_copy_that_is_resumed_is_apart_from_its_original(tmp_path: Path, queue: IoQueue) -> None:
    original, copy = [tmp_path / "a", tmp_path / "b"], [tmp_path / "x" / "a", tmp_path / "y" / "z" / "b"]
    store = Store(original, "run", 0, SPEC, queue)
    store.create()
    store.commit(1, blob("one"))
    store.close()
    for here, there in zip(original, copy, strict=True):
        shutil.copytree(here, there)
    _resumed(copy, queue).close()
    for paths in (original, copy):
        rank_files = look(paths[0] / "run" / "rank0")
        assert rank_files.wrong == () and rank_files.folders == tuple(path / "run" / "rank0" for path in paths)
    remove_run(copy[0] / "run")
    assert look(original[0] / "run" / "rank0").wrong == () and not (copy[1] / "run").exists()


def test_a_removal_names_the_drives_that_it_did_not_find(tmp_path: Path, queue: IoQueue) -> None:
    after = _moved(tmp_path, queue)
    left = remove_run(after[0] / "run").not_found
    assert left == (str(tmp_path / "db" / "swap" / "run" / "rank0"),) and not (after[0] / "run").exists()
    remove_run(after[1] / "run")
    assert not (after[1] / "run").exists()


def test_a_drive_that_was_emptied_is_not_looked_for(tmp_path: Path, queue: IoQueue) -> None:
    store = Store([tmp_path / "a", tmp_path / "b"], "run", 0, SPEC, queue)
    store.create()
    store.close()
    shutil.rmtree(tmp_path / "b" / "run")
    assert remove_run(tmp_path / "a" / "run").not_found == ()


__all__ = ["run_folder"]


def config_of(path: str) -> dict[str, Any]:
    """A config whose states are stored in the folder `path`."""
    tier = {"device": "nvme", "nvme_path": path}
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_optimizer": tier},
        "offload": {"device": "cpu"},
    }


@pytest.fixture
def on_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that counts as one on the drive of /."""
    testing.replace(monkeypatch, "machine.on_root", lambda path: True)
    testing.replace(monkeypatch, "machine.temporary_folder", lambda: str(tmp_path / "temporary"))
    testing.replace(monkeypatch, "machine.mount", lambda path: Mount("/dev/sda1", "ext4", "/"))
    return tmp_path


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that counts as one on a drive of its own."""
    testing.replace(monkeypatch, "machine.on_root", lambda path: False)
    testing.replace(monkeypatch, "machine.mount", lambda path: Mount("/dev/nvme0n1", "xfs", "/mnt/nvme"))
    return tmp_path


def test_a_folder_that_is_there_needs_no_notice(on_root: Path) -> None:
    assert [*folder_notices([str(on_root)])] == []


def test_a_folder_in_an_existing_one_is_named_with_its_drive(on_root: Path) -> None:
    (line,) = folder_notices([str(on_root / "swap")])
    assert isinstance(line, Remark)
    assert line.startswith(f"{on_root / 'swap'} is made for swap files, on the drive of / (/dev/sda1, ")
    assert line.endswith(" free)")


def test_one_in_a_missing_one_there_is_refused_and_the_first_that_exists_is_named(on_root: Path) -> None:
    """Whether the missing one is a mistyped name or a drive that is not mounted: nothing is made on another drive."""
    config = config_of(path=str(on_root / "nmve" / "runs" / "swap"))
    with pytest.raises(ConfigError) as refused:
        offload.initialize(model=nn.Linear(8, 8), config=config)
    assert str(refused.value) == (
        f"nvme_path {on_root}/nmve/runs/swap does not exist, and neither does the folder above it, "
        f"{on_root}/nmve/runs: the first one on that path which exists is {on_root}, on the drive of /; correct the "
        f"path, mount the drive, or make {on_root}/nmve/runs"
    )
    assert not (on_root / "nmve").exists(), "nothing was made"


def test_the_last_folder_is_made_also_behind_a_link(on_root: Path) -> None:
    (on_root / "drive").mkdir()
    (on_root / "nvme").symlink_to("drive")
    engine, *_ = offload.initialize(model=nn.Linear(8, 8), config=config_of(path=str(on_root / "nvme" / "swap")))
    engine.destroy(remove=True)
    assert (on_root / "drive" / "swap").is_dir()


@pytest.mark.parametrize("place", ["a drive of its own", "the temporary folder"])
def test_elsewhere_all_folders_are_made(place: str, on_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSpeed makes them: jobs of clusters have names of their own below $TMPDIR."""
    if place == "the temporary folder":
        testing.replace(monkeypatch, "machine.temporary_folder", lambda: str(on_root))
    else:
        testing.replace(monkeypatch, "machine.on_root", lambda path: False)
    path = on_root / "job" / "swap"
    engine, *_ = offload.initialize(model=nn.Linear(8, 8), config=config_of(path=str(path)))
    engine.destroy(remove=True)
    assert path.is_dir()


def test_a_folder_that_nothing_uses_may_be_anywhere(on_root: Path) -> None:
    """DeepSpeed's configs are handed from machine to machine with their paths."""
    config = config_of(path=str(on_root / "nmve" / "swap"))
    config["zero_optimization"]["offload_optimizer"]["device"] = "cpu"
    engine, *_ = offload.initialize(model=nn.Linear(8, 8), config=config)
    engine.destroy()
    assert not (on_root / "nmve").exists()


def test_offload_train_refuses_it_as_other_wrong_input(on_root: Path) -> None:
    done = call("--steps", "1", "--nvme-path", "nmve/swap")
    assert done.exit_code == 2 and "correct the path, mount the drive, or make" in done.stderr
    assert not Path("nmve").exists()


def test_on_a_drive_of_its_own_a_new_folder_is_no_warning(elsewhere: Path) -> None:
    (line,) = folder_notices([str(elsewhere / "swap")])
    assert isinstance(line, Remark) and "on the drive of /mnt/nvme (/dev/nvme0n1, " in line


def test_a_place_for_drives_without_one_is_a_warning(on_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    testing.replace(monkeypatch, "machine.drive_folders", (str(on_root / "mnt"),))
    (on_root / "mnt" / "nvme").mkdir(parents=True)
    (line,) = folder_notices([str(on_root / "mnt" / "nvme")])
    assert not isinstance(line, Remark) and "no drive is mounted there" in line
    missing = on_root / "mnt" / "nmve"
    with pytest.raises(ConfigError, match=f"there is no {missing}, and no drive is mounted at .*mkdir -p {missing}"):
        offload.initialize(model=nn.Linear(8, 8), config=config_of(path=str(missing)))
    assert not missing.exists(), "nothing was made"
    (finding,) = [each for each in info.findings(info.facts([str(missing)]), probed=True) if "drive of" in each.name]
    assert finding.level == "error" and f"there is no {missing}, and no drive is mounted at" in finding.words


def test_the_mount_of_a_folder_is_the_innermost_one(tmp_path: Path) -> None:
    mount = mount_of("/proc/self")
    assert (mount.kind, mount.point) == ("proc", "/proc")
    assert tmp_path.is_relative_to(mount_of(tmp_path).point)


def test_the_start_of_train_names_the_drive_and_ends_in_warnings(
    on_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    testing.replace(monkeypatch, "machine.drive_folders", (str(on_root / "mnt"),))
    (on_root / "mnt" / "nvme").mkdir(parents=True)
    Path("ds.json").write_text(json.dumps({"offload": {"nvme_path": "mnt/nvme", "durability": "step"}}))
    lines = call("--config", "ds.json", "--steps", "1", "--nvme-path", "drive").stdout.splitlines()
    assert any(line.startswith(f"{on_root / 'drive'} is made for swap files, on the drive of /") for line in lines)
    lines = call("--config", "ds.json", "--steps", "1", "--run", "two").stdout.splitlines()
    warnings = [line for line in lines if line.startswith("warning: ")]
    assert any(f"swap files go to {on_root / 'mnt' / 'nvme'} on the drive of /" in line for line in warnings)
    begin = next(number for number, line in enumerate(lines) if line.startswith("gpt2-tiny: "))
    assert lines[begin - len(warnings) : begin] == warnings, "after all that only informs"


def test_a_model_folder_that_is_not_there_is_told_with_its_whole_path(on_root: Path) -> None:
    done = call("--model", "./missing", "--steps", "1")
    assert (
        done.exit_code == 2 and f"the model folder {on_root / 'missing'} does not exist; give a folder" in done.stderr
    )
    done = call("--model", "./text.py", "--steps", "1")
    assert f"the model folder {on_root / 'text.py'} is a file; give" in done.stderr


OF_TWO = StoreSpec(AWAY_SPEC.partitions, 2, {"world_size": 2, "units": []}, frozen=AWAY_SPEC.frozen)


@pytest.mark.usefixtures("equal_drives")
def test_ranks_that_have_changed_places_are_refused(tmp_path: Path, queue: IoQueue) -> None:
    """Their files look alike: every checksum is right, and every weight would be in a wrong place."""
    for rank in range(2):
        store = Store([tmp_path], "run", rank, OF_TWO, queue)
        store.create()
        store.commit(0, {})
        store.close()
    run = tmp_path / "run"
    for name, target in (("rank0", "aside"), ("rank1", "rank0"), ("aside", "rank1")):
        (run / name).rename(run / target)
    told = r"rank0 has the swap files of rank 1, expected those of rank 0: .* put the files of each rank back"
    store = Store([tmp_path], "run", 0, OF_TWO, queue)
    assert store.newest_serial() == 1
    with pytest.raises(StoreError, match=told):
        store.open()
    with pytest.raises(StoreError, match=told):
        StoreSource(run, queue)
    with pytest.raises(StoreError, match=told):
        RunChecking(run)


def run_of_two_commits(root: Path, queue: IoQueue, drives: int = 1) -> Run:
    commits: dict[str, Contents] = {}
    run = Run(root, drives, queue, commits)
    run.create()
    run.commit()
    run.update(0)
    run.commit()
    return run


@pytest.mark.usefixtures("equal_drives")
def test_a_run_that_is_mounted_for_reads_is_verified_and_read(tmp_path: Path, queue: IoQueue) -> None:
    """As a snapshot, or a drive that is about to fail."""
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=1m", "tmpfs") as place:
        run = run_of_two_commits(place, queue)
        folder = run.store.folders[0].parent
        run.store.close()
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        with contextlib.closing(RunChecking(folder)) as checking:
            with pytest.raises(StoreError, match="is in use by another process"):
                Lock(folder / "rank0")
            assert checking.run(queue, lambda _: None).whole
        (states,) = (path for path in folder.rglob("states"))
        before = states.read_bytes()
        subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
        states.write_bytes(bytes(len(before)))
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        with contextlib.closing(RunChecking(folder)) as checking:
            (rank,) = checking.run(queue, lambda _: None).ranks  # type: ignore[union-attr]
        assert rank.damages and not rank.wrong, "that no note can be written is no damage"


@pytest.mark.usefixtures("equal_drives")
def test_a_run_of_another_user_is_read_and_not_resumed(
    tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere, so the refusals are made up."""
    run = run_of_two_commits(tmp_path, queue)
    folder = run.store.folders[0].parent

    def refuse(path: Path, **_: object) -> rank_folder.DirLock:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    testing.replace(monkeypatch, "folder.lock", refuse)
    with pytest.raises(StoreError, match=r"in use by process \d+ on .*wait until it has ended: a run is read"):
        RunChecking(folder)
    run.store.close()
    with contextlib.closing(RunChecking(folder)) as checking:
        assert checking.run(queue, lambda _: None).whole
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(StoreError, match="is not writable; set nvme_path to one that is"):
        run.resume()
    with pytest.raises(StoreError, match="is another user's, who alone may change it"):
        Lock(folder / "rank0", "delete")


@pytest.mark.usefixtures("equal_drives")
def test_a_lock_file_that_a_cleaner_deletes_lets_nobody_in(tmp_path: Path, queue: IoQueue) -> None:
    """Such programs delete files that nobody has changed for days."""
    run = run_of_two_commits(tmp_path, queue)
    folder = run.store.folders[0]
    (folder / "lock").unlink()
    with pytest.raises(StoreError, match=f"{folder} is in use by another process"):
        Lock(folder)
    run.update(0)
    run.commit()
    run.store.close()
    run.resume()
    run.compare()
    run.store.close()


@pytest.mark.usefixtures("equal_drives")
@pytest.mark.parametrize("drive", [0, 1])
def test_swap_files_that_are_deleted_beneath_a_run_are_told_once(
    drive: int, tmp_path: Path, queue: IoQueue, caplog: pytest.LogCaptureFixture
) -> None:
    """The process can still save its states, which are in files without a name."""
    run = run_of_two_commits(tmp_path, queue, drives=2)
    states = run.store.folders[drive] / "states"
    with caplog.at_level(logging.WARNING, "offload"):
        run.update(0)
        run.commit()
        assert not caplog.messages
        os.replace(states, states.with_name("moved"))
        for _ in range(2):
            run.update(0)
            run.commit()
    told = f"offload: {states} was deleted or moved while the run uses it: the run cannot be resumed after this process"
    assert [message.startswith(told) for message in caplog.messages] == [True]
    run.compare()
    run.store.close()


@pytest.mark.usefixtures("equal_drives")
def test_a_copy_of_all_drives_is_read_without_the_originals(
    tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest has the paths of the original's drives, which the original goes on writing."""
    testing.replace(monkeypatch, "size.stripe", AWAY_PAGE)
    run = run_of_two_commits(tmp_path / "here", queue, drives=2)
    run.store.close()
    shutil.copytree(tmp_path / "here", tmp_path / "copy")
    run.resume()
    for _ in range(2):
        for unit in TRAINABLE:
            run.update(unit)
        run.commit()
    run.store.close()
    copy = tmp_path / "copy" / "drives" / "0" / "run"
    with contextlib.closing(RunChecking(copy)) as checking:
        assert checking.run(queue, lambda _: None).whole
    shutil.rmtree(tmp_path / "copy" / "drives" / "1")
    with contextlib.closing(RunChecking(copy)) as checking:
        (rank,) = checking.run(queue, lambda _: None).ranks  # type: ignore[union-attr]
    missing = f"{tmp_path}/copy/drives/1/run/rank0: the folder is missing: drive 1 of 2"
    assert missing in [str(wrong) for wrong in rank.wrong]
    assert not rank.damages


@pytest.mark.usefixtures("equal_drives")
def test_a_run_is_found_by_a_path_without_its_name(
    tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `offload verify .`; the folders on the other drives have the name."""
    run = run_of_two_commits(tmp_path, queue, drives=2)
    run.store.close()
    monkeypatch.chdir(run.store.folders[0].parent)
    for path in (Path(), Path("rank0") / ".."):
        with contextlib.closing(RunChecking(path)) as checking:
            assert checking.run(queue, lambda _: None).whole
    remove_run(Path())
    assert not any((tmp_path / "drives").rglob("states"))
