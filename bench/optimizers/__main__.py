"""The command of this folder: one of `bytes` and `learning`."""

from __future__ import annotations

import sys

from bench.optimizers import learning, traffic

COMMANDS = {"bytes": traffic.main, "learning": learning.main}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.exit(f"usage: python -m bench.optimizers {'|'.join(COMMANDS)} ...; --help of each has its options")
    COMMANDS[sys.argv[1]](sys.argv[2:])
