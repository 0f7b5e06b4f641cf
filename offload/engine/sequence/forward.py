"""Calls of a model whose sequences are divided: each rank gets the whole batch, and the model its part of it.

    engine(input_ids, labels)     the whole batch, on each rank of a group
      ─► the model                this rank's part of the ids, their positions, the labels shifted before the cut
      ─► output.loss              the mean over all tokens that count, the same on each rank of the group
      ─► output.logits            of this rank's part

The labels are shifted first, since the last token of a part predicts the first one of the next. Each part's loss is a
sum divided by the number of tokens of all parts, which every rank knows, as it has all labels; the sum over the ranks
is then the mean over the sequence, and no mean of means.

A call with `shift_labels` and without `labels` has been cut already, as by DeepSpeed's loader: it is left as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from offload.engine.sequence.attention import SequenceAttention
from offload.engine.sequence.checks import inside_adapters
from offload.engine.sequence.group import SequenceParallel
from offload.errors import UsageError

_IGNORED = -100
"""The label of tokens that do not count, in transformers."""
_ALONG = ("input_ids", "inputs_embeds", "token_type_ids")
"""Inputs of one value a token, that are cut as they are."""
_KNOWN = frozenset((*_ALONG, "attention_mask", "position_ids", "labels", "shift_labels", "num_items_in_batch"))


class SequenceForward:
    """The hooks on a model whose sequences are divided. Belongs to the thread that runs the model."""

    def __init__(self, model: nn.Module, parallel: SequenceParallel) -> None:
        """Hooks the model, and registers its attention.

        Args:
            model: the model, or one of peft around it, that `checks.check_model` has let pass.
            parallel: this rank's group.
        """
        inner = inside_adapters(model)
        self._parallel, self._name = parallel, type(inner).__name__
        self._layers: int = inner.config.num_hidden_layers
        # Of the outer model's: a call may give inputs by their places.
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
        """Removes the hooks, and gives the model its own attention back."""
        while self._removers:
            self._removers.pop()()

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the inputs of this rank's part."""
        call = {**dict(zip(self._names, args, strict=False)), **kwargs}
        self._attention.times_called, self._has_loss = 0, False
        is_cut = call.get("shift_labels") is not None and call.get("labels") is None
        if not is_cut:
            # First of all, so that every rank of the group raises, or none.
            self._parallel.check_same_batch(_facts(call))
        self._check(call, is_cut)
        # A cache of keys is for generation, and each rank would have one of its part.
        changed = call if is_cut else self._part_of(call)
        return (), {**changed, "use_cache": False}

    def _check(self, call: Mapping[str, Any], is_cut: bool) -> None:
        """Raises `UsageError` for a call that cannot be divided."""
        tensors = [name for name, each in call.items() if isinstance(each, torch.Tensor) and name not in _KNOWN]
        mask = call.get("attention_mask")
        refused = (
            (call.get("past_key_values") is not None, "past_key_values, as in generation", "generate without it"),
            (_is_on(call.get("logits_to_keep")), "logits_to_keep, as in generation", "generate without it"),
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
        """Returns the inputs of this rank's part of a whole batch."""
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
        mine = slice(part * length // size, (part + 1) * length // size)
        found = {**call, **{name: call[name][:, mine] for name in _ALONG if call.get(name) is not None}}
        found["position_ids"] = self._positions(call, length, tokens.device)[..., mine]
        # The attention mask stays whole, as attention sees the whole sequence.
        labels, shifted = call.get("labels"), call.get("shift_labels")
        if labels is None:
            return found
        if shifted is None:
            shifted = F.pad(labels, (0, 1), value=_IGNORED)[..., 1:]
        if shifted.shape[-1] != length:
            raise UsageError(f"{self._name} expects labels for {length} tokens, got {list(shifted.shape)}")
        self._has_loss = True
        # A Trainer's number counts the tokens of the whole step.
        if call.get("num_items_in_batch") is None:
            found["num_items_in_batch"] = (shifted != _IGNORED).sum()
        # Models ask for `labels`, and their loss for `shift_labels`.
        found["labels"] = found["shift_labels"] = shifted[..., mine].contiguous()
        return found

    def _positions(self, call: Mapping[str, Any], length: int, device: torch.device) -> torch.Tensor:
        """Returns the positions of all tokens: those of the call, or 0, 1, 2 and so on."""
        given = call.get("position_ids")
        if given is None:
            return torch.arange(length, device=device)[None]
        if given.ndim != 2 or given.shape[-1] != length:
            raise UsageError(
                f"{self._name} expects position_ids of (rows, {length}), as the tokens, got {list(given.shape)}"
            )
        # By such positions transformers finds several documents in one row. A rank would not find those of the others.
        if call.get("attention_mask") is None and bool((given.diff(dim=-1) != 1).any()):
            raise UsageError(
                f"{self._name} was called with position_ids that begin anew within a row, and sequence_parallel_size "
                f"is {self._parallel.size}: packed documents that do not see each other cannot be divided; leave "
                "position_ids out, or give one document a row"
            )
        found: torch.Tensor = given
        return found

    def _after(self, output: Any) -> Any:
        """Returns the output with the loss of the whole sequence."""
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


def _is_on(keep: Any) -> bool:
    """Returns True if `logits_to_keep` keeps other logits than all."""
    return isinstance(keep, torch.Tensor) or bool(keep)


def _facts(call: Mapping[str, Any]) -> list[int]:
    """Returns numbers by which ranks find out that they were called with different batches."""
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
    device = next((each.device for each in sums if each.device.type != "cpu"), sums[0].device)
    # The host waits for the device once, not for each sum.
    return [*shapes, *torch.stack([each.to(device, non_blocking=True) for each in sums]).tolist()]
