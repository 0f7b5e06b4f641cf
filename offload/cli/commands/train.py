"""The command `offload train`. `train_run` runs the job."""

from __future__ import annotations

import dataclasses
import os

from offload.cli.console import BAD_INPUT, Json, errors
from offload.cli.options import read_recipe, takes_options
from offload.finetune.options import Options
from offload.launch.environment import rank_number


@takes_options(Options, recipe=read_recipe)
def train(options: Options, json_output: Json = False) -> None:
    """Train a causal language model. Weights and optimizer states are in swap files.

    Example: offload train --model ./llama --data chats.jsonl --output ./mine --nvme-path /mnt/nvme --resume auto

    The names of Hugging Face's arguments are taken too, such as --learning_rate or --output_dir.

    Ends with 0 after the last step, 1 if training failed or swap files are damaged, 2 for invalid options, 128 plus
    its number after a signal.
    """
    # Imported on use: the module loads rich and psutil, which would slow down every other command.
    from offload.cli.commands.train_run import Output, Training

    # Set by torchrun; only the first rank prints.
    with errors(BAD_INPUT):
        rank = rank_number(os.environ, "RANK", 0)
    console = Output(stderr=json_output, highlight=False, soft_wrap=True, quiet=rank > 0)
    # All ranks run this command; only one may write the log.
    options = options if rank == 0 else dataclasses.replace(options, log=None)
    Training(console, json_output and rank == 0).go(options)
