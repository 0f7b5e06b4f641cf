"""Introspection of an engine and named points of intervention, for tests.

Tests that use this module and the public API alone do not depend on how the engine is built: a rewrite of the engine
changes this file, and no test.

* `inspect(engine)` reads layouts, residency, budgets and counters.
* `settle`, `abandon`, `leave` and `fail` bring an engine to a moment that a test needs: updates written, a kill, the
  exit of the process, an error of a thread.
* `replace` and `intercept` change a named point, such as "store.commit" or "size.update_tile", for one test. A point
  is a row of `POINTS`; a run that uses none executes no code of this module.
* "threads.module", "threads.thread", "threads.clock" and "threads.queue" stand for `threading`, `Thread`, `time` and
  `queue` in each module whose threads meet: the update worker, the receiver of gradients, the pager's lock, the store,
  heartbeats. A test that replaces them owns every lock, wait and thread of an engine that it makes, and so the order of
  its threads.

    from offload import testing

    def test_a_failed_commit_stops_the_engine(monkeypatch):
        testing.replace(monkeypatch, "store.commit", fails)
        ...
        testing.settle(engine, commit=False)
        assert testing.inspect(engine).parameter_steps[0] == [1]
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from offload.activations.kept_inputs import KeptInputs
from offload.aio import aligned_empty
from offload.engine.gradients import NoCompletion
from offload.engine.update import UpdateWorker
from offload.metrics.meter import NO_SPANS, StepMeter
from offload.passes.layer_major import LayerMajor
from offload.sizes import align_up
from offload.states import State, Tier
from offload.swapper.table import Residency
from offload.timeline import OFF

if TYPE_CHECKING:
    import torch

    from offload.aio.shared_queue import SharedQueue
    from offload.distributed.process_group import Ranks
    from offload.engine.device_budget import DeviceBudget
    from offload.engine.engine import Engine
    from offload.engine.gradients import GradientAccumulator
    from offload.layout.flat_layout import UnitLayout
    from offload.layout.modes import Mode
    from offload.layout.placement import DeviceNeed
    from offload.layout.update_order import Lane
    from offload.swapper.memory.device import Device
    from offload.swapper.memory.device_arena import DeviceArena
    from offload.swapper.memory.host_arena import HostArena
    from offload.swapper.pager import Pager
    from offload.swapper.policy import Limits
    from offload.swapper.store import Store
    from offload.swapper.table import UnitSize

__all__ = [
    "POINTS",
    "Inspection",
    "Patcher",
    "abandon",
    "fail",
    "inspect",
    "intercept",
    "leave",
    "replace",
    "settle",
    "settle_early_updates",
]


# -- what an engine consists of ----------------------------------------------------------------------


class Inspection:
    """A live view of an engine, made by `inspect`: an access to an attribute reads its current value.

    Units are numbered from 0, in the order of `layouts`. Bytes and elements are counted on this rank.
    """

    def __init__(self, engine: Engine) -> None:
        self._core = engine._core
        self._parts = engine._core.components

    # Units and their states.

    @property
    def layouts(self) -> tuple[UnitLayout, ...]:
        return self._parts.layouts

    @property
    def trainable(self) -> tuple[range, ...]:
        """Elements of each unit that this rank updates."""
        return self._parts.trainable

    @property
    def shares(self) -> Sequence[tuple[range, range]]:
        """Trainable and frozen elements of each unit that this rank stores."""
        return self._parts.shards.shares

    @property
    def mode(self) -> Mode:
        return self._parts.shards.mode

    @property
    def state_bytes(self) -> Sequence[Mapping[State, int]]:
        """Bytes of each partition, gradients included, by unit and state."""
        return self._parts.shards.nbytes

    @property
    def sizes(self) -> Sequence[UnitSize]:
        """Names, tiers and bytes of the weights of each unit."""
        return self._parts.shards.sizes

    @property
    def parameter_steps(self) -> list[list[int]]:
        return self._core.state.parameter_steps

    @property
    def residents(self) -> dict[tuple[int, State], torch.Tensor]:
        """The memory of each partition, weights excepted, whose tier is above DISK."""
        return {key: resident.tensor for key, resident in self._parts.shards.residents.items()}

    def read_state(self, unit: int, state: State) -> memoryview:
        """Returns a copy of the newest bytes of a partition. Call `settle` before."""
        buffer = aligned_empty(self._parts.shards.states(unit)[state])
        for future in self._parts.shards.read(unit, state, 0, buffer):
            future.wait()
        return buffer

    def state_place(self, unit: int, state: State, byte: int = 0) -> tuple[Path, int]:
        """Returns the swap file and the offset in it of a byte of the newest slot of a partition."""
        store = self._parts.store
        return store.folders[0] / "states", store._places[unit][state][store.newest[unit]].offset(byte)

    # The layers below the engine.

    @property
    def store(self) -> Store | None:
        """The swap files; None if nothing is on DISK."""
        return self._parts.store if self._parts.store.folders else None

    @property
    def mended(self) -> int:
        """Number of ranges of slots whose bytes were not those expected, and were replaced by true copies."""
        return 0 if self.store is None else len(self.store._mended)

    @property
    def queue(self) -> SharedQueue | None:
        return self._parts.queue

    @property
    def pager(self) -> Pager:
        return self._parts.pager

    @property
    def device(self) -> Device:
        return self._parts.shards.device

    @property
    def host_arena(self) -> HostArena:
        return self._parts.arena

    @property
    def device_arena(self) -> DeviceArena:
        return self._parts.pager.arena

    @property
    def update_worker(self) -> UpdateWorker | None:
        """The thread that updates states; None if nothing trains."""
        return self._parts.update_worker if isinstance(self._parts.update_worker, UpdateWorker) else None

    @property
    def ranks(self) -> Ranks:
        return self._parts.world.ranks

    @property
    def gradients(self) -> GradientAccumulator:
        return self._parts.gradients

    @property
    def device_budget(self) -> DeviceBudget:
        """The component that repeats a forward with a smaller device arena when device memory runs out."""
        return self._core.device_budget

    @property
    def inputs(self) -> KeptInputs | None:
        """The inputs of blocks that wait for their backward outside of the device; None if they stay there."""
        return self._parts.activations if isinstance(self._parts.activations, KeptInputs) else None

    # What is switched on.

    @property
    def measures(self) -> bool:
        return isinstance(self._parts.meter, StepMeter)

    @property
    def records_spans(self) -> bool:
        """True if any component records spans of the timeline, or of the device's compute."""
        parts = self._parts
        lines = [parts.timeline, parts.pager.table.timeline, parts.gradients._timeline, parts.hooks._timeline]
        if isinstance(parts.update_worker, UpdateWorker):
            lines.append(parts.update_worker._timeline)
        compute = [parts.hooks._compute, parts.gradients._compute]
        return any(line is not OFF for line in lines) or any(line is not NO_SPANS for line in compute)

    @property
    def makes_early_updates(self) -> bool:
        """True if updates may begin under the backward."""
        return not isinstance(self._parts.gradients.completion, NoCompletion)

    @property
    def takes_turns(self) -> bool:
        return isinstance(self._parts.schedule, LayerMajor) and self._parts.schedule.possible

    def update_lane(self, unit: int) -> Lane:
        """Returns the lane of the updates of a unit that trains."""
        assert isinstance(self._parts.update_worker, UpdateWorker)
        return self._parts.update_worker._lane_of(unit)

    @property
    def tile_numel(self) -> int:
        """Largest number of elements that an update reads, computes and writes at a time; 0 if nothing trains."""
        return self._parts.update_worker.tile_numel

    @property
    def prefetch_limits(self) -> Limits:
        return self._parts.pager._limits

    @property
    def device_need(self) -> DeviceNeed:
        return self._core.state.settings.device_need

    # Weights.

    def residency(self, unit: int) -> Residency:
        return self._parts.pager.table.entries[unit].residency

    @property
    def access_order(self) -> list[int]:
        return list(self._parts.pager.table.access_order.order)

    @property
    def pins(self) -> list[int]:
        return [entry.pins for entry in self._parts.pager.table.entries]

    @property
    def busy_units(self) -> list[str]:
        """Names of units with an open use, an update under way or weights that are not written."""
        entries = self._parts.pager.table.entries
        busy = [entry for entry in entries if entry.pins or entry.updating or entry.in_update or entry.unwritten]
        return [entry.size.name for entry in busy]

    @property
    def fresh_units(self) -> int:
        """Number of units whose new weights an early update has left in host memory."""
        return sum(entry.fresh is not None for entry in self._parts.pager.table.entries)

    @property
    def live_views(self) -> bool:
        """True while a graph or a user holds a view of weights."""
        return bool(self._parts.unit_views._live)

    # Memory.

    def unaccounted_memory(self) -> dict[str, int]:
        """Returns the bytes of weights in the arenas beyond the buffers that units and states hold, by tier.

        A value that is not 0 is a leak, or a buffer that was released twice.
        """
        pager = self._parts.pager
        with pager.lock:
            host = [state.spare for state in self._parts.shards.residents.values() if state.spare is not None]
            device = []
            for entry in pager.table.entries:
                # The buffer of weights whose tier is HOST is no lease of the cache.
                if entry.host_buffer is not None and entry.size.tier is Tier.DISK:
                    host.append(entry.host_buffer)
                if entry.transfer is not None and entry.transfer.host_buffer is not None:
                    host.append(entry.transfer.host_buffer)
                # Host memory that the device uses where it is has no bytes in the device's arena.
                if entry.device_buffer is not None:
                    device.append(entry.device_buffer.nbytes if entry.device_buffer.offset >= 0 else 0)
                elif entry.residency is Residency.UPLOADING:
                    # any thread: an upload copies without the lock, and its thread has the buffer until then.
                    device.append(entry.size.nbytes)
            return {
                "host": pager.host.weights.space.used_bytes - sum(align_up(buffer.nbytes) for buffer in host),
                "device": pager.arena.used_bytes - sum(device),
            }

    @property
    def activation_bytes(self) -> int:
        """Bytes of inputs of blocks that wait for their backward, in all tiers."""
        return sum(counts["used"] for counts in self._parts.activations.bytes_by_tier().values())

    # Gradients.

    @property
    def gradient_dtype(self) -> torch.dtype:
        return self._parts.gradients.dtypes.stored

    def gradients_stay(self, unit: int) -> bool:
        """Returns True if the gradients of a unit stay on the device until the update."""
        return self._parts.gradients.stays(unit)

    def gradients_add_up_on_device(self, unit: int) -> bool:
        """Returns True if the gradients of the micro-batches are added up on the device."""
        return self._parts.gradients.totals.takes(unit)

    @property
    def gradient_totals(self) -> int:
        return len([*self._parts.gradients.totals.ranges()])

    def gradients_kept(self, unit: int) -> set[int]:
        """Returns the parameters of a unit whose gradients wait in autograd's own tensors, by index."""
        return set(self._parts.gradients.kept(unit, 0, self._parts.layouts[unit].trainable_stop))

    def waiting_gradient(self, unit: int, segment: int) -> torch.Tensor:
        """Returns the memory of the first chunk of this rank's part of a gradient that has arrived."""
        gradients, layout = self._parts.gradients, self._parts.layouts[unit]
        gradients.downloads.drain()
        first = max(self.trainable[unit].start - layout.segments[segment].start, 0)
        return gradients._stored(unit, segment, gradients._chunk(unit, segment, first))

    def gradients_spill(self, unit: int) -> bool:
        """Returns True if the gradients of a unit wait in a file."""
        return unit in self._parts.gradients.spill


def inspect(engine: Engine) -> Inspection:
    """Returns a live view of an engine's units, memory and counters."""
    return Inspection(engine)


# -- moments of an engine ----------------------------------------------------------------------------


def settle(engine: Engine, commit: bool = True) -> None:
    """Waits until the updates of the last step are written and, with `commit`, until a commit that is due is made.

    Unlike `Engine.synchronize`, drops no update under the backward, and with `commit=False` begins no call.

    Args:
        commit: True to begin a call of the engine, which delivers the contents that the last step's commit waits for.

    Raises:
        EngineFailed: if a background thread has failed.
    """
    if commit:
        engine._core.enter()
    engine._core.components.update_worker.finish(commit)


def settle_early_updates(engine: Engine) -> None:
    """Waits until every update that was offered under the backward has been made or dropped."""
    worker, pager = engine._core.components.update_worker, engine._core.components.pager
    assert isinstance(worker, UpdateWorker), "the engine trains nothing"
    while True:
        pager.check()
        with pager.lock:
            offers, pipeline = worker.offers, worker._pipeline
            waits = offers._promised or offers._offered or offers.unsettled or worker._jobs
            if not waits and not pipeline.in_flight:
                return
        time.sleep(0.0005)


def abandon(engine: Engine, remove: bool = False) -> None:
    """Closes an engine as a kill would leave it: nothing is finished, written or committed."""
    engine._core.components.meter.close()
    engine._core.shutdown.abandon(remove)


def leave(engine: Engine) -> None:
    """Ends an engine as the exit of the process does."""
    engine._core.shutdown.at_exit()


def fail(engine: Engine, error: BaseException) -> None:
    """Stops an engine as an error of one of its threads does."""
    engine._core.components.pager.fail(error)


# -- points ------------------------------------------------------------------------------------------


class Patcher(Protocol):
    """An object that undoes changes at the end of a test: pytest's `monkeypatch`, or the object of its `context()`."""

    def setattr(self, target: Any, name: str, value: Any) -> None:
        """Sets an attribute, and records its previous value."""


POINTS: Mapping[str, Sequence[str]] = {
    # Sizes.
    "size.chunk": (
        "offload.layout.placement:CHUNK",
        "offload.engine.gradients:CHUNK",
        "offload.distributed.reduce_scatter:CHUNK",
        "offload.optimizers.lamb:CHUNK",
    ),
    "size.first_weights": ("offload.engine.fill:CHUNK",),
    "size.parameter_access": ("offload.engine.access:CHUNK",),
    "size.update_tile": ("offload.layout.placement:_TILE_NBYTES",),
    "size.tile_buffers": ("offload.layout.placement:TILE_BUFFERS", "offload.planner.simulation.updater:TILE_BUFFERS"),
    "size.gradient_window": ("offload.layout.placement:_WINDOW_NBYTES",),
    "size.stream": ("offload.layout.placement:_STREAM_NBYTES",),
    "size.kept_gradient": ("offload.engine.gradients:KEPT_NUMEL",),
    "size.small_gradient": ("offload.engine.gradient_transfer:SMALL",),
    "size.staged_gradient": ("offload.engine.gradient_transfer:THROUGH_STAGING",),
    "size.least_kept_input": ("offload.activations.kept_inputs:LEAST_NBYTES",),
    "size.audit_share": ("offload.activations.audit:SHARE",),
    "size.export_chunk": ("offload.model_io.save:_CHUNK_NUMEL",),
    "size.export_reads": ("offload.model_io.save:_READS",),
    "size.export_writes": ("offload.model_io.save:_WRITES",),
    "size.block_chunk": ("offload.model_io.save:VALUES",),
    "size.safetensors_piece": ("offload.model_io.folder:_PIECE_NBYTES",),
    "size.pending_metrics": ("offload.metrics.writers:_MOST_PENDING",),
    "size.coded_replicas": ("offload.layout.memory_plan:MOST_CODED_REPLICAS",),
    "size.access_order": ("offload.swapper.policy:_LONGEST",),
    "size.row_request": ("offload.swapper.policy:_REQUEST_NBYTES",),
    "size.device_views": ("offload.swapper.memory.device_arena:_VIEWS",),
    "size.pin_chunk": ("offload.swapper.memory.device:PIN_CHUNK",),
    "size.pin_least": ("offload.swapper.memory.device:PIN_LEAST",),
    "size.file_sample": ("offload.fileio.inner_files:_SAMPLE_NBYTES",),
    "size.stripe": ("offload.swapper.store.drives:_STRIPE_BYTES",),
    "size.least_checksum": ("offload.swapper.store.format:_MIN_CHECKSUM_NBYTES",),
    "size.scrub": ("offload.swapper.store.store:_SCRUB_NBYTES",),
    "size.system_page": ("offload.aio.memory:_SYSTEM_PAGE",),
    "size.device_blocks": ("offload.kernels.blocks:_DEVICE_BLOCKS",),
    "size.tokens_in_memory": ("offload.finetune.corpus.token_stream:_IN_RAM",),
    "size.text_piece": ("offload.finetune.corpus.packing:_AT_ONCE",),
    # Threads: wherever an engine of one process makes a lock, an event or a thread. A lock that is missing here blocks
    # for ever under a test that owns the order of threads.
    "threads.module": (
        "offload.activations.kept_inputs:threading",
        "offload.engine.gradient_transfer:threading",
        "offload.engine.gradients:threading",
        "offload.engine.unit_views:threading",
        "offload.engine.update:threading",
        "offload.swapper.memory.lock:threading",
        "offload.swapper.store.format:threading",
        "offload.swapper.store.requests:threading",
        "offload.swapper.store.spill_file:threading",
        "offload.distributed.process_group:threading",
    ),
    "threads.thread": (
        "offload.distributed.process_group:Thread",
        "offload.engine.gradient_transfer:Thread",
        "offload.engine.update:Thread",
    ),
    "threads.clock": ("offload.distributed.process_group:time", "offload.engine.update:time"),
    "threads.queue": ("offload.distributed.process_group:queue",),
    # What the machine says.
    "clock.checkpoint": ("offload.checkpoint.files:_now",),
    "clock.steps": ("offload.metrics.meter:wall_clock",),
    "clock.drive_budget": ("offload.engine.commits:clock",),
    "clock.interrupts": ("offload.interrupts:_RETRY_S",),
    "clock.drive": ("offload.aio.unanswered:time",),
    "clock.drive_notice": ("offload.aio.unanswered:NOTICE_S",),
    "clock.probed_call": ("offload.hardware.probe:seconds_of",),
    "clock.model_pass": ("offload.planner.request:_seconds",),
    "machine.system_file": ("offload.aio.backend:_read", "offload.swapper.memory.limits:_read"),
    "machine.cpuinfo": ("offload.precision:_cpuinfo",),
    "machine.kernel_cores": ("offload.kernels:available_cores",),
    "machine.cores": ("offload.hardware.probe:_cores",),
    "machine.busy_seconds": ("offload.hardware.probe:_busy",),
    "machine.others_share": ("offload.hardware.probe:Others.share",),
    "machine.gpus": ("offload.hardware.system:driver_cards",),
    "machine.mount": ("offload.hardware.system:mount_of",),
    "machine.on_root": ("offload.hardware.system:_is_with_root",),
    "machine.temporary_folder": ("offload.hardware.system:gettempdir",),
    "machine.drive_folders": ("offload.hardware.system:_FOR_DRIVES",),
    "probe.measure": ("offload.hardware.probe:probe",),
    "probe.stored": ("offload.hardware.probe:kept",),
    "probe.largest_spread": ("offload.hardware.probe:FAR",),
    "probe.least_rate": ("offload.hardware.probe:SLOWEST",),
    "memory.map": ("offload.aio.memory:_map",),
    "memory.reading": ("offload.engine.memory_guard:read_host_memory",),
    "memory.reading_pace": ("offload.engine.memory_guard:_PACE",),
    "memory.free": (
        "offload.engine.access:free_host_memory",
        "offload.engine.edits:free_host_memory",
        "offload.engine.gradients:free_host_memory",
        "offload.swapper.memory.device:free_host_memory",
    ),
    "memory.free_for_plan": ("offload.planner.request:free_host_memory",),
    "disk.shortage_of_checkpoint": ("offload.checkpoint.save:find_shortage",),
    "disk.shortage_of_store": (
        "offload.distributed.reshard:find_shortage",
        "offload.swapper.store.store:find_shortage",
        "offload.swapper.store.store:find_drive_shortage",
    ),
    "disk.shortage_of_slots": ("offload.engine.plan:find_shortage",),
    "drives.measured": ("offload.swapper.store.drives:_measured",),
    "drives.bandwidths": ("offload.swapper.store.drives:bandwidths",),
    "drives.free": ("offload.swapper.store.drives:_free_bytes",),
    "modes.foreign": ("offload.provenance:foreign_mode",),
    "device.choose": ("offload.engine.setup:compute_device",),
    "device.open": ("offload.engine.setup:open_device",),
    "device.arena": ("offload.engine.assembly:DeviceArena",),
    "device.empty_cache": ("offload.engine.device_budget:empty_cache",),
    "device.shortages": ("offload.engine.device_budget:shortages",),
    "device.room": ("offload.swapper.memory.device:AcceleratorDevice.room",),
    "device.copy": ("offload.swapper.memory.device:AcceleratorDevice.copy",),
    "device.allocate": ("offload.swapper.memory.device_arena:DeviceArena._allocate",),
    "device.memory_node": ("offload.swapper.memory.device:memory_node",),
    "device.prefer_node": ("offload.swapper.memory.device:prefer_node",),
    "device.inputs": ("offload.engine.data:to_device",),
    "storage.users": ("offload.torch_internals:StorageUsers._tensors",),
    "dtype.warned": ("offload.precision:warned",),
    "dtype.rates": ("offload.precision:rates",),
    "dtype.measure": ("offload.precision:measure",),
    "kernel.update": ("offload.kernels:update",),
    "kernel.sum_squares": ("offload.kernels.cuda.kernels:sum_squares",),
    "kernel.driver": ("offload.kernels.cuda.driver:load",),
    "muon.products_in_bf16": ("offload.optimizers.matrices:products_in_bf16",),
    # I/O and files.
    "io.queue": ("offload.engine.assembly:IoQueue",),
    "io.open_queue": ("offload.engine.assembly:SharedQueue",),
    "io.close_queue": ("offload.aio.shared_queue:SharedQueue.close",),
    "io.native_queue": ("offload.aio.backend:Queue",),
    "io.read": ("offload.aio.queue:IoQueue.read",),
    "io.write": ("offload.aio.queue:IoQueue.write",),
    "io.notice": ("offload.aio.unanswered:announce",),
    "file.reserve": ("offload.aio.file:DirectFile.reserve",),
    "file.open_again": ("offload.aio.file:DirectFile._open_again",),
    "file.sync": ("offload.aio.file:DirectFile.sync",),
    "file.lock": ("offload.fileio.locked_dir:_flock",),
    "file.write_new": ("offload.model_io.save:write_new",),
    "file.write_all": ("offload.fileio.safetensors_stream:write_all",),
    "folder.exchange": ("offload.checkpoint.directory:exchange", "offload.model_io.save:exchange"),
    "folder.arrive": ("offload.model_io.save:_arrive",),
    "folder.rename": ("offload.distributed.reshard:_rename",),
    "folder.lock": ("offload.swapper.store.folder:DirLock",),
    "folder.sync": ("offload.swapper.store.folder:sync_folder",),
    "spill.read": ("offload.swapper.store.spill_file:SpillFile.read",),
    "spill.write": ("offload.swapper.store.spill_file:SpillFile.write",),
    # Weights.
    "pager.acquire": ("offload.swapper.pager:Pager.acquire",),
    "pager.close": ("offload.swapper.pager:Pager.close",),
    "host.start_read": ("offload.swapper.caches:HostCache.start_read",),
    "weights.device_tier": ("offload.swapper.pager:WeightUpdates.device_tier",),
    "parameter.read": ("offload.engine.params:ParamHandle.read",),
    "state.read": ("offload.engine.shards:LocalShards.read",),
    "safetensors.fill": ("offload.model_io.folder:Stored._fill",),
    # Store.
    "store.create": ("offload.swapper.store.store:Store.create",),
    "store.scrub": ("offload.swapper.store.store:Store._scrub",),
    "store.read": ("offload.swapper.store.store:Store.read",),
    "store.write": ("offload.swapper.store.store:Store.write",),
    "store.commit": ("offload.swapper.store.store:Store.commit",),
    "store.sync": ("offload.swapper.store.store:SwapFiles.sync",),
    "store.write_manifests": ("offload.swapper.store.store:SwapFiles._write_manifests",),
    "store.clone_range": ("offload.swapper.store.store:clone_range",),
    "store.copy_range": ("offload.swapper.store.store:copy_range",),
    # Gradients, activations and updates.
    "gradient.squares": ("offload.engine.gradients:squares_of",),
    "gradient.add_small": ("offload.engine.gradient_transfer:SmallGradients.add",),
    "gradient.begin_download": ("offload.engine.gradient_transfer:DeviceToHost._begin",),
    "gradient.drain": ("offload.engine.gradient_transfer:DeviceToHost.drain",),
    "gradient.spill": ("offload.engine.gradient_transfer:DiskSpill._write",),
    "input.fetch": ("offload.activations.kept_inputs:KeptInputs.fetch",),
    "input.take": ("offload.activations.kept_inputs:HostBlocks.take",),
    "audit.compare": ("offload.activations.audit:different",),
    "loss.in_chunks": ("offload.losses.causal_model:causal_lm",),
    "update.build": ("offload.engine.update_strategy:UpdateBuilder.updates",),
    "update.early": ("offload.engine.plan:makes_early_updates",),
    "update.finish": ("offload.engine.update:UpdateWorker.finish",),
    "update.commit": ("offload.engine.update:UpdateWorker._commit",),
    "update.deliver": ("offload.engine.update:UpdateWorker.deliver_blob",),
    "checkpoint.write_states": ("offload.checkpoint.save:_write_states",),
    "checkpoint.buffer": ("offload.fileio.buffered_copy:aligned_empty",),
    "export.buffer": ("offload.model_io.save:aligned_empty",),
    # Training by the command line.
    "train.save_model": ("offload.finetune.job:Job.save_model",),
    # Ranks.
    "ranks.heartbeat_store": ("offload.distributed.process_group:BoundedStore",),
    "ranks.silent": ("offload.distributed.process_group:SILENT",),
    "ranks.blame": ("offload.distributed.process_group:ProcessGroup._blame",),
    "ranks.gather": ("offload.distributed.process_group:ProcessGroup.gather",),
    "ranks.exchange": ("offload.distributed.process_group:ProcessGroup.exchange",),
    "ranks.reduce": ("offload.distributed.reduce_scatter:ReduceScatterAccumulator.put",),
    "ranks.finish_reduce": ("offload.distributed.reduce_scatter:ReduceScatterAccumulator._finish",),
    "pipeline.split_backward": ("offload.parallel.pipeline:split",),
}
"""Places in the package, as `module:attribute`, by the name that tests use. A name changes all its places."""


def _targets(point: str) -> list[tuple[Any, str]]:
    if point not in POINTS:
        raise KeyError(f"no point {point!r}: offload.testing.POINTS has {', '.join(POINTS)}")
    targets = []
    for place in POINTS[point]:
        module, _, path = place.partition(":")
        *owners, name = path.split(".")
        targets.append((functools.reduce(getattr, owners, importlib.import_module(module)), name))
    return targets


def replace(patch: Patcher, point: str, value: Any) -> None:
    """Replaces a function, a class or a number of the package until `patch` undoes it.

    Args:
        point: A name of `POINTS`.
        value: The replacement. A method's replacement takes `self`.
    """
    for owner, name in _targets(point):
        patch.setattr(owner, name, value)


def intercept(patch: Patcher, point: str, action: Callable[..., Any]) -> None:
    """Calls `action(real, *args, **kwargs)` in place of a function until `patch` undoes it.

    Args:
        point: A name of `POINTS`.
        action: Called with the real function, then with the arguments of the call; a method's include `self`.
    """
    for owner, name in _targets(point):
        patch.setattr(owner, name, _calling(action, getattr(owner, name)))


def _calling(action: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    # A plain function, so that a class binds its instance as the first argument after `real`.
    def call(*args: Any, **kwargs: Any) -> Any:
        return action(real, *args, **kwargs)

    return call
