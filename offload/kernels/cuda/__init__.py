"""The AdamW step and sums of squares on a CUDA device, with the same bits as on the CPU.

    kernels   public functions; argument lists and grids of each kernel; machine code, cached in the user's cache folder
    driver    through ctypes: libcuda, in the context that torch uses, and NVIDIA's compiler, which torch brings

The kernels are not yet verified on a GPU. Their arithmetic and all of the code above were run on a CPU, against a
libcuda and a libnvrtc that run the kernels as C++ (tests/fake_cuda). NVRTC itself compiles them for each architecture
without an approximate operation (tests/kernels/test_kernels_cuda.py).
"""

from __future__ import annotations

from offload.kernels.cuda.kernels import sum_squares, update, why_not

__all__ = ["sum_squares", "update", "why_not"]
