"""Attention over whole sequences of which each rank has a part, by an attention function of transformers.

    query, key, value   (rows, heads, part of the sequence, width)
       all-to-all ─►    (rows, part of the heads, sequence, width)
       the model's own function: sdpa, eager, flash
       all-to-all ─►    (rows, part of the sequence, heads, width)

This is Ulysses (arXiv 2309.14509). A model of transformers looks its attention function up by a name in its config, and
its mask by the same name. The name here says whose masks and attention it stands for, and how many parts a sequence
has; masks are made for the whole sequence then. All else of a block works on tokens one by one, so that it needs no
change.

**Few heads of keys and values.** Where there are fewer than ranks, each is sent to all ranks that need it.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from offload.engine.sequence.group import SequenceParallel, all_to_all
from offload.errors import UsageError

_OF_MODULES: weakref.WeakKeyDictionary[nn.Module, SequenceAttention] = weakref.WeakKeyDictionary()
"""The attention of the engine to which a module belongs."""
_CUT = frozenset(("position_ids", "shift_labels", "labels", "token_type_ids", "num_items_in_batch"))
"""Tensors that reach attention functions among other keywords, and that none of them needs for whole sequences."""


class SequenceAttention:
    """The attention of one model under an engine. Belongs to the thread that runs the model."""

    def __init__(self, model: Any, parallel: SequenceParallel) -> None:
        """Makes the model look this attention up.

        Args:
            model: a model of transformers that `checks.check_model` has let pass.
            parallel: this rank's group.
        """
        self._model, self._parallel, self._own = model, parallel, model.config._attn_implementation
        self.times_called = 0
        """Layers that have called it since somebody set this to 0."""
        # By module, as the function that transformers calls is one for all models of the process.
        for module in model.modules():
            _OF_MODULES[module] = self
        model.config._attn_implementation = _registered(self._own, parallel.size)

    def remove(self) -> None:
        """Gives the model its own attention back."""
        for module in self._model.modules():
            _OF_MODULES.pop(module, None)
        self._model.config._attn_implementation = self._own

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **keywords: Any,
    ) -> tuple[torch.Tensor, None]:
        """Returns the attention of this rank's part of the sequence; arguments as of transformers' functions.

        Args:
            module: the attention layer.
            query: (rows, heads, part of the sequence, width).
            key: (rows, heads of keys, part of the sequence, width).
            value: (rows, heads of keys, part of the sequence, width of values).
            attention_mask: of the whole sequence, as the model's own function takes it; None for a causal one.
            **keywords: of the model's own function.

        Returns:
            (rows, part of the sequence, heads, width of values), and no attention weights.

        Raises:
            UsageError: if the function takes a tensor of which each rank would need another part.
        """
        self.times_called += 1
        # Such as sinks or a bias of positions: of each, a rank needs the part of its heads.
        others = [name for name, each in keywords.items() if isinstance(each, torch.Tensor) and name not in _CUT]
        if others:
            raise UsageError(
                f"{type(module).__name__} gives its attention function {', '.join(others)} beside query, key and "
                "value, which sequence parallelism does not divide; leave sequence_parallel_size out for this model"
            )
        keywords = {name: each for name, each in keywords.items() if name not in _CUT}
        own = _own_function(self._own, module)
        layer: nn.Module | _WithGroups = module
        repeats = repeats_of(query.shape[1], key.shape[1], self._parallel.size)
        if repeats > 1:
            # Each rank needs the keys of its own queries alone: `repeats` copies of a head go to different ranks.
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
            layer = _WithGroups(module, query.shape[1] // key.shape[1])
        heads = _to_heads(self._parallel, (query, key, value))
        # The weights of some heads over the whole sequence are of no use to a caller that has a part of it.
        output, _ = own(layer, *heads, attention_mask, **keywords)
        return _to_sequence(self._parallel, output), None


def repeats_of(heads: int, of_keys: int, ranks: int) -> int:
    """Returns how often each head of keys is repeated, so that every rank has those of its queries.

    Args:
        heads: number of heads of queries, a multiple of `ranks`.
        of_keys: number of heads of keys, a divisor of `heads`.
        ranks: number of ranks.
    """
    if of_keys % ranks == 0:
        return 1
    # One head for each rank where that is the one of all its queries; as many as queries otherwise.
    return ranks // of_keys if ranks % of_keys == 0 else heads // of_keys


class _WithGroups:
    """An attention layer as its function reads it, with another number of queries for each head of keys."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module, self.num_key_value_groups = module, groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _to_heads(parallel: SequenceParallel, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns a part of the heads over the whole sequence, for all heads over a part of it. Collective.

    Args:
        parallel: the group.
        tensors: each (rows, heads, part of the sequence, width), with a number of heads that the ranks divide.
    """
    # Values may be narrower than keys, as in multi-head latent attention.
    if len({each.shape[-1] for each in tensors}) > 1:
        return [_to_heads(parallel, [each])[0] for each in tensors]
    size, (rows, _, part, width) = parallel.size, tensors[0].shape
    # (ranks, rows, heads of a rank, part, width), all tensors behind each other in one message
    counts = [each.shape[1] // size for each in tensors]
    sent = torch.cat([each.unflatten(1, (size, -1)).movedim(1, 0) for each in tensors], 2)
    # Row r is the part of the sequence that rank r has.
    received = all_to_all(parallel, sent.contiguous())
    whole = received.permute(1, 2, 0, 3, 4).reshape(rows, sum(counts), size * part, width)
    return list(whole.split(counts, 1))


def _to_sequence(parallel: SequenceParallel, output: torch.Tensor) -> torch.Tensor:
    """Returns all heads over a part of the sequence, for a part of the heads over all of it. Collective.

    Args:
        parallel: the group.
        output: (rows, sequence, heads of a rank, width).
    """
    sent = output.unflatten(1, (parallel.size, -1)).movedim(1, 0)  # (ranks, rows, part, heads of a rank, width)
    # Row r is the part of the heads that rank r has computed.
    received = all_to_all(parallel, sent.contiguous())
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous()


# -- transformers' tables ------------------------------------------------------------------------------


def _registered(own: str, size: int) -> str:
    """Returns the name under which transformers finds the attention of sequences in `size` parts, and their masks."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # The name of the model's own function is part of it: models look for "flash" there.
    name = f"offload_{size}_parts_{own}"
    ALL_ATTENTION_FUNCTIONS.register(name, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, functools.partial(_whole_mask, ALL_MASK_ATTENTION_FUNCTIONS[own], size))
    return name


def _attention(module: nn.Module, *args: Any, **keywords: Any) -> tuple[torch.Tensor, None]:
    """Calls the attention of the engine to which `module` belongs."""
    found = _OF_MODULES.get(module)
    if found is None:
        raise UsageError(
            f"{type(module).__name__} has the config of a model under an engine with sequence_parallel_size and is no "
            "module of that model; call set_attn_implementation on a copy, with the model's own: it computes whole "
            "sequences then"
        )
    return found(module, *args, **keywords)


def _whole_mask(own: Callable[..., Any], size: int, *args: Any, q_length: int, **keywords: Any) -> Any:
    """Returns the mask of the whole sequence.

    Args:
        own: makes the masks of the model's own attention.
        size: number of parts of a sequence.
        *args: as of transformers' functions.
        q_length: tokens of this rank's part.
        **keywords: as of transformers' functions; `attention_mask` is that of the whole sequence.
    """
    return own(*args, **{**keywords, "q_length": size * q_length, "kv_length": size * q_length})


def _own_function(own: str, module: Any) -> Callable[..., tuple[torch.Tensor, Any]]:
    """Returns the model's own attention function, which for "eager" stands beside the class of the layer."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if own != "eager":
        return ALL_ATTENTION_FUNCTIONS[own]  # type: ignore[no-any-return]
    return sys.modules[module.__class__.__module__].eager_attention_forward  # type: ignore[no-any-return]
