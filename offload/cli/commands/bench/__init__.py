"""`offload bench`: speed of the components and of training, each compared with a bound or a peer in the same run.

`group` is the command, `components` and `train` contain its subcommands. The benchmarks import torch, so each command
imports them on use: `offload --help` must stay fast.
"""

from offload.cli.commands.bench import components, train
from offload.cli.commands.bench.group import bench

__all__ = ["bench", "components", "train"]
