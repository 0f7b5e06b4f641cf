"""`deepspeed.accelerator`: the device of the process, by torch's own functions."""

from __future__ import annotations

import functools
import os
from typing import Any

import psutil
import torch

from offload.deepspeed.refused import set_accelerator as set_accelerator
from offload.swapper.memory.device_choice import accelerator_type


@functools.cache
def get_accelerator() -> DeepSpeedAccelerator:
    """Returns the accelerator that torch finds, or the CPU."""
    return DeepSpeedAccelerator(accelerator_type() or "cpu")


class DeepSpeedAccelerator:
    """A type of device under DeepSpeed's names.

    A name that is not defined here is that of torch's module of the device, such as `torch.cuda`.
    """

    def __init__(self, device_type: str) -> None:
        """Looks up torch's module of the device.

        Args:
            device_type: such as "cuda" or "cpu".
        """
        self._name = device_type
        self._module: Any = torch.get_device_module(device_type)

    def __getattr__(self, name: str) -> Any:
        """Returns what torch's module of the device has under this name: `synchronize`, `Stream`, `memory_stats`."""
        # `_module` itself, while the constructor has not set it.
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return getattr(self._module, name)
        except AttributeError:
            raise AttributeError(
                f"the accelerator has no {name!r}, and neither has {self._module.__name__}", name=name, obj=self
            ) from None

    def device_name(self, device_index: int | None = None) -> str:
        """Returns the name of the device, such as "cuda:0"; of its type without an index. The CPU has no index.

        Args:
            device_index: number of the device.
        """
        # DeepSpeed's name of the CPU has no number, which torch's devices accept without one.
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """Returns torch's context that makes a device the current one.

        Args:
            device_index: number of the device.
        """
        return (
            torch.device(self.device_name(device_index)) if self._name == "cpu" else self._module.device(device_index)
        )

    def current_device(self) -> int:
        """Returns the number of the current device; 0 on the CPU."""
        # Scripts count devices from it, also where there is one.
        return 0 if self._name == "cpu" else int(self._module.current_device())

    def current_device_name(self) -> str:
        """Returns the name of the current device."""
        return self.device_name(self.current_device())

    def set_device(self, device_index: int) -> None:
        """Makes a device the current one.

        Args:
            device_index: number of the device.
        """
        if self._name != "cpu":
            self._module.set_device(device_index)

    def empty_cache(self) -> None:
        """Gives memory that torch has cached back to the device."""
        if self._name != "cpu":
            self._module.empty_cache()

    def random(self) -> Any:
        """Returns torch's module of random numbers."""
        return torch.random

    def manual_seed(self, seed: int) -> Any:
        """Seeds the generator of the device, and returns what torch returns.

        Args:
            seed: the seed.
        """
        return torch.manual_seed(seed) if self._name == "cpu" else self._module.manual_seed(seed)

    manual_seed_all = manual_seed

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Returns the bytes that torch has allocated on the device; on the CPU those that the process occupies.

        Args:
            device_index: number of the device.
        """
        # torch counts nothing on the CPU, so the process is measured, as DeepSpeed does.
        return _resident() if self._name == "cpu" else int(self._module.memory_allocated(device_index))

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Returns the largest number of bytes that torch had allocated on the device.

        Args:
            device_index: number of the device.
        """
        return _resident() if self._name == "cpu" else int(self._module.max_memory_allocated(device_index))

    def total_memory(self, device_index: int | None = None) -> int:
        """Returns the bytes of the device's memory.

        Args:
            device_index: number of the device.
        """
        if self._name == "cpu":
            return int(psutil.virtual_memory().total)
        return int(self._module.get_device_properties(device_index or 0).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Returns the bytes of the device's memory that are free.

        Args:
            device_index: number of the device.
        """
        # RAM that the system can free counts as free; a device's memory is torch's own answer.
        if self._name == "cpu":
            return int(psutil.virtual_memory().available)
        return int(self._module.mem_get_info(device_index)[0])

    def is_available(self) -> bool:
        """Returns True: the device was found."""
        return True

    def is_synchronized_device(self) -> bool:
        """Returns True if calls end before they return, as on the CPU."""
        return self._name == "cpu"

    def is_bf16_supported(self) -> bool:
        """Returns True if the device computes in bf16."""
        return self._name == "cpu" or bool(self._module.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        """Returns True: every device of torch computes in fp16."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Returns the dtypes that weights can have."""
        wide = [torch.float32, torch.float16]
        return [*wide, torch.bfloat16] if self.is_bf16_supported() else wide

    def communication_backend_name(self) -> str:
        """Returns the backend of torch.distributed for tensors on the device."""
        return str(torch.distributed.get_default_backend_for_device(self._name))

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Returns True if a tensor is on this type of device.

        Args:
            tensor: the tensor.
        """
        return tensor.device.type == self._name

    def pin_memory(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Returns a copy of a tensor in pinned memory; without an accelerator the tensor itself.

        Args:
            tensor: a tensor on the CPU.
        """
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Returns True if a tensor is in pinned memory.

        Args:
            tensor: the tensor.
        """
        return self._name != "cpu" and tensor.is_pinned()

    def visible_devices_envs(self) -> list[str]:
        """Returns the environment variables that choose among the devices."""
        return ["CUDA_VISIBLE_DEVICES"] if self._name == "cuda" else []

    def get_compile_backend(self) -> str:
        """Returns the default backend of torch.compile."""
        return "inductor"


def _resident() -> int:
    """Returns the bytes of memory that this process occupies."""
    return int(psutil.Process(os.getpid()).memory_info().rss)
