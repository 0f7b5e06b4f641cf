"""The fused AdamW step in bf16 against the machine's memory: `python -m bench.adam [--numel N]`.

Bound: the kernel reads 14 bytes and writes 12 for each parameter (weight 2 + 2, residual 2 + 2, moments 8 + 8,
gradient 2). The probe moves as many bytes in the same proportion by adding a constant to fp32 arrays in place
(4 read and 4 written), on the same threads.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from bench.measure import in_turns, median_ratio, report
from offload import kernels

BYTES_PER_PARAMETER = 26


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args(arguments)
    numel = given.numel
    weight, residual = torch.zeros(numel, dtype=torch.bfloat16), torch.zeros(numel, dtype=torch.int16)
    exp_avg, exp_avg_sq = torch.zeros(numel), torch.zeros(numel)
    gradient = torch.randn(numel).to(torch.bfloat16)
    step = kernels.AdamWStep(1e-3, 0.9, 0.999, 1e-8, 0.01, 1, 1.0)
    probe = torch.zeros(numel * BYTES_PER_PARAMETER // 8)
    mine, theirs = in_turns(
        lambda: kernels.adamw(weight, residual, exp_avg, exp_avg_sq, gradient, step),
        lambda: probe.add_(1.0),
        given.rounds,
    )
    nbytes = numel * BYTES_PER_PARAMETER
    report(
        "adam",
        {
            "numel": numel,
            "gigabytes_per_second": nbytes / statistics.median(mine) / 1e9,
            "probe_gigabytes_per_second": nbytes / statistics.median(theirs) / 1e9,
            "fraction_of_probe": median_ratio(theirs, mine),
        },
    )


if __name__ == "__main__":
    main()
