"""Optimizers against each other: `python -m bench.optimizers bytes FOLDER`, and `... learning`."""
