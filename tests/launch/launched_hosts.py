"""Stand-ins for what `offload launch` starts, to put on a PATH: hosts that ssh reaches, and torchrun's Python."""

from __future__ import annotations

from pathlib import Path

# ssh is called with options of one or two words, the host, and one string for the host's shell.
_SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift 2; done
host=$1; shift
echo "$*" > "arguments-$host"
exec $BEFORE sh -c "$*"
"""
# Ends as the node is told to, or when it is asked to.
_PYTHON = """#!/bin/sh
node=$(echo "--node-rank 0 $*" | sed 's/.*--node-rank \\([0-9]*\\).*/\\1/')
trap 'kill $!; echo ended > "ended$node"; exit 0' TERM
printf %s "$SETTING" > "setting$node"
echo "$*" > "began$node"
case $node in "$FAILS") while [ ! -e began0 ] || [ ! -e began1 ]; do sleep 0.05; done; exit 7;; esac
sleep 1000 & wait
"""


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def put_ssh(folder: Path, before: str = "") -> Path:
    """Makes a folder with an `ssh` that runs the command on this machine, or behind the words `before` and `$host`."""
    return _write(folder / "ssh", _SSH.replace("$BEFORE", before)).parent


def put_python(folder: Path) -> Path:
    """Makes a Python that runs until it is asked to end, or ends with 7 on node FAILS of the environment."""
    return _write(folder / "python", _PYTHON)
