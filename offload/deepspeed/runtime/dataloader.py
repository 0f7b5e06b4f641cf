"""`deepspeed.runtime.dataloader`: loaders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from offload.engine.data import Loader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]

DeepSpeedDataLoader = Loader


class RepeatingLoader:
    """A loader without an end: it begins anew where it ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        """Keeps a loader.

        Args:
            loader: the loader.
        """
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            # A loader without items ends here too, instead of turning for ever.
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
