"""Predicted against measured: seconds of a step and peak RSS, in four placements: `python -m bench.predict FOLDER`.

Each round trains in each placement in turn, in a process of its own; before each it probes the machine, and before and
after it runs the model alone. Seconds are means of a run's steps, figures are medians of the rounds. Two predictions
stand beside the median of what was measured: that of `offload plan`, by the probe, and that of `offload plan
--measure`, by the model. Bars: 10 % of the seconds, 5 % of the peak.

`--accumulation 8 --orders "micro_batch_major layer_major"` measures a step of eight micro-batches in each order; a name
that ends in `+early` updates layers under the backward, others do not. The gain of an order is the seconds of the first
one over its own, as measured and as predicted.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
from typing import Any

import offload
from bench.measure import in_process, options, report
from bench.throttle import throttled
from offload.bench.measure import median_ratio, random_ids, resident, seconds_of
from offload.hardware.probe import DTYPES, probe
from offload.planner import memory, recommend
from offload.planner.activations import Load
from offload.planner.hardware import Hardware, probed
from offload.planner.model_shape import Shape, from_name
from offload.planner.request import compute_seconds, measured
from offload.presets import build
from offload.sizes import parse_size
from offload.swapper.memory.limits import free_host_memory

PLACEMENTS = (("none", "none"), ("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "nvme"))
_EARLY = "+early"
_UNCOUNTED = 2
"""Steps of each run: the first records the order of uses, the second has no update beside it yet."""


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__, seq_len=256, rounds=3)
    parser.add_argument("--steps", type=int, default=4, help="that count, of each run")
    parser.add_argument("--placements", default=" ".join("/".join(tiers) for tiers in PLACEMENTS))
    parser.add_argument("--dtype", default="bf16", choices=tuple(DTYPES), help="of the weights")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--orders", default="micro_batch_major", help="orders to compare, the first one is the base")
    parser.add_argument("--throttle", type=parse_size, help="bytes a second that the drive may read, and may write")
    args = parser.parse_args(arguments)
    with throttled(args.folder, args.throttle) if args.throttle else contextlib.nullcontext():
        _rounds(args)


def _rounds(args: argparse.Namespace) -> None:
    dtype = DTYPES[args.dtype]
    shape, load = from_name(args.model, args.seq_len, dtype), Load(args.batch_size, args.accumulation)
    orders = args.orders.split()
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {
        (name, order): [] for name in args.placements.split() for order in orders
    }
    for _ in range(args.rounds):
        for (name, order), done in runs.items():
            weights, states = name.split("/")
            rates = probe([str(args.folder)], "cpu")
            on = probed(rates, free_host_memory(), dtype=args.dtype)
            keys: dict[str, Any] = {"schedule": order.removesuffix(_EARLY), "speculate": order.endswith(_EARLY)}
            done.append(_run(args, shape, load._replace(**keys), (weights, states), on, keys))
            report("predict, one run", {"placement": name, "order": order, **done[-1]})
    about = {"model": args.model, "dtype": args.dtype, "tokens": load.tokens(shape), "throttle": args.throttle}
    for (name, order), of in runs.items():
        gains = _gains(runs[name, orders[0]], of)
        about |= {"placement": name, "order": order, "accumulation": args.accumulation}
        report("predict", {**about, **_summary(of), **gains})


def _gains(base: list[dict[str, Any]], runs: list[dict[str, Any]]) -> dict[str, float]:
    """Returns an order's speed relative to the first order of its placement: measured, and predicted twice."""

    def gain(name: str) -> float:
        return median_ratio([run[name] for run in base], [run[name] for run in runs])

    measured = gain("seconds")
    return {
        "gain": measured,
        "gain_by_probe": gain("by_probe"),
        "gain_by_model": gain("by_model"),
        "gain_by_model_over_measured": gain("by_model") / measured,
    }


def _run(
    args: argparse.Namespace,
    shape: Shape,
    load: Load,
    tiers: tuple[str, str],
    hardware: Hardware,
    keys: dict[str, Any],
) -> dict[str, Any]:
    """One placement in one order: predicted twice, and measured."""
    sizes = {"batch": args.batch_size, "accumulation": args.accumulation}
    content = memory.settings(*tiers, dtype=args.dtype, paths=[str(args.folder)], **sizes)
    dtype = DTYPES[args.dtype]
    content["offload"] |= {"device": "cpu", "run": "bench-predict", "durability": "auto", **keys}
    by_probe = recommend.plan(shape, hardware, load, content)
    before = in_process(measured, hardware, shape, load, dtype)
    trained = in_process(_train, args.model, args.batch_size, args.seq_len, args.steps, content)
    after = in_process(measured, hardware, shape, load, dtype)
    by_model = [recommend.plan(shape, model, load, content) for model in (before, after)]
    return {
        **trained,
        "compute": statistics.fmean(compute_seconds(shape, model, load.batch) for model in (before, after)),
        "probed_compute": compute_seconds(shape, hardware, load.batch),
        "by_probe": by_probe.timing.seconds,
        "by_model": statistics.fmean(planned.timing.seconds for planned in by_model),
        "predicted_peak": by_probe.host_peak,
        "predicted_budgets": by_probe.memory.host + by_probe.memory.device,
    }


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    def median(name: str) -> float:
        values: list[float] = [run[name] for run in runs]
        return statistics.median(values)

    def ratio(name: str, of: str) -> float:
        return median_ratio([run[name] for run in runs], [run[of] for run in runs])

    return {
        "seconds": median("seconds"),
        "spread": [round(min(r["seconds"] for r in runs), 3), round(max(r["seconds"] for r in runs), 3)],
        "plain_compute": median("compute"),
        "probed_compute": median("probed_compute"),
        "predicted_by_probe": median("by_probe"),
        "predicted_by_model": median("by_model"),
        "by_probe_over_measured": ratio("by_probe", "seconds"),
        "by_model_over_measured": ratio("by_model", "seconds"),
        "peak": int(median("peak")),
        "predicted_peak": int(median("predicted_peak")),
        "peak_over_measured": ratio("predicted_peak", "peak"),
        "budgets_as_planned": all(run["budgets"] == run["predicted_budgets"] for run in runs),
    }


# -- in a process of its own --------------------------------------------------------------------------


def _train(name: str, batch: int, length: int, steps: int, content: dict[str, Any]) -> dict[str, Any]:
    with offload.init(content):
        model: Any = build(name)
    base = resident()
    engine = offload.initialize(model=model, config=content)[0]
    ids = random_ids((batch, length), model.config.vocab_size)

    def step() -> None:
        engine.train_batch(itertools.repeat({"input_ids": ids, "labels": ids}))

    seconds = [seconds_of(step) for _ in range(_UNCOUNTED + steps)]
    peak = resident("VmHWM")
    budgets = engine.host_memory + engine.device_memory
    engine.destroy(remove=True)
    return {"seconds": statistics.fmean(seconds[_UNCOUNTED:]), "peak": peak - base, "budgets": budgets}


if __name__ == "__main__":
    main()
