"""Promises, one file a behaviour. `oracle` has what they share, `mutation` shows that they notice faults."""

from tests import mutation

mutation.install()  # before anything of the package is imported, here and in every process that a test spawns
