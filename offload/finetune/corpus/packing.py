"""Documents packed into rows of equal length, with labels and positions.

    records ──► documents of tokens ──► rows of --seq-len ──► batches, a function of seed and step
              encode                 pack                  Rows

Texts form one stream, which is cut into rows. A chat or a completion stays within one row, together with others that
fit; a longer one is truncated. Positions restart with each document. For some model families, transformers derives a
mask from the positions, so that documents of a row do not attend to each other. For other families, each chat and each
completion has its own row. The first token of a document is not learned, as if the document were alone in its row.
"""

from __future__ import annotations

import bisect
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from offload.errors import ConfigError
from offload.finetune.corpus.chats import Example, encode_chat, encode_chat_prompt, learned_words
from offload.finetune.corpus.documents import Chat, Completion, Prompt, Record, Text
from offload.finetune.corpus.token_stream import IGNORED, Pool, choose, make_array, pieces_of, take_rows
from offload.sizes import count_of

_NEWLINE = 10
_AT_ONCE = 1 << 20


class Document(NamedTuple):
    """Tokens and labels of one record."""

    ids: np.ndarray
    """(n,) int32"""
    learned: np.ndarray
    """(n,) bool"""
    divisible: bool
    """True if the document may be divided among several rows."""


# -- tokens -------------------------------------------------------------------------------------------


def encode(records: Iterable[Record], tokenizer: Any, whole: bool = False) -> list[Document]:
    """Returns the records as documents.

    Texts and completions end with the end-of-text token; chats end as their template defines.

    A tokenizer of None stands for bytes as tokens, with a newline as the end-of-text token. With `whole`, prompts and
    the messages of all roles are learned too.
    """
    ids, learned = Pool(np.int32), Pool(np.bool_)
    encoded = (encode_record(record, tokenizer, whole) for record in records)
    return [
        Document(ids.keep(document.ids), learned.keep(document.learned), document.divisible) for document in encoded
    ]


def encode_record(record: Record, tokenizer: Any, whole: bool = False) -> Document:
    """Returns one record as a document; see `encode`."""
    if isinstance(record, Chat):
        return _document(*encode_chat(record, tokenizer, whole))
    if isinstance(record, Text):
        ids = encode_text(record.text, tokenizer)
        end = _end(tokenizer)
        if len(ids) and end is not None and ids[-1] != end:
            ids = np.append(ids, np.int32(end))
        return Document(ids, np.ones(len(ids), bool), True)
    prompt = _begun(_ids(record.prompt, tokenizer), tokenizer)
    answer = _ended(_ids(record.completion, tokenizer, special=False), tokenizer)
    return _document(prompt + answer, [whole] * len(prompt) + [True] * len(answer))


def encode_prompt(prompt: Prompt | Chat, tokenizer: Any) -> np.ndarray:
    """Returns the tokens that a completion continues, (n,) int32: of a chat, up to the assistant's turn."""
    if isinstance(prompt, Prompt):
        return np.asarray(_begun(_ids(prompt.prompt, tokenizer), tokenizer), np.int32)
    return np.asarray(encode_chat_prompt(prompt, tokenizer), np.int32)


def _document(ids: Sequence[int], learned: Sequence[bool]) -> Document:
    return Document(np.asarray(ids, np.int32), np.asarray(learned, bool), False)


def encode_text(content: str, tokenizer: Any) -> np.ndarray:
    """Returns the tokens of a text, (n,) int32.

    The tokenizer receives chunks of about a million characters that end at line ends: a tokenizer allocates about a
    hundred bytes for each byte of its input.
    """
    pieces: list[np.ndarray] = []
    start = 0
    while start < len(content):
        stop = content.find("\n", start + _AT_ONCE) + 1 or len(content)
        ids = _ids(content[start:stop], tokenizer, special=start == 0)
        pieces.append(np.asarray(_begun(ids, tokenizer) if stop < len(content) else ids, np.int32))
        start = stop
    return np.concatenate(pieces) if pieces else np.empty(0, np.int32)


def _ids(content: str, tokenizer: Any, special: bool = True) -> list[int]:
    if tokenizer is None:
        return list(content.encode())
    ids: list[int] = tokenizer(content, add_special_tokens=special, verbose=False)["input_ids"]
    return ids


def _end(tokenizer: Any) -> int | None:
    end: int | None = _NEWLINE if tokenizer is None else tokenizer.eos_token_id
    return end


def _ended(ids: list[int], tokenizer: Any) -> list[int]:
    end = _end(tokenizer)
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


def _begun(ids: list[int], tokenizer: Any) -> list[int]:
    """Returns tokens without the end-of-text token that some tokenizers append to every input.

    An end-of-text token in the text itself stays. Encoding a plain word shows whether the tokenizer appends one.
    """
    if tokenizer is None or ids[-1:] != [_end(tokenizer)] or _ids("word", tokenizer)[-1:] != ids[-1:]:
        return ids
    return ids[:-1]


# -- rows ---------------------------------------------------------------------------------------------


class Packed(NamedTuple):
    """Rows of one length, each padded after its last document."""

    ids: np.ndarray
    """(rows, length) int32; padding is 0."""
    labels: np.ndarray
    """(rows, length) int32; -100 for tokens that are not learned, and for padding."""
    positions: np.ndarray
    """(rows, length) int32; positions restart with each document and with the padding."""
    cut: int
    """Number of indivisible documents longer than a row, which were truncated."""
    dropped: int
    """Number of indivisible documents without a token to learn within the length of a row; these were left out."""
    alone: bool
    """True if there are indivisible documents and each occupies a row of its own."""

    @property
    def learned(self) -> float:
        count = sum(np.count_nonzero(self.labels[some] != IGNORED) for some in pieces_of(self.labels))
        return float(count / self.labels.size)


def pack(documents: Sequence[Document], length: int, together: bool = True) -> Packed:
    """Packs documents into rows of `length` tokens. The result is deterministic.

    With `together`, several indivisible documents share a row; otherwise each has its own.
    """
    divisible = [document for document in documents if document.divisible and len(document.ids)]
    truncated = [_first(document, length) for document in documents if not document.divisible]
    # The first token is never learned, so a document needs a learned token after it.
    learned = [document for document in truncated if document.learned[1:].any()]
    stream = _stream(divisible, length)
    rows = _fit(stream, learned, length) if together else [*stream, *([document] for document in learned)]
    # First tokens are not learned, so a row of documents of a single token each would have nothing to learn.
    rows = [row for row in rows if any(part.learned[1:].any() for part in row)]
    if not rows:
        if not any(len(document.ids) for document in documents):
            raise ConfigError("the data contain nothing to learn: they are empty")
        if any(document.learned[1:].any() for document in documents):
            none = f"no document has a token to learn within --seq-len {length}; raise --seq-len"
        else:
            none = 'no message has the role "assistant" and a text, and no completion has one; or give --train-on all'
        raise ConfigError(f"the data contain nothing to learn: {none}")
    cut = sum(len(document.ids) > length for document in documents if not document.divisible)
    return Packed(*_arrays(rows, length), cut, len(truncated) - len(learned), not together and len(learned) > 0)


def hold_out(packed: Packed) -> tuple[Packed, Packed | None]:
    """Returns the rows to learn from, and evenly spread rows to evaluate on (None if there are too few rows)."""
    chosen = choose(len(packed.ids))
    if not len(chosen):
        return packed, None
    return _only(packed, np.delete(np.arange(len(packed.ids)), chosen)), _only(packed, chosen)


def _only(packed: Packed, rows: np.ndarray) -> Packed:
    ids, labels, positions = (take_rows(array, rows) for array in packed[:3])
    return packed._replace(ids=ids, labels=labels, positions=positions)


def inputs_of(packed: Packed, with_positions: bool) -> dict[str, np.ndarray]:
    """Returns the keyword arguments of the model for all rows, (rows, length) int32 each."""
    inputs = {"input_ids": packed.ids, "labels": packed.labels}
    return inputs | ({"position_ids": packed.positions} if with_positions else {})


def _first(document: Document, length: int) -> Document:
    return Document(document.ids[:length], document.learned[:length], document.divisible)


def _stream(documents: Sequence[Document], length: int) -> list[list[Document]]:
    """Returns the documents one after the other, cut into full rows; only the last row may have room."""
    rows: list[list[Document]] = []
    room = 0
    for document in documents:
        start = 0
        while start < len(document.ids):
            if not room:
                rows.append([])
                room = length
            stop = min(start + room, len(document.ids))
            rows[-1].append(Document(document.ids[start:stop], document.learned[start:stop], True))
            room -= stop - start
            start = stop
    return rows


def _fit(rows: list[list[Document]], documents: Sequence[Document], length: int) -> list[list[Document]]:
    """Adds documents to `rows`, the longest first, each to the row with the least sufficient room or to a new one.

    This is best-fit decreasing. When the function is called, only the last row of `rows` may have room.
    """
    # Pairs of room and row index, ascending by room; rows before the last one are full.
    rooms = sorted(
        (length - sum(len(document_part.ids) for document_part in rows[at]), at) for at in range(len(rows))[-1:]
    )
    for document in sorted(documents, key=lambda document: -len(document.ids)):
        needed = len(document.ids)
        place = bisect.bisect_left(rooms, (needed, 0))
        if place == len(rooms):
            rows.append([])
            room, at = length, len(rows) - 1
        else:
            room, at = rooms.pop(place)
        rows[at].append(document)
        bisect.insort(rooms, (room - needed, at))
    return rows


def _arrays(rows: Sequence[Sequence[Document]], length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns ids, labels and positions of the rows, (rows, length) int32 each."""
    ids, labels, positions = (make_array((len(rows), length), np.int32, fill) for fill in (0, IGNORED, 0))
    for number, row in enumerate(rows):
        start = 0
        for document_part in row:
            stop = start + len(document_part.ids)
            ids[number, start:stop] = document_part.ids
            # Labels are not shifted here: the model shifts them. The first token of a document would be predicted from
            # the document before, so its label stays -100.
            labels[number, start + 1 : stop] = np.where(document_part.learned, document_part.ids, IGNORED)[1:]
            positions[number, start:stop] = np.arange(len(document_part.ids))
            start = stop
        positions[number, start:] = np.arange(length - start)
    return ids, labels, positions


# -- batches ------------------------------------------------------------------------------------------


class Rows:
    """Batches of packed rows, shuffled anew for each pass over the data.

    A batch is a function of seed, step and micro-batch alone, so that a resumed run continues with the same batches.
    Each rank takes its own `size` rows of the common batch.
    """

    def __init__(
        self, packed: Packed, size: int, accumulation: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> None:
        """Stores the rows by reference. A micro-batch has `size` rows on each rank; all ranks have the same seed."""
        self._packed, self._accumulation, self._seed = packed, accumulation, seed
        self._first, self._size, self._stride = rank * size, size, size * world_size
        # The order of one pass is cached: to compute it for each row would take time linear in the data.
        self._kept: tuple[int, np.ndarray] = (-1, np.empty(0, int))
        self.with_positions = True
        """True if batches contain positions, by which some model families mask documents from each other."""
        self.row_count, self.token_count = packed.ids.shape[0], packed.ids.size
        self.largest_id = int(packed.ids.max())
        # The checksum identifies the data of a run across processes, see `Identity`.
        crc = 0
        for array in packed[:3]:
            crc = zlib.crc32(np.ascontiguousarray(array).data, crc)
        self.checksum = f"{crc:08x}"

    @property
    def steps_of_a_pass(self) -> int:
        """Returns the least number of steps after which each row has occurred at least once."""
        steps: int = -(-self.row_count // (self._stride * self._accumulation))
        return steps

    def inputs(self, step: int, micro_batch: int) -> dict[str, torch.Tensor]:
        """Returns the keyword arguments of the model for a micro-batch of a step, (size, length) int64 each."""
        first = ((step - 1) * self._accumulation + micro_batch) * self._stride + self._first
        rows = [self._row(number) for number in range(first, first + self._size)]
        taken = inputs_of(self._packed, self.with_positions)
        return {name: torch.from_numpy(array[rows].astype(np.int64)) for name, array in taken.items()}

    def _row(self, number: int) -> int:
        """Returns the index of the row at position `number`, counted through all passes."""
        epoch, place = divmod(number, self.row_count)
        return int(self._order(epoch)[place])

    def _order(self, epoch: int) -> np.ndarray:
        """Returns the order of a pass, (rows,); the latest order is cached."""
        if self._kept[0] != epoch:
            # Seeded by the number of the pass, so that a resumed run needs no state of a generator.
            chance = np.random.Generator(np.random.Philox(np.random.SeedSequence((self._seed, epoch))))
            self._kept = (epoch, chance.permutation(self.row_count))
        return self._kept[1]


def example(documents: Iterable[Document], length: int, tokenizer: Any) -> Example | None:
    """Returns the first chat or completion that is learned from, as it is in its row; None without one."""
    for document in (_first(candidate, length) for candidate in documents if not candidate.divisible):
        if document.learned[1:].any():
            return Example.of(document.ids.tolist(), document.learned.tolist(), tokenizer)
    return None


def notices(
    packed: Packed, rows: Rows, kinds: Mapping[type[Record], int], tokenizer: Any, whole: bool = False
) -> tuple[str, ...]:
    """Returns lines on the data for the user; `kinds` are the numbers of records of each kind."""
    lines = [
        f"data: {count_of(sum(kinds.values()), 'document')} in {count_of(rows.row_count, 'row')} of "
        f"{packed.ids.shape[1]} tokens, {packed.learned:.0%} of them learned; a pass over all rows takes "
        f"{count_of(rows.steps_of_a_pass, 'step')}"
    ]
    if kinds.get(Chat):
        lines.append(learned_words(tokenizer, whole))
    if kinds.get(Completion):
        lines.append(f"prompts and completions: {'both' if whole else 'the completions'} are learned")
    if packed.alone:
        lines.append(
            "each of these has a row of its own: in a shared row, this model would let one attend to the others"
        )
    if packed.cut:
        cut = count_of(packed.cut, "document is", "documents are")
        lines.append(f"{cut} longer than a row, and cut; a longer --seq-len cuts less")
    if packed.dropped:
        lines.append(
            f"{count_of(packed.dropped, 'document is', 'documents are')} left out: no token of it would be learned"
        )
    return tuple(lines)
