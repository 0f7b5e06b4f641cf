"""`deepspeed.runtime.config`: the config as an object."""

from __future__ import annotations

from typing import Any

from offload.config import load_config, resolve_batch
from offload.deepspeed.comm import get_world_size
from offload.deepspeed.content import content_of
from offload.engine.keywords import refuse
from offload.errors import ConfigError

DeepSpeedConfigError = ConfigError


class DeepSpeedConfig:
    """A config that was checked, with its three batch sizes."""

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        """Reads and checks a config.

        Args:
            config: path of the JSON, or its content as a dict.
            mpu: must be None.
            mesh_device: must be None.

        Raises:
            ConfigError: if the config is wrong.
            UsageError: if `mpu` or `mesh_device` is given.
        """
        refuse(mpu=mpu, mesh_param=mesh_device)
        self._param_dict = content_of(config)
        loaded = load_config(self._param_dict)
        batch = resolve_batch(loaded, get_world_size())
        self.train_batch_size = batch.total
        self.train_micro_batch_size_per_gpu = batch.micro
        self.gradient_accumulation_steps = batch.accumulation
        self.gradient_clipping = loaded.gradient_clipping
        self.zero_config = loaded.zero_optimization
        self.zero_optimization_stage = loaded.zero_optimization.stage
        self.zero_enabled = loaded.zero_optimization.stage > 0
