"""`python -m bench.gpu`: another name of `offload bench gpu`, with the same options."""

import sys

from offload.bench.gpu.__main__ import run

if __name__ == "__main__":
    sys.exit(run())
