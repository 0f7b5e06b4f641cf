"""A run or a checkpoint as a folder that other commands open: its model, or the adapter that it trains."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from offload.aio import IoQueue
from offload.errors import ConfigError
from offload.fileio import real_path
from offload.finetune.model import byte_tokenizer, learned_bytes
from offload.finetune.output import has_model, is_identity
from offload.model_io.save import TOKENIZER, copy_tokenizer, of_peft, shard_size
from offload.notices import shell_command
from offload.runs.export import export, open_source, plan_export
from offload.sizes import format_size
from offload.swapper.store import rank_folders
from offload.swapper.store.folder import read_finished


@contextlib.contextmanager
def as_folder(path: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """Yields a folder with the model or adapter of a run of `offload train`, and any other path as it is.

    The weights of the last commit are written into a folder beside the run, which is removed at the end. Of a run that
    has ended and removed its swap files, the folder is the one that it has saved.

    Raises:
        StoreError: The run cannot be read, or has no room for the weights beside it.
        ConfigError: The run does not say which tokenizer it has.
    """
    if not rank_folders(path):
        job = (read_finished(path) or {}).get("job")
        output = job.get("output") if is_identity(job) else None
        saved = isinstance(output, str) and has_model(Path(output))
        if saved:
            say(f"{path} has ended, and has saved its model in {output}")
        yield Path(output) if saved and isinstance(output, str) else path
        return
    path = real_path(path)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as beside:
        yield _exported(path, Path(beside) / "model", say)


def _exported(path: Path, out: Path, say: Callable[[str], None]) -> Path:
    with IoQueue() as queue, contextlib.closing(open_source(path, queue)) as source:
        job = source.client_state.get("job")
        if not is_identity(job) or "model" not in job:
            raise ConfigError(
                f"{path} is not of offload train, and does not say which tokenizer its model has; write it to a folder "
                f"first: {shell_command('export', path)} FOLDER --tokenizer FOLDER"
            )
        plan, adapter = plan_export(source, None, shard_size("5GB"))
        what = "model" if adapter is None else "adapter"
        if adapter is None and of_peft(source.about):
            raise ConfigError(
                f"the base model of the adapters in {path} has no folder, and nothing loads both from files: resume "
                "the run to evaluate it, or export its weights"
            )
        writer = tokenizer_writer(source.client_state)
        done = export(source, out, plan, queue, write_tokenizer=writer, adapter=adapter)
    say(
        f"step {done.step} of {path}: its {what} ({format_size(done.nbytes)}) is in {out.parent} until this command "
        "ends"
    )
    return out


def tokenizer_writer(client_state: Mapping[str, Any]) -> Callable[[Path], None] | None:
    """Returns the function that writes the tokenizer of a run of `offload train` into a folder; None if unknown."""
    job = client_state.get("job")
    # Without transformers, an export works but writes no tokenizer of bytes.
    if learned_bytes(client_state):
        if importlib.util.find_spec("transformers") is None:
            return None
        return lambda folder: byte_tokenizer().save_pretrained(str(folder))
    folder = Path(str(job["model"])) if is_identity(job) and "model" in job else None
    if folder is None or not any((folder / name).is_file() for name in TOKENIZER):
        return None
    return partial(copy_tokenizer, folder)
