"""The command line of `offload`."""

try:
    from offload.cli.main import app
except KeyboardInterrupt:  # of the imports; from `main` on the commands answer it
    raise SystemExit(130) from None

__all__ = ["app"]
