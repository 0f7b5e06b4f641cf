"""`python -m offload.deepspeed train.py ...`: runs a script in which `import deepspeed` means this package.

Under torchrun: `torchrun --nproc_per_node 2 -m offload.deepspeed train.py ...`.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
from collections.abc import Sequence

from offload.deepspeed import install
from offload.deepspeed.accelerate_checks import check_comments
from offload.engine.distributed.rendezvous import join_launcher


def main(arguments: Sequence[str]) -> None:
    """Runs a script, or a module with `-m`, as `__main__`.

    Args:
        arguments: [`-m`,] the script, and its own arguments.

    Raises:
        ConfigError: if transformers or accelerate could not read a config that has comments.
    """
    install()
    _set_environment()
    # As Python sets both for a script or a module that it starts itself.
    is_module = arguments[0] == "-m"
    target, *own = arguments[1:] if is_module else arguments
    sys.argv = [target, *own]
    try:
        if is_module:
            sys.path[0] = os.getcwd()
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            # Absolute, as Python makes `__file__`: a script may change its folder and look beside itself afterwards.
            script = os.path.abspath(target)
            sys.path[0] = os.path.dirname(script)
            runpy.run_path(script, run_name="__main__")
    except json.JSONDecodeError as error:
        check_comments(error)
        raise


def _set_environment() -> None:
    """Sets what DeepSpeed's launcher sets, of one of several ranks or of a process alone, unless a launcher has."""
    join_launcher()
    if "WORLD_SIZE" in os.environ:
        return
    # A fixed port would keep two runs from training beside each other.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in alone.items()})


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("expected a script: python -m offload.deepspeed train.py [arguments]")
    main(sys.argv[1:])
