"""The command line of `offload`."""

from offload.cli.main import app

__all__ = ["app"]
