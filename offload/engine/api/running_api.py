"""The API of any engine, whether it trains or not: the call of the model, its attributes, and what the engine takes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from offload.distributed.process_group import Communication
from offload.engine.core import EngineCore
from offload.engine.memory.report import MemoryReport, memory_report
from offload.engine.memory.sleep import FreedBytes
from offload.swapper.prefetch import PrefetchStats


class IoBytes(NamedTuple):
    """Bytes that the engine's own reads and writes have moved."""

    read: int
    written: int


class RunningApi:
    """Methods that run the model, and getters that read the core."""

    def __init__(self, core: EngineCore) -> None:
        """Creates the API over a complete core.

        Args:
            core: components and training state.
        """
        self._core = core
        self.module = core.module
        """The model that `initialize` received."""
        self.device = core.device
        """The device on which the model computes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model on inputs that are moved to the engine's device and cast as `auto_cast` of the config says.

        Args:
            *args: positional inputs of the model. Tensors are found in lists, tuples, mappings and dataclasses too.
            **kwargs: keyword inputs of the model, treated alike.

        Returns:
            The output of the model.

        Raises:
            UsageError: if `auto_cast` is false and the model cannot compute with the dtype of an input.
            EngineFailed: if an error has stopped the engine.
        """
        self._core.enter()
        # The batch may be what the device has no room for, so it moves where an out-of-memory error is explained.
        with self.autocast(), self._core.device_budget.advised():
            args, kwargs = self._core.inputs((args, kwargs))
            try:
                return self._core.run_model(args, kwargs)
            except RuntimeError as error:
                # torch reports a dtype mismatch deep inside the model; the replacement names the input and the config
                # key.
                if (clearer := self._core.inputs.explain(error, (args, kwargs))) is None:
                    raise
                raise clearer from error

    forward = __call__

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context of a forward that `torch_autocast` of the config asks for.

        `engine(...)` enters it by itself. torch's autocast cache is off: its copies of weights would outlive the device
        buffers of their units.
        """
        if not self._core.state.settings.config.torch_autocast.enabled:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    _names_page = ""
    """What an error for a missing attribute says of the names that there are."""

    # A type checker that saw `__getattr__` would accept any attribute name.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Returns the model's attribute of a name that the engine does not define: `generate`, `named_modules`.

            Args:
                name: the attribute. Names that begin with an underscore are not looked up on the model.

            Raises:
                AttributeError: if the model does not define it either.
            """
            # `self.module` would call this method again while the constructor has not set it yet.
            module = self.__dict__.get("module")
            if module is None or name.startswith("_") or not hasattr(module, name):
                model = (
                    "" if module is None else (f", and neither does its model (engine.module), {type(module).__name__}")
                )
                raise AttributeError(
                    f"an engine has no attribute {name!r}{model}{self._names_page}", name=name, obj=self
                )
            return getattr(module, name)

    # -- what it takes -------------------------------------------------------------------------------

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters; a tied parameter counts once."""
        return sum(segment.value_numel for layout in self._core.components.layouts for segment in layout.segments)

    @property
    def host_memory(self) -> int:
        """Bytes of the host arena: this engine's host budget."""
        return self._core.components.arena.nbytes

    @property
    def device_memory(self) -> int:
        """Bytes of the device arena: the device budget."""
        return self._core.components.pager.arena.nbytes

    @property
    def asleep(self) -> bool:
        """True after `sleep`, until the engine has its memory again."""
        return self._core.sleeping.asleep

    def sleep(self, host: bool = False) -> FreedBytes:
        """Gives the engine's device memory back between steps, for others to use, such as an engine that generates.

        The next call that uses the engine takes the memory again, as `wake()` does. Bits do not change. States that
        the swap files contain are read from them then; all others are copied from the device to host memory meanwhile.
        Every rank calls it. A graph that was made before cannot be run backward afterwards.

        Args:
            host: True to give back the host memory too, unpinned, except for states that are nowhere else.

        Returns:
            The bytes that are given back, by this call and by those since the engine was awake.

        Raises:
            UsageError: if a forward or a backward is running, if gradients wait for a step, or if a view of weights or
                the graph of a forward is held. Nothing has changed then.
            BudgetError: if host memory has no room for states of the device that are in no file.
        """
        return self._core.sleep(host)

    def wake(self) -> None:
        """Takes the memory that `sleep` gave back. Does nothing if the engine has it.

        Raises:
            BudgetError: if others have not freed it; the engine sleeps on, and the call may be repeated.
            IoError: if the swap files cannot be read; the engine is stopped then.
        """
        self._core.enter()

    def io_bytes(self) -> IoBytes:
        """Returns the bytes that the engine has read and written so far in this process."""
        queue = self._core.components.queue
        return IoBytes(0, 0) if queue is None else IoBytes(queue.read_bytes, queue.written_bytes)

    def communication(self) -> Communication:
        """Returns what this rank has sent to the others so far: collectives and bytes, by kind.

        Collectives of your own are not counted, nor the heartbeat.
        """
        return self._core.components.sent

    def memory_report(self) -> MemoryReport:
        """Returns bytes of RAM and of the device by owner, in sums that add up. `print` it for a readable form.

        `["host"]`: rss = base + arena + device_arena + other_engines + other. `base` was resident before the engine;
        `other` came later, such as activations and libraries. `["device"]`: allocated = arena + other. Each of
        `["classes"]` lists its budget in the host arena, the bytes in use now, and the peak. `["activations"]` lists
        inputs of blocks that are computed again, by tier, if "activations" of the config moves any.
        """
        return memory_report(self._core.components, self._core.base_bytes)

    def use_counts(self) -> PrefetchStats:
        """Returns how often units were used so far, were found on the device, and were used in an unpredicted order."""
        return self._core.components.pager.counts()
