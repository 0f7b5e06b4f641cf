"""A linear layer as a grid of smaller ones; each can be a unit of its own.

Block (o, i) maps the i-th part of the input to the o-th part of the output, and the outputs of a row are added. So a
layer that is larger than the device budget needs one block on the device at a time, in the backward too.

[Note: bits] With one split of the input each output is the sum of the same products as in `nn.Linear`. With more, the
sums of the blocks are rounded to the dtype, and added one after another. So with u the rounding error of the dtype, s
the sum of an output's absolute products, and n splits of the input, the split adds 2 n u s at most. The same holds for
the gradient of the input and the splits of the output. The gradient of a weight is the same sum in its block. Kernels
of products may order their sums otherwise for another shape of a matrix, so bits may differ with one split too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from offload.errors import UsageError


class _Block(nn.Linear):
    """One linear layer of the grid, with the initialization of the whole layer."""

    def __init__(self, whole_inputs: int, inputs: int, outputs: int, bias: bool, device: object, dtype: object) -> None:
        self.whole_inputs = whole_inputs  # the constructor of nn.Linear initializes
        super().__init__(inputs, outputs, bias, device, dtype)

    def reset_parameters(self) -> None:
        """Draws weight and bias from the distribution of an `nn.Linear` with the inputs of the whole layer."""
        bound = self.whole_inputs**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)


class TiledLinear(nn.Module):
    """A linear layer whose weight is divided into `in_splits` times `out_splits` blocks, after DeepSpeed's.

    `linears[o][i]` is the layer from the i-th part of the input to the o-th part of the output; the bias belongs to the
    last i. Parts differ by one feature at most, and the first ones are the larger ones. DeepSpeed's names are the same.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        init_linear: nn.Linear | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Makes the blocks.

        Args:
            in_features: features of the input.
            out_features: features of the output.
            bias: True to add a bias.
            in_splits: parts of the input.
            out_splits: parts of the output.
            init_linear: a layer of the same features whose weight and bias are copied; None to draw them as
                `nn.Linear` does.
            device: device of the weights.
            dtype: dtype of the weights.

        Raises:
            UsageError: if there are more splits than features or none, or if `init_linear` has another shape.
        """
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self._inputs, self._outputs = _parts(in_features, in_splits, "in"), _parts(out_features, out_splits, "out")
        last = in_splits - 1
        self.linears = nn.ModuleList(
            nn.ModuleList(
                _Block(in_features, inputs, outputs, bias and i == last, device, dtype)
                for i, inputs in enumerate(self._inputs)
            )
            for outputs in self._outputs
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the (..., out_features) output of a (..., in_features) input."""
        parts = hidden.split(self._inputs, -1)
        outputs = []
        for o in range(self.out_splits):
            total = self._block(o, 0)(parts[0])
            for i in range(1, self.in_splits):
                total = total + self._block(o, i)(parts[i])
            outputs.append(total)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copies weight and bias of an `nn.Linear` of the same features.

        Args:
            other: the layer.

        Raises:
            UsageError: if weight or bias has another shape, or only one of the layers has a bias.
        """
        expected = (self.out_features, self.in_features)
        if tuple(other.weight.shape) != expected or (other.bias is not None) != self.use_bias:
            raise UsageError(
                f"copy_params_from expects a linear layer with a weight of {list(expected)} and "
                f"{'a' if self.use_bias else 'no'} bias, got a weight of {list(other.weight.shape)} and "
                f"{'no' if other.bias is None else 'a'} bias"
            )
        rows = other.weight.split(self._outputs, 0)
        for o, rows_of_output in enumerate(rows):
            for i, weight in enumerate(rows_of_output.split(self._inputs, 1)):
                self._block(o, i).weight.copy_(weight)
        if other.bias is not None:
            for o, bias in enumerate(other.bias.split(self._outputs)):
                self._block(o, self.in_splits - 1).bias.copy_(bias)

    def _block(self, o: int, i: int) -> nn.Linear:
        row = self.linears[o]
        assert isinstance(row, nn.ModuleList)
        block = row[i]
        assert isinstance(block, nn.Linear)
        return block

    def extra_repr(self) -> str:
        """Returns the numbers for `repr`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"in_splits={self.in_splits}, out_splits={self.out_splits}"
        )


def _parts(features: int, splits: int, side: str) -> Sequence[int]:
    if not 1 <= splits <= features:
        raise UsageError(f"{side}_splits of TiledLinear is from 1 to {side}_features, {features}; got {splits}")
    return [features // splits + (part < features % splits) for part in range(splits)]
