"""Commands that precede a run.

`offload probe` measures the machine, `offload plan` predicts a run, and `offload check-config` reads a config file.
"""

from __future__ import annotations

import typer

from offload.cli.commands.planning import check_config, plan, probe
from offload.cli.options import UNDERSCORES, Grouped


def register(app: typer.Typer) -> None:
    """Adds these commands to `app`."""
    app.command()(probe.probe)
    app.command(cls=Grouped, context_settings=UNDERSCORES)(plan.plan)
    app.command("check-config")(check_config.check_config)
