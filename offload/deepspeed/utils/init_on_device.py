"""`deepspeed.utils.init_on_device`: tensors of a model on another device, or on none."""

from __future__ import annotations

import contextlib
from types import TracebackType

import torch


class OnDevice:
    """Context in which torch makes tensors on a device and in a dtype, such as on "meta" without memory."""

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        """Keeps the arguments.

        Args:
            dtype: dtype of floating-point tensors.
            device: the device.
            enabled: False to do nothing.
        """
        self._dtype, self._device, self._enabled = dtype, device, enabled
        self._open = contextlib.ExitStack()

    def __enter__(self) -> None:
        if self._enabled:
            # torch has no context of its own for the dtype.
            self._open.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
            self._open.enter_context(torch.device(self._device))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._open.__exit__(kind, error, trace)
