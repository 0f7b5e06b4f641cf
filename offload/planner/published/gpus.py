"""GPUs by their published figures, each with its source. Those of `_OURS` are this project's own measurements.

`flops`, `flops_fp32` and `bandwidth` are those of the makers' data sheets and white papers, which few programs reach.
`matmul`, `matmul_fp32`, `reached` and `link` are rates that programs reached. A rate that nobody published is
None, and a plan then assumes a fraction of the data sheet's; `link` is None only for a GPU that shares its memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from offload.errors import ConfigError
from offload.planner.published.rate import Figure
from offload.sizes import GIB, format_size

_TORCH = "github.com/zzc0721/torch-performance-test-data"
"""Products of square matrices of 1024 to 10240 in torch, the best size of a run; of several runs the median."""
_MAMF = "github.com/stas00/ml-engineering, compute/accelerator"
"""Products of matrices of many shapes in torch, the mean rate of the best shape."""
_OURS = "measured by this project: docs/benchmarks/2026-11-h200.md"
_PCIE_4 = Figure(25e9, "PCIe 4 x16, an A100: github.com/NVIDIA/nvbandwidth issue 42")
_PCIE_5 = Figure(50e9, "PCIe 5 x16, 51 to 53 GB/s reached: github.com/NVIDIA/nvbandwidth issues 24 and 53")
_HALF_OF_4 = Figure(12.5e9, f"PCIe 4 x8, half of x16: {_PCIE_4.source}")
_HALF_OF_5 = Figure(25e9, f"PCIe 5 x8, half of x16: {_PCIE_5.source}")
_PCIE_3 = Figure(12e9, "PCIe 3 x16, a V100: github.com/ZaidQureshi/bam issue 54")
_FASTEST_SLOT = 64e9
"""Bytes per second, each way, of 16 lanes of PCIe 5: no card in a slot has a faster link."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU's published figures."""

    name: str
    memory: int
    """Bytes; of a unified memory all bytes, which the CPU uses too."""
    flops: float
    """Dense operations per second in bf16, accumulated in fp32: the peak of the data sheet. Without units for bf16
    those in fp32, by which torch computes."""
    flops_fp32: float
    """Dense operations per second in fp32, without matrix units: torch uses TF32 only on request."""
    bandwidth: float
    """Bytes per second of the GPU's own memory: the peak of the data sheet."""
    link: Figure | None
    """Bytes per second that copies from pinned memory reach each way; None if GPU and CPU have one memory."""
    matmul: Figure | None = None
    """Operations per second that products of large matrices in bf16 reached in torch."""
    matmul_fp32: Figure | None = None
    """The same in fp32."""
    reached: Figure | None = None
    """Bytes per second of its memory that a program reached."""
    flops_fp16: float | None = None
    """`flops` in fp16 of a GPU that has matrix units for fp16 and none for bf16; None for any other."""
    matmul_fp16: Figure | None = None
    """`matmul` in fp16 of such a GPU."""

    @property
    def has_bf16(self) -> bool:
        """Returns True if products in bf16 are as fast as those in fp16."""
        return self.flops_fp16 is None

    @property
    def unified(self) -> bool:
        """Returns True if GPU and CPU have one memory, so that nothing has to be copied between them."""
        return self.link is None


GPUS = (
    Gpu(
        name="RTX 4060",
        memory=8 * GIB,
        flops=30.2e12,
        flops_fp32=15.1e12,
        bandwidth=272e9,
        link=_HALF_OF_4,  # 8 lanes
        matmul=Figure(31.2e12, f"{_TORCH} issue 66"),
        matmul_fp32=Figure(8.3e12, f"{_TORCH} issue 66"),
    ),
    Gpu(
        name="RTX 3080",
        memory=10 * GIB,  # a later one has 12 GiB and more cores
        flops=59.5e12,
        flops_fp32=29.8e12,
        bandwidth=760e9,
        link=_PCIE_4,
        matmul=Figure(64.7e12, f"{_TORCH} issue 114"),
        matmul_fp32=Figure(21.1e12, f"{_TORCH} issue 114"),
    ),
    Gpu(
        name="RTX 3060",
        memory=12 * GIB,  # one of 8 GiB has a slower memory
        flops=25.5e12,
        flops_fp32=12.7e12,
        bandwidth=360e9,
        link=_PCIE_4,
        matmul=Figure(25.5e12, f"{_TORCH} issue 131"),
        matmul_fp32=Figure(8.2e12, f"{_TORCH} issue 131"),
    ),
    Gpu(
        name="RTX 4070",
        memory=12 * GIB,
        flops=58.3e12,  # no run of a desktop card was published
        flops_fp32=29.1e12,
        bandwidth=504e9,
        link=_PCIE_4,
    ),
    Gpu(
        name="RTX 4070 SUPER",
        memory=12 * GIB,
        flops=71e12,
        flops_fp32=35.5e12,
        bandwidth=504e9,
        link=_PCIE_4,
        # Two runs of the table and one of an issue: the median.
        matmul=Figure(73.6e12, f"{_TORCH} issue 196"),
        matmul_fp32=Figure(24.6e12, f"{_TORCH} issue 196"),
    ),
    Gpu(
        name="RTX 5070",
        memory=12 * GIB,
        flops=61.7e12,
        flops_fp32=30.9e12,
        bandwidth=672e9,
        link=_PCIE_5,
        # Each machine counts once or, with two versions of torch, twice.
        matmul=Figure(66.1e12, f"{_TORCH} issues 101, 149, 159, 178, 179, 194"),
        matmul_fp32=Figure(22.9e12, f"{_TORCH} issues 101, 149, 159, 178, 179, 194"),
    ),
    Gpu(
        name="RTX 4060 Ti 16GB",
        memory=16 * GIB,
        flops=44.1e12,
        flops_fp32=22.1e12,
        bandwidth=288e9,
        link=_HALF_OF_4,  # 8 lanes
        # A run of the table and two of issues: the median.
        matmul=Figure(44.7e12, f"{_TORCH} issues 130, 145"),
        matmul_fp32=Figure(11.9e12, f"{_TORCH} issues 130, 145"),
    ),
    Gpu(
        name="RTX 4080",
        memory=16 * GIB,
        flops=97.5e12,  # no run of a desktop card was published
        flops_fp32=48.7e12,
        bandwidth=717e9,
        link=_PCIE_4,
    ),
    Gpu(
        name="RTX 5060 Ti 16GB",
        memory=16 * GIB,
        flops=47.4e12,
        flops_fp32=23.7e12,
        bandwidth=448e9,
        link=_HALF_OF_5,  # 8 lanes
        # Another run of one of these machines is left out.
        matmul=Figure(48.2e12, f"{_TORCH} issues 85, 129, 135, 136, 163"),
        matmul_fp32=Figure(16.9e12, f"{_TORCH} issues 85, 129, 135, 136, 163"),
    ),
    Gpu(
        name="RTX 5080",
        memory=16 * GIB,
        flops=112.6e12,
        flops_fp32=56.3e12,
        bandwidth=960e9,
        link=_PCIE_5,
        matmul=Figure(102.9e12, f"{_TORCH} issue 104"),
        matmul_fp32=Figure(33.6e12, f"{_TORCH} issue 104"),
    ),
    Gpu(
        name="T4",
        memory=16 * GIB,
        flops=8.1e12,  # bf16 has no matrix units
        flops_fp32=8.1e12,
        bandwidth=320e9,
        link=_PCIE_3,
        # The mean of two runs.
        matmul=Figure(2.4e12, _TORCH),
        matmul_fp32=Figure(4.3e12, _TORCH),
        flops_fp16=65e12,
        matmul_fp16=Figure(42.3e12, _TORCH),
    ),
    Gpu(
        name="RTX 3090",
        memory=24 * GIB,
        flops=71e12,
        flops_fp32=35.6e12,
        bandwidth=936e9,
        link=_PCIE_4,
        matmul=Figure(76.6e12, _TORCH),
        matmul_fp32=Figure(24.8e12, _TORCH),
    ),
    Gpu(
        name="RTX 4090",
        memory=24 * GIB,
        flops=165e12,
        flops_fp32=82.6e12,
        bandwidth=1008e9,
        link=_PCIE_4,
        matmul=Figure(164.8e12, _TORCH),
        matmul_fp32=Figure(54.7e12, _TORCH),
    ),
    Gpu(
        name="RTX 5090",
        memory=32 * GIB,
        flops=210e12,
        flops_fp32=104.8e12,
        bandwidth=1792e9,
        link=_PCIE_5,
        matmul=Figure(237.0e12, _TORCH),
        matmul_fp32=Figure(69.2e12, _TORCH),
    ),
    Gpu(
        name="RTX A6000",
        memory=48 * GIB,
        flops=155e12,
        flops_fp32=38.7e12,
        bandwidth=768e9,
        link=_PCIE_4,
        matmul=Figure(123.3e12, _TORCH),
        matmul_fp32=Figure(23.9e12, _TORCH),
    ),
    Gpu(
        name="L4",
        memory=24 * GIB,
        flops=121e12,
        flops_fp32=30.3e12,
        bandwidth=300e9,
        link=_PCIE_4,
        matmul=Figure(91.4e12, "github.com/mag-/gpu_benchmark"),
    ),
    Gpu(
        name="L40S",
        memory=48 * GIB,
        flops=362e12,
        flops_fp32=91.6e12,
        bandwidth=864e9,
        link=_PCIE_4,
        matmul=Figure(269.2e12, _TORCH),
        matmul_fp32=Figure(46.9e12, _TORCH),
    ),
    Gpu(
        name="A100 40GB",
        memory=40 * GIB,
        flops=312e12,
        flops_fp32=19.5e12,
        bandwidth=1555e9,
        link=_PCIE_4,
        matmul=Figure(246.3e12, _TORCH),
        matmul_fp32=Figure(18.1e12, _TORCH),
    ),
    Gpu(
        name="A100 80GB",
        memory=80 * GIB,
        flops=312e12,
        flops_fp32=19.5e12,
        bandwidth=2039e9,
        link=_PCIE_4,
        matmul=Figure(264.5e12, _TORCH),
        matmul_fp32=Figure(19.2e12, _TORCH),
    ),
    Gpu(
        name="H100",
        memory=80 * GIB,
        flops=989e12,
        flops_fp32=67e12,
        bandwidth=3350e9,
        link=_PCIE_5,
        matmul=Figure(786.5e12, _TORCH),
        matmul_fp32=Figure(52.1e12, _TORCH),
    ),
    Gpu(
        name="H200",
        memory=141 * GIB,
        flops=989e12,
        flops_fp32=67e12,
        bandwidth=4800e9,
        link=Figure(54e9, _OURS),
        matmul=Figure(790.3e12, _TORCH),
        matmul_fp32=Figure(51.3e12, _TORCH),
        reached=Figure(2500e9, _OURS),
    ),
    Gpu(
        name="GH200",  # two memories, joined by NVLink-C2C: copies are fast, but they are copies
        memory=96 * GIB,
        flops=989e12,
        flops_fp32=67e12,
        bandwidth=4000e9,
        link=Figure(300e9, "346 GB/s to the GPU, some 15 % less from it: github.com/NVIDIA/nvbandwidth issue 23"),
        matmul=Figure(828.6e12, _MAMF),
    ),
    Gpu(
        name="RX 7900 XTX",
        memory=24 * GIB,
        flops=122.8e12,
        flops_fp32=61.4e12,
        bandwidth=960e9,
        link=_PCIE_4,
        matmul=Figure(93.7e12, f"{_TORCH} issues 58, 68, 103"),
        matmul_fp32=Figure(25.7e12, f"{_TORCH} issues 58, 68, 103"),
    ),
    Gpu(
        name="Radeon PRO W7900",
        memory=48 * GIB,
        flops=122.6e12,
        flops_fp32=61.3e12,
        bandwidth=864e9,
        link=_PCIE_4,
    ),
    Gpu(
        name="MI300X",
        memory=192 * GIB,
        flops=1307e12,
        flops_fp32=163.4e12,
        bandwidth=5300e9,
        link=_PCIE_5,
        matmul=Figure(668.4e12, _MAMF),
    ),
    Gpu(
        name="MI300A",
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
        memory=128 * GIB,
        flops=125e12,
        flops_fp32=31e12,
        bandwidth=273e9,
        link=None,
        matmul=Figure(60e12, "J. Carmack, A. Hannun, October 2025: banandre.com/blog/2025-10"),
    ),
    Gpu(
        name="Ryzen AI MAX+ 395",
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


def find_gpu(text: str) -> tuple[Gpu, str | None]:
    """Returns the GPU that `text` names, and an assumption in words or None.

    Args:
        text: a name or a part of one, such as "4090" or "a100-80gb", or a memory size such as "24GB". A size selects
            the smallest and slowest RTX card with that much memory, or else the smallest and slowest other card.

    Raises:
        ConfigError: `text` is neither a name nor a size.
    """
    wanted = re.sub(r"[^a-z0-9]", "", text.lower())
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
