"""A counter of operations and bytes while a model runs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from offload.planner.model_shape.shape import Use
from offload.torch_internals import RESHAPED, TorchDispatchMode, tree_leaves

_ATTENTION = "_scaled_dot_product_"
"""Start of the names of attention's operations that keep no matrix of tokens times tokens."""


class Counter(TorchDispatchMode):
    """A dispatch mode that attributes operations to the unit whose use started last."""

    def __init__(self, weights: set[int], sequence: int) -> None:
        """Starts without a use.

        Args:
            weights: the storages of the model's parameters.
            sequence: tokens of the sequence that the model runs on.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights, self._known = weights, set(weights)
        self._rows: list[dict[str, Any]] = []
        self._storages: list[Any] = []
        """References that keep storages alive: a freed storage's address could be used again and be taken for known."""
        self.largest = 0
        self.in_mlp = False
        """True while the MLP of a repeated block runs."""
        self._mask = (1, 1, sequence, sequence)

    def begin(self, unit: int, boundary: int, lookup: bool) -> None:
        """Starts a use of `unit`, unless the last use is of the same unit; `boundary` is the bytes of its input."""
        if not self._rows or self._rows[-1]["unit"] != unit:
            counts = dict.fromkeys(("flops", "nbytes", "attention", "mlp_flops"), 0.0)
            sizes = dict.fromkeys(("saved", "largest", "mlp_saved", "mlp_largest"), 0)
            self._rows.append({"unit": unit, "boundary": boundary, "lookup": lookup, **counts, **sizes})

    def uses(self) -> list[Use]:
        """Returns the uses in the order in which they started."""
        return [Use(**row) for row in self._rows]

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts a tensor that autograd saves, once per storage and without weights, and returns the tensor."""
        storage = tensor.untyped_storage()
        if self._rows and storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._storages.append(storage)
            # transformers makes a causal mask for fake tensors only; on real ones attention takes the order for given.
            if tuple(tensor.shape) != self._mask:
                self._rows[-1]["saved"] += storage.nbytes()
                self._rows[-1]["mlp_saved"] += storage.nbytes() if self.in_mlp else 0
        return tensor

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if not self._rows:
            return out
        made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        # An operation counts by its FLOPs if torch has a formula, else by its traffic; views move nothing.
        formula = flop_registry.get(function._overloadpacket)
        if formula is None and _ATTENTION in function.name():
            formula = _attention_flops  # torch has none for the operation on a CPU
        if formula is not None:
            self._count_products(formula(*args, **kwargs, out_val=out), _ATTENTION in function.name())
        elif made and not function.is_view and function is not RESHAPED:  # a question, about a device say, makes none
            given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            # Reads of weights are left out: the rate `Hardware.weights` accounts for them.
            taken = [each for each in given if each.untyped_storage()._cdata not in self._weights]
            moved = [each for each in (*taken, *made) if tuple(each.shape) != self._mask]  # see `save`
            self._rows[-1]["nbytes"] += sum(each.nbytes for each in moved)
        if not function.is_view:
            largest = max((each.nbytes for each in made if tuple(each.shape) != self._mask), default=0)
            self.largest = max(self.largest, largest)
            name = "mlp_largest" if self.in_mlp else "largest"
            self._rows[-1][name] = max(self._rows[-1][name], largest)
        return out

    def _count_products(self, flops: float, attention: bool) -> None:
        """Adds the operations of a matrix product or of attention to the current use."""
        row = self._rows[-1]
        row["flops"] += flops
        row["attention"] += flops if attention else 0.0
        row["mlp_flops"] += flops if self.in_mlp else 0.0


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> float:
    """Returns the operations of both products of attention, without regard to a causal mask, as torch counts them."""
    *batch, tokens, features = query.shape
    return 2.0 * math.prod(batch) * tokens * key.shape[-2] * (features + value.shape[-1])
