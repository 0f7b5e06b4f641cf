"""Words for a user: notices at the start of a run, lines while it trains, and commands that a message suggests."""

from __future__ import annotations

import logging
import shlex
import sys
import textwrap
import traceback

from offload.errors import printable

logger = logging.getLogger("offload.notices")
ENDS = logger.getChild("ends")
"""Logger of the line on a run that is left at its end. A command that says this itself silences it."""

_LONGEST_LINE = 300
"""Characters of an exception that other ranks receive."""


class Remark(str):
    """A notice that only informs. A notice that is a plain `str` warns of a request not fulfilled, or of a risk."""


class Headline(Remark):
    """A remark that a user sees without any configuration of logging: where states are, and where a run resumes."""


def shell_command(*words: object) -> str:
    """Returns a command of `offload` as a shell takes it, with quotes where a path needs them."""
    return shlex.join(["offload", *map(str, words)])


def folder_to_make(folder: object) -> str:
    """Returns the words after "there is no folder", in which something was to be written: its name, and a cure."""
    return f"{folder}; make it with `{shlex.join(['mkdir', '-p', str(folder)])}`, or give another"


def announce(notice: str, log: logging.Logger = logger) -> None:
    """Logs a notice.

    A warning and a headline appear on stderr without any configuration of logging; another remark does not.
    """
    # A console without handlers shows only warnings, and nobody configures logging to find out that a run resumed.
    if isinstance(notice, Headline):
        show(f"offload: {notice}", log)
    else:
        level = logging.INFO if isinstance(notice, Remark) else logging.WARNING
        log.log(level, "offload: %s", printable(notice))


def show(line: str, log: logging.Logger) -> None:
    """Logs a line at level INFO, or prints it to stderr if that logs nothing and the user has set no higher level."""
    line = printable(line)  # which may quote names from files of others
    # The user's own handlers show the line once, in their format.
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        log.info(line)
    elif not _silenced(log):
        print(line, file=sys.stderr, flush=True)


def _silenced(log: logging.Logger) -> bool:
    """Returns True if the user has set a level above INFO for a logger of this library."""
    ancestor: logging.Logger | None = log
    # The level of the root is the one of all libraries, WARNING by default.
    while ancestor is not None and ancestor.name != "root":
        if ancestor.level:
            return ancestor.level > logging.INFO
        ancestor = ancestor.parent
    return False


def exception_line(error: BaseException) -> str:
    """Returns the type and the message of an exception on one line of at most 300 characters."""
    return textwrap.shorten("".join(traceback.format_exception_only(error)), _LONGEST_LINE, placeholder=" …")
