"""`deepspeed.ops.op_builder`: DeepNVMe's handle, which is built already."""

from __future__ import annotations

import types
from typing import NoReturn

from offload import deepnvme
from offload.deepspeed.refused import refused_class
from offload.errors import UsageError

__all__ = ["AsyncIOBuilder", "GDSBuilder", "NotImplementedBuilder"]


class AsyncIOBuilder:
    """Builder of the module that has `aio_handle`."""

    def load(self, verbose: bool = True) -> types.ModuleType:
        """Returns `offload.deepnvme`, the module that has `aio_handle`.

        Args:
            verbose: without effect: nothing is built.
        """
        return deepnvme

    def is_compatible(self, verbose: bool = True) -> bool:
        """Returns True: the extension comes with the package.

        Args:
            verbose: without effect.
        """
        return True


class NotImplementedBuilder:
    """Builder of an extension of DeepSpeed that has no counterpart here."""

    def load(self, verbose: bool = True) -> NoReturn:
        """Raises `UsageError`: there is nothing to load.

        Args:
            verbose: without effect.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "this extension of DeepSpeed has no counterpart here: the engine has kernels of its own, and "
            "AsyncIOBuilder is that of DeepNVMe"
        )

    def is_compatible(self, verbose: bool = True) -> bool:
        """Returns False.

        Args:
            verbose: without effect.
        """
        return False


GDSBuilder = refused_class("GDSBuilder", "files are read into host memory: use AsyncIOBuilder, and copy to the GPU")
