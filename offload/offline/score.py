"""Scores of records: the log-likelihood of their tokens, or the output of a reward model."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from offload.finetune.corpus.documents import Record
from offload.finetune.corpus.packing import encode_record
from offload.finetune.corpus.token_stream import IGNORED
from offload.finetune.model import check_model, without_cache
from offload.offline.open_model import OpenModel, TokenRow, in_groups, padded, refuse, rows_of


@dataclass(frozen=True, kw_only=True)
class Score:
    """Score of one record."""

    place: str
    """File, and line or row."""
    tokens: int
    """Tokens of the record that the model has read."""
    counted: int
    """Tokens whose likelihood counts; 0 for a reward."""
    log_likelihood: float | None
    """Natural logarithm of the probability of those tokens; None for a reward, and if no token counts."""
    reward: list[float] | None
    """Output of a reward model for the record."""
    cut: bool
    """True if only the first tokens were read, since a chat or completion is longer than a row."""

    @property
    def perplexity(self) -> float | None:
        return None if self.log_likelihood is None else _perplexity(self.log_likelihood, self.counted)

    def line(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"place": self.place, "tokens": self.tokens}
        if self.reward is not None:
            shown["reward"] = self.reward[0] if len(self.reward) == 1 else self.reward
        else:
            shown |= {"counted": self.counted, "log_likelihood": self.log_likelihood, "perplexity": self.perplexity}
        return shown | ({"cut": True} if self.cut else {})


@dataclass
class Total:
    """Sums over all records."""

    records: int = 0
    tokens: int = 0
    counted: int = 0
    log_likelihood: float = 0.0
    uncounted: int = 0
    """Records without a token whose likelihood counts."""
    cut: int = 0

    def add(self, score: Score) -> None:
        self.records += 1
        self.tokens += score.tokens
        self.counted += score.counted
        self.log_likelihood += score.log_likelihood or 0.0
        self.uncounted += score.reward is None and not score.counted
        self.cut += score.cut

    @property
    def perplexity(self) -> float | None:
        return _perplexity(self.log_likelihood, self.counted) if self.counted else None


def _perplexity(log_likelihood: float, tokens: int) -> float:
    try:
        return math.exp(-log_likelihood / tokens)
    except OverflowError:  # a model of random numbers over a long record
        return math.inf


@dataclass(eq=False)
class _PendingRecord:
    """A record some of whose rows have no result yet."""

    place: str
    rows: list[TokenRow]
    cut: bool
    results: list[torch.Tensor]

    def score(self, rewards: bool) -> Score:
        """Returns the score of the complete record. Raises `NumericsError` if a result is inf or NaN."""
        # A log-likelihood of -inf is valid, for a token that the model excludes; a reward of -inf is not.
        if not all((value.isfinite() if rewards else value < math.inf).all() for value in self.results):
            raise refuse(self.place)
        # A reward belongs to the whole record, so no token counts.
        counted = 0 if rewards else sum(row.counted for row in self.rows)
        # Each window of a text except the first begins with a token of the previous window.
        tokens = sum(len(row.ids) for row in self.rows) - max(len(self.rows) - 1, 0)
        return Score(
            place=self.place,
            tokens=tokens,
            counted=counted,
            log_likelihood=math.fsum(float(value) for value in self.results) if counted else None,
            reward=self.results[0].flatten().tolist() if rewards and self.results else None,
            cut=self.cut,
        )


def scores(
    model: OpenModel, records: Iterable[Record], *, seq_len: int, batch_size: int, micro_batch_size: int
) -> Iterator[Score]:
    """Yields the score of each record, in order. Records are read as they are needed.

    The weights cross to the device once for a batch of `batch_size` rows of at most `seq_len` tokens. The rows pass
    through each block in micro-batches.
    """
    if model.rewards and model.config.pad_token_id is None:
        micro_batch_size = 1  # without a padding token, the model cannot find the last token of a padded row
    # The queue stays short: a record waits only for rows of its own or of an earlier record in the same batch.
    waiting: deque[_PendingRecord] = deque()
    for group in in_groups(_rows(model, records, seq_len, waiting), batch_size):
        # Sorted, so that micro-batches contain rows of similar length and little padding.
        group.sort(key=lambda pair: -len(pair[1].ids))
        micro_batches = list(in_groups(group, micro_batch_size))
        results = model.engine.map(lambda pairs: _run(model, [row for _, row in pairs]), micro_batches)
        for pairs, values in zip(micro_batches, results, strict=True):
            for (record, _), value in zip(pairs, values, strict=True):
                record.results.append(value)
        # Scores are yielded in the order of the records, as soon as all rows of a record have a result.
        while waiting and len(waiting[0].results) == len(waiting[0].rows):
            yield waiting.popleft().score(model.rewards)
    while waiting:  # records without tokens at the end
        yield waiting.popleft().score(model.rewards)


def _rows(
    model: OpenModel, records: Iterable[Record], length: int, waiting: deque[_PendingRecord]
) -> Iterator[tuple[_PendingRecord, TokenRow]]:
    """Yields the rows of all records, each with its record, and appends each record to `waiting`."""
    for record in records:
        # The reward of a chat depends on all tokens, so no tokens are marked.
        document = encode_record(record, model.tokenizer, whole=model.rewards)
        if model.rewards:  # one row for the whole record, since there is one output
            document = document._replace(divisible=False)
        rows = rows_of(document, length) if len(document.ids) else []
        if rows:
            check_model(model.engine.module, max(len(row.ids) for row in rows), int(document.ids.max()))
        cut = not document.divisible and len(document.ids) > length
        waiting.append(_PendingRecord(record.place, rows, cut, []))
        yield from ((waiting[-1], row) for row in rows)


def _run(model: OpenModel, rows: Sequence[TokenRow]) -> torch.Tensor:
    fill = model.config.pad_token_id if model.rewards else 0
    inputs = {
        "input_ids": padded([row.ids for row in rows], 0 if fill is None else fill),
        "attention_mask": padded([np.ones(len(row.ids), np.int64) for row in rows], 0),
        **without_cache(model.engine.module),
    }
    # The first branch needs no labels, the second never holds all logits, the third is for heads that change logits.
    if model.rewards:
        rewards: torch.Tensor = model.engine(**inputs).logits
        return rewards.float().cpu()
    labels = padded([row.labels for row in rows], IGNORED)
    if model.chunked:
        losses: torch.Tensor = model.engine(**inputs, labels=labels).loss
        return -losses.float().cpu()
    logits = model.engine(**inputs).logits
    labels = labels.to(logits.device)  # the engine moves only its own inputs, and the labels are not among them
    sums = [
        -F.cross_entropy(row[:-1].float(), wanted[1:], ignore_index=IGNORED, reduction="sum")
        for row, wanted in zip(logits, labels, strict=True)
    ]
    return torch.stack(sums).cpu()
