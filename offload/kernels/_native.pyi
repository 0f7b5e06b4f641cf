"""The native kernels. Arrays are addresses; only `offload.kernels`, which checks them, calls this."""

def supported_isas() -> list[str]: ...
def configure(isa: str, threads: int, /) -> None: ...
def thread_count() -> int: ...
def adamw(
    weight: int,
    residual: int,
    exp_avg: int,
    exp_avg_sq: int,
    grad: int,
    grad_bf16: bool,
    numel: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float,
    decoupled: bool,
    /,
) -> None: ...
def split_master(master: int, weight: int, residual: int, numel: int, /) -> None: ...
def join_master(weight: int, residual: int, master: int, numel: int, /) -> None: ...
def accumulate(out: int, out_bf16: bool, grad: int, grad_bf16: bool, numel: int, add: bool, /) -> float: ...
def sum_squares(values: int, bf16: bool, numel: int, /) -> float: ...
