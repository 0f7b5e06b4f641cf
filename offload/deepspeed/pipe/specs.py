"""Layers that are described, and built only by the processes that have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from offload.errors import ConfigError


class LayerSpec:
    """A layer of a `PipelineModule`: its class and the arguments of its constructor."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        """Stores the arguments.

        Args:
            typename: the class of the layer.
            *module_args: positional arguments of its constructor.
            **module_kwargs: keywords of its constructor.

        Raises:
            ConfigError: if `typename` is no class of a module.
        """
        if not isinstance(typename, type) or not issubclass(typename, nn.Module):
            raise ConfigError(f"{type(self).__name__} expects a class of torch.nn.Module, got {typename!r}")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Returns a new layer.

        Args:
            log: without effect, as there is no log of it here.
        """
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that is one with all others of its key: several uses of the same weights, in any stages."""

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        """Stores the arguments.

        Args:
            key: the name that the uses of the layer share.
            typename: the class of the layer.
            *module_args: positional arguments of its constructor.
            forward_fn: computes this use of the layer, given the layer and its input; None to call the layer.
            tied_weight_attr: names of the layer's parameters whose gradients are added up over the stages.
            **module_kwargs: keywords of its constructor.
        """
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)
