"""`deepspeed.runtime.sequence_parallel`: sequences shared among ranks, with models of transformers.

DeepSpeed calls the groups of sequence parallelism an `mpu`: `register_with_transformers` returns them, and
`deepspeed.initialize` takes them. An engine creates its own groups of the same ranks, so that its messages and a
script's messages stay separate. The engine also registers the attention of its model, so this module registers nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from offload.activations.tiles import in_chunks
from offload.deepspeed.comm import get_rank, get_world_group, get_world_size, init_distributed
from offload.errors import UsageError


class SequenceGroups:
    """Groups of `sequence_parallel_size` consecutive ranks."""

    def __init__(self, sequence_parallel_size: int) -> None:
        """Creates the groups. All ranks call this; a size that does not divide their number is a `UsageError`."""
        init_distributed()
        size, ranks = sequence_parallel_size, get_world_size()
        if isinstance(size, bool) or not isinstance(size, int) or size < 1 or ranks % size:
            raise UsageError(
                f"sequence_parallel_size expects a divisor of the number of ranks, {ranks}, got {size!r}; start a "
                "multiple of it, or set it to 1"
            )
        groups = [list(range(first, first + size)) for first in range(0, ranks, size)]
        self._size, self._group = size, dist.new_subgroups_by_enumeration(groups)[0]

    def get_sequence_parallel_group(self) -> Any:
        return self._group

    def get_sequence_parallel_world_size(self) -> int:
        return self._size

    def get_sequence_parallel_rank(self) -> int:
        """Returns the number of this rank's part of each sequence."""
        return get_rank() % self._size

    def get_sequence_data_parallel_group(self) -> Any:
        """Returns the group over which ZeRO divides states: the group of all ranks."""
        return get_world_group()

    def get_sequence_data_parallel_world_size(self) -> int:
        """Returns the number of ranks over which ZeRO divides states."""
        return get_world_size()

    def get_sequence_data_parallel_rank(self) -> int:
        """Returns the number of this rank among those over which ZeRO divides states."""
        return get_rank()

    def get_data_parallel_world_size(self) -> int:
        """Returns the number of groups with samples of their own."""
        return get_world_size() // self._size

    def get_data_parallel_rank(self) -> int:
        """Returns the number of this rank's group."""
        return get_rank() // self._size


_formed: list[SequenceGroups] = []
"""The groups of this process: none, or one."""


def _form(sequence_parallel_size: int) -> SequenceGroups:
    """Returns the groups of this size; a script creates them only once. Collective."""
    if _formed and _formed[0].get_sequence_parallel_world_size() != sequence_parallel_size:
        raise UsageError(
            f"sequence_parallel_size is {sequence_parallel_size}, and this process has groups of "
            f"{_formed[0].get_sequence_parallel_world_size()} ranks for sequences already; call "
            "register_with_transformers with one size"
        )
    if not _formed:
        _formed.append(SequenceGroups(sequence_parallel_size))
    return _formed[0]


# -- deepspeed.utils.groups: ZeRO divides over all ranks, some of which may share each sequence -----------

get_data_parallel_group = _get_data_parallel_group = get_world_group
get_data_parallel_rank = _get_data_parallel_rank = get_rank
get_data_parallel_world_size = _get_data_parallel_world_size = get_world_size


def get_model_parallel_rank() -> int:
    """Returns 0: layers are not divided over ranks."""
    return 0


def get_model_parallel_world_size() -> int:
    """Returns 1: layers are not divided over ranks."""
    return 1


get_tensor_model_parallel_rank = get_model_parallel_rank
get_tensor_model_parallel_world_size = get_model_parallel_world_size


def _get_sequence_parallel_group() -> Any:
    """Returns the ranks that share each sequence with this one; None if none does."""
    return _formed[0].get_sequence_parallel_group() if _formed else None


def _get_sequence_parallel_rank() -> int:
    """Returns the part of each sequence that this rank has."""
    return _formed[0].get_sequence_parallel_rank() if _formed else 0


def _get_sequence_parallel_world_size() -> int:
    """Returns the number of ranks that share each sequence."""
    return _formed[0].get_sequence_parallel_world_size() if _formed else 1


# -- ulysses_sp ----------------------------------------------------------------------------------------

_IGNORED = -100


class UlyssesSPAttentionHF:
    """Sequence parallelism for models of transformers; only its class methods are for scripts."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int = 1,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
    ) -> SequenceGroups | None:
        """Returns the groups for `deepspeed.initialize(mpu=...)`; None if each rank has its own sequences. Collective.

        Args:
            model_name_or_path: the model; ignored, since the engine takes the attention from the model it receives.
            core_attn_implementation: "sdpa", "eager" or a flash attention; build the model with
                `attn_implementation=` of the same name.
            sequence_parallel_size: ranks that share a sequence.
            micro_batch_size: samples of a micro-batch; each call's own number of samples is used.
            seq_length: tokens of a sequence, a multiple of `sequence_parallel_size`; each call's own length is used.
            seq_length_is_variable: without effect.
            disable_in_eval: must be False: an evaluation shares sequences too.

        Raises:
            UsageError: if an argument has an unsupported value.
        """
        known = core_attn_implementation in ("sdpa", "eager") or core_attn_implementation.startswith("flash_attention")
        if not known:
            raise UsageError(
                'register_with_transformers expects core_attn_implementation "sdpa", "eager" or a flash attention, '
                f"got {core_attn_implementation!r}; build the model with one of these as attn_implementation"
            )
        if disable_in_eval:
            raise UsageError(
                "register_with_transformers(disable_in_eval=True) is not supported: an evaluation shares sequences "
                "too; leave it out, and call the model on all ranks of a group"
            )
        if seq_length is not None and seq_length % sequence_parallel_size:
            raise UsageError(
                f"seq_length expects a multiple of sequence_parallel_size, {sequence_parallel_size}, got {seq_length}; "
                "pad sequences to such a length"
            )
        return None if sequence_parallel_size == 1 else _form(sequence_parallel_size)

    @classmethod
    def unregister_from_transformers(cls, core_attn_implementation: str | None = None) -> None:
        """Destroys the groups. A model has its own attention again once its engine is destroyed."""
        while _formed:
            dist.destroy_process_group(_formed.pop().get_sequence_parallel_group())


class UlyssesSPDataLoaderAdapter:
    """A loader that yields this rank's part of every batch, of all ranks that share sequences with this one."""

    def __init__(self, dl: Iterable[Any], sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        """Wraps a loader of dicts of (rows, tokens) tensors, as many on each rank; the samples may differ.

        `sp_rank` is the number of this rank's part of each sequence, among the `sp_world_size` ranks of `sp_group`.
        Parts go to `device`.
        """
        self.dl, self.sp_rank, self.sp_group, self.sp_world_size = dl, sp_rank, sp_group, sp_world_size
        self.device = device

    def __len__(self) -> int:
        """Returns the number of batches of all ranks that share sequences."""
        return len(self.dl) * self.sp_world_size  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yields this rank's part of the batch of each rank, with `shift_labels` in place of `labels`. Collective."""
        for batch in self.dl:
            yield from map(self._part_of, self._of_all(batch))

    def _of_all(self, batch: Mapping[str, Any]) -> list[dict[str, torch.Tensor]]:
        """Returns the batches of all ranks that share sequences, on the CPU. Collective."""
        forms: dict[str, Any] = {}
        content = bytearray()
        for name, tensor in batch.items():
            if not isinstance(tensor, torch.Tensor):
                raise UsageError(
                    f"UlyssesSPDataLoaderAdapter expects batches of tensors, got a {type(tensor).__name__} as {name}; "
                    "leave it out of the batch"
                )
            forms[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            content += tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        # Exchanges bytes and JSON, since torch's exchange of objects would execute another rank's pickles.
        head = json.dumps(forms).encode()
        own_size = torch.tensor([len(head), len(content)], device=self.device)
        sizes = [torch.empty_like(own_size) for _ in range(self.sp_world_size)]
        dist.all_gather(sizes, own_size, group=self.sp_group)
        longest = max(int(size.sum()) for size in sizes)
        sent = torch.frombuffer(bytearray((head + content).ljust(longest)), dtype=torch.uint8).to(self.device)
        rows = [torch.empty_like(sent) for _ in range(self.sp_world_size)]
        dist.all_gather(rows, sent, group=self.sp_group)
        return [_unpacked(bytes(row.cpu().numpy()), int(size[0])) for row, size in zip(rows, sizes, strict=True)]

    def _part_of(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rows, tokens = batch["input_ids"].shape
        if tokens % self.sp_world_size:
            raise UsageError(
                f"UlyssesSPDataLoaderAdapter expects rows of a multiple of {self.sp_world_size} tokens, got {tokens}; "
                "pad them, with labels of -100"
            )
        part = dict(batch)
        mask = part.pop("attention_mask", None)
        if mask is not None and not bool(mask.all()):
            raise UsageError(
                "UlyssesSPDataLoaderAdapter expects rows without an attention mask: pad at the end of rows, with "
                "labels of -100, where causal attention needs no mask; or leave the adapter out, and give the model "
                "whole batches with labels"
            )
        if "position_ids" not in part:
            part["position_ids"] = torch.arange(tokens, device="cpu").expand(rows, -1)
        if "labels" in part:
            part["shift_labels"] = F.pad(part.pop("labels"), (0, 1), value=_IGNORED)[..., 1:]
        size = tokens // self.sp_world_size
        own = slice(self.sp_rank * size, (self.sp_rank + 1) * size)
        for name, tensor in part.items():
            cut = tensor[:, own] if tensor.shape[:2] == (rows, tokens) else tensor
            part[name] = cut.contiguous().to(self.device)
        return part


def _unpacked(content: bytes, head: int) -> dict[str, torch.Tensor]:
    """Returns the batch of a rank from its bytes; the first `head` contain names, dtypes and shapes."""
    batch = {}
    for name, (dtype, shape) in json.loads(content[:head]).items():
        kind: torch.dtype = getattr(torch, dtype)
        nbytes = math.prod(shape) * kind.itemsize
        batch[name] = torch.frombuffer(bytearray(content[head : head + nbytes]), dtype=kind).view(shape)
        head += nbytes
    return batch


# -- tiled compute -------------------------------------------------------------------------------------
#
# Each piece is computed again in the backward. `compute_params` says in DeepSpeed when ZeRO may reduce a gradient; here
# autograd gives the sum over all pieces, so the argument has no effect.


class TiledMLP:
    """The MLP of `offload.tiled`, under the name and with the arguments of ALST."""

    @staticmethod
    def apply(
        fn: Callable[[nn.Module, torch.Tensor], torch.Tensor],
        self: nn.Module,
        x: torch.Tensor,
        shards: int,
        compute_params: Sequence[nn.Parameter] | None = None,
    ) -> torch.Tensor:
        """Returns `fn(self, x)`, computed in pieces of the sequence.

        Args:
            fn: the forward of the MLP. It uses no parameters but those of `self`.
            self: the MLP.
            x: (..., tokens, features) input.
            shards: number of pieces at most.
            compute_params: without effect.

        Raises:
            UsageError: if `fn` uses other tensors that train, or a parameter has a hook of `register_hook`.
        """
        sizes = [piece.shape[-2] for piece in x.chunk(shards, dim=-2)]
        starts = [0, *accumulate(sizes)]
        return in_chunks(self, partial(fn, self), x, x.ndim - 2, list(zip(starts, sizes, strict=False)))


def sequence_tiled_compute(
    fn: Callable[..., torch.Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, torch.Tensor],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Sequence[nn.Parameter] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> torch.Tensor:
    """Returns the outputs of `fn` for pieces of a sequence, joined.

    Args:
        fn: computes a piece from keywords.
        seqlen: tokens of the sequence.
        shards: number of pieces.
        kwargs_to_shard: (rows, tokens, ...) tensors, divided along the tokens.
        kwargs_to_pass: keywords that each piece receives as they are.
        grad_requiring_tensor_key: without effect: each tensor that requires a gradient gets one.
        compute_params: without effect.
        output_unshard_dimension: dimension along which outputs are joined; 0 stacks losses.
        output_reduction: "mean" or "sum" of the joined outputs; None for none.

    Raises:
        UsageError: if `output_reduction` is another one.
    """
    _check_reduction(output_reduction, None)
    step = math.ceil(seqlen / shards)
    outputs = []
    for start in range(0, seqlen, step):
        pieces = {name: tensor[:, start : start + step] for name, tensor in kwargs_to_shard.items()}
        outputs.append(checkpoint(partial(fn, **pieces, **kwargs_to_pass), use_reentrant=False))
    joined = torch.stack(outputs) if output_unshard_dimension == 0 else torch.cat(outputs, output_unshard_dimension)
    return joined if output_reduction is None else getattr(joined, output_reduction)()


class SequenceTiledCompute:
    """`sequence_tiled_compute`, with the arguments of the autograd function of ALST."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Sequence[nn.Parameter] | None,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> torch.Tensor:
        """Calls `sequence_tiled_compute`; `args` are the values of both lists of keys, in their order."""
        divided = dict(zip(keys_to_shard, args, strict=False))
        passed = dict(zip(keys_to_pass, args[len(keys_to_shard) :], strict=True))
        return sequence_tiled_compute(
            fn,
            seqlen,
            shards,
            divided,
            passed,
            grad_requiring_tensor_key,
            compute_params,
            output_unshard_dimension,
            output_reduction,
        )


class TiledFusedLogitsLoss:
    """A loss whose logits exist for one piece at a time, with the arguments of ALST.

    `offload.losses.causal_lm` needs no second computation, and brings paged weights of the head once.
    """

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        self: nn.Module,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor | None,
        shards: int,
        compute_params: Sequence[nn.Parameter] | None = None,
        output_reduction: str = "mean",
    ) -> torch.Tensor:
        """Returns the reduced losses `fn(self, x, y)` of pieces of the tokens, or `fn(self, x, y, mask)` with a mask.

        Args:
            fn: computes the loss of a piece, a scalar.
            self: the first argument of `fn`.
            x: (rows, tokens, ...) hidden states; a piece is (tokens of the piece, ...).
            y: (rows, tokens) labels.
            mask: (rows, tokens), or None.
            shards: number of pieces at most, of rows * tokens.
            compute_params: without effect.
            output_reduction: "mean" or "sum" over the pieces.

        Raises:
            UsageError: if `output_reduction` is another one, or the shapes differ in rows or tokens.
        """
        _check_reduction(output_reduction, "mean")
        tensors = [x, y] if mask is None else [x, y, mask]
        if any(tensor.ndim < 2 or tensor.shape[:2] != x.shape[:2] for tensor in tensors):
            raise UsageError(
                "TiledFusedLogitsLoss expects x, y and mask of the same rows and tokens, got "
                f"{', '.join(str(list(tensor.shape)) for tensor in tensors)}; give labels that are as long as x"
            )
        flat = [tensor.flatten(0, 1).chunk(shards) for tensor in tensors]
        losses = torch.stack([checkpoint(fn, self, *piece, use_reentrant=False) for piece in zip(*flat, strict=True)])
        reduced: torch.Tensor = getattr(losses, output_reduction)()
        return reduced


def _check_reduction(output_reduction: str | None, default: str | None) -> None:
    if output_reduction not in ("mean", "sum", default):
        raise UsageError(
            f'output_reduction expects "mean" or "sum"{"" if default else ", or None"}, got {output_reduction!r}; give '
            "one of them"
        )
