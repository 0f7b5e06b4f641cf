"""Calls of a model whose sequences are divided: each rank gets the whole batch, and its model computes one part.

    engine(input_ids, labels)     the whole batch, on each rank of a group
      ─► the model                this rank's part of the ids, their positions, the labels shifted before the cut
      ─► output.loss              the mean over all tokens that count, the same on each rank of the group
      ─► output.logits            of this rank's part

The labels are shifted first, since the last token of a part predicts the first token of the next part. Each rank
divides the summed loss of its part by the number of tokens of all parts, which it knows from the labels. The sum over
the ranks is then the mean over the whole sequence, and no mean of means.

A call with `shift_labels` and without `labels` has been cut already, as by DeepSpeed's loader: it is left as it is.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from offload.config import Config
from offload.distributed.process_group import Kind, Ranks
from offload.distributed.world import World
from offload.engine.callbacks import Extension
from offload.errors import ConfigError, UsageError
from offload.layout.pass_order import LAYER_MAJOR
from offload.provenance import change_of_call, described, foreign_hooks, forward_text, is_causal_lm_loss, is_of
from offload.sizes import count_of

# -- group ---------------------------------------------------------------------------------------------
#
# Sequence parallelism with ZeRO: groups of ranks that share each sequence, among all ranks that share the states.
#
#     four ranks, "sequence_parallel_size": 2     part 0     part 1
#
#                                      group 0    rank 0     rank 1    the same samples, all-to-alls round attention
#                                      group 1    rank 2     rank 3    other samples
# The ranks of a group are consecutive, as torchrun numbers the ranks of a machine: their link should be the fastest.
# ZeRO divides states over all ranks, and a gradient is the mean over all ranks. For this, each rank's loss is the loss
# of the whole sequence, and its backward crosses the ranks of the group. So the mean over n ranks is the mean over the
# n / size different losses.
#
# **No deadlock.** The thread that runs the model makes all collectives, of the groups and of ZeRO, and every rank of a
# group runs the same program. An exchange is no round of agreement: a rank that waits in an exchange serves no other
# rank. So experts that are units are refused, since ranks use different ones (`check_units`).


@dataclass(frozen=True, kw_only=True)
class SequenceParallel:
    """This rank's place in its group."""

    world: World

    @property
    def group(self) -> Ranks:
        """The ranks that share each sequence, in the order of its parts."""
        return self.world.sequence

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def part(self) -> int:
        return self.group.rank

    def exchange(self, sent: torch.Tensor) -> torch.Tensor:
        """Returns the rows that the ranks of the group send to this rank. Collective of the group.

        Row r of `sent`, (size, ...) contiguous on the device, is for rank r. Row r of the result comes from rank r, and
        is filled before any later compute of the calling thread runs.
        """
        received = torch.empty_like(sent)
        # Rows of equal length, one for each rank: this is the exchange of ZeRO's gradients, with all ranks as senders.
        rows = received.view(self.size, -1), sent.view(self.size, -1)
        self.group.exchange(*rows, range(self.size), Kind.SEQUENCE).order_compute()
        return received

    def check_same_batch(self, facts: list[int]) -> None:
        """Compares the numbers that describe each rank's batch. Collective of the group.

        Raises `UsageError` on all ranks of the group, if they have different batches.
        """
        # Every rank compares all numbers with its own, so that either all ranks raise or none.
        for rank, rank_facts in zip(
            self.group.members, self.group.collect(facts, "compare their batches"), strict=True
        ):
            if rank_facts != facts:
                raise UsageError(
                    f"ranks {self.world.everyone.rank} and {rank} share each sequence (sequence_parallel_size is "
                    f"{self.size}), and called the model with different batches; give both the whole of one batch: a "
                    f"sampler of your own takes num_replicas={self.world.data_ranks} and rank=(the rank) // "
                    f"{self.size}, as training_data= does"
                )

    def sum_of(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the sum of a tensor of one element over the group, the same bits on each rank. Differentiable."""
        # Each rank sends its value to all, and adds the values up in the order of ranks. An all-reduce promises no
        # order, and the logs of two ranks could show losses that differ in the last bit.
        rows = value.reshape(1).expand(self.size).contiguous()
        return all_to_all(self, rows).sum().view(value.shape)


class _AllToAll(torch.autograd.Function):
    """An exchange of rows, whose backward sends the gradient of each row back to the rank that it came from."""

    @staticmethod
    def forward(ctx: Any, parallel: SequenceParallel, rows: torch.Tensor) -> torch.Tensor:
        ctx.parallel = parallel
        return parallel.exchange(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        # What came from rank r goes back to rank r: the transpose of an exchange is the same exchange.
        return None, ctx.parallel.exchange(gradient.contiguous())


def all_to_all(parallel: SequenceParallel, rows: torch.Tensor) -> torch.Tensor:
    """Returns the rows that the ranks of a group send to this rank. Differentiable. Collective of the group.

    `rows` is (size, ...), contiguous on the device; row r is for rank r.
    """
    received: torch.Tensor = _AllToAll.apply(parallel, rows)  # type: ignore[no-untyped-call]
    return received


def form_groups(world: World, size: int) -> Ranks:
    """Divides all ranks into groups that share sequences, and returns this rank's group. Collective.

    All ranks have the same `size`. Raises `ConfigError` on all ranks, if the ranks cannot be divided into such groups.
    """
    ranks = world.everyone.size
    if size == 1:
        return Ranks()
    if ranks % size:
        raise ConfigError(
            f"sequence_parallel_size is {size}, the number of ranks that share each sequence, and "
            f"{count_of(ranks, 'rank')} cannot be divided into such groups: set it to a divisor of {ranks}"
        )
    if world.divides_model:
        raise ConfigError(
            f"sequence_parallel_size is {size}, and the model is divided by tensor parallelism: an engine knows one of "
            "the two; leave sequence_parallel_size out, or give a model before parallelize_module"
        )
    groups = [list(range(first, first + size)) for first in range(0, ranks, size)]
    # Each group is one replica, whatever "mics_shard_size" is for all ranks.
    return world.everyone.divided(groups, -1)


# -- attention -----------------------------------------------------------------------------------------
#
# Attention over whole sequences that are divided over ranks, by an attention function of transformers.
#
#     query, key, value   (rows, heads, part of the sequence, width)
#        all-to-all ─►    (rows, part of the heads, sequence, width)
#        the model's own function: sdpa, eager, flash
#        all-to-all ─►    (rows, part of the sequence, heads, width)
#
# This is Ulysses (arXiv 2309.14509). A model of transformers looks its attention function up by a name in its config,
# and its mask by the same name. The name here contains the name of the model's own attention, and the number of parts
# of a sequence. Masks under this name are made for the whole sequence. The rest of a block works on tokens one by one,
# and needs no change.
#
# **Few heads of keys and values.** If there are fewer such heads than ranks, each head is sent to all ranks that need
# it.


_OF_MODULES: weakref.WeakKeyDictionary[nn.Module, SequenceAttention] = weakref.WeakKeyDictionary()
"""The attention of the engine that a module belongs to."""
_CUT = frozenset(("position_ids", "shift_labels", "labels", "token_type_ids", "num_items_in_batch"))
"""Tensors among the keywords of attention functions that no function needs for the whole sequence."""


class SequenceAttention:
    """The attention of one model under an engine. Belongs to the thread that runs the model."""

    def __init__(self, model: Any, parallel: SequenceParallel) -> None:
        """Makes the model look this attention up."""
        self._model, self._parallel, self._own = model, parallel, model.config._attn_implementation
        self.times_called = 0
        """Number of layers that have called this attention since `times_called` was set to 0."""
        # By module, since transformers calls one function for all models of the process.
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

        `query`, `key` and `value` are (rows, heads, part of the sequence, width), `attention_mask` is that of the whole
        sequence. Returns (rows, part of the sequence, heads, width of values), and no attention weights. Raises
        `UsageError` if the function takes a tensor that would have to be divided over ranks.
        """
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.times_called += 1
        # Such as sinks or a bias of positions: a rank would need only the part for its heads.
        tensors = [name for name, entry in keywords.items() if isinstance(entry, torch.Tensor) and name not in _CUT]
        if tensors:
            raise UsageError(
                f"{type(module).__name__} gives its attention function {', '.join(tensors)} beside query, key and "
                "value, which sequence parallelism does not divide; leave sequence_parallel_size out for this model"
            )
        keywords = {name: entry for name, entry in keywords.items() if name not in _CUT}
        # The function of "eager" is in the Python module of the layer's class.
        here: Any = sys.modules[module.__class__.__module__]
        own_attention = here.eager_attention_forward if self._own == "eager" else ALL_ATTENTION_FUNCTIONS[self._own]
        layer: nn.Module | _WithGroups = module
        repeats = repeats_of(query.shape[1], key.shape[1], self._parallel.size)
        if repeats > 1:
            # Each rank needs the keys of its own queries alone: `repeats` copies of a head go to different ranks.
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
            layer = _WithGroups(module, query.shape[1] // key.shape[1])
        heads = _to_heads(self._parallel, (query, key, value))
        # The attention weights are dropped: they cover the whole sequence, and the caller has only a part of it.
        output, _ = own_attention(layer, *heads, attention_mask, **keywords)
        # All heads over a part of the sequence: (ranks, rows, part, heads of a rank, width), row r for rank r's part.
        sent = output.unflatten(1, (self._parallel.size, -1)).movedim(1, 0)
        received = all_to_all(self._parallel, sent.contiguous())  # row r has the heads of rank r
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous(), None


def repeats_of(heads: int, of_keys: int, ranks: int) -> int:
    """Returns how often each head of keys is repeated, so that every rank has the keys of its queries."""
    if of_keys % ranks == 0:
        return 1
    # One head of keys for each rank if all queries of the rank use that head; otherwise one for each head of queries.
    return ranks // of_keys if ranks % of_keys == 0 else heads // of_keys


class _WithGroups:
    """An attention layer as its function reads it, with another number of queries for each head of keys."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module, self.num_key_value_groups = module, groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _to_heads(parallel: SequenceParallel, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Exchanges all heads over a part of the sequence for a part of the heads over all of it. Collective.

    Each tensor is (rows, heads, part of the sequence, width), with a number of heads that is a multiple of the number
    of ranks.
    """
    # Values may be narrower than keys, as in multi-head latent attention.
    if len({tensor.shape[-1] for tensor in tensors}) > 1:
        return [_to_heads(parallel, [tensor])[0] for tensor in tensors]
    size, (rows, _, part, width) = parallel.size, tensors[0].shape
    # (ranks, rows, heads of a rank, part, width), all tensors one after the other in one message
    counts = [tensor.shape[1] // size for tensor in tensors]
    sent = torch.cat([tensor.unflatten(1, (size, -1)).movedim(1, 0) for tensor in tensors], 2)
    # Row r is rank r's part of the sequence.
    received = all_to_all(parallel, sent.contiguous())
    whole = received.permute(1, 2, 0, 3, 4).reshape(rows, sum(counts), size * part, width)
    return list(whole.split(counts, 1))


# -- transformers' tables ------------------------------------------------------------------------------


def _registered(own: str, size: int) -> str:
    """Registers, in transformers, the attention and masks of sequences in `size` parts; returns their name."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # The new name contains the name of the model's own function: models look for "flash" there.
    name = f"offload_{size}_parts_{own}"
    ALL_ATTENTION_FUNCTIONS.register(name, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, functools.partial(_whole_mask, ALL_MASK_ATTENTION_FUNCTIONS[own], size))
    return name


def _attention(module: nn.Module, *args: Any, **keywords: Any) -> tuple[torch.Tensor, None]:
    attention = _OF_MODULES.get(module)
    if attention is None:
        raise UsageError(
            f"{type(module).__name__} has the config of a model under an engine with sequence_parallel_size and is no "
            "module of that model; call set_attn_implementation on a copy, with the model's own: it computes whole "
            "sequences then"
        )
    return attention(module, *args, **keywords)


def _whole_mask(own: Callable[..., Any], size: int, *args: Any, q_length: int, **keywords: Any) -> Any:
    """Returns the mask of a whole sequence of `size` parts, made by `own`, the mask function of the model.

    `q_length` counts the tokens of this rank's part. The keyword `attention_mask` covers the whole sequence.
    """
    return own(*args, **{**keywords, "q_length": size * q_length, "kv_length": size * q_length})


# -- checks --------------------------------------------------------------------------------------------
# Checks of a model before its sequences are divided: only known attention functions may mix tokens.


_LAYERS = frozenset(("full_attention", "sliding_attention", "chunked_attention"))
"""Kinds of layers, by the names in a model's config, that mix tokens by attention alone."""
_MIXERS = (nn.Conv1d, nn.Conv2d, nn.RNNBase, nn.MultiheadAttention)
"""Modules that mix tokens in another way, so that a rank would need the tokens of other ranks."""


def inside_adapters(model: nn.Module) -> Any:
    """Returns the model of transformers inside of a model of peft, or the model itself."""
    base = getattr(model, "get_base_model", None)
    return model if base is None or not hasattr(model, "peft_config") else base()


def check_model(model: nn.Module, config: Config) -> None:
    """Raises `ConfigError` if the config divides sequences and `model` does not allow it. Changes nothing."""
    size = config.sequence_parallel_size
    if size == 1:
        return
    if config.offload.schedule == LAYER_MAJOR:
        raise ConfigError(
            '"schedule": "layer_major" runs several micro-batches at once, and sequence_parallel_size is '
            f"{size}, whose ranks exchange parts of one at a time: leave one of the two out"
        )
    inner = inside_adapters(model)
    name = type(inner).__name__
    why = _why_not_transformers(model, inner) or _why_not_config(inner.config, size) or _why_not_modules(inner)
    if why is not None:
        raise ConfigError(
            f"sequence_parallel_size is {size}, which divides the sequences of causal language models of transformers, "
            f"and {name} {why}; leave sequence_parallel_size out for this model, or set it to 1"
        )


def check_units(size: int, experts: bool) -> None:
    """Raises `ConfigError` if ranks that share sequences may use different units."""
    if size > 1 and experts:
        raise ConfigError(
            f"sequence_parallel_size is {size}, and experts are units of their own, of which ranks use those "
            'of their tokens, while others wait for them in attention: leave "experts" out, or set it to "whole"'
        )


def _why_not_transformers(model: nn.Module, inner: Any) -> str | None:
    """Returns, as a clause, why a model lacks the needed interface of transformers; None if it has the interface."""
    # transformers is not imported here: a model of transformers has imported it.
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(inner, transformers.PreTrainedModel):
        return "is no model of transformers"
    if model is not inner and any(peft.is_prompt_learning for peft in model.peft_config.values()):  # type: ignore[operator]
        return "has adapters that put tokens before each sequence"
    if not inner._supports_attention_backend:
        return "does not look its attention up in transformers' table of attention functions"
    from transformers.masking_utils import sdpa_mask

    # Older versions give masks the positions of one part, which do not determine the positions of the whole.
    if "q_length" not in inspect.signature(sdpa_mask).parameters:
        return "is one of a transformers that is too old: 5.23 was tried"
    for part in (inner, model):
        if (change := change_of_call(part, f"its {type(part).__name__}")) is not None:
            return f"does not run as its class says: {change}, which would see a part of the sequence"
    if not is_causal_lm_loss(inner.loss_function) or not _gives_keywords_to_loss(inner):
        return "does not end in transformers' loss of a causal language model"
    # Flex attention has masks of blocks, and kernels of the hub have arguments of their own.
    own = inner.config._attn_implementation
    if own not in ("sdpa", "eager") and not str(own).startswith("flash_attention"):
        return f"has attn_implementation={own!r}, where sdpa, eager and flash attention are known"
    if own == "eager":
        files = (sys.modules[type(module).__module__] for module in inner.modules())
        functions = [part for file in files if (part := getattr(file, "eager_attention_forward", None)) is not None]
        if not functions:
            return "has no function eager_attention_forward beside its layers"
    else:
        functions = [transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[own]]
    foreign = next((function for function in functions if not is_of(function, "transformers")), None)
    return None if foreign is None else f"has the attention {described(foreign)}, which is not transformers' own"


def _why_not_config(config: Any, size: int) -> str | None:
    """Returns, as a clause, why a model's config does not allow divided sequences; None if it does."""
    # Read from the config, and not from a run, which would need a batch and the weights.
    heads = getattr(config, "num_attention_heads", None)
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    reasons = (
        (bool(getattr(config, "sub_configs", None)), "consists of several models, such as one for images"),
        (bool(config.is_encoder_decoder), "has an encoder"),
        (not getattr(config, "is_causal", True), "is not causal"),
        (not isinstance(heads, int), "does not say its num_attention_heads"),
        (bool(kinds), f"has layers of the kind {', '.join(kinds)}, where {', '.join(sorted(_LAYERS))} are known"),
        (getattr(config, "output_router_logits", False), "adds a loss of its router, which is no mean over tokens"),
        (getattr(config, "output_attentions", False), "returns attention weights (output_attentions)"),
        (getattr(config, "reorder_and_upcast_attn", False), "computes attention by itself (reorder_and_upcast_attn)"),
    )
    why_not = next((why for holds, why in reasons if holds), None)
    if why_not is None and heads % size:  # type: ignore[operator]
        return f"has {count_of(heads, 'head')}, which {size} ranks cannot divide evenly"  # type: ignore[arg-type]
    return why_not


def _why_not_modules(inner: nn.Module) -> str | None:
    """Returns, as a clause, the module that may mix tokens without attention or has a parameter for each head."""
    # A kind of layer that is in no list here is noticed in the first forward, by the number of attention calls.
    for path, module in inner.named_modules():
        if isinstance(module, _MIXERS):
            return f"has the {type(module).__name__} {path}, which mixes tokens"
        # A hook of the user's may mix tokens, or look for the whole sequence.
        if "forward" in vars(module):
            return f"has a forward of its own on {path}, {described(vars(module)['forward'])}"
        if (hook := next(foreign_hooks(module, "transformers", "peft"), None)) is not None:
            return f"has the {hook[0]} {described(hook[1])} on {path}, which would see a part of each sequence"
        if isinstance(getattr(module, "sinks", None), nn.Parameter):
            return f"has a parameter for each head in {path}"
    return None


def _gives_keywords_to_loss(model: Any) -> bool:
    """Returns True if the model's forward hands its keywords on to `self.loss_function`, decided by its text.

    These keywords are the labels of this rank's part, shifted before the cut, and the number of tokens of the whole
    sequence. The text decides, since a run would need a batch and the weights.
    """
    text = forward_text(model, "transformers")
    calls = [node for node in ast.walk(text) if isinstance(node, ast.Call)] if text is not None else []
    losses = [call for call in calls if ast.unparse(call.func) == "self.loss_function"]
    return len(losses) == 1 and any(keyword.arg is None for keyword in losses[0].keywords)


# -- forward -------------------------------------------------------------------------------------------


_IGNORED = -100
"""The label of tokens that do not count, in transformers."""
_ALONG = ("input_ids", "inputs_embeds", "token_type_ids")
"""Inputs with one entry for each token, which are cut as they are."""
_KNOWN = frozenset((*_ALONG, "attention_mask", "position_ids", "labels", "shift_labels", "num_items_in_batch"))


class SequenceForward(Extension):
    """The hooks on a model whose sequences are divided. Belongs to the thread that runs the model."""

    def __init__(self, model: nn.Module, parallel: SequenceParallel) -> None:
        """Hooks the model, and registers its attention."""
        inner = inside_adapters(model)
        self._parallel, self._name = parallel, type(inner).__name__
        self._layers: int = inner.config.num_hidden_layers
        # Parameters of the outer model's forward: a call may give inputs by position.
        self._names = [*inspect.signature(type(model).forward).parameters][1:]
        self._attention = SequenceAttention(inner, parallel)
        self._has_loss = False
        """True if the call under way computes the loss of a part."""
        # Functions, and no methods: a deep copy of the model has the same hooks, and would copy this object with them.
        self._removers: list[Callable[[], None]] = [
            model.register_forward_pre_hook(
                lambda called, args, kwargs: self._before(args, kwargs) if called is model else None, with_kwargs=True
            ).remove,
            model.register_forward_hook(
                lambda called, args, output: self._after(output) if called is model else None
            ).remove,
            self._attention.remove,
        ]

    def remove(self) -> None:
        while self._removers:
            self._removers.pop()()

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = {**dict(zip(self._names, args, strict=False)), **kwargs}
        self._attention.times_called, self._has_loss = 0, False
        is_cut = call.get("shift_labels") is not None and call.get("labels") is None
        if not is_cut:
            # Before all other checks, so that either every rank of the group raises or none.
            self._parallel.check_same_batch(_facts(call))
        self._check(call, is_cut)
        # A cache of keys is for generation, and a rank's cache would hold only its part.
        changed = call if is_cut else self._part_of(call)
        return (), {**changed, "use_cache": False}

    def _check(self, call: Mapping[str, Any], is_cut: bool) -> None:
        tensors = [name for name, value in call.items() if isinstance(value, torch.Tensor) and name not in _KNOWN]
        mask, keep = call.get("attention_mask"), call.get("logits_to_keep")
        refused = (
            (call.get("past_key_values") is not None, "past_key_values, as in generation", "generate without it"),
            (isinstance(keep, torch.Tensor) or bool(keep), "logits_to_keep, as in generation", "generate without it"),
            (bool(call.get("output_attentions")), "output_attentions", "leave it out"),
            (bool(call.get("output_router_logits")), "output_router_logits", "leave it out"),
            (bool(tensors), f"{', '.join(tensors)}, of which no part is known", "leave it out"),
            (is_cut and mask is not None, "shift_labels and attention_mask", "give labels in place of shift_labels"),
            (is_cut and call.get("position_ids") is None, "shift_labels without position_ids", "give both, or labels"),
        )
        for holds, what, cure in refused:
            if holds:
                raise UsageError(
                    f"{self._name} was called with {what}, and sequence_parallel_size is {self._parallel.size}: {cure}"
                )

    def _part_of(self, call: dict[str, Any]) -> dict[str, Any]:
        tokens = call.get("input_ids") if call.get("inputs_embeds") is None else call["inputs_embeds"]
        size, part = self._parallel.size, self._parallel.part
        if not isinstance(tokens, torch.Tensor) or tokens.ndim < 2 or tokens.shape[1] % size:
            shape = list(tokens.shape) if isinstance(tokens, torch.Tensor) else tokens
            raise UsageError(
                f"{self._name} expects input_ids of (rows, tokens), tokens a multiple of sequence_parallel_size, "
                f"{size}, got {shape}: pad rows to such a length, with labels of -100 (pad_to_multiple_of of "
                "transformers' collators)"
            )
        length = tokens.shape[1]
        share = slice(part * length // size, (part + 1) * length // size)
        shard = {**call, **{name: call[name][:, share] for name in _ALONG if call.get(name) is not None}}
        shard["position_ids"] = self._positions(call, length, tokens.device)[..., share]
        # The attention mask stays whole, as attention sees the whole sequence.
        labels, shifted = call.get("labels"), call.get("shift_labels")
        if labels is None:
            return shard
        if shifted is None:
            shifted = F.pad(labels, (0, 1), value=_IGNORED)[..., 1:]
        if shifted.shape[-1] != length:
            raise UsageError(f"{self._name} expects labels for {length} tokens, got {list(shifted.shape)}")
        self._has_loss = True
        # A Trainer's number counts the tokens of the whole step.
        if call.get("num_items_in_batch") is None:
            shard["num_items_in_batch"] = (shifted != _IGNORED).sum()
        # Models ask for `labels`, and their loss for `shift_labels`.
        shard["labels"] = shard["shift_labels"] = shifted[..., share].contiguous()
        return shard

    def _positions(self, call: Mapping[str, Any], length: int, device: torch.device) -> torch.Tensor:
        """Returns the positions of all tokens: those of the call, or 0, 1, 2 and so on."""
        positions = call.get("position_ids")
        if positions is None:
            return torch.arange(length, device=device)[None]
        if positions.ndim != 2 or positions.shape[-1] != length:
            raise UsageError(
                f"{self._name} expects position_ids of (rows, {length}), as the tokens, got {list(positions.shape)}"
            )
        # From such positions transformers finds several documents in a row. A rank lacks the positions of the other
        # ranks.
        if call.get("attention_mask") is None and bool((positions.diff(dim=-1) != 1).any()):
            raise UsageError(
                f"{self._name} was called with position_ids that begin anew within a row, and sequence_parallel_size "
                f"is {self._parallel.size}: packed documents that do not see each other cannot be divided; leave "
                "position_ids out, or give one document a row"
            )
        checked: torch.Tensor = positions
        return checked

    def _after(self, output: Any) -> Any:
        # Raised before the first backward, so no step was trained on parts that do not see each other.
        if self._attention.times_called != self._layers:
            raise UsageError(
                f"{self._attention.times_called} of {self._layers} layers of {self._name} have used the table of "
                "transformers' attention functions, so that others have mixed the tokens of one part alone; leave "
                "sequence_parallel_size out for this model"
            )
        if not self._has_loss:
            return output
        self._has_loss = False
        # With return_dict=False the loss comes first.
        if isinstance(output, tuple):
            return (self._parallel.sum_of(output[0]), *output[1:])
        output["loss"] = self._parallel.sum_of(output["loss"])
        return output


def _facts(call: Mapping[str, Any]) -> list[int]:
    """Returns numbers that describe a batch. Ranks compare them to notice different batches."""
    shapes: list[int] = []
    sums: list[torch.Tensor] = []
    for name in ("input_ids", "inputs_embeds", "labels", "attention_mask"):
        value = call.get(name)
        if not isinstance(value, torch.Tensor):
            shapes += [0, 0]
            sums.append(torch.zeros((), dtype=torch.int64, device="cpu"))
            continue
        flat = value.detach().reshape(-1)
        bits = flat.float().view(torch.int32) if flat.is_floating_point() else flat
        # A sum with weights notices an exchange of tokens too. It wraps around alike on every rank.
        places = torch.arange(1, flat.numel() + 1, device=flat.device)
        shapes += [value.shape[0], value.shape[-1]]
        sums.append((bits.to(torch.int64) * places).sum())
    device = next((total.device for total in sums if total.device.type != "cpu"), sums[0].device)
    # The host waits for the device once, not for each sum.
    return [*shapes, *torch.stack([total.to(device, non_blocking=True) for total in sums]).tolist()]
