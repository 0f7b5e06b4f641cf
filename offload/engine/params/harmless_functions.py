"""The functions of torch that need no element of a parameter, and calls of them on placeholders."""

from __future__ import annotations

from typing import Any

import torch

from offload.torch_internals import plain_tensors


def asks_for_no_element(func: Any) -> bool:
    """Returns True if a function of torch, called with a parameter, needs none of its values."""
    return func in _HARMLESS or is_harmless_property(func)


def call_plainly(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls `func` on placeholders as they are, without dispatch to `__torch_function__`."""
    with plain_tensors():
        return func(*args, **kwargs)


TENSOR: Any = torch.Tensor
"""`torch.Tensor`, typed as Any: in the stubs its properties are tensors, on the class they are descriptors."""


_HARMLESS: frozenset[Any] = frozenset(
    {
        *(
            getattr(TENSOR, name)
            for name in (
                "size dim ndimension numel nelement __len__ element_size is_floating_point is_complex is_signed "
                "is_contiguous stride storage_offset data_ptr untyped_storage get_device is_pinned is_inference "
                "is_shared register_hook retain_grad _is_view new_empty new_zeros new_ones new_full new_tensor "
                "is_same_size"
            ).split()
        ),
        *(
            getattr(torch, name)
            for name in (
                "numel is_floating_point is_complex is_same_size empty_like zeros_like ones_like full_like rand_like "
                "randn_like result_type can_cast"
            ).split()
        ),
        torch.autograd.grad,
        torch.autograd.backward,
    }
)
"""Functions that need no element; `grad` and `backward` identify a parameter by its autograd node alone."""


_WITH_DATA = frozenset({"data", "T", "H", "mT", "mH", "real", "imag", "__cuda_array_interface__"})
"""Properties that return the elements themselves, or their address."""


def is_harmless_property(func: Any) -> bool:
    """Returns True for the getter, setter or deleter of a property that does not return the elements."""
    if getattr(func, "__name__", "") not in ("__get__", "__set__", "__delete__"):
        return False
    name = getattr(getattr(func, "__self__", None), "__name__", None)
    return name is not None and name not in _WITH_DATA


def name_of(func: Any) -> str:
    """Returns the name of a torch function for messages; for a property, the property's name."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return name
