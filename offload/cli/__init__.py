"""The command line."""

from offload.cli.main import app

__all__ = ["app"]
