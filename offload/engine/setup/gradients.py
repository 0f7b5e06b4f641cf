"""The accumulator of gradients, put together as the plan says: its memory in each tier, and its threads."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from offload.aio.shared_queue import SharedQueue
from offload.distributed.agreement import Agreement
from offload.distributed.reduce_scatter import ReduceScatterAccumulator
from offload.engine.callbacks import EngineCallbacks
from offload.engine.gradients.accumulator import GradientAccumulator
from offload.engine.gradients.completion import UnitCompletion
from offload.engine.gradients.device_to_host import DeviceToHost
from offload.engine.gradients.disk_spill import DiskSpill, windows
from offload.engine.gradients.places import GradientPlaces
from offload.engine.gradients.values import borders, parameter_starts
from offload.engine.metrics.compute_spans import ComputeSpans
from offload.engine.optim.speculation.rules import RunFacts, run_may_speculate
from offload.engine.setup.plan import Plan
from offload.engine.setup.run_files import RunFiles
from offload.layout.modes import LAMB
from offload.layout.pass_order import makes_early_updates
from offload.layout.placement import STAGING_BUFFERS, WINDOWS
from offload.states import State, Tier
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostArena
from offload.swapper.pager import Pager
from offload.swapper.store import Written
from offload.swapper.store.requests import DriveSpans
from offload.swapper.store.spill_file import SpillFile
from offload.timeline import OFF, Timeline


def gradient_accumulator(
    plan: Plan,
    host: HostArena,
    arena: DeviceArena,
    files: RunFiles,
    pager: Pager,
    rounds: Agreement | None,
    callbacks: EngineCallbacks,
    spans: DriveSpans,
    compute: ComputeSpans,
) -> GradientAccumulator:
    """Returns the accumulator of gradients, with its memory in the tiers of the plan.

    Args:
        plan: All decisions.
        host: Source of host buffers.
        arena: Source of device buffers.
        files: The files of the run.
        pager: Receives failures of other threads.
        rounds: Order of collectives; None with one rank.
        callbacks: The engine.
        spans: Records requests to the drives.
        compute: Spans of forward and backward.
    """
    dtype, trainable, timeline = plan.parts.gradient_dtype, plan.trainable, pager.table.timeline
    with contextlib.ExitStack() as undo:
        spill = downloads = None
        if files.queue is not None and plan.placement.spilled:
            spill = _spill(plan, trainable, host, files.queue, pager, files.written, spans)
            undo.callback(spill.close)
        # The CPU cannot read gradients on such a device, so they are first copied to pinned staging buffers.
        if any(plan.parts.trainable_numel) and not plan.device.host_addressable:
            downloads = _downloads(plan, host, pager, timeline)
            undo.callback(downloads.close)
        waiting = _gradient_places(plan, arena, spill, downloads)
        accumulator: GradientAccumulator
        if plan.ranks is None or rounds is None or plan.parts.reduction is None:
            accumulator = GradientAccumulator(
                plan.layouts,
                trainable,
                host,
                dtype,
                waiting,
                callbacks,
                timeline=timeline,
                compute=compute,
                completion=UnitCompletion(callbacks) if run_may_speculate(_run_facts(plan)) else None,
            )
        else:
            accumulator = ReduceScatterAccumulator(
                plan.layouts,
                trainable,
                host,
                dtype,
                waiting,
                callbacks,
                device=plan.device,
                device_arena=arena,
                reduction=plan.parts.reduction,
                ranks=plan.ranks,
                rounds=rounds,
                timeline=timeline,
                compute=compute,
            )
        undo.pop_all()
    return accumulator


def _gradient_places(
    plan: Plan, arena: DeviceArena, spill: DiskSpill | None, downloads: DeviceToHost | None
) -> GradientPlaces:
    """Returns the memory in which gradients wait, other than that of the host."""
    dtype = plan.parts.gradient_dtype
    # Totals on the device keep their place for the whole run, so that no step allocates device memory.
    on_device = {
        unit: arena.keep(plan.parts.nbytes[unit][State.GRAD]).view(dtype)
        for unit, tiers in enumerate(plan.placement.tiers)
        if tiers.get(State.GRAD) is Tier.DEVICE
    }
    totals = {unit: arena.keep(nbytes).view(dtype) for unit, nbytes in plan.placement.added}
    return GradientPlaces(spill=spill, on_device=on_device, totals=totals, downloads=downloads)


def _run_facts(plan: Plan) -> RunFacts:
    """Returns the facts that decide whether updates may be made under the backward."""
    return RunFacts(
        wanted=makes_early_updates(plan.config.offload.speculate, plan.device.host_addressable)
        and plan.config.offload.debug.overlap,
        ranks=plan.processes,
        one_pass=plan.mode.optimizer != LAMB and not plan.mode.whole_units,
        commits=plan.slots == 2 and plan.commit_every > 0,
        on_disk=any(
            part and all(tier is Tier.DISK for state, tier in row.items() if state is not State.GRAD)
            for part, row in zip(plan.trainable, plan.placement.tiers, strict=True)
        ),
    )


def _downloads(plan: Plan, host: HostArena, pager: Pager, timeline: Timeline) -> DeviceToHost:
    """Returns the copies of gradients from the device to staging buffers in host memory."""
    staging = [host.staging.take(host.classes.staging // STAGING_BUFFERS) for _ in range(STAGING_BUFFERS)]
    buffers = [each for each in staging if each is not None]
    # Two buffers or more: one is filled by the device while the CPU reads another.
    assert len(buffers) == STAGING_BUFFERS, "the class was sized for them"
    most = plan.parts.largest_gradient
    return DeviceToHost(plan.device, buffers, most, plan.device_kernels, pager.fail, pager.check, timeline=timeline)


def _spill(
    plan: Plan,
    trainable: Sequence[range],
    host: HostArena,
    queue: SharedQueue,
    pager: Pager,
    written: Written,
    spans: DriveSpans,
) -> DiskSpill:
    """Returns the gradients on disk, with their windows in host memory."""
    placement, parts = plan.placement, plan.parts
    itemsize = parts.gradient_dtype.itemsize
    buffers = [host.gradients.take(placement.window_numel * itemsize) for _ in range(WINDOWS)]
    unit_windows = {
        unit: windows(borders(layout, part), parameter_starts(layout, part), placement.window_numel)
        for unit, layout, part in ((unit, plan.layouts[unit], trainable[unit]) for unit in placement.spilled)
    }
    nbytes = {unit: parts.nbytes[unit][State.GRAD] for unit in unit_windows}
    # Gradients do not outlive a step, so their file is never committed.
    scratch = SpillFile(
        plan.config.drives,
        nbytes,
        queue,
        written,
        spans,
        title=lambda unit: f"the gradient of {plan.layouts[unit].name or 'the root'}",
    )
    # A receiving thread adds gradients beside the backward, so that its waits are none of the model's.
    timeline = pager.table.timeline if plan.device.host_addressable else OFF
    return DiskSpill(
        unit_windows, parts.gradient_dtype, [each for each in buffers if each], scratch, pager.fail, timeline
    )
