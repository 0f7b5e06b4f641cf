"""The weights of a whole model as a `Source`, read from the parts of a checkpoint or of an engine's processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from offload.aio import aligned_empty
from offload.aio.protocols import Pending
from offload.checkpoint.load import StateReader
from offload.checkpoint.resharding import Run, Source
from offload.engine.model_io.grid.layout import PartLayout, WholeParameter, whole_model
from offload.engine.model_io.grid.strips import strips
from offload.errors import StoreError
from offload.layout.fingerprint import describe
from offload.states import State


class Part(NamedTuple):
    """One part of a model, open for reads."""

    layout: PartLayout
    states: StateReader
    buffers: Mapping[str, torch.Tensor]
    frozen: bool


class WholeSource:
    """The parts of a model as one; implements `offload.engine.model_io.weight_source.Source`."""

    def __init__(self, parts: Sequence[Part], step: int, close: Callable[[], None] = lambda: None) -> None:
        """Puts the parts together.

        Args:
            parts: All parts.
            step: Number of the step.
            close: Closes their files.

        Raises:
            StoreError: If the parts cannot be put together.
        """
        self._parts, self._close = parts, close
        whole = whole_model([part.layout for part in parts], [list(part.buffers) for part in parts])
        modes = {part.layout.mode.name: part.layout.mode for part in parts}
        if len(modes) > 1:
            raise StoreError(f"the parts are in different modes, {', '.join(modes)}: give parts of one run")
        (self._mode,) = modes.values()
        self._parameters = whole.parameters
        # One rank and no padding between states of ranks: `read` finds bytes by their elements alone.
        self.description: Mapping[str, Any] = describe(whole.layouts, self._mode, 1)
        self.about, self.step = whole.about, step
        self.client_state: Mapping[str, Any] = {}
        """Each part has its own, of which none is that of the whole."""
        self.frozen = all(part.frozen for part in parts)
        self.buffers: Mapping[str, torch.Tensor] = {
            whole.names[part.layout.position, name]: value
            for part in parts
            if part.layout.coordinate == 0
            for name, value in part.buffers.items()
        }

    def read(self, rank: int, unit: int, state: State, start: int, buffer: memoryview) -> _Joined:
        """Begins to read bytes of a whole unit; see `Source.read`. Its only rank is 0."""
        assert rank == 0
        size = self._mode.states[state].itemsize
        joined, first, last = _Joined(len(buffer)), start // size, (start + len(buffer)) // size
        # Padding between parameters is not read: nobody looks at those bytes of the buffer.
        for parameter in self._parameters[unit]:
            segment = parameter.segment
            begin, end = max(first, segment.start), min(last, segment.stop)
            if begin < end:
                out = buffer[(begin - first) * size : (end - first) * size]
                self._begin(parameter, state, range(begin - segment.start, end - segment.start), out, joined)
        return joined

    def _begin(
        self, parameter: WholeParameter, state: State, elements: range, out: memoryview, joined: _Joined
    ) -> None:
        """Begins to read elements of a parameter from its pieces.

        Args:
            parameter: The parameter.
            state: The state.
            elements: Its elements.
            out: Receives their bytes.
            joined: Receives the reads.
        """
        size, widths = self._mode.states[state].itemsize, parameter.widths
        for strip in strips(widths, elements.start, elements.stop):
            piece = parameter.pieces[strip.piece]
            nbytes = (strip.stop - strip.start) * size
            if strip.rows == 1:
                memory = out[strip.at * size : strip.at * size + nbytes]
            else:
                # One long read in place of one for each row, whose parts are put where they belong afterwards.
                memory = aligned_empty(nbytes)
                row = sum(widths) * size
                joined.copies.append(_Copy(memory, out[strip.at * size :], strip.rows, row))
            source = Source(piece.unit, piece.segment.start + strip.start, piece.segment.trainable)
            run = Run(0, strip.stop - strip.start, source)
            joined.reads += self._parts[piece.part].states.read(run, state, memory, 0)

    def close(self) -> None:
        """Closes the files; idempotent."""
        self._close()


class _Copy(NamedTuple):
    """Rows that were read one behind the other, and where they go, `step` bytes apart."""

    memory: memoryview
    out: memoryview
    rows: int
    step: int

    def run(self) -> None:
        """Copies them."""
        width = len(self.memory) // self.rows
        whole = torch.frombuffer(self.out, dtype=torch.uint8)
        rows = torch.frombuffer(self.memory, dtype=torch.uint8).view(self.rows, width)
        whole.as_strided((self.rows, width), (self.step, 1)).copy_(rows)


class _Joined:
    """Reads of several parts, as one."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self.reads: list[Pending] = []
        self.copies: list[_Copy] = []

    def done(self) -> bool:
        """Returns True if all reads have ended."""
        return all(read.done() for read in self.reads)

    def wait(self) -> int:
        """Waits for all reads, in their order, and returns the number of bytes."""
        # In the order of their begin: with an engine each wait is a collective.
        for read in self.reads:
            read.wait()
        for copy in self.copies:
            copy.run()
        return self._nbytes
