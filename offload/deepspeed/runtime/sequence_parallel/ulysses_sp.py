"""`deepspeed.runtime.sequence_parallel.ulysses_sp`: sequences shared among ranks, with models of transformers.

The engine registers the attention, as soon as `deepspeed.initialize` gets the model and the groups that
`register_with_transformers` returns. So nothing is registered here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from offload.deepspeed.runtime.sequence_parallel import parallel_state_sp
from offload.deepspeed.runtime.sequence_parallel.parallel_state_sp import SequenceGroups
from offload.errors import UsageError

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
        """Returns the groups for `deepspeed.initialize(mpu=...)`, or None for one rank a sequence. All ranks call this.

        Args:
            model_name_or_path: the model, whose attention the engine takes from the model that it gets.
            core_attn_implementation: "sdpa", "eager" or a flash attention; build the model with
                `attn_implementation=` of the same name.
            sequence_parallel_size: ranks that share a sequence.
            micro_batch_size: samples of a micro-batch; those of each call are taken.
            seq_length: tokens of a sequence, a multiple of `sequence_parallel_size`; those of each call are taken.
            seq_length_is_variable: without effect.
            disable_in_eval: must be False: an evaluation shares sequences too.

        Raises:
            UsageError: if an argument asks for what is not supported.
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
        return None if sequence_parallel_size == 1 else parallel_state_sp.form(sequence_parallel_size)

    @classmethod
    def unregister_from_transformers(cls, core_attn_implementation: str | None = None) -> None:
        """Destroys the groups. A model has its own attention again once its engine is destroyed.

        Args:
            core_attn_implementation: without effect.
        """
        parallel_state_sp.forget()


class UlyssesSPDataLoaderAdapter:
    """A loader of this rank's part of each batch of all ranks that share sequences, one batch after the other."""

    def __init__(self, dl: Iterable[Any], sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        """Wraps a loader.

        Args:
            dl: yields dicts of (rows, tokens) tensors, as many on each rank: other samples, or the same.
            sp_rank: the part of each sequence that this rank has.
            sp_group: the ranks that share sequences.
            sp_world_size: their number.
            device: where the parts go.
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
        for name, each in batch.items():
            if not isinstance(each, torch.Tensor):
                raise UsageError(
                    f"UlyssesSPDataLoaderAdapter expects batches of tensors, got a {type(each).__name__} as {name}; "
                    "leave it out of the batch"
                )
            forms[name] = [str(each.dtype).removeprefix("torch."), list(each.shape)]
            content += each.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        # Bytes and JSON in place of torch's exchange of objects, which would run what another rank has pickled.
        head = json.dumps(forms).encode()
        mine = torch.tensor([len(head), len(content)], device=self.device)
        sizes = [torch.empty_like(mine) for _ in range(self.sp_world_size)]
        dist.all_gather(sizes, mine, group=self.sp_group)
        longest = max(int(each.sum()) for each in sizes)
        sent = torch.frombuffer(bytearray((head + content).ljust(longest)), dtype=torch.uint8).to(self.device)
        rows = [torch.empty_like(sent) for _ in range(self.sp_world_size)]
        dist.all_gather(rows, sent, group=self.sp_group)
        return [_unpacked(bytes(row.cpu().numpy()), int(size[0])) for row, size in zip(rows, sizes, strict=True)]

    def _part_of(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns this rank's part of a whole batch, on the device."""
        rows, tokens = batch["input_ids"].shape
        if tokens % self.sp_world_size:
            raise UsageError(
                f"UlyssesSPDataLoaderAdapter expects rows of a multiple of {self.sp_world_size} tokens, got {tokens}; "
                "pad them, with labels of -100"
            )
        found = dict(batch)
        mask = found.pop("attention_mask", None)
        if mask is not None and not bool(mask.all()):
            raise UsageError(
                "UlyssesSPDataLoaderAdapter expects rows without an attention mask: pad at the end of rows, with "
                "labels of -100, where causal attention needs no mask; or leave the adapter out, and give the model "
                "whole batches with labels"
            )
        if "position_ids" not in found:
            found["position_ids"] = torch.arange(tokens, device="cpu").expand(rows, -1)
        if "labels" in found:
            found["shift_labels"] = F.pad(found.pop("labels"), (0, 1), value=_IGNORED)[..., 1:]
        size = tokens // self.sp_world_size
        mine = slice(self.sp_rank * size, (self.sp_rank + 1) * size)
        for name, each in found.items():
            cut = each[:, mine] if each.shape[:2] == (rows, tokens) else each
            found[name] = cut.contiguous().to(self.device)
        return found


def _unpacked(content: bytes, head: int) -> dict[str, torch.Tensor]:
    """Returns the batch of a rank from its bytes, of which the first `head` say names, dtypes and shapes."""
    found = {}
    for name, (dtype, shape) in json.loads(content[:head]).items():
        kind: torch.dtype = getattr(torch, dtype)
        nbytes = math.prod(shape) * kind.itemsize
        found[name] = torch.frombuffer(bytearray(content[head : head + nbytes]), dtype=kind).view(shape)
        head += nbytes
    return found
