"""The engine of a model that is run and not trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch

from offload.engine.api.running_api import RunningApi
from offload.engine.core import EngineCore
from offload.engine.inference.pass_meter import PassMeter, PassSeconds
from offload.errors import UsageError

_Batch = TypeVar("_Batch")
_T = TypeVar("_T")


class InferenceEngine(RunningApi):
    """A model whose weights are paged, and that does not train. Created by `offload.inference`.

    All methods belong to the thread that runs the model; in a forked child every call raises. After an error on a
    background thread every call raises `EngineFailed`. Attributes that the engine does not define are looked up on the
    model. A `with` statement destroys the engine at its end.
    """

    def __init__(self, core: EngineCore, notices: Sequence[str], meter: PassMeter) -> None:
        """Creates the engine over a complete core.

        Args:
            core: components and state.
            notices: lines that were reported at the start.
            meter: adds up the forwards.
        """
        super().__init__(core)
        self.notices = tuple(notices)
        """Lines that were reported at the start: where the weights are, and why some are not read in place."""
        self._meter = meter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model without a graph, on inputs that are moved to the engine's device.

        Args:
            *args: positional inputs of the model. Tensors are found in lists, tuples, mappings and dataclasses too.
            **kwargs: keyword inputs of the model, treated alike.

        Returns:
            The output of the model.

        Raises:
            IoError: if a file of the model cannot be read, or has changed.
            EngineFailed: if an error has stopped the engine.
        """
        with torch.no_grad():
            return super().__call__(*args, **kwargs)

    forward = __call__

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generates by the model's own `generate`, on inputs that are moved to the engine's device.

        Each token is one pass over the weights, for all prompts of the batch. The cache of keys and values is the
        model's own, and is on the engine's device.

        Args:
            *args: positional arguments of the model's `generate`.
            **kwargs: its keywords, such as `max_new_tokens` and `do_sample`.

        Returns:
            What the model's `generate` returns, on the engine's device.

        Raises:
            UsageError: if the model has no `generate`.
            IoError: if a file of the model cannot be read, or has changed.
            EngineFailed: if an error has stopped the engine.
        """
        generate = getattr(self.module, "generate", None)
        if generate is None:
            raise UsageError(
                f"{type(self.module).__name__} has no generate: give a model of transformers that generates, or call "
                "the engine once for each token"
            )
        self._core.enter()
        with torch.no_grad(), self.autocast(), self._core.device_budget.advised():
            args, kwargs = self._core.inputs((args, kwargs))
            return generate(*args, **kwargs)

    def map(self, function: Callable[[_Batch], _T], batches: Iterable[_Batch]) -> list[_T]:
        """Returns what `function` returns for each batch, in order.

        All batches pass through one block of the model before the next block is fetched: the weights are read and
        copied once for all of them. The first call runs two batches one after the other, which shows whether the model
        allows that. A model that is no chain of blocks, or keeps values between them, gets its batches one by one.

        Args:
            function: receives a batch, and calls the engine or the model; it may run on another thread.
            batches: the batches, all of which are taken first.

        Raises:
            IoError: if a file of the model cannot be read, or has changed.
            EngineFailed: if an error has stopped the engine.
        """
        self._core.enter()
        # Bound by default arguments: a closure would see the last batch.
        works = [lambda batch=batch: function(batch) for batch in batches]
        order = self._core.components.layer_major
        # Of many batches run one by one each would read all weights; two show as much.
        first = 2 if order is not None and order.possible and not order.watched else 0
        found: list[_T] = []
        with torch.no_grad():
            for some in (works[:first], works[first:]):
                if some:
                    found += self._core.run_micro_batches(some, len(some), trains=False)
        return found

    def pass_seconds(self) -> PassSeconds:
        """Returns the seconds of all forwards so far, and what they waited for."""
        return self._meter.seconds

    def destroy(self) -> None:
        """Joins every thread, frees all memory and closes the files. Idempotent. The parameters stay placeholders."""
        # Swap files, if the config asked for them, are copies of the model's own: nothing to keep.
        self._core.shutdown.destroy(remove=True)

    def __enter__(self) -> InferenceEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()
