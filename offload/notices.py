"""Notices for a user at the start of a run: warnings and remarks."""

from __future__ import annotations

import logging

logger = logging.getLogger("offload.notices")


class Remark(str):
    """A notice that only informs. A notice that is a plain `str` warns of a request not fulfilled, or of a risk."""


def announce(notice: str) -> None:
    """Logs a notice.

    A warning appears on stderr without any configuration of logging; a remark does not.

    Args:
        notice: the text; a `Remark` is logged as information, any other string as a warning.
    """
    logger.log(logging.INFO if isinstance(notice, Remark) else logging.WARNING, "offload: %s", notice)
