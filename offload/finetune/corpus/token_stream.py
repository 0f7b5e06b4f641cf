"""Text files as training data, held-out sequences, and the memory of both.

Text is a flat array of token ids; the seed determines the batches. Small arrays are in RAM. Large arrays may exceed the
RAM, and are in temporary files. These are mapped and unlinked, so that they disappear with the process. The kernel
keeps their pages in RAM while there is room, and writes them out otherwise.
"""

from __future__ import annotations

import math
import mmap
import os
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from offload.errors import ConfigError
from offload.fileio.inner_files import open_data
from offload.sizes import count_of, format_size


def standard_library() -> list[Path]:
    """Returns the folder of Python's standard library, in a list: tens of megabytes of text on every machine."""
    return [Path(sysconfig.get_path("stdlib"))]


# Folders of installed packages, which are skipped: those below the standard library differ between machines.
_INSTALLED = {"site-packages", "dist-packages"}


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Returns the files of `paths` in a deterministic order.

    Folders are searched for *.py, *.txt and *.md, except in installed packages.
    """
    files: list[Path] = []
    for path in paths:
        if path.suffix in (".jsonl", ".ndjson"):
            raise ConfigError(
                f"{path} contains documents, and --text would learn their JSON syntax; give the file by --data"
            )
        if path.is_file():
            files.append(path)
        elif path.is_dir():
            inside = (p for kind in ("py", "txt", "md") for p in path.rglob(f"*.{kind}"))
            files += sorted(p for p in inside if p.is_file() and not _INSTALLED & {*p.relative_to(path).parts})
        else:
            raise ConfigError(f"there is no text at {path}")
    if not files:
        raise ConfigError(f"no *.py, *.txt or *.md file under {', '.join(map(str, paths))}")
    return files


def read_bytes(files: Sequence[Path]) -> np.ndarray:
    """Returns the bytes of all files, (n,) uint8, with a newline between two files. Each byte is a token."""
    pool = Pool(np.uint8)
    # A generator: one file is in memory at a time, and the pool moves large data to disk.
    contents = (b"\n" * (at > 0) + _read(path) for at, path in enumerate(files))
    return join([pool.keep(np.frombuffer(content, np.uint8)) for content in contents], np.uint8)


def read_tokens(files: Sequence[Path], encode: Callable[[str], np.ndarray]) -> np.ndarray:
    """Returns the tokens of all files, (n,) int32, without a separator; `encode` tokenizes the text of one file."""
    pool = Pool(np.int32)
    # Invalid UTF-8 is replaced: a single bad byte in a source tree must not end the training.
    pieces = (np.asarray(encode(_read(path).decode(errors="replace")), np.int32) for path in files)
    return join([pool.keep(piece) for piece in pieces], np.int32)


def _read(path: Path) -> bytes:
    """Returns a file's content. Raises `ConfigError` if it cannot be read, or has a zero byte in the first 64 KiB."""
    try:
        with open_data(path) as file:
            content = file.read()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if b"\0" in content[:_LOOKED_AT]:
        raise ConfigError(
            f"{path} is not text: the file contains zero bytes; give a text file, or a folder of *.py, *.txt, *.md"
        )
    return content


_LOOKED_AT = 1 << 16


def hold_out(tokens: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens to learn from, (m,), and evenly spread sequences to evaluate on, (k, length)."""
    count = len(tokens) // length
    chosen = choose(count)
    if not len(chosen):
        return tokens, np.empty((0, length), tokens.dtype)
    # The data to learn from are the intervals between the held-out sequences.
    begins, ends = chosen * length, (chosen + 1) * length
    between = zip([0, *ends], [*begins, len(tokens)], strict=True)
    return join([tokens[begin:end] for begin, end in between], tokens.dtype), in_sequences(tokens, length)[chosen]


def in_sequences(tokens: np.ndarray, length: int) -> np.ndarray:
    """Returns a view of the tokens as sequences, (n, length), without the last incomplete one."""
    count = len(tokens) // length
    return tokens[: count * length].reshape(count, length)


class Batches:
    """Batches of sequences at random positions of a token array.

    A batch is a function of seed, step and micro-batch alone, so that a resumed run continues with the same batches.
    Each rank takes its own `size` rows of the common batch.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        size: int,
        length: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        accumulation: int = 1,
    ) -> None:
        """Stores the tokens, (n,), by reference; raises `ConfigError` if the text is shorter than one sequence."""
        if len(tokens) < length:
            raise ConfigError(
                f"the text contains {count_of(len(tokens), 'token')}, a sequence needs {length}; give more text"
            )
        self._tokens, self._length, self._seed = tokens, length, seed
        self.token_count, self.largest_id = len(tokens), int(tokens.max())
        self.checksum = f"{zlib.crc32(np.ascontiguousarray(tokens).data):08x}"
        self._rows, self._size = slice(rank * size, (rank + 1) * size), size * world_size
        self.steps_of_a_pass = -(-len(tokens) // (length * self._size * accumulation))
        """Number of steps that together use as many tokens as the text contains."""

    def batch(self, step: int, micro_batch: int) -> torch.Tensor:
        # Each rank draws the starts of all ranks' rows and takes its own, so that ranks need not communicate.
        chance = np.random.Generator(np.random.Philox(np.random.SeedSequence((self._seed, step, micro_batch))))
        starts = chance.integers(0, len(self._tokens) - self._length + 1, self._size)
        return torch.from_numpy(
            np.stack([self._tokens[s : s + self._length] for s in starts[self._rows]]).astype(np.int64)
        )

    def inputs(self, step: int, micro_batch: int) -> dict[str, torch.Tensor]:
        """Returns the keyword arguments of the model for a micro-batch; every token is learned."""
        ids = self.batch(step, micro_batch)
        return {"input_ids": ids, "labels": ids}


_IN_RAM = 256 << 20
"""Bytes of an array, or of all arrays of a pool, up to which RAM is used."""
_BLOCK = 64 << 20
"""Smallest size of a pool's file."""
_AT_ONCE = 16 << 20
"""Bytes of an array that are scanned or copied at a time."""


def make_array(shape: tuple[int, ...], dtype: Any, fill: int = 0) -> np.ndarray:
    """Returns an array filled with `fill`; the array owns its memory."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes <= _IN_RAM:
        return np.full(shape, fill, dtype)
    array: np.ndarray = _map(nbytes).view(dtype).reshape(shape)
    if fill:
        array.fill(fill)
    return array


def take_rows(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns a copy of `array[rows]` in memory of `make_array`, copied about 16 MiB at a time."""
    rows_taken = make_array((len(rows), *array.shape[1:]), array.dtype)
    for some in pieces_of(rows_taken):
        rows_taken[some] = array[rows[some]]
    return rows_taken


def join(arrays: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    """Returns the concatenation of the arrays, (n,) of `dtype`, in memory of `make_array`."""
    return np.concatenate(arrays, out=make_array((sum(map(len, arrays)),), dtype))


def pieces_of(array: np.ndarray) -> Iterator[slice]:
    """Returns an iterator over slices of an array's rows; a copy of one slice takes about 16 MiB."""
    step = max(_AT_ONCE // array[:1].nbytes, 1) if len(array) else 1
    return (slice(begin, begin + step) for begin in range(0, len(array), step))


class Pool:
    """Memory for many small arrays of one dtype. A file of the pool is freed with the last array in it."""

    def __init__(self, dtype: Any) -> None:
        self._free = np.empty(0, dtype)
        self._kept = 0

    def keep(self, values: np.ndarray) -> np.ndarray:
        """Returns `values`, (n,) of the pool's dtype, while the pool is small, else a copy of `values` in a file."""
        self._kept += values.nbytes
        if self._kept <= _IN_RAM:
            return values
        if len(values) > len(self._free):
            self._free = _map(max(values.nbytes, _BLOCK)).view(self._free.dtype)
        place, self._free = self._free[: len(values)], self._free[len(values) :]
        place[:] = values
        return place


def _map(nbytes: int) -> np.ndarray:
    """Returns zeros, (nbytes,) uint8, in a mapped file without a name."""
    try:
        with tempfile.TemporaryFile(prefix="offload-tokens-") as file:
            # Reserves the blocks now: on a full disk a later write to the mapping would raise SIGBUS.
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
    except OSError as error:
        raise ConfigError(
            f"{format_size(nbytes)} of the data's tokens do not fit in {tempfile.gettempdir()}: {error.strerror}; free "
            f"some of it, or set TMPDIR to a folder of a larger disk"
        ) from error


MOST = 16
"""Upper limit of held-out sequences: a few thousand tokens show a trend and cost few forwards."""
_SHARE = 20
"""One sequence in this many is held out."""
IGNORED = -100
"""Label of a token that does not count, as in torch's cross entropy."""


def choose(count: int) -> np.ndarray:
    """Returns the indices of held-out sequences, (k,), evenly spread over `count`: one in twenty, at most 16."""
    k = min(count // _SHARE, MOST)
    return (np.arange(k) * count // max(k, 1) + count // max(2 * k, 1)).astype(int)


class EvaluationReport(NamedTuple):
    """Result of an evaluation after `step` steps."""

    step: int
    loss: float
    """Mean over all tokens whose label is not -100."""
    seconds: float

    def line(self) -> dict[str, Any]:
        return {"step": self.step, "eval_loss": self.loss, "eval_seconds": self.seconds}


class HeldOut:
    """Batches of held-out sequences. Each rank evaluates its own rows of every batch."""

    def __init__(self, inputs: Mapping[str, np.ndarray], size: int, rank: int = 0, world_size: int = 1) -> None:
        """Stores the keyword arguments of the model, (n, length) each, by reference; uncounted labels are -100."""
        self._inputs, self._size, self._rank, self._world_size = inputs, size, rank, world_size
        self.count = len(inputs["labels"])
        self.largest_id = int(inputs["input_ids"].max())

    def batches(self) -> Iterator[tuple[dict[str, torch.Tensor], int]]:
        """Yields batches of this rank, each with the number of tokens that count.

        Every rank yields the same number of batches, since a forward gathers weights from all ranks. A rank that has no
        rows left yields the first row; none of its tokens counts.
        """
        for begin in range(0, self.count, self._size * self._world_size):
            first = begin + self._rank * self._size
            rows = slice(first, min(first + self._size, self.count)) if first < self.count else slice(0, 1)
            inputs = {name: torch.from_numpy(array[rows].astype(np.int64)) for name, array in self._inputs.items()}
            counted = int((inputs["labels"][:, 1:] != IGNORED).sum()) if first < self.count else 0
            yield inputs, counted

    def loss(self, loss_of: Callable[[dict[str, torch.Tensor]], float], mean: Callable[[float], float]) -> float:
        """Returns the mean loss over all counted tokens of all ranks. All ranks must call together.

        `loss_of` returns the mean loss of a batch; `mean` returns the mean of a number over ranks, and is a collective.
        """
        total, tokens = 0.0, 0
        for inputs, counted in self.batches():
            batch_loss = loss_of(inputs)
            if counted:  # the mean loss of no tokens is NaN
                total, tokens = total + batch_loss * counted, tokens + counted
        return mean(total) / mean(float(tokens))
