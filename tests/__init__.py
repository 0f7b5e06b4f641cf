"""Promises, one file a behaviour, in rooms by what they are about: docs/testing.md lists the rooms.

`support` has the helper modules, `mutants` shows that the tests notice faults.
"""

from pathlib import Path

from tests.mutants import importing

ROOT = Path(__file__).parents[1]
"""The folder of the repository."""

importing.install()  # before anything of the package is imported, here and in every process that a test spawns
