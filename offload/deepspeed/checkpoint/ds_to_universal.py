"""`deepspeed.checkpoint.ds_to_universal`: a checkpoint that an engine has written, as DeepSpeed's universal one.

As a program, `python -m offload.deepspeed.checkpoint.ds_to_universal --input_folder CHECKPOINT --output_folder FOLDER`
takes the arguments of DeepSpeed's script of this name. Engines need none: `load_checkpoint` reads checkpoints of any
number of ranks, and DeepSpeed's own.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from pathlib import Path

from offload.aio import IoQueue
from offload.errors import OffloadError, StoreError
from offload.runs.export import open_source, with_states
from offload.runs.own_checkpoint import find_own
from offload.runs.states_by_parameter import plan_states
from offload.runs.universal import KIND, export_universal

__all__ = ["main", "parse_arguments"]


def parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(
        prog="ds_to_universal",
        description="Writes a checkpoint of save_checkpoint as DeepSpeed's universal checkpoint.",
    )
    parser.add_argument("--input_folder", required=True, help="the folder that save_checkpoint received")
    parser.add_argument("--output_folder", required=True, help="the folder to write")
    parser.add_argument("--num_extract_workers", type=int, help="has no effect: states are streamed")
    parser.add_argument("--num_merge_workers", type=int, help="has no effect: states are streamed")
    parser.add_argument("--keep_temp_folder", action="store_true", help="has no effect: there is none")
    parser.add_argument("--no_strict", dest="strict", action="store_false", help="has no effect")
    parser.add_argument("--inject_missing_state", action="store_true", help="has no effect: no state is missing")
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    """Writes the checkpoint in `args.input_folder` as a universal one into `args.output_folder`, completely or not.

    Raises:
        StoreError: if the folder has no checkpoint of an engine, or its optimizer is not AdamW.
    """
    folder = Path(args.input_folder)
    if find_own(folder) is None:
        raise StoreError(f"{folder} contains no checkpoint of an engine: expected the folder of save_checkpoint")
    with IoQueue() as queue, closing(open_source(folder, queue)) as source:
        trained = with_states(source, folder)
        export_universal(trained, Path(args.output_folder), plan_states(trained, folder, KIND))


if __name__ == "__main__":
    options = parse_arguments()
    try:
        main(options)
    except (OffloadError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    print(f"a universal checkpoint of {options.input_folder} is in {options.output_folder}")
