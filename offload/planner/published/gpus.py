"""GPUs by their published figures, each with its source. Those of `_OURS` are this project's own measurements.

`flops`, `flops_fp32` and `bandwidth` are those of the makers' data sheets and white papers.
`matmul`, `matmul_fp32`, `reached` and `link` are rates that programs reached. A rate that nobody published is
None, and a plan then assumes a fraction of the data sheet's; `link` is None only for a GPU that shares its memory.
"""

from __future__ import annotations

import re
from dataclasses import replace

from offload.errors import ConfigError
from offload.planner.published.geforce import GEFORCE
from offload.planner.published.gpu import PCIE_4, PCIE_5, TORCH, Gpu
from offload.planner.published.rate import Figure
from offload.sizes import GIB, format_size

_MAMF = "github.com/stas00/ml-engineering, compute/accelerator"
"""Products of matrices of many shapes in torch, the mean rate of the best shape."""
_OURS = "measured by this project: docs/benchmarks/2026-11-h200.md"
_PCIE_3 = Figure(12e9, "PCIe 3 x16, a V100: github.com/ZaidQureshi/bam issue 54")
_FASTEST_SLOT = 64e9
"""Bytes per second, each way, of 16 lanes of PCIe 5: no card in a slot has a faster link."""

GPUS = (
    *GEFORCE,
    Gpu(
        name="T4",
        generation="Turing",
        memory=16 * GIB,
        flops=8.1e12,  # bf16 has no matrix units
        flops_fp32=8.1e12,
        bandwidth=320e9,
        link=_PCIE_3,
        # The mean of two runs.
        matmul=Figure(2.4e12, TORCH),
        matmul_fp32=Figure(4.3e12, TORCH),
        flops_fp16=65e12,
        matmul_fp16=Figure(42.3e12, TORCH),
    ),
    Gpu(
        name="RTX A6000",
        generation="Ampere workstation",
        memory=48 * GIB,
        flops=155e12,
        flops_fp32=38.7e12,
        bandwidth=768e9,
        link=PCIE_4,
        matmul=Figure(123.3e12, TORCH),
        matmul_fp32=Figure(23.9e12, TORCH),
    ),
    Gpu(
        name="L4",
        generation="Ada data center",
        memory=24 * GIB,
        flops=121e12,
        flops_fp32=30.3e12,
        bandwidth=300e9,
        link=PCIE_4,
        matmul=Figure(91.4e12, "github.com/mag-/gpu_benchmark"),
    ),
    Gpu(
        name="L40S",
        generation="Ada data center",
        memory=48 * GIB,
        flops=362e12,
        flops_fp32=91.6e12,
        bandwidth=864e9,
        link=PCIE_4,
        matmul=Figure(269.2e12, TORCH),
        matmul_fp32=Figure(46.9e12, TORCH),
    ),
    Gpu(
        name="A100 40GB",
        generation="A100",
        memory=40 * GIB,
        flops=312e12,
        flops_fp32=19.5e12,
        bandwidth=1555e9,
        link=PCIE_4,
        matmul=Figure(246.3e12, TORCH),
        matmul_fp32=Figure(18.1e12, TORCH),
    ),
    Gpu(
        name="A100 80GB",
        generation="A100",
        memory=80 * GIB,
        flops=312e12,
        flops_fp32=19.5e12,
        bandwidth=2039e9,
        link=PCIE_4,
        matmul=Figure(264.5e12, TORCH),
        matmul_fp32=Figure(19.2e12, TORCH),
    ),
    Gpu(
        name="H100",
        generation="Hopper",
        memory=80 * GIB,
        flops=989e12,
        flops_fp32=67e12,
        bandwidth=3350e9,
        link=PCIE_5,
        matmul=Figure(786.5e12, TORCH),
        matmul_fp32=Figure(52.1e12, TORCH),
    ),
    Gpu(
        name="H200",
        generation="Hopper",
        memory=141 * GIB,
        flops=989e12,
        flops_fp32=67e12,
        bandwidth=4800e9,
        link=Figure(54e9, _OURS),
        matmul=Figure(790.3e12, TORCH),
        matmul_fp32=Figure(51.3e12, TORCH),
        reached=Figure(2500e9, _OURS),
    ),
    Gpu(
        name="GH200",  # two memories, joined by NVLink-C2C: copies are fast, but they are copies
        generation="Hopper",
        memory=96 * GIB,
        flops=989e12,
        flops_fp32=67e12,
        bandwidth=4000e9,
        link=Figure(300e9, "346 GB/s to the GPU, some 15 % less from it: github.com/NVIDIA/nvbandwidth issue 23"),
        matmul=Figure(828.6e12, _MAMF),
    ),
    Gpu(
        name="RX 7900 XTX",
        generation="RDNA 3",
        memory=24 * GIB,
        flops=122.8e12,
        flops_fp32=61.4e12,
        bandwidth=960e9,
        link=PCIE_4,
        matmul=Figure(93.7e12, f"{TORCH} issues 58, 68, 103"),
        matmul_fp32=Figure(25.7e12, f"{TORCH} issues 58, 68, 103"),
    ),
    Gpu(
        name="Radeon PRO W7900",
        generation="RDNA 3",
        memory=48 * GIB,
        flops=122.6e12,
        flops_fp32=61.3e12,
        bandwidth=864e9,
        link=PCIE_4,
    ),
    Gpu(
        name="MI300X",
        generation="CDNA 3",
        memory=192 * GIB,
        flops=1307e12,
        flops_fp32=163.4e12,
        bandwidth=5300e9,
        link=PCIE_5,
        matmul=Figure(668.4e12, _MAMF),
    ),
    Gpu(
        name="MI300A",
        generation="CDNA 3",
        memory=128 * GIB,
        flops=980.6e12,
        flops_fp32=122.6e12,
        bandwidth=5300e9,
        link=None,
    ),
    Gpu(
        # The maker names only 1 Pflop/s in FP4 with sparsity. At the ratios of its other GPUs this is 125 dense Tflop/s
        # in bf16.
        name="DGX Spark GB10",
        generation="GB10",
        memory=128 * GIB,
        flops=125e12,
        flops_fp32=31e12,
        bandwidth=273e9,
        link=None,
        matmul=Figure(60e12, "J. Carmack, A. Hannun, October 2025: banandre.com/blog/2025-10"),
    ),
    Gpu(
        name="Ryzen AI MAX+ 395",
        generation="RDNA 3.5",
        memory=128 * GIB,
        flops=59.4e12,
        flops_fp32=29.7e12,
        bandwidth=256e9,
        link=None,
        matmul=Figure(35.1e12, "mamf-finder with hipBLASLt: llm-tracker.info/_TOORG/Strix-Halo"),
        matmul_fp32=Figure(8.7e12, "github.com/ROCm/legacy-rocm-build issue 5807"),
        reached=Figure(212e9, "rocm_bandwidth_test: llm-tracker.info/_TOORG/Strix-Halo"),
    ),
)
"""H100 and H200 are the SXM versions. Apple's machines are not here: the package runs on Linux alone."""


_MAKERS = re.compile(r"\b(nvidia|geforce|tesla|amd|instinct|sxm\d*)\b")
"""Words that `nvidia-smi` and torch write around a card's name."""


def find_gpu(text: str) -> tuple[Gpu, str | None]:
    """Returns the GPU that `text` names, and an assumption in words or None.

    Args:
        text: a name or a part of one, such as "4090", "a100-80gb" or "NVIDIA GeForce RTX 4090", or a memory size such
            as "24GB". A size selects the smallest and slowest RTX card with that much memory, or else the smallest and
            slowest other card.

    Raises:
        ConfigError: `text` is neither a name nor a size.
    """
    wanted = re.sub(r"[^a-z0-9]", "", _MAKERS.sub(" ", text.lower()))
    names = {re.sub(r"[^a-z0-9]", "", gpu.name.lower()): gpu for gpu in GPUS}
    if wanted in names:
        return names[wanted], None
    named = [gpu for name, gpu in names.items() if wanted and wanted in name]
    # "4060" is the RTX 4060, and not the RTX 4060 Ti.
    named = [gpu for name, gpu in names.items() if wanted and name.endswith(wanted)] or named
    size = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*gi?b", text.strip().lower())
    # GPUs sold as 24 GB contain 24 GiB.
    nbytes = 0 if size is None else int(float(size[1]) * GIB)
    # Without a size, the entry with the most memory represents the name: "A100" is the one of 80 GB.
    if size is None and named:
        return max(named, key=lambda gpu: gpu.memory), None
    if nbytes:
        # A size alone means a card in a slot, not a chip that shares its memory or its board with a processor.
        cards = [gpu for gpu in GPUS if gpu.link is not None and gpu.link.value < _FASTEST_SLOT]
        of_size = sorted((gpu for gpu in cards if gpu.memory >= nbytes), key=lambda gpu: (gpu.memory, gpu.flops))
        # A bare memory size usually means a consumer card, so RTX cards are preferred.
        largest = max(cards, key=lambda gpu: gpu.memory)
        like = next((gpu for gpu in of_size if gpu.name.startswith("RTX")), None) or (of_size or [largest])[0]
        return replace(
            like, name=f"GPU of {format_size(nbytes)}", memory=nbytes
        ), f"the GPU is as fast as a {like.name}"
    known = ", ".join(gpu.name for gpu in GPUS)
    raise ConfigError(f"there is no GPU {text!r} here: give a size such as 24GB, or one of {known}")
