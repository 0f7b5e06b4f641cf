"""`deepspeed.accelerator`: the device of the process, by torch's own functions."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, MutableMapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn, TypeVar

import psutil
import torch

from offload.deepspeed.refused import set_accelerator as set_accelerator
from offload.errors import ConfigError, UsageError
from offload.hardware.system import nodes
from offload.swapper.memory.device import accelerator_type
from offload.torch_internals.tensors import cpu_computes_fp16

__path__: list[str] = []  # a package of DeepSpeed, so that Python asks for `deepspeed.accelerator.real_accelerator`

T = TypeVar("T")

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@functools.cache
def get_accelerator() -> DeepSpeedAccelerator:
    """Returns the accelerator that torch finds, or the CPU."""
    device_type = accelerator_type()
    return CpuAccelerator() if device_type is None else DeepSpeedAccelerator(device_type)


def is_current_accelerator_supported() -> bool:
    """Returns True: the accelerator is one of torch's, or the CPU."""
    return True


class DeepSpeedAccelerator:
    """A type of device under DeepSpeed's names.

    A name that is not defined here is looked up in torch's module of the device, such as `torch.cuda`.
    """

    def __init__(self, device_type: str) -> None:
        self._name = device_type
        self._module: Any = torch.get_device_module(device_type)
        self._compile_backend = "inductor"

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of torch's module of the device, such as `synchronize`, `Stream` or `memory_stats`."""
        # Includes `_module` before the constructor has set it.
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return getattr(self._module, name)
        except AttributeError:
            raise AttributeError(
                f"the accelerator has no {name!r}, and neither has {self._module.__name__}", name=name, obj=self
            ) from None

    # -- the device ---------------------------------------------------------------------------------

    @property
    def supports_nvtx_domain(self) -> bool:
        """True if ranges may have a domain of nvtx, as on NVIDIA's GPUs."""
        return self._name == "cuda"

    def is_synchronized_device(self) -> bool:
        """Returns True if calls end before they return, as on the CPU."""
        return self._name == "cpu"

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def is_available(self) -> bool:
        """Returns True: the device was found."""
        return True

    def device_name(self, device_index: int | None = None) -> str:
        """Returns the name of the device, such as "cuda:0"; of its type without an index."""
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        """Returns a device, which is also a context in which torch's factories use it."""
        return torch.device(self.device_name(device_index))

    def current_device(self) -> int:
        return int(self._module.current_device())

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def communication_backend_name(self) -> str:
        """Returns the backend of torch.distributed for tensors on the device."""
        return str(torch.distributed.get_default_backend_for_device(self._name))

    def communication_backend_version(self) -> Any:
        """Returns the version of NCCL; None without it."""
        return torch.cuda.nccl.version() if self._name == "cuda" else None

    # -- random numbers -----------------------------------------------------------------------------

    def random(self) -> Any:
        return torch.random

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        self._module.set_rng_state(new_state, *_index_argument(device_index))

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        state: torch.Tensor = self._module.get_rng_state(*_index_argument(device_index))
        return state

    def default_generator(self, device_index: int) -> torch.Generator:
        generator: torch.Generator = self._module.default_generators[device_index]
        return generator

    # -- memory -------------------------------------------------------------------------------------

    def memory_cached(self, device_index: int | None = None) -> int:
        """Returns the bytes that torch holds on the device, as `memory_reserved` does."""
        return int(self._module.memory_reserved(device_index))

    def max_memory_cached(self, device_index: int | None = None) -> int:
        """Returns the largest number of bytes that torch held on the device, as `max_memory_reserved` does."""
        return int(self._module.max_memory_reserved(device_index))

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        """Begins the peaks of the device's memory anew."""
        self._module.reset_peak_memory_stats(device_index)

    reset_max_memory_cached = reset_max_memory_allocated

    def total_memory(self, device_index: int | None = None) -> int:
        """Returns the size of the device's memory in bytes."""
        return int(self._module.get_device_properties(device_index or 0).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Returns the bytes of the device's memory that are free."""
        return int(self._module.mem_get_info(device_index)[0])

    # -- pinned memory ------------------------------------------------------------------------------

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """Returns a tensor in pinned memory, without an accelerator the tensor itself; without a copy no values."""
        if make_copy:
            return tensor.pin_memory()
        return self.pin_empty(tensor.shape if match_shape else (tensor.numel(),), dtype=tensor.dtype)

    def pin_empty(self, *size: Any, dtype: torch.dtype, device: Any = "cpu") -> torch.Tensor:
        """Returns pinned memory of the host without values; without an accelerator ordinary memory."""
        if torch.device(device).type != "cpu":
            raise ConfigError(f"pin_empty allocates memory of the host: device must be cpu, got {device!r}")
        shape = size[0] if len(size) == 1 and isinstance(size[0], tuple | list) else size
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self._name != "cpu")

    def pin_empty_like(
        self, tensor: torch.Tensor, device: Any = "cpu", dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Returns pinned memory of the host without values, of a tensor's shape and, by default, dtype."""
        return self.pin_empty(tuple(tensor.shape), dtype=tensor.dtype if dtype is None else dtype, device=device)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._name != "cpu" and tensor.is_pinned()

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Does nothing: torch unpins memory when no tensor refers to it."""

    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        """Pins memory for CUDA. Returns False where there is none."""
        if self._name != "cuda":
            return False
        self._module.check_error(int(self._module.cudart().cudaHostRegister(address, num_bytes, 0)))
        return True

    def unregister_host_memory(self, address: int) -> None:
        """Undoes `register_host_memory`."""
        if self._name == "cuda":
            self._module.check_error(int(self._module.cudart().cudaHostUnregister(address)))

    def pin_memory_alignment(self) -> int:
        """Returns 1: no alignment is needed."""
        return 1

    # -- dtypes and tensors -------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        return bool(self._module.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        return self._name != "cuda" or self._module.get_device_capability()[0] >= 7

    def is_fp64_supported(self) -> bool:
        return self._name != "mps"

    def supported_dtypes(self) -> list[torch.dtype]:
        halves = {torch.float16: self.is_fp16_supported(), torch.bfloat16: self.is_bf16_supported()}
        return [torch.float32, *(dtype for dtype, supported in halves.items() if supported)]

    def _tensor(self, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
        """Returns a function of values that makes a tensor on the device."""
        return functools.partial(torch.tensor, dtype=dtype, device=self._name)

    BFloat16Tensor = property(lambda self: self._tensor(torch.bfloat16), doc="Makes a tensor of bf16 on the device.")
    ByteTensor = property(lambda self: self._tensor(torch.uint8), doc="Makes a tensor of bytes on the device.")
    DoubleTensor = property(lambda self: self._tensor(torch.float64), doc="Makes a tensor of fp64 on the device.")
    FloatTensor = property(lambda self: self._tensor(torch.float32), doc="Makes a tensor of fp32 on the device.")
    HalfTensor = property(lambda self: self._tensor(torch.float16), doc="Makes a tensor of fp16 on the device.")
    IntTensor = property(lambda self: self._tensor(torch.int32), doc="Makes a tensor of int32 on the device.")
    LongTensor = property(lambda self: self._tensor(torch.int64), doc="Makes a tensor of int64 on the device.")

    # -- graphs, ranges, compilers ------------------------------------------------------------------

    def create_graph(self) -> Any:
        """Returns a new graph of CUDA; None where there is none."""
        return self._module.CUDAGraph() if self._name == "cuda" else None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        """Returns a context that records a graph of `create_graph`; where there is none, one without effect."""
        return contextlib.nullcontext() if graph is None else self._module.graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        if graph is not None:
            graph.replay()

    def is_current_stream_capturing(self) -> bool:
        return self._name == "cuda" and bool(self._module.is_current_stream_capturing())

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> Any:
        """Begins a range of nvtx; without effect where there is none."""
        return self._module.nvtx.range_push(msg) if self._name == "cuda" else None

    def range_pop(self, domain: Any = None) -> Any:
        """Ends a range of nvtx; without effect where there is none."""
        return self._module.nvtx.range_pop() if self._name == "cuda" else None

    def lazy_call(self, callback: Callable[[], T]) -> T:
        """Returns `callback()`: torch initializes the device at its first use."""
        return callback()

    def is_triton_supported(self) -> bool:
        """Returns True on NVIDIA's GPUs since Ampere."""
        return self._name == "cuda" and self._module.get_device_capability()[0] >= 8

    def prefer_triton_grouped_mm(self) -> bool:
        """Returns False: there are no kernels of Triton here."""
        return False

    def is_compile_supported(self) -> bool:
        """Returns True: torch has `compile`."""
        return True

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Sets the backend that `get_compile_backend` returns; an unknown one is a `ConfigError`."""
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise ConfigError(
                f"set_compile_backend expects a backend of torch.compile, {', '.join(known)}; got {backend!r}"
            )
        self._compile_backend = backend

    # -- extensions and environment -----------------------------------------------------------------

    def op_builder_dir(self) -> str:
        """Returns the module that has the builders."""
        return "deepspeed.ops.op_builder"

    def get_op_builder(self, class_name: str) -> Any:
        """Returns the builder of an extension; for an unknown name a class whose `load` raises `UsageError`."""
        return AsyncIOBuilder if class_name == "AsyncIOBuilder" else NotImplementedBuilder

    def create_op_builder(self, class_name: str) -> Any:
        return self.get_op_builder(class_name)()

    def build_extension(self) -> Any:
        """Returns torch's class that builds extensions."""
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    def export_envs(self) -> list[str]:
        """Returns the prefixes of environment variables that a launcher sends to other hosts."""
        return ["NCCL"] if self._name == "cuda" else []

    def visible_devices_envs(self) -> list[str]:
        """Returns the environment variables that choose among the devices."""
        return [_VISIBLE] if self._name in ("cuda", "cpu") else []

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Sequence[int]
    ) -> None:
        """Sets these variables in an environment, so that the devices of these numbers stay visible."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))


class CpuAccelerator(DeepSpeedAccelerator):
    """The CPU under DeepSpeed's names: no streams, and the memory of the process in place of a device's."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self._peak = _resident()

    Stream = property(lambda _: None, doc="None: there are no streams.")
    Event = property(lambda _: None, doc="None: there are no events.")

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> None:
        """Returns None: there are no streams."""

    default_stream = current_stream

    def synchronize(self, device_index: int | None = None) -> None:
        """Does nothing: calls have ended when they return."""

    def device_name(self, device_index: int | None = None) -> str:
        return "cpu"

    def current_device(self) -> int:
        """Returns LOCAL_RANK, or 0 without a launcher, as the number of the current device."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    def set_device(self, device_index: int) -> None:
        """Does nothing: there is only one device."""

    def device_count(self) -> int:
        """Returns LOCAL_SIZE if a launcher has set it, else the number of NUMA nodes with processors."""
        set_to = int(os.environ.get("LOCAL_SIZE", "0"))
        return set_to if set_to > 0 else max(1, sum(bool(node["cpus"]) for node in nodes()))

    # torch.cpu has no generator of its own, so these methods use torch's default generator.
    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> torch.Generator:
        """Seeds all generators of torch, and returns the default one."""
        return torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator

    def empty_cache(self) -> None:
        """Does nothing: torch caches no memory of the host."""

    # torch does not count memory on the CPU, so these methods measure the process, as in DeepSpeed.
    def get_rss(self) -> int:
        """Returns the bytes that the process occupies."""
        resident = _resident()
        self._peak = max(self._peak, resident)
        return resident

    def reset_rss(self) -> int:
        """Resets the peak, and returns the bytes that the process occupies."""
        self._peak = _resident()
        return self._peak

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Returns the bytes that the process occupies."""
        return self.get_rss()

    memory_cached = memory_reserved = memory_allocated

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Returns the most bytes that any of these methods has measured since the last reset."""
        self.get_rss()
        return self._peak

    max_memory_cached = max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self.reset_rss()

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        """Returns the bytes that the process occupies and their peak, under torch's keys."""
        return {"allocated_bytes.all.current": self.get_rss(), "allocated_bytes.all.peak": self._peak}

    def total_memory(self, device_index: int | None = None) -> int:
        return int(psutil.virtual_memory().total)

    def available_memory(self, device_index: int | None = None) -> int:
        """Returns the bytes of the RAM that are free, or that the system can free."""
        return int(psutil.virtual_memory().available)

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """Returns the tensor itself: there is no device to pin memory for."""
        return tensor

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        """Returns True if the processor has instructions for fp16. Without them torch computes in it all the same."""
        return cpu_computes_fp16()

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, *([torch.float16] if self.is_fp16_supported() else [])]

    BFloat16Tensor = property(lambda _: torch.BFloat16Tensor, doc="torch's class of tensors of bf16.")
    ByteTensor = property(lambda _: torch.ByteTensor, doc="torch's class of tensors of bytes.")
    DoubleTensor = property(lambda _: torch.DoubleTensor, doc="torch's class of tensors of fp64.")
    FloatTensor = property(lambda _: torch.FloatTensor, doc="torch's class of tensors of fp32.")
    HalfTensor = property(lambda _: torch.HalfTensor, doc="torch's class of tensors of fp16.")
    IntTensor = property(lambda _: torch.IntTensor, doc="torch's class of tensors of int32.")
    LongTensor = property(lambda _: torch.LongTensor, doc="torch's class of tensors of int64.")


class AsyncIOBuilder:
    """Builder of the module that has `aio_handle`; nothing is built."""

    def load(self, verbose: bool = True) -> ModuleType:
        """Returns `offload.deepnvme`, the module that has `aio_handle`."""
        # Imported here, since most scripts need no extension.
        return import_module("offload.deepnvme")

    def is_compatible(self, verbose: bool = True) -> bool:
        """Returns True: the extension comes with the package."""
        return True


class NotImplementedBuilder:
    """Builder of an extension of DeepSpeed that has no counterpart here."""

    def load(self, verbose: bool = True) -> NoReturn:
        """Raises `UsageError`: there is nothing to load."""
        raise UsageError(
            "this extension of DeepSpeed has no counterpart here: the engine has kernels of its own, and "
            "AsyncIOBuilder is that of DeepNVMe"
        )

    def is_compatible(self, verbose: bool = True) -> bool:
        return False


def _index_argument(device_index: int | None) -> tuple[int, ...]:
    return () if device_index is None else (device_index,)


def _resident() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)
