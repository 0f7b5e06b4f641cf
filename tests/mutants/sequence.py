"""Faults in `offload.engine.sequence`, and the tests that must notice them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_TWO = "tests/ranks/test_sequence_parallel.py::test_two_ranks_that_share_sequences_equal_one_rank"

MUTANTS = (
    Mutant(
        "cut labels before they are shifted",
        "offload.parallel.sequence",
        'shard["labels"] = shard["shift_labels"] = shifted[..., share].contiguous()',
        'shard["labels"] = shard["shift_labels"] = F.pad(labels[..., share], (0, 1), value=-100)[..., 1:].contiguous()',
        _TWO,
    ),
    Mutant(
        "take the mean of the parts' means as the loss of a sequence",
        "offload.parallel.sequence",
        'shard["num_items_in_batch"] = (shifted != _IGNORED).sum()',
        'shard["num_items_in_batch"] = (shifted[..., share] != _IGNORED).sum().clamp(min=1) * size',
        _TWO,
    ),
    Mutant(
        "let positions of each part begin anew",
        "offload.parallel.sequence",
        "self._positions(call, length, tokens.device)[..., share]",
        "self._positions(call, length, tokens.device)[..., : length // size]",
        _TWO,
    ),
    Mutant(
        "leave a gradient on the rank where attention has made it",
        "offload.parallel.sequence",
        "return None, ctx.parallel.exchange(gradient.contiguous())",
        "return None, gradient.contiguous()",
        _TWO,
    ),
    Mutant(
        "give a rank the keys of other ranks' queries",
        "offload.parallel.sequence",
        "key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)",
        "key.repeat(1, repeats, 1, 1), value.repeat(1, repeats, 1, 1)",
        _TWO,
    ),
)
