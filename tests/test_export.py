"""`offload export` writes what transformers loads: the weights of the engine, bit for bit, whatever the placement."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from typer.testing import CliRunner

import offload
from offload.aio import IoQueue
from offload.cli import app
from offload.engine.source import StoreSource
from offload.engine.weights import Weights
from offload.errors import StoreError
from offload.export import export, make_plan, read_nbytes
from tests import models
from tests.oracle import DROPOUT_FREE_JOBS as _  # noqa: F401
