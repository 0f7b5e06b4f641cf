"""Files of runs and checkpoints as an enemy makes them: changed where they mean something, with right checksums.

Each forgery changes one thing of a run, a checkpoint or a log, and names the commands that then read it. A command must
end with an exit code, one line for an error, no control characters, in seconds and without much memory:

    python -m tests.cli.forgery 10000      # as many forgeries, from seed 0 on; prints what went wrong
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import io
import json
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from offload.aio import crc32c
from offload.sizes import MIB, PAGE

SECONDS, NBYTES = 5, 100 * MIB
"""What a command may take at most: processor time, and memory beside what it takes of the intact files."""
_ESCAPE = "\x1b[31mred\x1b]0;title\x07"
_NAMES = ["", ".", "..", "/etc/passwd", "../../x", "a/b", "a\0b", _ESCAPE, "\udc80", "x" * 5000, "manifest.json", "²"]
_NUMBERS: list[Any] = [-1, 0, 1, 2, 7, 255, 4096, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63)]
_OTHERS: list[Any] = [None, True, False, 1.5, 0.0, -0.0, 4096.0, 1e308, [], {}, [[]], [None], {"": None}, "", "7"]


class Outcome(NamedTuple):
    """What a command did with a forgery."""

    forgery: str
    command: str
    wrong: str
    """Empty if it did as it must."""


# -- the intact files ---------------------------------------------------------------------------------


def make_files(root: Path) -> None:
    """Trains for three steps, and leaves a run in swap files, two checkpoints and a log below `root`."""
    import torch
    from torch import nn

    import offload

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("scale", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.second(self.first(x))
            return hidden

    torch.manual_seed(0)
    (root / "swap").mkdir(parents=True)
    engine = offload.initialize(
        model=Model(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme"},
                "offload_optimizer": {"device": "nvme"},
            },
            "offload": {
                "nvme_path": str(root / "swap"),
                "run": "run",
                "device": "cpu",
                "host_memory": "64MiB",
                "log": str(root / "log.jsonl"),
            },
        },
    )[0]
    engine.client_state["rows"] = {"a": (1, 2), "b": [float("inf")]}
    for step in range(3):
        loss = engine(torch.ones(2, 8)).square().mean()
        engine.backward(loss)
        engine.step()
        if step:
            engine.save_checkpoint(str(root / "ck"), tag=f"step{step}", client_state={"x": [1, {"y": 2}]})
    engine.destroy(remove=False)
    _add_undo(root / "swap" / "run" / "rank0")


def _add_undo(rank: Path) -> None:
    """Writes the copy of a slot that the newest record names, as an edit on a grid makes it."""
    from offload.states import State
    from offload.swapper.store.format import own_nbytes
    from offload.swapper.store.inspection import look
    from offload.swapper.store.recovery import _UndoEntry

    rank_files = look(rank)
    assert rank_files.manifest is not None
    record, places = rank_files.commits[0].record, rank_files.manifest.spec.places()[0][State.WEIGHT]
    place = places[record.slots[0]].extents[0]
    with (rank / "states").open("rb") as states:
        states.seek(place.offset)
        data = states.read(own_nbytes(places))
    (rank / "undo").write_bytes(_UndoEntry((record.serial, record.time_ns), 0, State.WEIGHT, len(data)).pack() + data)


# -- changes ------------------------------------------------------------------------------------------


def _value(rng: random.Random) -> Any:
    """A value that a reader does not expect."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(_NAMES)
    if kind == 1:
        return rng.choice(_OTHERS)
    if kind == 2:
        deep: Any = rng.choice(_NUMBERS)
        for _ in range(rng.choice([3, 30, 200])):
            deep = [deep] if rng.random() < 0.5 else {"a": deep}
        return deep
    return rng.choice(_NUMBERS)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _places(inner, (*path, key))


def change(rng: random.Random, value: Any) -> tuple[Any, str]:
    """Returns JSON with one or two changes, and what they are."""
    value = json.loads(json.dumps(value))
    told = []
    for _ in range(rng.choice([1, 1, 1, 2])):
        paths = list(_places(value))
        if not paths:
            return _value(rng), "all of it"
        path = rng.choice(paths)
        inner = value
        for key in path[:-1]:
            inner = inner[key]
        key, kind = path[-1], rng.randrange(5)
        if kind == 0:
            del inner[key]
        elif kind == 1 and isinstance(inner, dict):
            inner[rng.choice(_NAMES)] = inner.pop(key)
        elif kind == 2 and isinstance(inner, list):
            inner.insert(rng.randrange(len(inner) + 1), rng.choice([inner[key], _value(rng)]))
        elif kind == 3 and type(inner[key]) is int:
            inner[key] += rng.choice([-1, 1, 32, 2048, -2048, 4096, -4096])
        else:
            inner[key] = _value(rng)
        told.append("/".join(map(str, path)) + f" ({kind})")
    return value, ", ".join(told)


def _text(value: Any) -> bytes:
    return json.dumps(value).encode(errors="replace")


def _write_record(rank: Path, page: int, **fields: int) -> None:
    """Writes fields of a record with the checksum that is then right."""
    form, names = (
        struct.Struct("<8sIIQQQQII"),
        ("magic", "version", "blob", "serial", "step", "time_ns", "nbytes", "crc", "units"),
    )
    data = bytearray((rank / "commit").read_bytes())
    body = data[page * PAGE : (page + 1) * PAGE - 4]
    held = dict(zip(names, form.unpack_from(body), strict=True)) | fields
    form.pack_into(body, 0, *(held[name] for name in names))
    data[page * PAGE : (page + 1) * PAGE] = body + struct.pack("<I", crc32c(bytes(body)))
    (rank / "commit").write_bytes(data)


def _newest(rank: Path) -> tuple[int, int]:
    """The page of the newest record, and the bytes of its blob."""
    data, form = (rank / "commit").read_bytes(), struct.Struct("<8sIIQQQQII")
    heads = [form.unpack_from(data, page * PAGE) for page in (0, 1)]
    page = max((0, 1), key=lambda number: heads[number][3])
    return page, heads[page][6]


def _write_blob(rank: Path, edit: Callable[[dict[str, Any], dict[str, bytes]], None]) -> None:
    """Writes the newest blob again, and its record: `edit` changes its header, and the bytes of its tensors."""
    page, nbytes = _newest(rank)
    data = (rank / f"blob.{page}").read_bytes()[:nbytes]
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    tensors = {
        name: data[8 + length :][slice(*entry["data_offsets"])]
        for name, entry in header.items()
        if name != "__metadata__"
    }
    before = {name: len(each) for name, each in tensors.items()}
    edit(header, tensors)
    if {name: len(each) for name, each in tensors.items()} != before:
        end = 0
        for name, tensor in tensors.items():
            width = {"U8": 1, "I64": 8, "F32": 4}.get(header[name]["dtype"], 1)
            shape = [len(tensor) // 40, 5] if name == "store.sums" else [len(tensor) // width]
            header[name] |= {"shape": shape, "data_offsets": [end, end + len(tensor)]}
            end += len(tensor)
    text = _text(header)
    packed = struct.pack("<Q", len(text)) + text + b"".join(tensors.values())
    (rank / f"blob.{page}").write_bytes(packed)
    _write_record(rank, page, nbytes=len(packed), crc=crc32c(packed))


def _in_blob(name: str) -> Callable[[random.Random, Path], str]:
    """A change of a tensor of the blob that is JSON."""

    def forge(rng: random.Random, rank: Path) -> str:
        told = ""

        def edit(_: dict[str, Any], tensors: dict[str, bytes]) -> None:
            nonlocal told
            value, told = change(rng, json.loads(tensors[name]))
            tensors[name] = _text(value)

        _write_blob(rank, edit)
        return told

    return forge


def _sums(rng: random.Random, rank: Path) -> str:
    told = ""

    def edit(_: dict[str, Any], tensors: dict[str, bytes]) -> None:
        nonlocal told
        rows = [list(row) for row in struct.iter_unpack("<5q", tensors["store.sums"])]
        row, column = rng.randrange(len(rows)), rng.randrange(5)
        if rng.random() < 0.2:
            rows.insert(rng.randrange(len(rows)), rows[row]) if rng.random() < 0.5 else rows.pop(row)
            told = f"a row of {row}"
        else:
            rows[row][column] = rng.choice([n for n in _NUMBERS if -(2**63) <= n < 2**63])
            told = f"row {row}, column {column}: {rows[row][column]}"
        tensors["store.sums"] = b"".join(struct.pack("<5q", *row) for row in rows)

    _write_blob(rank, edit)
    return told


def _header(rng: random.Random, rank: Path) -> str:
    told = ""

    def edit(header: dict[str, Any], _: dict[str, bytes]) -> None:
        nonlocal told
        value, told = change(rng, header)
        header.clear()
        header.update(value if isinstance(value, dict) else {})

    _write_blob(rank, edit)
    return told


def _record(rng: random.Random, rank: Path) -> str:
    name = rng.choice(["version", "blob", "serial", "step", "time_ns", "nbytes", "crc", "units"])
    most = 2 ** (32 if name in ("version", "blob", "crc", "units") else 64)
    value = rng.choice([n for n in _NUMBERS if 0 <= n < most])
    _write_record(rank, rng.randrange(2), **{name: value})
    return f"{name} is {value}"


def _json_file(name: str) -> Callable[[random.Random, Path], str]:
    """A change of a file that is JSON, or that is then written as JSON."""

    def forge(rng: random.Random, folder: Path) -> str:
        path = folder / name
        value, told = change(rng, json.loads(path.read_text()) if path.is_file() else {"steps": 3, "job": {"a": 1}})
        path.write_bytes(_text(value))
        return told

    return forge


def _undo(rng: random.Random, rank: Path) -> str:
    data = (rank / "undo").read_bytes()
    value, told = change(rng, json.loads(data[: PAGE - 4]))
    body = _text(value).ljust(PAGE - 4)[: PAGE - 4]
    (rank / "undo").write_bytes(body + struct.pack("<I", crc32c(body)) + data[PAGE:])
    return told


def _seal(checkpoint: Path, manifest: dict[str, Any]) -> None:
    """Writes the manifest of a checkpoint with the checksum that is then right."""
    manifest.pop("crc32c", None)
    total = crc32c(json.dumps(manifest, sort_keys=True).encode())
    (checkpoint / "manifest.json").write_bytes(_text({**manifest, "crc32c": total}))


def _checkpoint(rng: random.Random, folder: Path) -> str:
    checkpoint = folder / "step2"
    value, told = change(rng, json.loads((checkpoint / "manifest.json").read_text()))
    if isinstance(value, dict):
        _seal(checkpoint, value)
    return told


def _progress(rng: random.Random, folder: Path) -> str:
    checkpoint, name = folder / "step2", "progress.rank0.safetensors"
    import safetensors.torch
    import torch

    tensors = safetensors.torch.load((checkpoint / name).read_bytes())
    key = rng.choice(["facts", "facts", "client_state"])
    value, told = change(rng, json.loads(bytes(tensors[key].numpy())))
    tensors[key] = torch.frombuffer(bytearray(_text(value)), dtype=torch.uint8)
    data = safetensors.torch.save(tensors)
    (checkpoint / name).write_bytes(data)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][name] = {"nbytes": len(data), "crc32c": {"": crc32c(data)}}
    _seal(checkpoint, manifest)
    return f"{key}: {told}"


def _states(rng: random.Random, folder: Path) -> str:
    checkpoint, name = folder / "step2", "states.rank0.safetensors"
    data = (checkpoint / name).read_bytes()
    length = int.from_bytes(data[:8], "little")
    value, told = change(rng, json.loads(data[8 : 8 + length]))
    text = _text(value).ljust(length)
    packed = struct.pack("<Q", len(text)) + text + data[8 + length :]
    (checkpoint / name).write_bytes(packed)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][name]["nbytes"] = len(packed)
    _seal(checkpoint, manifest)
    return told


def _latest(rng: random.Random, folder: Path) -> str:
    (folder / "latest").write_bytes(name := rng.choice(_NAMES).encode(errors="replace"))
    return repr(name[:20])


def _log(rng: random.Random, root: Path) -> str:
    lines = (root / "log.jsonl").read_text().splitlines()
    at = rng.randrange(len(lines))
    value, told = change(rng, json.loads(lines[at]))
    lines[at] = _text(value).decode()
    (root / "log.jsonl").write_text("\n".join(lines) + "\n")
    return told


def _raw(rng: random.Random, root: Path) -> str:
    """Damage of a file's bytes, or something else in its place."""
    path = rng.choice(sorted(each for each in root.rglob("*") if each.is_file()))
    kind = rng.choice(["cut", "noise", "fifo", "folder", "link", "loop", "holes", "deep", "gone", "escapes", "mode"])
    data = path.read_bytes()
    path.unlink()
    if kind == "cut":
        path.write_bytes(data[: rng.randrange(len(data) + 1)])
    elif kind == "noise":
        changed = bytearray(data or b"\0")
        for _ in range(rng.choice([1, 8, 64])):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        path.write_bytes(changed)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in ("link", "loop"):
        path.symlink_to("/etc/passwd" if kind == "link" else path.name)
    elif kind == "holes":
        path.write_bytes(data)
        os.truncate(path, 10 * 10**12)
    elif kind == "deep":
        path.write_bytes(rng.choice([b"[", b'{"a":', b'"\\"']) * 100_000)
    elif kind == "escapes":
        path.write_text(_ESCAPE * 10)
    elif kind == "mode":
        path.write_bytes(data)
        path.chmod(rng.choice([0, 0o666, 0o222]))
    return f"{kind} at {path.relative_to(root)}"


class Kind(NamedTuple):
    """A kind of forgery."""

    folder: str
    """Of the file that changes, below the root."""
    forge: Callable[[random.Random, Path], str]
    reads: str
    """Who reads it: commands on a run, on checkpoints, or on a log."""


KINDS = {
    "record": Kind("swap/run/rank0", _record, "run"),
    "manifest of a store": Kind("swap/run/rank0", _json_file("manifest.json"), "run"),
    "manifest in a blob": Kind("swap/run/rank0", _in_blob("store.manifest"), "run"),
    "written bytes": Kind("swap/run/rank0", _in_blob("store.written"), "run"),
    "facts of a commit": Kind("swap/run/rank0", _in_blob("facts"), "run"),
    "checksums": Kind("swap/run/rank0", _sums, "run"),
    "header of a blob": Kind("swap/run/rank0", _header, "run"),
    "undo": Kind("swap/run/rank0", _undo, "run"),
    "finished": Kind("swap/run", _json_file("finished.json"), "run"),
    "closed": Kind("swap/run", _json_file("closed.json"), "run"),
    "resharded": Kind("swap/run", _json_file("resharded.json"), "run"),
    "manifest of a checkpoint": Kind("ck", _checkpoint, "checkpoint"),
    "progress": Kind("ck", _progress, "checkpoint"),
    "header of states": Kind("ck", _states, "checkpoint"),
    "latest": Kind("ck", _latest, "checkpoint"),
    "log": Kind("", _log, "log"),
    "bytes of a run": Kind("swap", _raw, "run"),
    "bytes of a checkpoint": Kind("ck", _raw, "checkpoint"),
}


# -- commands -----------------------------------------------------------------------------------------


def _commands(reads: str, root: Path) -> list[list[str]]:
    run, out = str(root / "swap" / "run"), str(root / "out")
    if reads == "log":
        return [["report", str(root / "log.jsonl"), "-o", f"{out}.html"], ["report", str(root / "log.jsonl"), "--json"]]
    path = run if reads == "run" else str(root / "ck")
    commands = [["inspect", path], ["inspect", path, "--json"], ["verify", path], ["export", path, f"{out}-weights"]]
    commands += [["export", path, f"{out}-{form}", "--format", form] for form in ("deepspeed-universal", "dcp")]
    if reads == "run":
        commands += [["inspect", str(root / "swap")], ["convert", run, "--moments", "bf16", "--run", "other"]]
        commands += [["RESUME", run], ["rm", run, "--yes"]]
    else:
        commands += [
            ["inspect", f"{path}/step2"],
            ["verify", f"{path}/step2"],
            ["LOAD", path],
            ["import", path, f"{out}-i"],
        ]
    return commands


class TookTooLong(BaseException):
    """A command that does not end."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise TookTooLong("".join(traceback.format_stack(frame, limit=6)))


def _peak() -> int:
    """The most memory that this process had since the peak was forgotten, which this does."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return int(lines["VmHWM"].split()[0]) * 1024


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _engine_reads(command: list[str]) -> None:
    """Reads what an engine reads before it changes: the last commit of a run, or a checkpoint."""
    from offload.aio import IoQueue
    from offload.checkpoint.files import find
    from offload.checkpoint.load import look
    from offload.engine.snapshot import Snapshot
    from offload.fileio.plain_json import from_plain
    from offload.swapper.store import Store, run_status
    from offload.swapper.store.format import read_manifest

    path = Path(command[1])
    if command[0] == "LOAD":
        checkpoint = find(path, None)
        if checkpoint is not None:
            state = look(Path(checkpoint), 0, 1, {})
            from_plain(state.client_state)
        return
    run_status([path.parent], path.name)
    with IoQueue() as queue:
        spec = read_manifest(path / "rank0" / "manifest.json").spec
        if spec.slots == 2 and spec.nbytes < 64 * MIB:
            store = Store([path.parent], path.name, 0, spec, queue)
            try:
                if store.newest_serial() is not None:
                    from_plain(Snapshot.unpack(store.open()).facts["client_state"])
            finally:
                store.close()


@functools.cache
def _offload() -> Any:
    """The commands, which typer's own runner would make anew for each call."""
    import typer.main

    from offload.cli.main import app

    return typer.main.get_command(app)


def _invoke(command: list[str]) -> tuple[str, int]:
    """Runs a command of `offload`, and returns what it printed, and its exit code. Other exceptions pass."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            _offload().main(args=command, prog_name="offload")
        except SystemExit as end:
            return printed.getvalue(), end.code if isinstance(end.code, int) else 1
    raise AssertionError("a command ends with an exit code")


def run_command(command: list[str], most: int) -> tuple[str, int]:
    """Runs a command in this process.

    Returns:
        What was wrong about its end, "" for nothing; and the bytes of memory that it took.

    Args:
        command: Words behind `offload`, or one of the two words for what an engine reads.
        most: Bytes of memory that it may take.
    """
    from offload.errors import OffloadError

    before = _resident()
    _peak()
    handlers = {number: signal.signal(number, _stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 20 * SECONDS)  # waits for nobody; other processes may have the processor
    wrong = ""
    try:
        if command[0].isupper():
            with contextlib.suppress(OffloadError):
                _engine_reads(command)
        else:
            text, code = _invoke(command)
            if code not in (0, 1, 2):
                wrong = f"exit code {code}"
            elif "Traceback" in text or "\x1b" in text or "\x07" in text:
                wrong = f"it printed {text[-300:]!r}"
            elif text.count("error: ") > 1 or (text.startswith("error: ") and text.strip().count("\n")):
                wrong = f"an error of several lines: {text[-600:]!r}"
    except TookTooLong as stopped:
        wrong = f"no end after {SECONDS} s of the processor: {stopped}"
    except Exception as error:
        wrong = "".join(traceback.format_exception(error)[-6:])
    finally:
        for number, handler in handlers.items():
            signal.setitimer(signal.ITIMER_PROF if number == signal.SIGPROF else signal.ITIMER_REAL, 0)
            signal.signal(number, handler)
    taken = _peak() - before
    if not wrong and taken > most:
        wrong = f"it took {taken / MIB:.0f} MiB, expected at most {most / MIB:.0f}"
    return wrong, taken


class Bench:
    """The intact files, and a place in which copies of them are forged and read."""

    def __init__(self, folder: Path) -> None:
        self._intact, self.root = folder / "intact", folder / "forged"
        make_files(self._intact)
        self._usual: dict[str, int] = {}
        """Bytes that each command takes of intact files. The first run of each also imports what it needs."""
        for reads in ("log", "checkpoint", "run"):
            for _ in range(2):
                self.restore()
                for command in _commands(reads, self.root):
                    wrong, taken = run_command(command, 1 << 40)
                    assert not wrong, (command, wrong)
                    self._usual["".join(command)] = taken

    def restore(self) -> None:
        """Makes a new copy of the intact files, at `root`."""
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self._intact, self.root)

    def run(self, command: list[str]) -> str:
        """Runs one of the commands, and returns what was wrong about its end; "" for nothing."""
        return run_command(command, self._usual["".join(command)] + NBYTES)[0]

    def forge(self, seed: int, most: int = 3) -> list[Outcome]:
        """Makes forgery number `seed`, and returns what its readers did wrong: at most so many, drawn by the seed."""
        rng = random.Random(seed)
        name = rng.choice(sorted(KINDS))
        kind = KINDS[name]
        self.restore()
        told = f"{seed}: {name}: {kind.forge(rng, self.root / kind.folder)}"
        outcomes = []
        commands = _commands(kind.reads, self.root)
        # The removal last: nothing is left to be read behind it.
        drawn = sorted(rng.sample(range(len(commands)), min(most, len(commands))))
        for command in (commands[each] for each in drawn):
            wrong = self.run(command)
            if wrong:
                outcomes.append(Outcome(told, " ".join(command), wrong))
        outside = {each.name for each in self.root.iterdir()} - {"swap", "ck", "log.jsonl"}
        if strange := [each for each in outside if not each.startswith("out")]:
            outcomes.append(Outcome(told, "all", f"files elsewhere: {strange}"))
        return outcomes


def main() -> None:
    """Makes as many forgeries as the first argument says, from the seed on that the second one says."""
    faulthandler.enable()
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    faults = 0
    with tempfile.TemporaryDirectory(prefix="forgery-") as folder:
        bench = Bench(Path(folder))
        for seed in range(first, first + count):
            for outcome in bench.forge(seed):
                faults += 1
                text = f"{outcome.forgery}\n  {outcome.command}\n  {outcome.wrong}\n"
                sys.stdout.write(text.encode("ascii", "backslashreplace").decode())
                sys.stdout.flush()
            if (seed - first) % 500 == 499:
                print(f"-- {seed - first + 1} forgeries, {faults} faults", flush=True)
    print(f"{count} forgeries, {faults} faults")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
