"""A drive whose rate falls, predicted against measured: `python -m bench.sustained FOLDER`, as root.

The kernel holds the drive back to `--rate` until `--bytes` are written, and its writes to `--after` from then on. First
`offload probe --sustained` finds the fall. Then a run trains on a drive that falls anew, weights and states on it, and
the seconds of its steps before and after the fall stand beside those that the curve predicts. Bars: 10 % of the bytes,
and of the seconds. Rates that are low for the machine hide what else it does.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
from typing import Any

import offload
from bench.measure import in_process, options, report
from bench.throttle import falling, throttled
from offload.bench.measure import random_ids, seconds_of
from offload.hardware import sustained
from offload.hardware.probe import DTYPES, probe
from offload.planner import memory, recommend
from offload.planner.activations import Load
from offload.planner.hardware import probed
from offload.planner.model_shape import from_name
from offload.planner.request import measured
from offload.planner.sustained import step_seconds, sustained_steps
from offload.presets import build
from offload.sizes import MIB, parse_size
from offload.swapper.memory.limits import free_host_memory

_PROBED = 16 * MIB
"""Size of the file that measures the drive's rates before the fall, in bytes."""
_UNCOUNTED = 2
"""Steps of the run: the first records the order of uses, the second has no update beside it yet."""
_LONGER = 1.6
"""Ratio of all bytes that the probe writes to those before the fall."""


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__, seq_len=64, rounds=1)
    parser.add_argument("--rate", type=parse_size, default=100 * 10**6, help="bytes a second before the fall")
    parser.add_argument("--bytes", type=parse_size, default=10**9, help="that are written before the fall")
    parser.add_argument("--after", type=parse_size, default=40 * 10**6, help="bytes a second that are written after it")
    parser.add_argument("--dtype", default="fp32", choices=tuple(DTYPES), help="of the weights")
    args = parser.parse_args(arguments)
    drive: dict[str, Any] = {"folder": args.folder, "rate": args.rate, "nbytes": args.bytes, "after": args.after}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # the curve of this drive is nobody else's
        for _ in range(args.rounds):
            with falling(**drive):
                curve = sustained.probe(str(args.folder), int(_LONGER * args.bytes), idle_seconds=0)
            sustained.keep(curve)
            figures = {"burst_bytes": curve.burst_bytes, "of": args.bytes, "after_rate": curve.after}
            report("sustained, the probe", {**figures, "ratio": (curve.burst_bytes or 0) / args.bytes})
            report("sustained, the run", _run(args, drive))


def _run(args: Any, drive: dict[str, Any]) -> dict[str, Any]:
    dtype, load = DTYPES[args.dtype], Load(args.batch_size, 1)
    shape = from_name(args.model, args.seq_len, dtype)
    with throttled(args.folder, args.rate):
        on = probed(probe([str(args.folder)], "cpu", _PROBED), free_host_memory(), dtype=args.dtype)
    content = memory.settings("nvme", "nvme", dtype=args.dtype, paths=[str(args.folder)], batch=args.batch_size)
    content["offload"] |= {"device": "cpu", "run": "bench-sustained", "durability": "step"}
    on = in_process(measured, on, shape, load, dtype)
    planned = recommend.plan(shape, on, load, content)
    steps = sustained_steps(planned)
    assert steps is not None and steps.measured, "the plan writes, and its drive has a curve"
    with falling(**drive):
        taken = in_process(_train, args, int(_LONGER * args.bytes), content)
    # A step during which the rate falls is neither before nor after it.
    counted = [row for row in taken[_UNCOUNTED:] if not row[0] < args.bytes <= row[1]]
    figures: dict[str, Any] = {"moved": planned.timing.moved.read + planned.timing.moved.written}
    for name, rows in (
        ("before", [row for row in counted if row[1] < args.bytes]),
        ("after", [row for row in counted if row[0] >= args.bytes]),
    ):
        seconds = statistics.median(row[2] for row in rows)
        expected = step_seconds(steps.by_written, rows[0][0])
        figures |= {f"steps_{name}": len(rows), f"seconds_{name}": seconds, f"predicted_{name}": expected}
        figures[f"ratio_{name}"] = expected / seconds
    return {**figures, "model": args.model, "drive_read_write": [on.read, on.written], "load": os.getloadavg()[0]}


def _train(args: Any, nbytes: int, content: dict[str, Any]) -> list[tuple[int, int, float]]:
    """Returns for each step the bytes that the run has written before and after it, and its seconds."""
    with offload.init(content):
        model: Any = build(args.model)
    engine = offload.initialize(model=model, config=content)[0]
    ids = random_ids((args.batch_size, args.seq_len), model.config.vocab_size)

    def step() -> None:
        engine.train_batch(itertools.repeat({"input_ids": ids, "labels": ids}))

    rows: list[tuple[int, int, float]] = []
    while (before := _written(engine)) < nbytes:
        seconds = seconds_of(step)
        rows.append((before, _written(engine), seconds))
    engine.destroy(remove=True)
    return rows


def _written(engine: offload.Engine) -> int:
    return sum(drive.run_bytes for drive in engine.drive_writes())


if __name__ == "__main__":
    main()
