"""Faults put into the code on purpose, each of which a test must notice: `python -m tests.mutants`.

They are faults of the store, the pager, gradients, updates and the device, where data is at stake. `mutant` says what
one is, the tables have them by room, `importing` puts one in, `__main__` is the command.
"""

from __future__ import annotations

from tests.mutants import device, gradients, store, storm, swapper, updates

MUTANTS = (*swapper.MUTANTS, *store.MUTANTS, *gradients.MUTANTS, *updates.MUTANTS, *device.MUTANTS, *storm.MUTANTS)
