"""Access orders of tests."""

from __future__ import annotations

from collections.abc import Sequence

from offload.swapper.policy import AccessOrder, PassKind


def access_order(uses: Sequence[int], kind: PassKind = PassKind.TRAIN) -> AccessOrder:
    """Returns an access order that predicts `uses` for runs of `kind`."""
    trace = AccessOrder()
    record(trace, uses, kind)
    return trace


def record(trace: AccessOrder, uses: Sequence[int], kind: PassKind = PassKind.TRAIN) -> None:
    """Makes an access order predict `uses` for runs of `kind`."""
    trace.begin(kind)
    for unit in uses:
        trace.use(unit)
    trace.finish()
