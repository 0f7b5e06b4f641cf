"""`deepspeed.utils.logging`: the logger, and lines of chosen ranks."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Sequence

from offload.deepspeed.comm import get_rank

_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


def _logger() -> logging.Logger:
    """Returns a logger that writes warnings to stdout, as DeepSpeed's does."""
    found = logging.getLogger("DeepSpeed")
    # The module may be imported under two names, and a second handler would double each line.
    if not found.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        found.addHandler(handler)
        found.setLevel(logging.WARNING)
        found.propagate = False
    return found


logger = _logger()


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs a message on some ranks.

    Args:
        message: the message.
        ranks: the ranks; None, or -1 among them, for all.
        level: level of the message.
    """
    rank = get_rank()
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


@functools.cache
def _logged(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs a message on some ranks, the first time only.

    Args:
        message: the message.
        ranks: the ranks; None, or -1 among them, for all.
        level: level of the message.
    """
    _logged(message, None if ranks is None else tuple(ranks), level)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Sets the level of the logger.

    Args:
        log_level_str: such as "info".
        custom_logger: another logger.

    Raises:
        ValueError: if there is no such level.
    """
    if log_level_str.lower() not in _LEVELS:
        raise ValueError(f"{log_level_str} is no level of logging: expected one of {', '.join(_LEVELS)}")
    (custom_logger or logger).setLevel(_LEVELS[log_level_str.lower()])
