"""The published figures of a GPU, and the sources that several GPUs share."""

from __future__ import annotations

from dataclasses import dataclass

from offload.planner.published.rate import Figure

TORCH = "github.com/zzc0721/torch-performance-test-data"
"""Products of square matrices of 1024 to 10240 in torch, the best size of a run; of several runs the median."""
PCIE_4 = Figure(25e9, "PCIe 4 x16, an A100: github.com/NVIDIA/nvbandwidth issue 42")
PCIE_5 = Figure(50e9, "PCIe 5 x16, 51 to 53 GB/s reached: github.com/NVIDIA/nvbandwidth issues 24 and 53")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU's published figures."""

    name: str
    generation: str
    """Cards of one generation and kind, which reach about the same fraction of their data sheets. GeForce and
    workstation cards of one architecture are two: a GeForce card has half the rate where sums are in fp32."""
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
