"""Words for a user: notices at the start of a run, and commands that a message suggests."""

from __future__ import annotations

import logging
import shlex
import textwrap
import traceback

logger = logging.getLogger("offload.notices")

_LONGEST_LINE = 300
"""Characters of an exception that other ranks are told."""


class Remark(str):
    """A notice that only informs. A notice that is a plain `str` warns of a request not fulfilled, or of a risk."""


def shell_command(*words: object) -> str:
    """Returns a command of `offload` as a shell takes it, with quotes where a path needs them.

    Args:
        words: the words behind `offload`.
    """
    return shlex.join(["offload", *map(str, words)])


def announce(notice: str) -> None:
    """Logs a notice.

    A warning appears on stderr without any configuration of logging; a remark does not.

    Args:
        notice: the text; a `Remark` is logged as information, any other string as a warning.
    """
    logger.log(logging.INFO if isinstance(notice, Remark) else logging.WARNING, "offload: %s", notice)


def exception_line(error: BaseException) -> str:
    """Returns the type and the message of an exception on one line of at most 300 characters.

    Args:
        error: any exception, also one whose message has many lines, or cannot be made.
    """
    return textwrap.shorten("".join(traceback.format_exception_only(error)), _LONGEST_LINE, placeholder=" …")
