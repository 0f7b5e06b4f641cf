"""Counts of what one rank sends to the others: collectives and bytes, by kind.

Bytes are the payload that this rank has for others, once for each rank that receives it. A ring or a tree of the
backend may pass other ranks' bytes on, and adds headers: neither is counted, so the numbers are the same with any
backend. With n ranks, a unit of W bytes of weights and G bytes of gradients:

    gather of weights          W / n to each of n - 1 ranks:  W (n - 1) / n
    reduction of gradients     G / n to each of n - 1 ranks:  G (n - 1) / n; 0 bytes from a rank without gradients

With r replicas of s shards (`mesh`), s takes the place of n, and an all-reduce over the replicas follows a reduction:

    sum of S bytes             S / r to each of r - 1 ranks, twice:  2 S (r - 1) / r

With a secondary partition over nodes of s ranks, W (s - 1) / s is what a gather within a node sends.

Where codes are sent (`payload`), W and G are their bytes, 130 for 128 elements, and the codes of a sum of S elements go
to each of r - 1 ranks once.

This is what ZeRO's paper counts as the volume of an all-gather and of a reduce-scatter (arXiv 1910.02054, section 7).
A collective in which a rank sends nothing counts, since the rank takes part and waits.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Kind(enum.Enum):
    """A purpose of collectives. Values are fields of `Communication`."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    AGREEMENT = "agreement"
    PARAMETERS = "parameters"
    SEQUENCE = "sequence"
    MESSAGES = "messages"

    @property
    def purpose(self) -> str:
        """What such a collective is for, in messages on waits and lost ranks."""
        return {"gradients": "reduce gradients", "sequence": "exchange parts of sequences"}.get(self.value, self.value)


class Sent(NamedTuple):
    """Collectives of one kind, and the bytes that this rank sent in them."""

    collectives: int = 0
    nbytes: int = 0


class Communication(NamedTuple):
    """What this rank has sent to others since its engine was created, by kind. All is 0 with one rank."""

    weights: Sent = Sent()
    """Gathers of weights for forwards, backwards and reads; one for each of a unit's trainable and frozen part. Those
    within a node are counted apart."""
    node_weights: Sent = Sent()
    """Gathers of weights within a node, from a secondary partition (`zero_hpz_partition_size`)."""
    gradients: Sent = Sent()
    """Reductions of gradients, one for each unit whose gradients are complete or must make room; with several replicas
    two, or one if a replica has one shard."""
    agreement: Sent = Sent()
    """Rounds in which all ranks announce what each does next."""
    parameters: Sent = Sent()
    """Parts of parameters that an optimizer steps as a whole: Muon, SinkGD, optimizers of torch."""
    sequence: Sent = Sent()
    """Parts of sequences and of heads that ranks of sequence parallelism exchange round attention, and of a loss."""
    messages: Sent = Sent()
    """All others: decisions on a step, norms of LAMB, edits and reads of states, checkpoints, the start."""

    @property
    def total(self) -> Sent:
        """All kinds together."""
        return Sent(sum(each.collectives for each in self), sum(each.nbytes for each in self))

    def since(self, before: Communication) -> Communication:
        """Returns what was sent after `before` was taken."""
        return Communication(
            *(
                Sent(now.collectives - then.collectives, now.nbytes - then.nbytes)
                for now, then in zip(self, before, strict=True)
            )
        )

    def plus(self, other: Communication) -> Communication:
        """Returns what was sent here and there."""
        return Communication(
            *(
                Sent(one.collectives + two.collectives, one.nbytes + two.nbytes)
                for one, two in zip(self, other, strict=True)
            )
        )

    def with_one(self, kind: Kind, nbytes: int) -> Communication:
        """Returns the counts after one more collective, in which this rank sends `nbytes` bytes."""
        sent: Sent = getattr(self, kind.value)
        return self._replace(**{kind.value: Sent(sent.collectives + 1, sent.nbytes + nbytes)})
