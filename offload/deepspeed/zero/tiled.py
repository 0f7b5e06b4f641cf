"""`zero.TiledLinear` with DeepSpeed's arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offload.activations.linear import TiledLinear as _TiledLinear
from offload.errors import UsageError


class TiledLinear(_TiledLinear):
    """A linear layer as a grid of smaller ones, each of which is paged by itself. See `offload.TiledLinear`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: type[nn.Linear] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        """Makes the blocks.

        Args:
            in_features: features of the input.
            out_features: features of the output.
            bias: True to add a bias.
            in_splits: parts of the input.
            out_splits: parts of the output.
            input_is_already_split: must be False.
            combine_out_splits: must be True.
            linear_cls: must be `torch.nn.Linear`.
            init_linear: a layer whose weight and bias are copied.
            **kwargs: `device` and `dtype` of the weights.

        Raises:
            UsageError: if an argument asks for something that is not supported.
        """
        if input_is_already_split or not combine_out_splits or linear_cls is not nn.Linear:
            raise UsageError(
                "TiledLinear takes the whole input, returns the whole output, and is made of torch.nn.Linear: leave "
                "input_is_already_split, combine_out_splits and linear_cls out"
            )
        super().__init__(in_features, out_features, bias, in_splits, out_splits, init_linear, **kwargs)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copies weight and bias of a layer of the same features.

        Args:
            other: the layer.
        """
        # The constructor knows how a layer is cut, so it makes the blocks that are copied.
        like = _TiledLinear(
            self.in_features, self.out_features, self.use_bias, self.in_splits, self.out_splits, init_linear=other
        )
        self.load_state_dict(like.state_dict())


class TiledLinearReturnBias(TiledLinear):
    """A `TiledLinear` of Megatron, which returns its bias beside the output; not supported."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises `UsageError`.

        Args:
            *args: ignored.
            **kwargs: ignored.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "TiledLinearReturnBias is for layers of Megatron, which add the bias later: use deepspeed.zero.TiledLinear"
        )
