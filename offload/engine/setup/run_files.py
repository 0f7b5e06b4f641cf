"""The files of a run: swap files, their queue, and the count of bytes written."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass

from offload.aio.shared_queue import SharedQueue
from offload.engine.setup.plan import Plan
from offload.engine.training.snapshot import scheduler_state
from offload.swapper.store import Store, Written
from offload.swapper.store.format import was_committed
from offload.swapper.store.model_files import ModelFiles


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The files of a run, as far as it has any."""

    queue: SharedQueue | None
    """Queue of all requests; None without files."""
    store: Store | None
    """The swap files; None without states on DISK."""
    model_files: ModelFiles | None
    """The model's own files; None if no weight is read there."""
    make: Callable[[], None]
    """Makes the swap files of a new run, before anything is written to them; does nothing for a resumed run."""
    written: Written
    """Counts of the bytes that go to each drive."""


class NewStore:
    """The swap files of a start, which replace those of an earlier run as late as possible.

    An error before `make` leaves the earlier run as it was, on every rank.
    """

    def __init__(self, plan: Plan, store: Store | None, resumed: bool, lr_scheduler: object) -> None:
        """Changes nothing.

        Args:
            plan: All decisions.
            store: The swap files, locked; None without any.
            resumed: True if they are open at a commit.
            lr_scheduler: The schedule, whose state the first commit contains; None without one.
        """
        self._plan, self._store, self._resumed, self._lr_scheduler = plan, store, resumed, lr_scheduler
        self._made = False

    def make(self) -> None:
        """Makes the files of a new run, once every rank has come so far. Collective.

        Raises:
            ConfigError: If no commit can contain the state of the schedule.
            StoreError: If there is no room.
        """
        plan, store = self._plan, self._store
        if store is None or self._resumed:
            return
        if plan.commit_every:
            scheduler_state(self._lr_scheduler)
        run_id = uuid.uuid4().hex
        if plan.everyone is not None:
            # All take the first rank's: by it folders of ranks are known to belong together.
            run_id = plan.everyone.share(run_id, "check its start")[0]
        self._made = True
        store.create(over=plan.resume or plan.replace, run_id=run_id)
        if plan.everyone is not None:
            # A rank commits only after this exchange: no commit exists beside files of an earlier run.
            plan.everyone.share(None, "create its store")

    def undo(self) -> None:
        """Closes the files after an error. An earlier run keeps its files, and a new one leaves none."""
        if self._store is None:
            return
        if not self._plan.resume and (self._made or not was_committed(self._store.folders[0])):
            self._store.remove()
        self._store.close()
