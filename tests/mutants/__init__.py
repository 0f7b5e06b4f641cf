"""Faults put into the code on purpose, each of which a test must notice: `python -m tests.mutants`.

`mutant` says what one is, the tables have them by room, `importing` puts one in, `__main__` is the command.
"""

from __future__ import annotations

from tests.mutants import (
    above,
    activations,
    checkpoints,
    device,
    distributed,
    engine,
    frozen_blocks,
    gradients,
    moment_codes,
    optimizers,
    params,
    quantized,
    secondary,
    sequence,
    store,
    storm,
    swapper,
    tiles,
)

MUTANTS = (
    *swapper.MUTANTS,
    *store.MUTANTS,
    *engine.MUTANTS,
    *params.MUTANTS,
    *distributed.MUTANTS,
    *gradients.MUTANTS,
    *checkpoints.MUTANTS,
    *above.MUTANTS,
    *device.MUTANTS,
    *activations.MUTANTS,
    *tiles.MUTANTS,
    *optimizers.MUTANTS,
    *frozen_blocks.MUTANTS,
    *moment_codes.MUTANTS,
    *quantized.MUTANTS,
    *secondary.MUTANTS,
    *sequence.MUTANTS,
    *storm.MUTANTS,
)
