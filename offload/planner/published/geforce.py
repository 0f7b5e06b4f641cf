"""GeForce cards by their published figures, each with its source.

Their tensor cores have half the rate where sums are in fp32, as torch asks for: `flops` is that half.
"""

from __future__ import annotations

from offload.planner.published.gpu import PCIE_4, PCIE_5, TORCH, Gpu
from offload.planner.published.rate import Figure
from offload.sizes import GIB

_HALF_OF_4 = Figure(12.5e9, f"PCIe 4 x8, half of x16: {PCIE_4.source}")
_HALF_OF_5 = Figure(25e9, f"PCIe 5 x8, half of x16: {PCIE_5.source}")

GEFORCE = (
    Gpu(
        name="RTX 4060",
        generation="GeForce RTX 40",
        memory=8 * GIB,
        flops=30.2e12,
        flops_fp32=15.1e12,
        bandwidth=272e9,
        link=_HALF_OF_4,  # 8 lanes
        matmul=Figure(31.2e12, f"{TORCH} issue 66"),
        matmul_fp32=Figure(8.3e12, f"{TORCH} issue 66"),
    ),
    Gpu(
        name="RTX 3070 Ti",
        generation="GeForce RTX 30",
        memory=8 * GIB,
        flops=43.5e12,
        flops_fp32=21.7e12,
        bandwidth=608e9,
        link=PCIE_4,
        matmul=Figure(45.8e12, f"{TORCH} issue 184"),
        matmul_fp32=Figure(17.0e12, f"{TORCH} issue 184"),
    ),
    Gpu(
        name="RTX 3080",
        generation="GeForce RTX 30",
        memory=10 * GIB,  # a later one has 12 GiB and more cores
        flops=59.5e12,
        flops_fp32=29.8e12,
        bandwidth=760e9,
        link=PCIE_4,
        matmul=Figure(64.7e12, f"{TORCH} issue 114"),
        matmul_fp32=Figure(21.1e12, f"{TORCH} issue 114"),
    ),
    Gpu(
        name="RTX 3060",
        generation="GeForce RTX 30",
        memory=12 * GIB,  # one of 8 GiB has a slower memory
        flops=25.5e12,
        flops_fp32=12.7e12,
        bandwidth=360e9,
        link=PCIE_4,
        matmul=Figure(25.5e12, f"{TORCH} issue 131"),
        matmul_fp32=Figure(8.2e12, f"{TORCH} issue 131"),
    ),
    Gpu(
        name="RTX 3080 Ti",
        generation="GeForce RTX 30",
        memory=12 * GIB,
        flops=68.2e12,
        flops_fp32=34.1e12,
        bandwidth=912e9,
        link=PCIE_4,
        # A run of the table and two of issues: the median.
        matmul=Figure(76.5e12, f"{TORCH} issues 117, 132"),
        matmul_fp32=Figure(24.4e12, f"{TORCH} issues 117, 132"),
    ),
    Gpu(
        name="RTX 4070",
        generation="GeForce RTX 40",
        memory=12 * GIB,
        flops=58.3e12,  # no run of a desktop card was published
        flops_fp32=29.1e12,
        bandwidth=504e9,
        link=PCIE_4,
    ),
    Gpu(
        name="RTX 4070 SUPER",
        generation="GeForce RTX 40",
        memory=12 * GIB,
        flops=71e12,
        flops_fp32=35.5e12,
        bandwidth=504e9,
        link=PCIE_4,
        # Two runs of the table and one of an issue: the median.
        matmul=Figure(73.6e12, f"{TORCH} issue 196"),
        matmul_fp32=Figure(24.6e12, f"{TORCH} issue 196"),
    ),
    Gpu(
        name="RTX 4070 Ti",
        generation="GeForce RTX 40",
        memory=12 * GIB,
        flops=80.2e12,  # no run of a desktop card was published
        flops_fp32=40.1e12,
        bandwidth=504e9,
        link=PCIE_4,
    ),
    Gpu(
        name="RTX 5070",
        generation="GeForce RTX 50",
        memory=12 * GIB,
        flops=61.7e12,
        flops_fp32=30.9e12,
        bandwidth=672e9,
        link=PCIE_5,
        # Each machine counts once or, with two versions of torch, twice.
        matmul=Figure(66.1e12, f"{TORCH} issues 101, 149, 159, 178, 179, 194"),
        matmul_fp32=Figure(22.9e12, f"{TORCH} issues 101, 149, 159, 178, 179, 194"),
    ),
    Gpu(
        name="RTX 4060 Ti 16GB",
        generation="GeForce RTX 40",
        memory=16 * GIB,
        flops=44.1e12,
        flops_fp32=22.1e12,
        bandwidth=288e9,
        link=_HALF_OF_4,  # 8 lanes
        # A run of the table and two of issues: the median.
        matmul=Figure(44.7e12, f"{TORCH} issues 130, 145"),
        matmul_fp32=Figure(11.9e12, f"{TORCH} issues 130, 145"),
    ),
    Gpu(
        name="RTX 4070 Ti SUPER",
        generation="GeForce RTX 40",
        memory=16 * GIB,
        flops=88.2e12,
        flops_fp32=44.1e12,
        bandwidth=672e9,
        link=PCIE_4,
        # A run at clocks above the card's own is left out.
        matmul=Figure(92.7e12, f"{TORCH} issue 70"),
        matmul_fp32=Figure(31.2e12, f"{TORCH} issue 70"),
    ),
    Gpu(
        name="RTX 4080",
        generation="GeForce RTX 40",
        memory=16 * GIB,
        flops=97.5e12,  # no run of a desktop card was published
        flops_fp32=48.7e12,
        bandwidth=717e9,
        link=PCIE_4,
    ),
    Gpu(
        name="RTX 4080 SUPER",
        generation="GeForce RTX 40",
        memory=16 * GIB,
        flops=104.4e12,  # no run of a desktop card was published
        flops_fp32=52.2e12,
        bandwidth=736e9,
        link=PCIE_4,
    ),
    Gpu(
        name="RTX 5060 Ti 16GB",
        generation="GeForce RTX 50",
        memory=16 * GIB,
        flops=47.4e12,
        flops_fp32=23.7e12,
        bandwidth=448e9,
        link=_HALF_OF_5,  # 8 lanes
        # Another run of one of these machines is left out.
        matmul=Figure(48.2e12, f"{TORCH} issues 85, 129, 135, 136, 163"),
        matmul_fp32=Figure(16.9e12, f"{TORCH} issues 85, 129, 135, 136, 163"),
    ),
    Gpu(
        name="RTX 5070 Ti",
        generation="GeForce RTX 50",
        memory=16 * GIB,
        flops=87.9e12,
        flops_fp32=43.9e12,
        bandwidth=896e9,
        link=PCIE_5,
        # The mean of two runs.
        matmul=Figure(92.2e12, f"{TORCH} issues 86, 172"),
        matmul_fp32=Figure(30.7e12, f"{TORCH} issues 86, 172"),
    ),
    Gpu(
        name="RTX 5080",
        generation="GeForce RTX 50",
        memory=16 * GIB,
        flops=112.6e12,
        flops_fp32=56.3e12,
        bandwidth=960e9,
        link=PCIE_5,
        matmul=Figure(102.9e12, f"{TORCH} issue 104"),
        matmul_fp32=Figure(33.6e12, f"{TORCH} issue 104"),
    ),
    Gpu(
        name="RTX 3090",
        generation="GeForce RTX 30",
        memory=24 * GIB,
        flops=71e12,
        flops_fp32=35.6e12,
        bandwidth=936e9,
        link=PCIE_4,
        matmul=Figure(76.6e12, TORCH),
        matmul_fp32=Figure(24.8e12, TORCH),
    ),
    Gpu(
        name="RTX 4090",
        generation="GeForce RTX 40",
        memory=24 * GIB,
        flops=165e12,
        flops_fp32=82.6e12,
        bandwidth=1008e9,
        link=PCIE_4,
        matmul=Figure(164.8e12, TORCH),
        matmul_fp32=Figure(54.7e12, TORCH),
    ),
    Gpu(
        name="RTX 5090",
        generation="GeForce RTX 50",
        memory=32 * GIB,
        flops=210e12,
        flops_fp32=104.8e12,
        bandwidth=1792e9,
        link=PCIE_5,
        matmul=Figure(237.0e12, TORCH),
        matmul_fp32=Figure(69.2e12, TORCH),
    ),
)
