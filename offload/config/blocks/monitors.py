"""Blocks of the monitors, which receive the numbers of each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from offload.config.blocks.block import Block
from offload.config.blocks.values import expanded


class _Folder(Block):
    """A monitor that writes into a folder."""

    SUGGESTION: ClassVar[Mapping[str, Any]] = {"enabled": True}

    enabled: bool = Field(False, description="whether these files are written")
    output_path: Annotated[str, BeforeValidator(expanded)] = Field("runs", description="folder of all jobs")
    job_name: str | None = Field(None, description="folder in it; default: the name of the run")


class TensorBoard(_Folder):
    """Numbers of each step for TensorBoard; see guides/monitor-a-run.md. Needs `pip install 'offload[monitor]'`."""


class CsvMonitor(_Folder):
    """Numbers of each step, each kind of number in its own CSV file; see guides/monitor-a-run.md."""


class Wandb(Block):
    """Numbers of each step for Weights & Biases; see guides/monitor-a-run.md. Needs `pip install wandb`."""

    SUGGESTION: ClassVar[Mapping[str, Any]] = {"enabled": True}

    enabled: bool = Field(False, description="whether the numbers are sent")
    project: str = Field("offload", description="project")
    team: str | None = Field(None, description="owner of the project; default: that of the login")
    group: str | None = Field(None, description="group of runs")
    name: str | None = Field(None, description="name of the run; default: one that wandb makes")
