"""The commands `offload score`, `offload generate` and `offload chat`: a folder's model, without training."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from offload.cli.console import FAILED, Json, errors
from offload.cli.options import takes_options
from offload.cli.signals import signals
from offload.errors import ConfigError, printable
from offload.fileio import check_place, naming_errors
from offload.offline.options import ModelOptions
from offload.options import option, switch
from offload.sizes import count_of, format_size

if TYPE_CHECKING:
    from offload.finetune.corpus.documents import Chat, Prompt
    from offload.offline.open_model import OpenModel

_OUTPUT: Any = option(
    "Write the lines to this file, which must not exist. [default: stdout]", group="Data", metavar="FILE"
)


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(ModelOptions):
    """Options of `offload score`."""

    data: tuple[Path, ...] = option(
        'Records: a *.jsonl file with {"text"}, {"messages"} or {"prompt", "completion"} a line, *.parquet or '
        "*.csv with such columns, a text file, or a folder of these; may repeat.",
        default=...,
        group="Data",
        metavar="PATH",
    )
    output: Path | None = _OUTPUT
    seq_len: int | None = option(
        "Most tokens of a row. [default: the model's positions, at most 1024]", "--max-length", group="Data"
    )
    batch_size: int = option(
        "Rows for which the weights are read once: the more, the less the drive counts.", default=64
    )
    micro_batch_size: int = option("Rows that a layer computes at a time.", default=8)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(ModelOptions):
    """Options of `offload generate`."""

    prompt: str | None = option(
        "A question, which the tokenizer's chat template makes a prompt of; without a template a text to continue. "
        "The answer is printed as it is.",
        group="Data",
    )
    raw: bool = switch("Continue the text of --prompt itself, without the chat template.")
    data: tuple[Path, ...] = option(
        'Prompts: a *.jsonl file with {"prompt"}, {"text"} or {"messages"} a line, *.parquet or *.csv with such '
        "columns, a text file, or a folder of these; may repeat.",
        default=(),
        metavar="PATH",
    )
    output: Path | None = _OUTPUT
    batch_size: int = option(
        "Prompts that are continued at a time: the weights are read once a token.", default=8, group="Data"
    )
    max_new_tokens: int = option("Most tokens of a continuation.", default=64, group="Sampling")
    do_sample: bool = switch("Draw tokens by their probabilities; else the most probable one.")
    temperature: float | None = option("With --do-sample: below 1 sharper, above 1 flatter.")
    seed: int = option("Seed of --do-sample.", default=0)
    static_cache: int | None = option(
        "Most tokens of a prompt and its continuation. Keys and values get memory for them before the first token, "
        "which --device-memory counts. [default: their memory grows with each token]",
        group="Placement",
        metavar="TOKENS",
    )
    static_cache_on: Literal["device", "host"] = option(
        "With --static-cache: host keeps keys and values in host memory, and brings each layer's to the GPU.",
        default="device",
    )


@dataclass(frozen=True, kw_only=True)
class ChatOptions(ModelOptions):
    """Options of `offload chat`."""

    system: str | None = option("A system message before the first of yours.", group="Data")
    max_new_tokens: int = option("Most tokens of an answer.", default=512, group="Sampling")
    do_sample: bool = switch("Draw tokens by their probabilities; else the most probable one.")
    temperature: float | None = option("With --do-sample: below 1 sharper, above 1 flatter.")
    seed: int = option("Seed of --do-sample.", default=0)


@takes_options(ScoreOptions)
def score(typed: ScoreOptions, json_output: Json = False) -> None:
    """Score records by a model larger than the RAM. Log-likelihood and perplexity, or the reward of a classifier.

    Example: offload score ./llama-70b --data chats.jsonl --output scores.jsonl

    Weights are read from the folder's own files, where they lie; nothing else is written than the scores, one JSON
    object a record. All else goes to stderr.
    """
    with errors(FAILED, {"--output": typed.output}), signals():
        _check_numbers(batch_size=typed.batch_size, micro_batch_size=typed.micro_batch_size, seq_len=typed.seq_len)
        if typed.seq_len == 1:
            raise ConfigError("--seq-len 1 leaves nothing to predict; give 2 or more")
        from offload.finetune.corpus.documents import find_data, read_records
        from offload.offline.score import Total, scores

        # Missing data are reported before a model of many gigabytes is opened.
        files = find_data(typed.data)
        with _lines(typed.output, json_output) as (write, kept):
            rows = {"rows": typed.micro_batch_size, "batch": typed.batch_size, "seq_len": typed.seq_len}
            with _opened(typed, scores=True, **rows) as model:
                measured, total = _Measured(model), Total()
                record_scores = scores(
                    model,
                    read_records(files),
                    seq_len=model.longest,
                    batch_size=model.batch,
                    micro_batch_size=model.rows,
                )
                for record in record_scores:
                    total.add(record)
                    write(record.line())
                facts = measured.report(
                    f"{count_of(total.records, 'record')}, {count_of(total.tokens, 'token')}", total.tokens
                )
        if total.perplexity is not None:
            mean = total.log_likelihood / total.counted
            _say(f"log-likelihood {mean:.4f} a token, perplexity {total.perplexity:.4f}, of {total.counted} tokens")
        if total.uncounted:
            _say(
                f"{count_of(total.uncounted, 'record has', 'records have')} no token that counts, and null as score: "
                "of a chat the turns of the assistant count, of a completion its text"
            )
        if total.cut:
            _say(f"{count_of(total.cut, 'record was', 'records were')} cut to a row; a longer --seq-len cuts less")
        if json_output:
            _print_json({**vars(total), "perplexity": total.perplexity, **facts, "scores": kept})


@takes_options(GenerateOptions)
def generate(typed: GenerateOptions, json_output: Json = False) -> None:
    """Continue prompts by a model larger than the RAM.

    Example: offload generate ./llama-70b --prompt "Why is the sky blue?" --max-new-tokens 32

    Weights are read from the folder's own files once for each token of a batch of prompts. With --data each
    continuation is a JSON object on a line of its own. All else goes to stderr.
    """
    with errors(FAILED, {"--output": typed.output}), signals():
        _check_generation(typed)
        from offload.finetune.corpus.documents import find_data, read_prompts
        from offload.offline.generate import completions, encode_fitting, question
        from offload.offline.open_model import StaticCacheSize

        on_host = typed.static_cache_on == "host"
        # Files are searched now and read later.
        prompts: Iterable[Prompt | Chat] = read_prompts(find_data(typed.data))
        prompt = typed.prompt

        def check(tokenizer: Any, config: Any) -> None:
            nonlocal prompts
            # Prompts of files are read and checked as they are needed, so only `--prompt` is checked now.
            if prompt is not None:
                asked = question(prompt, tokenizer, typed.raw)
                prompts = [asked]
                encode_fitting(asked, tokenizer, config, max_new_tokens=typed.max_new_tokens, cached=typed.static_cache)

        with _lines(typed.output, json_output) as (write, kept):
            rows = 1 if typed.prompt is not None else typed.batch_size
            cache = None if typed.static_cache is None else StaticCacheSize(typed.static_cache, rows, on_host)
            with _opened(typed, cache=cache, check=check) as model:
                import torch

                measured = _Measured(model)
                torch.manual_seed(typed.seed)
                sampling = {} if typed.temperature is None else {"temperature": typed.temperature}
                count = tokens = 0
                for completion in completions(
                    model,
                    prompts,
                    batch_size=typed.batch_size,
                    max_new_tokens=typed.max_new_tokens,
                    cached=typed.static_cache,
                    cache_on_host=on_host,
                    do_sample=typed.do_sample,
                    **sampling,
                ):
                    count, tokens = count + 1, tokens + completion.tokens
                    if typed.prompt is not None and typed.output is None and not json_output:
                        # A model may generate characters that control the terminal.
                        print(printable(completion.text) if sys.stdout.isatty() else completion.text)
                    else:
                        write(completion.line())
                facts = measured.report(f"{count_of(count, 'prompt')}, {count_of(tokens, 'new token')}", tokens)
        if json_output:
            _print_json({"prompts": count, "tokens": tokens, **facts, "completions": kept})


@takes_options(ChatOptions)
def chat(typed: ChatOptions, json_output: Json = False) -> None:
    """Talk to a model larger than the RAM, by its chat template.

    Example: offload chat ./my-llama --system "Answer briefly."

    Each line of stdin is a message; Ctrl-D ends. The answer appears token by token, and each token is a pass over the
    weights in the folder's own files. All else goes to stderr.
    """
    with errors(FAILED), signals():
        _check_numbers(max_new_tokens=typed.max_new_tokens)
        _check_sampling(typed)
        from offload.offline.generate import Conversation, check_chat_template

        with _opened(typed, check=check_chat_template) as model:
            import torch

            measured = _Measured(model)
            torch.manual_seed(typed.seed)
            sampling = {} if typed.temperature is None else {"temperature": typed.temperature}
            conversation = Conversation(
                model, typed.system, max_new_tokens=typed.max_new_tokens, do_sample=typed.do_sample, **sampling
            )
            answers: list[str] = []
            for message in _messages():
                # A model may generate characters that control the terminal.
                show = (lambda text: print(printable(text), end="", flush=True)) if not json_output else None
                answers.append(conversation.answer(message, show))
                if show is not None:
                    print(flush=True)
            tokens = conversation.tokens
            facts = measured.report(f"{count_of(len(answers), 'answer')}, {count_of(tokens, 'new token')}", tokens)
        if json_output:
            _print_json({"answers": answers, "tokens": tokens, **facts})


def _messages() -> Iterator[str]:
    """Yields the lines of stdin that are not empty. In a terminal a sign shows that a line is expected."""
    if sys.stdin.isatty():
        _say("write a message and press Enter; Ctrl-D ends")
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        # Python represents bytes that are not UTF-8 by surrogates, which tokenizers reject.
        if any("\ud800" <= character <= "\udfff" for character in line):
            _say("a line that is not UTF-8 is left out")
        elif line.strip():
            yield line.strip()


def _check_sampling(typed: GenerateOptions | ChatOptions) -> None:
    if not 0 <= typed.seed < 2**63:
        raise ConfigError(f"--seed is at least 0 and below 2**63, not {typed.seed}")
    if typed.temperature is not None and not (typed.do_sample and typed.temperature > 0):
        raise ConfigError("--temperature is a number above 0, and needs --do-sample")


def _check_generation(typed: GenerateOptions) -> None:
    """Raises `ConfigError` for options of `offload generate` that are out of range or contradict each other."""
    _check_numbers(batch_size=typed.batch_size, max_new_tokens=typed.max_new_tokens, static_cache=typed.static_cache)
    if (typed.prompt is None) == (not typed.data):
        raise ConfigError("expected one of --prompt and --data")
    if typed.raw and typed.prompt is None:
        raise ConfigError("--raw is for --prompt; a line of --data is a chat only if it contains messages")
    _check_sampling(typed)
    # Python represents arguments that are not UTF-8 by surrogates, which tokenizers reject.
    if typed.prompt is not None and any("\ud800" <= character <= "\udfff" for character in typed.prompt):
        raise ConfigError("--prompt is not UTF-8: give a text in the terminal's encoding, or a file by --data")
    if typed.static_cache_on == "host" and typed.static_cache is None:
        raise ConfigError("--static-cache-on host needs --static-cache TOKENS, the size of the cache")


@contextlib.contextmanager
def _opened(typed: ModelOptions, **options: Any) -> Iterator[OpenModel]:
    """Yields the model of a folder, an adapter or a run, by `open_model`. `_measured` alone reports lines on it."""
    from offload.hub import local_model
    from offload.offline.open_model import open_model
    from offload.runs.as_folder import as_folder

    notices = logging.getLogger("offload.notices")
    with as_folder(Path(local_model(typed.model)), _say) as folder:
        # The command prints the lines of the start itself, remarks too, which logging leaves out by default.
        notices.setLevel(logging.ERROR)
        model = open_model(dataclasses.replace(typed, model=str(folder)), **options)
        notices.setLevel(logging.INFO)
        with model.engine:
            yield model


def _check_numbers(**given: int | None) -> None:
    for name, value in given.items():
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is at least 1, not {value}")


@contextlib.contextmanager
def _lines(output: Path | None, in_one_object: bool) -> Iterator[tuple[Callable[[Any], None], list[Any]]]:
    """Yields a function that writes its argument as a line of JSON, and a list of arguments that were not written.

    Without an `output` the lines go to stdout. With `in_one_object` their content goes into the list instead.
    """
    from offload.fileio.jsonl import json_line

    kept: list[Any] = []
    if output is None:
        yield kept.append if in_one_object else _print_json, kept
        return
    if output.exists():
        raise ConfigError(f"{output} exists already; give --output another name, or delete the file")
    check_place(output, "--output")  # the first line creates the file, hours after the start
    with contextlib.ExitStack() as opened:
        file: FileIO | None = None

        def write(content: Any) -> None:
            nonlocal file
            line = f"{json_line(content)}\n".encode()
            with naming_errors(output, "write"):
                # Opened by the first line, so that a failed start leaves no file that blocks the next one. Mode "x": a
                # second call never overwrites scores that took hours.
                file = file or opened.enter_context(output.open("xb", buffering=0))
                while line:
                    line = line[file.write(line) :]

        try:
            yield write, kept
        except BaseException:
            if file is not None and not output.stat().st_size:
                output.unlink()
            raise
        if file is None:
            output.touch()


def _print_json(content: Any) -> None:
    from offload.fileio.jsonl import json_line

    print(json_line(content), flush=True)


class _Measured:
    """Time and bytes of a command, counted from the moment when its model was ready."""

    def __init__(self, model: OpenModel) -> None:
        self._model, self._began = model, time.perf_counter()
        for line in (*model.engine.notices, *model.lines):
            _say(line)

    def report(self, done: str, tokens: int) -> dict[str, Any]:
        """Reports the work and the time of its phases, and returns both for a JSON object."""
        seconds, spent = time.perf_counter() - self._began, self._model.engine.pass_seconds()
        read, rate = self._model.engine.io_bytes().read, tokens / max(seconds, 1e-9)
        _say(f"{done} in {seconds:.1f} s: {rate:.1f} tokens/s; {format_size(read)} of weights read")
        parts = {"drive": spent.drive, "copies": spent.copies, "compute": spent.compute}
        if spent.total:
            shares = ", ".join(f"{name} {part / spent.total:.0%}" for name, part in parts.items())
            _say(f"limited by {spent.limit}: of {spent.total:.1f} s in the model {shares}")
        return {
            "seconds": seconds,
            "tokens_per_second": rate,
            "read_bytes": read,
            "limited_by": spent.limit if spent.total else None,
            "forward_parts_seconds": parts,
        }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
