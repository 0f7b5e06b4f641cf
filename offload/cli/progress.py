"""Progress of a measurement: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def measuring() -> Iterator[Callable[[str, float], None]]:
    """Yields a function of a description and the fraction done, from 0 to 1, which shows both.

    The progress goes to stderr, so that stdout contains the result only.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        yield lambda words, _: console.print(f"measuring {words}")
        return
    columns = (BarColumn(30), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda words, done: progress.update(task, completed=done, description=words)
