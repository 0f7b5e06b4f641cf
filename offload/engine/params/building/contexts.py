"""The contexts in which code may compute with parameters that have no values yet."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _State(threading.local):
    """State of the calling thread: the depth of its `building` contexts, and whether `building_a_model` is open."""

    depth = 0
    model = False
    """True while a model is under construction, so that values written by its own code are kept."""
    copies = False
    """True in `keeping_copies`."""


state = _State()


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Allows computation with deferred parameters, on the meta device and without effect, inside of the context.

    Constructors and initializers need this, because they compute with their parameters.
    """
    state.depth += 1
    try:
        yield
    finally:
        state.depth -= 1


@contextlib.contextmanager
def building_a_model() -> Iterator[None]:
    """Extends `building`: a parameter that code writes by hand, outside of an initializer, keeps the written values."""
    outer, state.model = state.model, True
    try:
        with building():
            yield
    finally:
        state.model = outer


@contextlib.contextmanager
def keeping_copies() -> Iterator[None]:
    """Extends `building_a_model` to a model that is built: values that anyone copies into a parameter are kept.

    While a model is built, a copy by the code of transformers is left out, since its initializers repeat it.
    """
    outer, state.copies = state.copies, True
    try:
        with building_a_model():
            yield
    finally:
        state.copies = outer


def is_building() -> bool:
    """Returns True if this thread is inside of `building`."""
    return state.depth > 0
