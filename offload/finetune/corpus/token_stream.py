"""Text files as training data: a flat array of token ids, and batches determined by the seed."""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from offload.errors import ConfigError
from offload.fileio.inner_files import open_data
from offload.finetune.corpus.token_memory import Pool, join
from offload.finetune.evaluation import choose
from offload.sizes import count_of


def standard_library() -> list[Path]:
    """Returns the folder of Python's standard library, in a list: tens of megabytes of text on every machine."""
    return [Path(sysconfig.get_path("stdlib"))]


# Folders of installed packages, which are skipped: those below the standard library differ between machines.
_INSTALLED = {"site-packages", "dist-packages"}


def find_files(paths: Sequence[Path]) -> list[Path]:
    """Returns the files of `paths` in a deterministic order.

    Args:
        paths: files of any kind, and folders that are searched for *.py, *.txt and *.md, except in installed packages.

    Raises:
        ConfigError: a path does not exist or is a JSON lines file, or no file is found.
    """
    found: list[Path] = []
    for path in paths:
        if path.suffix in (".jsonl", ".ndjson"):
            raise ConfigError(
                f"{path} contains documents, and --text would learn their JSON syntax; give the file by --data"
            )
        if path.is_file():
            found.append(path)
        elif path.is_dir():
            inside = (p for kind in ("py", "txt", "md") for p in path.rglob(f"*.{kind}"))
            found += sorted(p for p in inside if p.is_file() and not _INSTALLED & {*p.relative_to(path).parts})
        else:
            raise ConfigError(f"there is no text at {path}")
    if not found:
        raise ConfigError(f"no *.py, *.txt or *.md file under {', '.join(map(str, paths))}")
    return found


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
        """Stores the tokens by reference.

        Args:
            tokens: token ids, (n,).
            size: sequences of a micro-batch on each rank.
            length: tokens of a sequence.
            seed: seed of the positions; must be the same on all ranks.
            rank: this rank.
            world_size: number of ranks.
            accumulation: micro-batches of a step.

        Raises:
            ConfigError: the text is shorter than one sequence.
        """
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
        """Returns the ids of one micro-batch of one step, (size, length) int64."""
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
