"""The command `offload bench`, and checks that its subcommands share."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from offload.errors import ConfigError

bench = typer.Typer(
    help="Measure components and training, each against a bound or a peer in the same run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def check_plot(path: Path | None) -> None:
    """Raises `ConfigError` if a plot cannot be written to `path`, before minutes of measuring."""
    if path is None:
        return
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'offload[bench]'")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"expected a file that ends in .png, .svg or .pdf, got {path}")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    # Access is checked now, so that minutes of measuring are not lost.
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{path} cannot be written")
