"""Peak RSS of training against its formula, with states many times the host budget: `python -m bench.memory FOLDER`.

Formula: RSS before `offload.initialize`, plus host budget, device budget (the device is the CPU here), and 512 MiB
for activations, libraries and one unit on its way into the files. Each row is a process of its own, of which the kernel
tells the peak; the last steps' bytes are those that the kernel has counted for it (/proc/self/io).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import transformers

import offload
from bench.measure import in_process, report, settings_for
from offload.bench.measure import kernel_bytes, random_ids, resident
from offload.sizes import GIB, MIB

ALLOWANCE = 512 * MIB
ROWS = [(1, 1), (1, 4), (2, 1), (2, 4), (4, 1), (4, 4), (1, 10)]
"""Host budget in GiB, and the states' size as a multiple of it."""
_STATE_BYTES = 12


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rows", default=" ".join(f"{gib}x{times}" for gib, times in ROWS))
    options = parser.parse_args(arguments)
    for row in options.rows.split():
        gib, times = (int(number) for number in row.split("x"))
        figures = in_process(_train, options.folder, gib * GIB, times, options.steps)
        over = figures["peak"] - figures["base"] - figures["host_memory"] - figures["device_memory"]
        report("memory", {"budget_gib": gib, "times": times, **figures, "over": over, "kept": over <= ALLOWANCE})


def _train(folder: Path, budget: int, times: int, steps: int) -> dict[str, Any]:
    parameters = budget * times // _STATE_BYTES
    width = 1024 if parameters < 300e6 else 2048
    layers = max(1, round(parameters / (12 * width**2)))
    durability = "none" if budget * times > 8 * GIB else "auto"
    settings = settings_for(folder, "bench-memory", "nvme", host_memory=budget, durability=durability)
    with offload.init(settings):
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_layer=layers, n_embd=width, n_head=16, vocab_size=512, n_positions=128, use_cache=False
            )
        )
    base = resident()
    engine = offload.initialize(model=model, config=settings)[0]
    ids = random_ids((1, 64), 512)
    io: list[int] = []
    for _ in range(steps):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        io.append(sum(kernel_bytes() or ()))
    count = engine.parameter_count
    engine.destroy(remove=True)
    return {
        "parameters": count,
        "base": base,
        "peak": resident("VmHWM"),
        "host_memory": engine.host_memory,
        "device_memory": engine.device_memory,
        "bytes_per_parameter": (io[-1] - io[-2]) / count,
        "notices": json.dumps([notice for notice in engine.notices if "host memory" in notice]),
    }


if __name__ == "__main__":
    main()
