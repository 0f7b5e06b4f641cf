"""Training and evaluation data of `offload train`: documents packed into rows, or sequences of a text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from offload.errors import ConfigError
from offload.finetune.corpus import packing, token_stream
from offload.finetune.corpus.chats import Example
from offload.finetune.corpus.documents import DataFile, Record, find_data, read_records
from offload.finetune.corpus.token_stream import HeldOut
from offload.finetune.options import Options
from offload.sizes import count_of


class DataFiles(NamedTuple):
    """The data files, and data sets of the hub: found but not read."""

    learned: Sequence[DataFile]
    evaluated: Sequence[DataFile]


class Share(NamedTuple):
    """Parameters that determine this rank's part of each step."""

    micro: int
    accumulation: int
    seed: int
    rank: int
    world_size: int


class Data(NamedTuple):
    """Training batches, held-out sequences, and lines on both for the user."""

    batches: token_stream.Batches | packing.Rows
    held_out: HeldOut | None
    lines: tuple[str, ...]
    example: Example | None = None
    """A document of the training data with its learned tokens; None for text, which is learned as a whole."""

    def first_row(self, tokenizer: Any) -> Example:
        """Returns the first row of the first step, without its padding; the heading contains the counts."""
        inputs = self.batches.inputs(1, 0)
        ids, labels = (inputs[name][0].numpy() for name in ("input_ids", "labels"))
        learned: np.ndarray = labels != token_stream.IGNORED
        # Padding is 0, and not learned. The last token of a document is learned, or follows one that is not 0.
        count = int(np.flatnonzero((ids != 0) | learned)[-1]) + 1
        # The model predicts each token from those before it, so the first of a row is never learned.
        learned[0] = False
        row = Example.of(ids[:count].tolist(), learned[:count].tolist(), tokenizer, whole=True)
        row.heading = (
            f"the first row of step 1 ({count_of(count, 'token')}, {learned.sum()} learned, {len(ids) - count} of "
            "padding)"
        )
        return row

    @property
    def largest_id(self) -> int:
        return max(self.batches.largest_id, self.held_out.largest_id if self.held_out is not None else 0)


def find_files(options: Options) -> DataFiles:
    """Returns the data files that the options name."""
    if options.data:
        return DataFiles(find_data(options.data), find_data(options.eval_data) if options.eval_data else [])
    learned = token_stream.find_files(options.text or token_stream.standard_library())
    return DataFiles(learned, token_stream.find_files(options.eval_data) if options.eval_data else [])


def read_files(options: Options, files: DataFiles, tokenizer: Any, share: Share, apart: bool) -> Data:
    """Reads and tokenizes the data files; `apart` is True if the model masks documents of one row from each other.

    A tokenizer of None stands for bytes as tokens.
    """
    data = (
        _documents(options, files, tokenizer, share, apart) if options.data else _text(options, files, tokenizer, share)
    )
    return data._replace(lines=(*data.lines, *_evaluation_lines(options, data.held_out)))


def _documents(options: Options, files: DataFiles, tokenizer: Any, share: Share, apart: bool) -> Data:
    """Returns documents in rows, with rows held out unless evaluation files are given."""
    kinds: Counter[type[Record]] = Counter()
    whole = options.train_on == "all"
    documents = packing.encode(_counted(files.learned, kinds), tokenizer, whole)
    example = packing.example(documents, options.length, tokenizer)
    packed = packing.pack(documents, options.length, apart)
    evaluated: packing.Packed | None = None
    if files.evaluated:
        evaluated = _packed_to_evaluate(options, files, tokenizer, apart)
    elif options.eval_every != 0:
        # Rows are held out after packing, so that training and evaluation have rows of the same length.
        packed, evaluated = packing.hold_out(packed)
    learned = packing.Rows(packed, *share)
    # Positions are of use only to families that mask by them.
    learned.with_positions = apart
    held_out = None if evaluated is None else _held_out(packing.inputs_of(evaluated, apart), share)
    return Data(learned, held_out, packing.notices(packed, learned, kinds, tokenizer, whole), example)


def _counted(files: Sequence[DataFile], kinds: Counter[type[Record]]) -> Iterator[Record]:
    # Counted while the records stream through: they are never all in memory.
    for record in read_records(files):
        kinds[type(record)] += 1
        yield record


def _packed_to_evaluate(options: Options, files: DataFiles, tokenizer: Any, apart: bool) -> packing.Packed:
    """Returns the documents of --eval-data in rows; errors name the option."""
    try:
        documents = packing.encode(read_records(files.evaluated), tokenizer, options.train_on == "all")
        return packing.pack(documents, options.length, apart)
    except ConfigError as error:
        raise ConfigError(f"--eval-data: {error}") from error


def _text(options: Options, files: DataFiles, tokenizer: Any, share: Share) -> Data:
    """Returns sequences of a text, with sequences held out unless evaluation files are given."""
    tokens, length = _tokens(files.learned, tokenizer), options.length
    # Sequences are held out before batches are drawn, so that no training batch contains an evaluated token.
    evaluated = np.empty((0, length), tokens.dtype)
    if files.evaluated:
        evaluated = token_stream.in_sequences(_tokens(files.evaluated, tokenizer), length)
        if not len(evaluated):
            raise ConfigError(
                f"--eval-data contains less than one sequence of --seq-len {length} tokens; give more text"
            )
    elif options.eval_every != 0:
        tokens, evaluated = token_stream.hold_out(tokens, length)
    learned = token_stream.Batches(
        tokens, share.micro, length, share.seed, share.rank, share.world_size, share.accumulation
    )
    return Data(
        learned, _held_out({"input_ids": evaluated, "labels": evaluated}, share) if len(evaluated) else None, ()
    )


def _held_out(inputs: dict[str, np.ndarray], share: Share) -> HeldOut:
    return HeldOut(inputs, share.micro, share.rank, share.world_size)


def _tokens(files: Sequence[DataFile], tokenizer: Any) -> np.ndarray:
    paths = [file for file in files if isinstance(file, Path)]  # a text is no data set of the hub
    if tokenizer is None:
        return token_stream.read_bytes(paths)
    return token_stream.read_tokens(paths, lambda content: packing.encode_text(content, tokenizer))


def _evaluation_lines(options: Options, held_out: HeldOut | None) -> tuple[str, ...]:
    if options.eval_every == 0:
        return ()
    if held_out is None:
        return ("no evaluation: there is too little data to hold some of it out; give --eval-data",)
    suffix = "" if options.eval_data else ", held out"
    return (f"evaluated on {count_of(held_out.count, 'sequence')}{suffix}",)


def steps_of(options: Options, default: int, batches: token_stream.Batches | packing.Rows) -> int:
    """Returns the number of steps: the option, or the steps of the requested passes over the data, or the default."""
    if options.epochs is not None:
        # A fraction of a step counts as one step, so that the last rows are used too. The decimal number is multiplied
        # exactly: as floats, 0.07 * 100 is more than 7.
        return max(1, math.ceil(Fraction(str(options.epochs)) * batches.steps_of_a_pass))
    return default if options.steps is None else options.steps
