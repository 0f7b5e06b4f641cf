"""Promises, one file a behaviour. `support` has the helper modules, `mutants` shows that the tests notice faults."""

from tests.mutants import importing

importing.install()  # before anything of the package is imported, here and in every process that a test spawns
