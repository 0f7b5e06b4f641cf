"""Commands for swap files and checkpoints, such as `offload inspect`, `verify`, `export`, `fork` and `rm`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from offload.cli.console import BAD_INPUT, FAILED, Json, echo, errors, make_console
from offload.cli.signals import signals
from offload.errors import StoreError, UsageError, naming_memory
from offload.fileio import atomic_write, check_place, real_path
from offload.notices import shell_command
from offload.options import checked, dtypes
from offload.sizes import count_of, format_size, parse_rate, parse_size

if TYPE_CHECKING:
    from rich.console import Console


_DAMAGED, _MENDED = 1, 3
_SHOWN = 20
"""Most damages or names to print; `--json` contains all."""


_RUN: Any = typer.Argument(help="A run's folder: NVME_PATH/RUN.")


def inspect(
    path: Path = typer.Argument(
        help="A run, one rank of it, an nvme path with runs; a checkpoint, or a folder of them."
    ),
    json_output: Json = False,
) -> None:
    """List the runs or checkpoints of a folder. Model, commits, sizes, who uses it, what is damaged.

    Changes nothing, and may look at a run that trains. Example: offload inspect /mnt/nvme
    """
    from offload.runs.inspection import inspect as look

    with errors(BAD_INPUT):
        content = look(path)
    if json_output:
        print(json.dumps(content))
        return
    from offload.cli.commands.inspect_tables import tables

    console = make_console(highlight=False, soft_wrap=True)
    for table in tables(content):
        console.print(table)


def verify(
    path: Path = typer.Argument(
        help="A run's folder, NVME_PATH/RUN; or a checkpoint, or a folder of them: the latest."
    ),
    repair: bool = typer.Option(False, "--repair", help="Replace damaged bytes of a run where there is a true copy."),
    model: Path | None = typer.Option(
        None,
        help="With --repair: folder of the model with which the run began, for frozen weights. [default: that of "
        "offload train]",
    ),
    rate: str | None = typer.Option(None, help="Bytes to read a second at most, such as 50MB.", **checked(parse_rate)),
    json_output: Json = False,
) -> None:
    """Compare every byte of a run or checkpoint with its checksum. Of a run the last commit is compared.

    With --repair a true copy may be in the other slot, in a kept step or a fork, in the store of a rank with the same
    shard, or in the model's files. It must have the checksum of the commit. Without --repair nothing is mended. After
    damage the last lines are the next command, and the step that a resume takes.

    Exit code 0 if everything is intact, 1 if something is damaged, 2 if there is nothing to verify, or a
    process holds it, 3 if all that was damaged is mended. Example: offload verify /mnt/nvme/my-run
    """
    from offload.aio import IoQueue
    from offload.runs.verify import open_checking

    console = make_console(stderr=json_output, highlight=False, soft_wrap=True)
    with errors(BAD_INPUT), signals():
        _check_folder(path)
        if model is not None and not model.is_dir():
            raise UsageError(f"--model expects the folder of the model with which the run began, and {model} is none")
        # An open run stays locked until `closing`, so that no process writes to it meanwhile.
        pace = _pace(rate)
        with closing(open_checking(path, repair, model)) as checking, IoQueue() as queue:
            with _bar(console, checking.nbytes) as progress:

                def compared(nbytes: int) -> None:
                    progress(nbytes)
                    pace(nbytes)

                report = checking.run(queue, compared)
    if json_output:
        print(json.dumps(report.as_json()))
    else:
        for line in report.lines(_SHOWN):
            console.print(line, markup=False)
    if not report.whole:
        # Damage is a result, not an error: the report is on stdout.
        raise typer.Exit(_DAMAGED)
    if report.mended:
        raise typer.Exit(_MENDED)


def _pace(rate: str | None) -> Callable[[int], None]:
    """Returns a function that is called with bytes that were read, and sleeps so long that `rate` is kept."""
    if rate is None:
        return lambda nbytes: None
    per_second, began, done = parse_rate(rate), time.monotonic(), 0

    def pace(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        time.sleep(max(0.0, began + done / per_second - time.monotonic()))

    return pace


def import_(
    path: Path = typer.Argument(
        help="Folder that DeepSpeed's save_checkpoint or torch's dcp.save has written, or a tag in it."
    ),
    out: Path = typer.Argument(help="Folder of checkpoints to write into."),
    tag: str | None = typer.Option(None, help="Tag of the checkpoint. [default: the latest]"),
    json_output: Json = False,
) -> None:
    """Convert a checkpoint of DeepSpeed or FSDP2 for an engine. ZeRO 1 to 3, universal, torch.distributed.checkpoint.

    Nothing in the files is executed, and no model's code is needed.
    engine.load_checkpoint also reads the folder itself. Example: offload import ./saved ./imported --tag step1000
    """
    from offload.aio import IoQueue
    from offload.runs.import_checkpoint import check_output, import_checkpoint, nbytes_of, open_foreign

    console = make_console(stderr=json_output, highlight=False, soft_wrap=True)
    with errors(FAILED, {"OUT": out}), signals():
        _check_folder(path)
        check_output(out)
        checkpoint = open_foreign(path, tag)
        with IoQueue() as queue, _bar(console, nbytes_of(checkpoint)) as progress:
            done = import_checkpoint(checkpoint, out, queue, progress)
    words = f"step {done.step}: {count_of(done.parameters, 'parameter')}, {format_size(done.nbytes)}, in {done.path}"
    _tell(json_output, done._asdict(), words, done.notices)


def export(
    path: Path = typer.Argument(
        help="A run's folder, NVME_PATH/RUN; or a checkpoint, or a folder of them: the latest. For gguf a model's."
    ),
    out: Path = typer.Argument(help="Folder to write; must not exist, or be empty. Or a new file, X.gguf."),
    format: Literal["safetensors", "gguf", "deepspeed-universal", "dcp"] | None = typer.Option(
        None,
        help="Weights for transformers, or for llama.cpp; or all that DeepSpeed, or FSDP2 (dcp.load), resumes "
        "from. [default: gguf for a name that ends in .gguf, else safetensors]",
    ),
    dtype: str | None = typer.Option(
        None,
        help="Dtype of the weights. fp32 gives the exact masters. [default: as they train]",
        **dtypes("bf16", "fp32", "fp16"),
    ),
    max_shard_size: str = typer.Option("5GB", help="Bytes of a file at most.", **checked(parse_size)),
    tokenizer: Path | None = typer.Option(
        None,
        help="Folder from which a tokenizer's files are copied along. [default: that of a run of offload train]",
        metavar="FOLDER",
    ),
    json_output: Json = False,
) -> None:
    """Write the weights of a run or checkpoint for transformers. They are safetensors files.

    With --format deepspeed-universal, write masters, moments, counters and schedule as a universal checkpoint of
    DeepSpeed; with --format dcp, for torch.distributed.checkpoint. A model's folder becomes a file of llama.cpp.
    Example: offload export /mnt/nvme/my-run ./my-model && offload export ./my-model ./my-model.gguf
    """
    from offload.aio import IoQueue
    from offload.model_io.save import read_nbytes, shard_size
    from offload.runs.as_folder import tokenizer_writer
    from offload.runs.export import check_target, note_saved, open_source, plan_export, with_states
    from offload.runs.export import export as write
    from offload.runs.states_by_parameter import plan_states

    console = make_console(stderr=json_output, highlight=False, soft_wrap=True)
    format = format or ("gguf" if out.suffix == ".gguf" else "safetensors")
    if format == "gguf":
        _export_gguf(path, out, dtype, tokenizer, console, json_output)
        return
    with errors(FAILED, {"OUT": out}), signals():
        _check_folder(path)
        check_target(out.absolute())
        check_place(out, "OUT")
        if format != "safetensors" and (dtype or tokenizer):
            raise UsageError(
                f"--dtype and --tokenizer are of safetensors; {format} has masters in fp32: leave them out"
            )
        # All arguments are checked before the weights are read.
        shard_nbytes = shard_size(max_shard_size)
        with IoQueue() as queue, closing(open_source(path, queue)) as source:
            if format != "safetensors":
                if format == "dcp":
                    from offload.runs.distributed import KIND
                    from offload.runs.distributed import export_distributed as write_all
                else:
                    from offload.runs.universal import KIND
                    from offload.runs.universal import export_universal as write_all
                trained = with_states(source, path)
                states = plan_states(trained, path, KIND)
                with _bar(console, states.nbytes) as progress:
                    done = write_all(trained, out, states, progress)
            else:
                plan, adapter = plan_export(source, dtype, shard_nbytes)
                writer = tokenizer_writer(source.client_state)
                with _bar(console, read_nbytes(plan)) as progress:
                    done = write(source, out, plan, queue, progress, tokenizer, writer, adapter)
            note_saved(source, path)
    count, size = count_of(done.parameters, "parameter"), format_size(done.nbytes)
    words = f"step {done.step}: {count}, {size} in {done.dtype}, in {done.path}"
    _tell(json_output, {**done._asdict(), "epoch": done.step}, words, done.notices)


def _export_gguf(
    path: Path, out: Path, dtype: str | None, tokenizer: Path | None, console: Console, json_output: bool
) -> None:
    with errors(FAILED, {"OUT": out}), signals():
        _check_folder(path)
        if dtype is not None:
            raise UsageError("--dtype is for a run; a GGUF file has the dtype of the model's files: leave it out")
        from offload.offline.gguf import GgufPlan, check_file

        check_file(out.absolute())
        check_place(out, "OUT")
        plan = GgufPlan.of(path, tokenizer)
        with _bar(console, plan.nbytes) as progress:
            plan.write(out.absolute(), progress)
    words = f"{count_of(len(plan.tensors), 'tensor')} of {plan.architecture}, {format_size(plan.nbytes)}, in {out}"
    _tell(json_output, {"tensors": len(plan.tensors), "nbytes": plan.nbytes, "path": out}, words)


def merge(
    adapter: Path = typer.Argument(metavar="ADAPTER", help="Folder of an adapter of peft."),
    out: Path = typer.Argument(metavar="OUT", help="New folder of the model."),
    base: str | None = typer.Option(
        None, help="Folder or hub name of the base model. [default: the one that the adapter names]"
    ),
    json_output: Json = False,
) -> None:
    """Merge a LoRA adapter and its base model into one model.

    The base model's files are read and written a piece at a time, so that the model may be larger than the RAM.
    Example: offload merge ./adapter ./my-llama
    """
    console = make_console(stderr=json_output, highlight=False, soft_wrap=True)
    with errors(FAILED, {"OUT": out}), signals():
        from offload.offline.merge import MergePlan
        from offload.runs.export import check_target

        _check_folder(adapter)
        check_target(out.absolute())
        check_place(out, "OUT")
        plan = MergePlan.of(adapter, base)
        with _bar(console, plan.nbytes) as progress:
            notices = plan.write(out, progress)
    words = (
        f"the adapter is merged into {count_of(len(plan.changes), 'weight')} of {plan.base}; the model "
        f"({format_size(plan.nbytes)}) is in {out}: {shell_command('chat', out)}"
    )
    content = {"changed": len(plan.changes), "nbytes": plan.nbytes, "base": plan.base, "path": out}
    _tell(json_output, content, words, notices)


def convert(
    path: Path = _RUN,
    moments: Literal["fp32", "bf16", "int8"] | None = typer.Option(
        None, help="Form of the new run's moments. [default: as before]"
    ),
    master: Literal["fp32", "bf24"] | None = typer.Option(
        None, help="Form of the new run's masters of bf16 weights. [default: as before]"
    ),
    run: str | None = typer.Option(None, help="Name of the new run. [default: RUN-FORM]"),
    json_output: Json = False,
) -> None:
    """Convert a run to other forms of moments or masters. Writes a new run beside it.

    To fp32 the values stay, to bf16, bf24 and int8 they are rounded to nearest. The run itself is only read: a kill
    leaves it as it is. Example: offload convert /mnt/nvme/my-run --moments int8 --master bf24
    """
    from offload.aio import IoQueue
    from offload.config import load_config
    from offload.model_io.source import StoreSource
    from offload.runs.convert import convert as write
    from offload.runs.convert import plan
    from offload.runs.verify import RunChecking

    console = make_console(stderr=json_output, highlight=False, soft_wrap=True)
    forms = {what: form for what, form in (("master", master), ("moments", moments)) if form is not None}
    with errors(FAILED), signals():
        _check_folder(path)
        path = real_path(path)  # a link that the user names is followed here, and no other below
        if not forms:
            raise StoreError("expected --moments or --master, or both, got neither")
        if run is not None:
            load_config({"offload": {"run": run}})  # a run of another name could not be resumed
        check_place(path, "the new run beside")
        with IoQueue() as queue:
            with closing(StoreSource(path, queue)) as source:
                plan(source, path, forms, run)  # what cannot be done is said before everything is read
            # Parameters are read from their places in a partition, where there is no checksum to compare with.
            with closing(RunChecking(path)) as checking, _bar(console, checking.nbytes) as progress:
                if not checking.run(queue, progress).whole:
                    say_where = shell_command("verify", path)
                    raise StoreError(f"{path} is damaged, and is not converted; `{say_where}` says where", damaged=True)
            with closing(StoreSource(path, queue)) as source:
                made = plan(source, path, forms, run)
                with _bar(console, made.nbytes // 2) as progress:
                    done = write(source, made, queue, progress)
    changed = [what for what in forms if done.before[what] != done.after[what]]
    words = ", ".join(f"{what} in {done.after[what]} in place of {done.before[what]}" for what in changed)
    options = " ".join(f"--{what} {form}" for what, form in done.after.items() if form != "fp32" or what in changed)
    words = (
        f"step {done.step}: {words}, {format_size(done.nbytes)} in {done.run}; resume with --run {done.run.name} "
        f"{options} --resume must; `{shell_command('rm', path)}` deletes the run that was converted"
    )
    _tell(json_output, done._asdict(), words)


def fork(
    path: Path = typer.Argument(help="A run's folder, NVME_PATH/RUN, or a kept step of it, NVME_PATH/RUN@STEP."),
    name: str = typer.Argument(help="Name of the new run."),
    json_output: Json = False,
) -> None:
    """Make another run of a commit. Of a run's last one, or of a step that it has kept.

    The new run has the same states and its own files beside the old ones. On XFS and btrfs they share their bytes until
    a run writes them: a fork takes milliseconds. Elsewhere they are copied. The run itself is only read.
    Example: offload fork /mnt/nvme/my-run@500 lower-lr
    """
    from offload.aio import IoQueue
    from offload.config import load_config
    from offload.runs.fork import find_commit
    from offload.runs.fork import fork as make

    with errors(FAILED), signals():
        load_config({"offload": {"run": name}})  # a run of another name could not be resumed
        path = find_commit(path)
        _check_folder(path)
        with IoQueue() as queue:
            done = make(path, name, queue)
    how = f"{format_size(done.nbytes)} {'shared with' if done.shared else 'copied from'} {path} in {done.run}"
    _tell(json_output, done._asdict(), f"step {done.step}: {how}; resume with --run {name} --resume must")


def log(path: Path = typer.Argument(help="A run's folder, NVME_PATH/RUN."), json_output: Json = False) -> None:
    """List the steps that a run has left. Kept steps, forks, and the runs it was forked from.

    May be called while the run trains. Example: offload log /mnt/nvme/my-run
    """
    from offload.runs.fork import history

    with errors(BAD_INPUT):
        rows = history(path)
    if json_output:
        print(json.dumps(rows))
        return
    from rich.table import Column, Table

    from offload.errors import printable

    table = Table(Column("step", justify="right"), "run", "time", "on disk", "", box=None)
    for row in rows:
        origin = row["forked_from"]
        of = "" if origin is None or row["kept"] else f"from {origin['run']} at step {origin['step']}"
        size = format_size(row["bytes"])
        table.add_row(str(row["step"]), *(printable(text, lines=False) for text in (row["run"], row["time"], size, of)))
    make_console(highlight=False, soft_wrap=True, markup=False).print(table)


def replay(
    path: Path = typer.Argument(
        help="A run's folder, NVME_PATH/RUN, or that of a run whose kept steps alone are left."
    ),
    steps: str = typer.Option(help="The steps to compute again.", metavar="FIRST..LAST"),
    log: Path | None = typer.Option(None, help="The log of the run. [default: that of its --log]"),
    certificate: Path | None = typer.Option(
        None, help="Write what was compared to this new file, as JSON.", metavar="FILE"
    ),
    offload_param: Literal["none", "cpu", "nvme"] | None = typer.Option(
        None, help="Tier of the weights. [default: that of the run]"
    ),
    offload_optimizer: Literal["none", "cpu", "nvme"] | None = typer.Option(
        None, help="Tier of the states. [default: that of the run]"
    ),
    json_output: Json = False,
) -> None:
    """Compute steps of a run again, and prove its log bit for bit.

    Replays runs of `offload train` of one process that had --log, and --keep-every or --keep. Compared are all bits of
    each step's loss and gradient norm, and of the last step's states, if that step is kept. The run is only read: a
    fork of it computes, and is removed.

    Exit code 0 if all bits are equal, 1 if one differs, 2 if the steps cannot be computed again, the log is of another
    run, or the certificate cannot be written.
    Example: offload replay /mnt/nvme/my-run --steps 101..120 --certificate steps.json
    """
    import logging

    from offload.aio import IoQueue
    from offload.runs.replay import lines_of, parse_steps
    from offload.runs.replay import replay as compute

    logging.getLogger("offload").setLevel(logging.ERROR)
    placement = {"offload_param": offload_param, "offload_optimizer": offload_optimizer}
    named = {"--certificate": certificate}
    # 1 is the code of a difference alone, so nothing that fails has it.
    with errors(BAD_INPUT, named, failed=BAD_INPUT), naming_memory(), signals():
        wanted = parse_steps(steps)
        if certificate is not None:
            if certificate.exists():
                raise UsageError(f"--certificate {certificate} must be a new file: it exists already")
            check_place(certificate, "--certificate")
        with IoQueue() as queue:
            proof = compute(
                path,
                wanted,
                queue,
                log=log,
                placement={name: tier for name, tier in placement.items() if tier is not None},
                say=lambda line: echo(line, err=True),
            )
    # First what hours have computed: the certificate may find no room.
    if json_output:
        print(json.dumps(proof))
    else:
        for line in lines_of(proof):
            echo(line)
    if certificate is not None:
        with errors(BAD_INPUT if proof["equal"] else FAILED, named):
            atomic_write(certificate, json.dumps(proof, indent=2) + "\n")
    if not proof["equal"]:
        raise typer.Exit(FAILED)


def rm(
    path: Path = _RUN, yes: bool = typer.Option(False, "--yes", help="Do not ask."), json_output: Json = False
) -> None:
    """Delete a run's swap files, on all of the run's drives.

    Exit code 0 if the files are deleted, 1 if the answer was no, or a drive of the run was not found, 2 if PATH is no
    run, or a process uses the run.
    Example: offload rm /mnt/nvme/my-run
    """
    from offload.swapper.store import find_removal, remove_run

    with errors(BAD_INPUT):
        if json_output and not yes:
            # A question would mix with the JSON object on stdout.
            raise UsageError("--json never asks: give --yes as well")
        _check_folder(path)
        removal = find_removal(path)
        if not json_output:
            for folder in removal.folders:
                echo(f"  {folder}")
            for file in removal.files:
                echo(f"  {file}{' (left by a kill)' if file.suffix == '.tmp' else ''}")
        if not yes:
            size = format_size(removal.nbytes)
            typer.confirm(f"Delete {path} ({size}) with all commits of the run?", abort=True)
        # The folders are searched again under the lock: the list above may be outdated.
        done = remove_run(path)
        if json_output:
            print(json.dumps(done._asdict(), default=str))
        elif done.strangers:
            names = ", ".join(done.strangers[:_SHOWN])
            echo(f"{path} is kept: it contains files that do not belong to the run: {names}")
        if done.not_found:
            echo(
                "files of the run are left on its other drives, which were mounted elsewhere, or copied: "
                f"{', '.join(done.not_found)} was not deleted; delete the run's folder on each such drive: "
                f"`{shell_command('rm', 'DRIVE/RUN')}`",
                err=True,
            )
            raise typer.Exit(FAILED)


def _tell(json_output: bool, content: Mapping[str, Any], words: str, notices: Iterable[str] = ()) -> None:
    for notice in notices:
        echo(notice, err=True)
    if json_output:
        print(json.dumps(content, default=str))
    else:
        echo(words)


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise StoreError(f"there is no folder {path}")


@contextmanager
def _bar(console: Console, nbytes: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that advances a progress bar by a number of bytes. Without a terminal there is no bar."""
    if not console.is_terminal:
        yield lambda _: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(30), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=nbytes)
        yield lambda count: progress.advance(task, count)
