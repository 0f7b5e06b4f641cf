"""DeepSpeed's names, so that a script of DeepSpeed trains by this library with another import, or unmodified.

    import offload.deepspeed as deepspeed

Each name has DeepSpeed's signature and documented behaviour, or its use is an error that names an alternative.
`install()` makes `import deepspeed` import this package in the process; `offload run train.py` does so for a script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import offload
from offload.deepspeed.import_hook import VERSION, install
from offload.deepspeed.names import attributes_of, public_names

__version__ = version = VERSION
"""The version of DeepSpeed whose names this package has. Scripts compare it."""
__version_major__, __version_minor__, __version_patch__ = map(int, VERSION.split("."))
__git_branch__ = git_branch = "offload"
__git_hash__ = git_hash = offload.__version__
HAS_TRITON = False
dist = None

__all__ = ["__version__", "install", *public_names("")]

if not TYPE_CHECKING:
    __getattr__ = attributes_of("")

    def __dir__() -> list[str]:
        """Returns all names, imported or not."""
        return sorted({*globals(), *__all__})
