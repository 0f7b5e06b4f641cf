"""A page about this machine: `offload bench card FOLDER`.

The page says which models the machine trains and how fast, what limits a step, whether results are right, and what
other packages do with the same step. Its parts, each in a process of its own, run while the minutes last:

    probe    rates of processor, memory, device and drive, by which the planner places each model
    text     60 steps on real text: plain PyTorch, this package in memory, and from swap files with a SIGKILL in between
    models   a row a model: a step as the planner places it, beside its prediction and the resources that it needs
    peers    one model by plain PyTorch, this package, DeepSpeed and FSDP2, in turns

A part without enough time is left out, and a line says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import offload
from offload import precision
from offload.bench.child_process import growing_segments, run_child, write_json
from offload.bench.configs import placed
from offload.bench.gpu.report import machine
from offload.bench.gpu.training import Profile, Save, Work, measure_steps
from offload.bench.measure import DriveSpeeds
from offload.bench.train import figures as train_figures
from offload.bench.train import loops
from offload.bench.train.plan import PLAIN, Contender, TrainJob, make_plan
from offload.errors import BudgetError, ConfigError, OffloadError
from offload.finetune.corpus.token_stream import find_files, read_bytes, standard_library
from offload.finetune.model import allows_chunks
from offload.hardware.probe import Probed, as_json, from_json, probe
from offload.layout.modes import DTYPES
from offload.layout.pass_order import LAYER_MAJOR, makes_early_updates
from offload.notices import folder_to_make
from offload.planner import recommend
from offload.planner.activations import Load
from offload.planner.hardware import Hardware, probed
from offload.planner.model_shape import from_name
from offload.planner.recommend import Planned
from offload.planner.request import ready
from offload.presets import PRESETS, require_transformers
from offload.report.links import Interval, Span, total, union
from offload.report.timeline_view import read_window
from offload.swapper.memory.device import compute_device
from offload.swapper.memory.limits import free_host_memory

# -- settings ------------------------------------------------------------------------------------------


FORMAT = 1
"""Version of the JSON's keys."""
TEXT, PEERS = "text", "peers"


def _numel(model: str) -> float:
    """Returns the approximate number of parameters of a preset, which is written as 3.5M or 13B."""
    written = PRESETS[model].parameters
    return float(written[:-1]) * {"M": 1e6, "B": 1e9}[written[-1]]


MODELS = tuple(sorted(PRESETS, key=_numel))
"""All presets, the smallest first."""


class Kind(NamedTuple):
    """What is measured on one kind of compute device."""

    models: tuple[str, ...]
    """Rows of the table; a larger preset follows if the planner finds one that fits."""
    sequence: int
    batches: tuple[int, ...]
    """Sequences of a micro-batch to try, the most first."""
    sequences: int
    """Sequences of a step."""
    peers: str
    """Model of the comparison with other packages."""
    text: str
    """Model of the runs on text."""
    text_shape: tuple[int, int]
    """Sequences and tokens of a step on text."""
    built: float
    """Parameters a second that are drawn and stored before the first step: a cautious estimate."""
    seconds: Mapping[str, float]
    """Rough seconds of the parts that train no row."""


GPU = Kind(
    models=("llama-1b", "llama-3b", "llama-8b", "llama-13b"),
    sequence=2048,
    batches=(4, 2, 1),
    sequences=16,
    peers="llama-3b",
    text="gpt2-small",
    text_shape=(4, 256),
    built=2.5e8,
    seconds={TEXT: 100.0, PEERS: 240.0},
)
CPU = Kind(
    models=("gpt2-tiny", "gpt2-small", "llama-1b"),
    sequence=256,
    batches=(1,),
    sequences=4,
    peers="gpt2-small",
    text="gpt2-tiny",
    text_shape=(2, 128),
    built=1e8,
    seconds={TEXT: 45.0, PEERS: 90.0},
)
STEPS, KILLED_AFTER = 60, 30
"""Steps on text, and the step after which the process kills itself."""
_TIMED = 3
"""Steps of a row that are timed; three come before them, and one after them is divided."""
_STARTS = 15.0
"""Seconds from the start of a process to its first work."""
_PROBE_SECONDS = 20.0
_LEAVING = 5.0
"""Seconds that a process needs to end after its last step."""


class CardPlan(NamedTuple):
    """Settings that have been checked."""

    folder: Path
    device: torch.device
    gpu_memory: int | None
    """Bytes of GPU memory that may be taken; None for all of it."""
    minutes: float
    only: tuple[str, ...]
    """Models, `TEXT` and `PEERS`; all parts if it is empty."""

    @property
    def kind(self) -> Kind:
        return CPU if self.device.type == "cpu" else GPU

    def has(self, part: str) -> bool:
        """Returns True if the page has this part, or a row of this model."""
        return not self.only or part in self.only


def check(folder: Path, gpu_memory: int | None, minutes: float, only: Sequence[str]) -> CardPlan:
    """Returns the settings. Raises `ConfigError` before anything is measured."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder_to_make(folder)}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"the folder {folder} is not writable, and swap files go there; give another one")
    if not minutes > 0:
        raise ConfigError(f"expected --minutes above 0, got {minutes:g}")
    device = compute_device("auto")
    if gpu_memory is not None and device.type != "cuda":
        raise ConfigError(f"--gpu-memory limits a GPU, and this machine computes on {device.type}: leave it out")
    for name in only:
        if name not in (*MODELS, TEXT, PEERS):
            raise ConfigError(f"--only {name}: expected {TEXT}, {PEERS} or a preset: {', '.join(MODELS)}")
    require_transformers()
    return CardPlan(folder.resolve(), device, gpu_memory, minutes, tuple(only))


# -- work of a process ---------------------------------------------------------------------------------
#
# Each part runs as `python -m offload.bench.card JOB FIGURES`: a job as JSON, and the file for its figures.


def work(job: Mapping[str, Any], save: Save) -> None:
    """Does the work of one process."""
    {"probe": _probe, "row": row, "text": text}[job["part"]](job, save)


def _probe(job: Mapping[str, Any], save: Save) -> None:
    save(as_json(probe([job["folder"]], job["device"], seconds=job["seconds"])))


def row(job: Mapping[str, Any], save: Save) -> None:
    """Times the steps of a planned model, then divides the time of one further step."""
    device, seconds = torch.device(job["device"]), job["until"] - time.monotonic()
    folder, settings, seen, last = Path(job["folder"]), job["settings"], list[Profile](), dict[str, Any]()
    settings["offload"]["trace"] = str(folder / "trace.json")

    def keep(figures: dict[str, Any]) -> None:
        save(figures)
        last.update(figures)

    def watch(profile: Profile) -> None:
        seen.append(profile)
        last["disk_bytes"] = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())

    of_job = {name: job[name] for name in _OF_WORK}
    measure_steps(Work(device, folder, steps=_TIMED, seconds=seconds, **of_job), settings, keep, watch)
    window = read_window(folder / "trace.json", (1e6 * seen[0].start, 1e6 * seen[0].end))
    save(last | {"divided": divide(seen[0].start, seen[0].end, layers(seen[0], window.spans))})


_OF_WORK = ("model", "batch_size", "seq_len", "accumulation", "recompute", "chunked_loss", "limit")
"""Fields of `Work` that a job has."""


def text(job: Mapping[str, Any], save: Save) -> None:
    """Trains on text by plain PyTorch or by this package, from the last commit on if there is one.

    The process kills itself after the step `kill`, while that step's update and commit are under way.
    """
    about, kill = TrainJob(**job["about"]), job["kill"]
    if about.device == "cuda":  # a GPU repeats its bits with these kernels alone
        torch.use_deterministic_algorithms(True)
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
    batches, losses = text_batches(about), list[float]()
    if about.contender == PLAIN:
        from safetensors.torch import save_model

        save_model(loops.model_of(about.model), about.weights)
        trainer = loops.plain(about, Contender(PLAIN, PLAIN))
        for batch in batches:
            losses.append(trainer.step([batch]).loss)
        save({"from": 0, "losses": losses})
        return
    settings = placed(about.contender, Path(about.folder), torch.device(about.device), about.batch_size, about.dtype)
    files = "nvme" in about.contender
    settings["offload"] |= {"run": "bench-card"} | ({"durability": "step", "resume": "auto"} if files else {})
    with offload.init(settings):
        model: Any = loops.model_of(about.model)
    offload.load_pretrained(model, about.weights)
    engine = offload.initialize(model=model, config=settings)[0]
    begun = engine.global_steps
    for number, batch in enumerate(batches[begun:], begun + 1):
        losses.append(float(engine.train_batch(iter([batch]))))
        save({"from": begun, "losses": losses})
        if number == kill:
            os.kill(os.getpid(), signal.SIGKILL)
    digest = hashlib.sha256()
    for name, value in sorted(engine.module.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.cpu().flatten().view(torch.uint8).numpy().data)
    save({"from": begun, "losses": losses, "weights": digest.hexdigest()})
    engine.destroy(remove=True)


_FILES = 100
"""Files of the text: more than a megabyte."""


def text_batches(about: TrainJob) -> list[loops.Batch]:
    """Returns a batch for each step: bytes of the source of Python's standard library, one a token."""
    data = torch.from_numpy(read_bytes(find_files(standard_library())[:_FILES]))
    shape, generator = (about.batch_size, about.seq_len), torch.Generator().manual_seed(0)
    batches = []
    for _ in range(about.steps):
        starts = torch.randint(len(data) - about.seq_len, shape[:1], generator=generator)
        ids = torch.stack([data[start : start + about.seq_len] for start in starts.tolist()]).long().to(about.device)
        batches.append({"input_ids": ids, "labels": ids})
    return batches


# -- figures -------------------------------------------------------------------------------------------


UPDATES, READS, OTHER = "waits for updates", "waits for reads", "other"
_READS = ("waits for read of ", "waits for a streamed unit", "waits for the read of ")
_COPIES = ("waits for upload of ", "waits for an upload ahead", "waits for a copy of weights")


def layers(profile: Profile, spans: Iterable[Span]) -> dict[str, list[Interval]]:
    """Returns what a step's time goes to, the most important first. A moment counts for the first that covers it.

    On a GPU kernels come first, since it computes on while the host waits. A CPU that waits computes nothing.
    """
    rows: dict[str, list[Interval]] = {UPDATES: [], READS: [], "compute": [], "copies": [], "receiver": []}
    for span in spans:
        at = (span.start / 1e6, span.end / 1e6)
        if span.row == "waits":
            name = READS if span.name.startswith(_READS) else UPDATES
            rows["copies" if span.name.startswith(_COPIES) else name].append(at)
        elif span.row == "compute" and span.name.startswith(("forward", "backward")):
            rows["compute"].append(at)
        elif span.row == "uploads":
            rows["copies"].append(at)
        elif span.row == "downloads":
            rows["receiver"].append(at)
    if profile.kernels is None:
        return rows
    waits = {name: rows[name] for name in (UPDATES, READS)}
    return {"kernels": [*profile.kernels], **waits, "copies": [*profile.copies], "receiver": rows["receiver"]}


def divide(start: float, end: float, named: Mapping[str, Sequence[Interval]]) -> dict[str, float]:
    """Returns the seconds of a step by what `layers` names, and all other seconds. They add up to the step."""
    seconds_of: dict[str, float] = {}
    covered, seconds = list[Interval](), 0.0
    for name, intervals in named.items():
        covered = union([*covered, *intervals], start, end)
        seconds_of[name] = total(covered) - seconds
        seconds = total(covered)
    return {**seconds_of, OTHER: end - start - seconds}


def resources(probed_machine: Probed, planned: Mapping[str, Any], figures: Mapping[str, Any]) -> dict[str, float]:
    """Returns the least seconds in which each resource does its part of a step, at the rates of the same run."""
    of, numel, drive = probed_machine.rates.by_dtype[planned["dtype"]], figures["parameters"], probed_machine.drives[0]
    speeds = DriveSpeeds(drive.read, drive.write, drive.mixed)
    moved = [numel * figures[f"{way}_bytes_per_parameter"] for way in ("read", "written", "uploaded", "downloaded")]
    # States that stay on a GPU are updated there, by kernels that count as such.
    updated = 0.0 if planned["tiers"].endswith("/none") and figures["profiled"] else numel / of.optimizer
    of_files = {"AdamW": updated, "drive": speeds.seconds(*moved[:2])}
    if figures["profiled"] is None:
        return {"products": planned["flops"] / of.matmul, **of_files}
    rates = probed_machine.rates
    copies = {"copies up": moved[2] / rates.upload, "copies down": moved[3] / rates.download}
    return {"kernels": figures["profiled"]["kernels"], **copies, **of_files}


def bound(seconds: Mapping[str, float]) -> float:
    """Returns the least seconds of a step: those of the largest resource.

    On a CPU products and AdamW take turns at the same cores, so both together are one resource.
    """
    if "products" in seconds:
        return max(seconds["products"] + seconds["AdamW"], seconds["drive"])
    return max(seconds.values())


def compared(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what the runs on text show: the difference from plain PyTorch, and whether the resume has equal bits."""
    plain, whole, killed, resumed = (runs[name] for name in ("plain", "whole", "killed", "resumed"))
    begun = resumed["from"]
    same = whole["losses"][:begun] == killed["losses"][:begun] and whole["losses"][begun:] == resumed["losses"]
    pairs = list(zip(whole["losses"], plain["losses"], strict=True))
    return {
        "steps": len(whole["losses"]),
        "killed_after": len(killed["losses"]),
        "resumed_after": begun,
        "equal_bits": 0 < begun <= len(killed["losses"]) and same and whole["weights"] == resumed["weights"],
        "largest_difference": max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs),
        "last_ten": [statistics.fmean(run["losses"][-10:]) for run in (plain, whole)],
    }


# -- plans ---------------------------------------------------------------------------------------------


def machine_of(plan: CardPlan, probed_machine: Probed, dtype: str) -> Hardware:
    """Returns the probed machine, within the limit of GPU memory."""
    on = probed(probed_machine, free_host_memory(), [str(plan.folder)], dtype)
    return on if plan.gpu_memory is None else replace(on, gpu_memory=min(plan.gpu_memory, on.gpu_memory))


def planned_row(plan: CardPlan, on: Hardware, model: str, files: Path) -> Planned:
    """Returns the plan of a model's step, with the largest micro-batch that fits.

    Raises:
        BudgetError: no micro-batch fits.
    """
    kind = plan.kind
    shape = from_name(model, kind.sequence, DTYPES[on.dtype])
    for batch in kind.batches:
        load = Load(
            batch,
            kind.sequences // batch,
            chunked_loss=allows_chunks(model),
            # By name, as the config has it: gradients then wait in fewer bytes.
            schedule=LAYER_MAJOR,
            speculate=makes_early_updates("auto", on.on_cpu),
        )
        try:
            return recommend.choose(shape, on, load, None, dtype=on.dtype, paths=[str(files)])
        except BudgetError:
            if batch == kind.batches[-1]:
                raise
    raise AssertionError("a kind has at least one micro-batch")


def prediction(planned: Planned) -> dict[str, Any]:
    """Returns the numbers of a plan that the page shows or needs."""
    zero, load, timing = planned.memory.config.zero_optimization, planned.load, planned.timing
    products = load.batch * load.accumulation * sum(use.flops for use in planned.shape.uses)
    return {
        "seconds": timing.seconds,
        "limit": timing.limit,
        "tiers": f"{zero.offload_param.device}/{zero.offload_optimizer.device}",
        "dtype": planned.hardware.dtype,
        "parameters": planned.shape.parameters,
        "batch_size": load.batch,
        "seq_len": planned.shape.sequence,
        "accumulation": load.accumulation,
        "recompute": load.recompute,
        "chunked_loss": load.chunked_loss,
        "host_bytes": planned.host_peak,
        "disk_bytes": planned.memory.stored + planned.memory.spilled,
        # The backward makes two products for each of the forward, which recomputation repeats.
        "flops": (3 + load.recompute) * products,
    }


# -- command -------------------------------------------------------------------------------------------


Tell = Callable[[str], None]


class _Card:
    def __init__(self, plan: CardPlan, folder: Path, tell: Tell, save: Save) -> None:
        self._plan, self._folder, self._tell, self._save = plan, folder, tell, save
        self._end = time.monotonic() + 60 * plan.minutes
        self.report: dict[str, Any] = {
            "benchmark": "card",
            "format": FORMAT,
            "machine": machine(plan.device),
            "given": {"gpu_memory": plan.gpu_memory, "minutes": plan.minutes, "only": list(plan.only)},
            "rows": [],
            "left_out": {},
            "failed": {},
        }

    @property
    def _left(self) -> float:
        return self._end - time.monotonic()

    def run(self) -> None:
        """Runs all parts, the most important first."""
        plan, kind = self._plan, self._plan.kind
        probed_machine: Probed | None = None
        with self._part("probe"):
            probed_machine = self._probed()
        if probed_machine is None:
            return
        if plan.has(TEXT) and self._has_time(TEXT, kind.seconds[TEXT]):
            with self._part(TEXT):
                self._text()
        dtype = precision.choose(plan.device).dtype
        names = [name for name in plan.only if name in MODELS] if plan.only else list(kind.models)
        for name in names[:2]:
            self._row(probed_machine, dtype, name)
        if plan.has(PEERS) and self._has_time(PEERS, kind.seconds[PEERS]):
            with self._part(PEERS):
                self._peers(dtype)
        for name in names[2:]:
            self._row(probed_machine, dtype, name)
        if not plan.only:
            self._largest(probed_machine, dtype)

    @contextlib.contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """Notes an error of a part, such as that of a full folder: the page keeps the parts before it."""
        try:
            yield
        except OffloadError as error:
            self.report["failed"][name] = str(error)
        except OSError as error:
            self.report["failed"][name] = f"{error}; {self._plan.folder} needs free space and must be writable"

    def _has_time(self, part: str, seconds: float) -> bool:
        """Returns True if a part's seconds are left; otherwise the report says so."""
        if seconds <= self._left:
            return True
        left = max(self._left, 0.0)
        self.report["left_out"][part] = f"left out for time: it takes about {seconds:.0f} s, and {left:.0f} s were left"
        self._tell(f"{part}: {self.report['left_out'][part]}")
        self._save(self.report)
        return False

    def _child(self, part: str, job: Mapping[str, Any], **environment: str) -> dict[str, Any]:
        """Runs a job in a process of its own, and returns its state and figures; its swap files stay."""
        written = self._folder / "figures.json"
        written.unlink(missing_ok=True)
        environment |= growing_segments()
        return run_child("offload.bench.card", {"part": part, **job}, written, self._left, **environment)

    def _fails(self, name: str, result: Mapping[str, Any]) -> bool:
        """Returns True if a process has not ended well; the report then says how."""
        if result["state"] == "done":
            return False
        if result["state"] == "stopped":
            self.report["left_out"][name] = "stopped when the minutes were over"
        else:
            last = (result["last_lines"] or ["no words"])[-1]
            self.report["failed"][name] = f"ended with exit code {result['exit_code']}: {last}"
        self._save(self.report)
        return True

    def _probed(self) -> Probed | None:
        self._tell("probe: processor, memory, device, drive")
        job = {"folder": str(self._folder), "device": self._plan.device.type, "seconds": _PROBE_SECONDS}
        result = self._child("probe", job)
        if self._fails("probe", result):
            return None
        self.report["probe"] = result["figures"]
        return from_json(result["figures"])

    def _row(self, probed_machine: Probed, dtype: str, model: str) -> None:
        files = self._folder / "swap"
        try:
            planned = planned_row(self._plan, machine_of(self._plan, probed_machine, dtype), model, files)
        except (BudgetError, ConfigError) as error:
            self.report["rows"].append({"model": model, "does_not_fit": str(error)})
            self._tell(f"{model}: does not fit")
            return
        predicted = prediction(planned)
        needs = _STARTS + planned.shape.parameters / self._plan.kind.built + (_TIMED + 4) * predicted["seconds"]
        row: dict[str, Any] = {"model": model, "planned": predicted}
        self.report["rows"].append(row)
        if not self._has_time(model, needs):
            return
        self._tell(f"{model}: predicted {predicted['seconds']:.3g} s a step, about {needs:.0f} s in all")
        settings = ready(planned)
        settings["offload"] |= {"device": self._plan.device.type, "run": "bench-card"}
        job = {name: predicted[name] for name in _OF_WORK if name in predicted}
        job |= {"model": model, "limit": self._plan.gpu_memory, "until": self._end - _LEAVING}
        job |= {"settings": settings, "folder": str(files), "device": self._plan.device.type}
        with self._part(model):
            files.mkdir()
            try:
                result = self._child("row", job)
            finally:
                shutil.rmtree(files)
            if not self._fails(model, result):
                figures = result["figures"]
                needed = resources(probed_machine, predicted, figures)
                row |= {"figures": figures, "resources": needed, "bound_seconds": bound(needed)}
                self._save(self.report)

    def _largest(self, probed_machine: Probed, dtype: str) -> None:
        """Adds the row of the largest preset that the planner places, unless there is one."""
        have = max(_numel(row["model"]) for row in self.report["rows"])
        for model in reversed([name for name in MODELS if _numel(name) > have]):
            before = len(self.report["rows"])
            self._row(probed_machine, dtype, model)
            if "planned" in self.report["rows"][before]:
                return

    def _peers(self, dtype: str) -> None:
        plan, kind = self._plan, self._plan.kind
        batch = kind.batches[0]
        checked = make_plan(
            self._folder,
            model=kind.peers,
            batch_size=batch,
            seq_len=kind.sequence,
            micro_batches=kind.sequences // batch,
            dtype=dtype,
            rounds=1,
            steps=2,
            recompute=kind is GPU,
            gpu_memory=plan.gpu_memory,
            only=("offload cpu/cpu", "deepspeed cpu/cpu", "fsdp2"),
        )
        result = loops.measure(checked, lambda line: self._tell(f"{PEERS}: {line}"), self._end)
        self.report["peers"] = train_figures.as_json({}, checked, result)
        self._save(self.report)

    def _text(self) -> None:
        kind, device = self._plan.kind, self._plan.device.type
        files, (batch, sequence) = self._folder / "text", kind.text_shape
        files.mkdir()
        job = TrainJob(
            contender=PLAIN,
            folder=str(files),
            weights=str(files / "model.safetensors"),
            device=device,
            model=kind.text,
            batch_size=batch,
            seq_len=sequence,
            micro_batches=1,
            dtype=precision.choose(self._plan.device).dtype,
            steps=STEPS,
            recompute=False,
            gpu_memory=None,
        )
        runs: dict[str, Any] = {}
        turns: tuple[tuple[str, str, int | None], ...] = (
            ("plain", PLAIN, None),
            ("whole", "cpu/cpu", None),
            ("killed", "nvme/nvme", KILLED_AFTER),
            ("resumed", "nvme/nvme", None),
        )
        try:
            for name, contender, kill in turns:
                self._tell(f"text: {STEPS} steps of {kind.text}, {contender}, {name}")
                about = job._replace(contender=contender)._asdict()
                result = self._child("text", {"about": about, "kill": kill}, CUBLAS_WORKSPACE_CONFIG=":4096:8")
                # A Python that is started by a script ends with 128 and the number of the signal.
                was_killed = kill is not None and result.get("exit_code") in (-signal.SIGKILL, 128 + signal.SIGKILL)
                if not was_killed and self._fails(TEXT, result):
                    return
                runs[name] = result["figures"]
        finally:
            shutil.rmtree(files)
        self.report["text"] = {"model": kind.text, "runs": runs, **compared(runs)}
        self._save(self.report)


def measure(plan: CardPlan, output: Path | None = None, tell: Tell = lambda _: None) -> dict[str, Any]:
    """Measures this machine, and returns the content of the page. `output` has all figures after each part.

    An exception, such as that of a signal, ends the running process, and removes all files but `output`.
    """
    began = time.monotonic()

    def save(report: dict[str, Any]) -> None:
        if output is None:
            return
        try:
            write_json(output, report)
        except OSError as error:  # the page still has the figures
            report["failed"]["--output"] = str(error)

    with tempfile.TemporaryDirectory(prefix="bench-card-", dir=plan.folder) as folder:
        card = _Card(plan, Path(folder), lambda line: tell(f"{time.monotonic() - began:4.0f} s  {line}"), save)
        card.run()
    save(card.report)
    return card.report


def judge(report: Mapping[str, Any]) -> int:
    """Returns the exit code: 1 if a part failed, or a resumed run had other bits; else 0."""
    return 1 if report["failed"] or not report.get("text", {}).get("equal_bits", True) else 0


if __name__ == "__main__":
    work(json.loads(sys.argv[1]), lambda figures: write_json(Path(sys.argv[2]), figures))
