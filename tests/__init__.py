"""Promises, one file a behaviour. `oracle` has what they share, `mutants` shows that they notice faults."""

from tests.mutants import importing

importing.install()  # before anything of the package is imported, here and in every process that a test spawns
