"""Helper modules of the tests: reference loops, models, processes, fault injection, bounds."""
