"""A checkpoint saved and loaded, a run exported, all on disk: `python -m bench.checkpoint FOLDER [--layers N]`.

Bound of the time: what is read over the read rate and what is written over the write rate of the same folder, measured
in the same run, for one drive that does one after the other. A save reads all once and writes it once; a load reads it
twice, since all is checked before anything is changed, and writes it once. An export in fp32 reads weight and residual,
4 bytes a parameter, and writes as many. Memory: the peak of the resident set during
each, above what was resident before it. Needs room for 36 bytes a parameter: two slots and the checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import offload
from bench.measure import apart, random_ids, report, resident, seconds, settings_for
from offload.aio import Bandwidth, IoQueue, bandwidths
from offload.engine.model_io.weight_source import StoreSource
from offload.presets import PRESETS, require_transformers
from offload.runs.export import export, make_plan
from offload.sizes import GIB, MIB
from offload.swapper.store import remove_run

ALLOWANCE = 512 * MIB
"""Bytes above the base that a save or a load may take."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--layers", type=int, default=None, help="fewer layers than the model has, where room is short")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    report("checkpoint", apart(_run, given))


def streamed(
    action: Callable[[], object],
    reads: int,
    writes: int,
    rate: Bandwidth,
    rounds: int,
    prepare: Callable[[], object] = gc.collect,
) -> dict[str, Any]:
    """Seconds of `action`, which moves so many bytes, against its bound, the median round; and the most memory it took.

    `prepare` comes before each round and does not count.
    """
    found = []
    for _ in range(rounds):
        prepare()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        base = resident()
        taken = seconds(action)
        found.append((taken, resident("VmHWM") - base))
    found.sort()
    taken, bound = found[rounds // 2][0], reads / rate.read + writes / rate.write
    over = max(each[1] for each in found)
    return {
        "seconds": taken,
        "bytes_per_second": (reads + writes) / taken,
        "bound_seconds": bound,
        "share_of_bound": bound / taken,
        "over": over,
        "kept": over <= ALLOWANCE,
    }


def _run(given: argparse.Namespace) -> dict[str, Any]:
    run, saved = given.folder / "bench-checkpoint", given.folder / "bench-checkpoint-saved"
    settings = settings_for(given.folder, run.name, "nvme", durability="step")
    engine = _engine(given, settings)
    try:
        ids = random_ids((1, 16), 256)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        nbytes = sum(
            nbytes
            for row in engine._core.components.shards.nbytes
            for state, nbytes in row.items()
            if state.value != "grad"
        )
        rate = bandwidths([given.folder], nbytes=min(GIB, nbytes), rounds=3)[0]

        def save() -> None:
            engine.save_checkpoint(saved)

        save()
        figures = {
            "model": given.model,
            "layers": given.layers,
            "parameters": engine.parameter_count,
            "checkpoint_bytes": nbytes,
            "read_rate": rate.read,
            "write_rate": rate.write,
            "save": streamed(save, nbytes, nbytes, rate, given.rounds, lambda: shutil.rmtree(saved)),
            "load": streamed(lambda: engine.load_checkpoint(saved), 2 * nbytes, nbytes, rate, given.rounds),
        }
    finally:
        engine.destroy()
        shutil.rmtree(saved, ignore_errors=True)
    try:
        exported = 4 * figures["parameters"]
        with contextlib.closing(IoQueue()) as queue, contextlib.closing(StoreSource(run, queue)) as source:
            plan = make_plan(source, "fp32", 5 * GIB)
            figures["export"] = streamed(
                lambda: export(source, saved, plan, queue),
                exported,
                exported,
                rate,
                given.rounds,
                lambda: shutil.rmtree(saved, ignore_errors=True),
            )
    finally:
        remove_run(run)
        shutil.rmtree(saved, ignore_errors=True)
    return figures


def _engine(given: argparse.Namespace, settings: dict[str, Any]) -> offload.Engine:
    transformers, preset = require_transformers(), PRESETS[given.model]
    name = {"LlamaConfig": "num_hidden_layers", "GPT2Config": "n_layer"}[preset.config]
    fewer = {} if given.layers is None else {name: given.layers}
    with offload.init(settings):
        config = getattr(transformers, preset.config)(**{**preset.settings, **fewer}, use_cache=False)
        model = transformers.AutoModelForCausalLM.from_config(config)
    return offload.initialize(model=model, config=settings)[0]


if __name__ == "__main__":
    main()
