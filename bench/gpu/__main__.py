"""`python -m bench.gpu`: another name of `offload bench gpu`, with the same options."""

from __future__ import annotations

import sys

from offload.bench.gpu.__main__ import run

if __name__ == "__main__":
    sys.exit(run())
