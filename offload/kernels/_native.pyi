"""The native kernels. Arrays are addresses; only `offload.kernels`, which checks them, calls this."""

from collections.abc import Sequence

import torch

def supported_isas() -> list[str]: ...
def configure(isa: str, threads: int, /) -> None: ...
def parse_cpus(list: str, /) -> list[int]: ...
def run_beside(node: int, allowed: list[int], /) -> None: ...
def thread_count() -> int: ...
def update(
    rule: str,
    weight: tuple[int, int],
    beside: int,
    moments: Sequence[int],
    moment_type: int,
    grad: tuple[int, int],
    numel: int,
    segments: Sequence[tuple[int, int, Sequence[float], tuple[int, int]]],
    /,
) -> None: ...
def lamb_moments(
    weight: tuple[int, int],
    beside: int,
    moments: Sequence[int],
    moment_type: int,
    grad: tuple[int, int],
    numel: int,
    segment: tuple[int, int, Sequence[float], tuple[int, int]],
    sums: int,
    /,
) -> None: ...
def split_master(master: int, weight: int, residual: int, numel: int, /) -> None: ...
def join_master(weight: int, residual: int, master: int, numel: int, /) -> None: ...
def quantize(format: int, values: int, type: int, blocks: int, numel: int, /) -> None: ...
def dequantize(format: int, blocks: int, values: int, type: int, numel: int, /) -> None: ...
def accumulate(out: int, out_type: int, grad: int, grad_type: int, numel: int, add: bool, /) -> float: ...
def sum_squares(values: int, type: int, numel: int, /) -> float: ...

class Sum:
    def __init__(
        self,
        out: int,
        out_type: int,
        numel: int,
        tensor: type,
        strided: torch.layout,
        elements: dict[torch.dtype, int],
        /,
    ) -> None: ...
    def take(self, grad: torch.Tensor, add: bool, /) -> float | None: ...
