"""`deepspeed.ops.op_builder`: DeepNVMe's handle, which is built already."""

from __future__ import annotations

import types

from offload import deepnvme
from offload.deepspeed.refused import refused_class

__all__ = ["AsyncIOBuilder", "GDSBuilder"]


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


GDSBuilder = refused_class("GDSBuilder", "files are read into host memory: use AsyncIOBuilder, and copy to the GPU")
