"""Lines for a user at the start of a run: warnings, but for remarks."""

from __future__ import annotations

import logging

logger = logging.getLogger("offload.notices")


class Remark(str):
    """A notice that only informs; any other string tells of what a user asked for and does not get, or should know."""


def tell(notice: str) -> None:
    """Log a notice: a warning is seen on stderr without any set-up of logging, a remark is not."""
    logger.log(logging.INFO if isinstance(notice, Remark) else logging.WARNING, "offload: %s", notice)
