"""`OffloadStrategy`: PyTorch Lightning's Trainer on an engine that holds the model, gradients and optimizer states.

    trainer = Trainer(strategy=OffloadStrategy("ds_config.json"), accelerator="cpu", devices=1)

The loops are Lightning's own. Lightning calls its strategy to set up a model, to run a step, a backward and an
optimizer step, and to write and read checkpoints. This strategy passes these calls to the engine. Lightning's DDP
strategy, the base class, provides processes, their group, reductions and gathers, but wraps no model here.

[Note: one engine] The first `fit`, `validate`, `test` or `predict` builds the engine, and later calls use the same
engine: weights are in its files, so Lightning's teardown, which moves a model to the CPU, would move nothing.

Requires `pip install lightning`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from offload.checkpoint.files import LATEST, find
from offload.config import load_config
from offload.config.script_values import (
    ScriptValue,
    content_of,
    filled,
    refuse_blocks,
    refuse_commits,
    refuse_shared_batches,
    value_of,
    without,
)
from offload.engine.engine import Engine
from offload.engine.setup import initialize
from offload.engine.snapshot import GeneratorStates
from offload.errors import ConfigError, StoreError, UsageError
from offload.model_io.load import init

_PRECISION = {"32-true": None, "bf16-mixed": "torch_autocast", "bf16-true": "bf16", "16-true": "fp16"}
"""For each `precision` of Lightning's Trainer the block of the config that it enables."""
_OF_THE_ENGINE = ("state_dict", "optimizer_states")
"""Parts of Lightning's checkpoint that the engine's checkpoint contains."""


class EnginePrecision(Precision):
    """Lightning's plugin for backward, clip and step; the engine runs all three."""

    def __init__(self, engine: Engine, precision: Any) -> None:
        self._engine = engine
        self.precision = precision

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, **kwargs: Any) -> None:
        """Runs the backward of a loss that Lightning has divided by the micro-batches of a step."""
        self._engine.backward(tensor, scale_wrt_gas=False, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Runs the closure, a forward and its backward, and then the optimizer step if there is a gradient."""
        result = self._wrap_closure(model, optimizer, closure)
        # A `training_step` that returns None has no backward. Without any backward, torch's optimizers change nothing.
        if self._engine.micro_batches:
            self._engine.optimizer.step()
        return result

    def clip_gradients(self, optimizer: Any, clip_val: Any = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Clips the gradient of the step that follows, in the engine."""
        if clip_val <= 0:
            return
        if getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm) == "value":
            raise UsageError(
                'gradients are in the engine, which clips their norm alone: gradient_clip_algorithm="norm"'
            )
        self._engine.clip_grad_norm_(clip_val)


class OffloadStrategy(DDPStrategy):
    """Strategy of Lightning's Trainer that trains one model with one optimizer by an engine."""

    strategy_name = "offload"

    engine: Engine | None = None
    """The engine, from the first `fit`, `validate`, `test` or `predict` on; None before."""
    precision_plugin: Any

    def __init__(self, config: Any, **kwargs: Any) -> None:
        """Constructs the strategy.

        Args:
            config: path of a DeepSpeed-style JSON file, or its content as a dict. Keys that it leaves out, or sets to
                "auto", take the values of Lightning's Trainer.
            **kwargs: as in Lightning's `DDPStrategy`, such as `process_group_backend` and `timeout`.

        Raises:
            ConfigError: if the config is wrong, enables commits, or has an optimizer or a schedule:
                `configure_optimizers` creates these.
        """
        self._content = refuse_blocks(content_of(config), "optimizer", "scheduler")
        refuse_commits(self._content, "Lightning", "fit(ckpt_path=...)", "every_n_train_steps of ModelCheckpoint")
        load_config(self._content)
        super().__init__(**kwargs)

    # -- beginning ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Changes nothing: the engine sets device and dtype of weights."""
        yield

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Lets `configure_model` build a model without weights. The engine creates the weights unit by unit."""
        with init(self._config()):
            yield

    def setup_environment(self) -> None:
        """Creates the group of processes. The random generators of a single process stay as they are.

        Lightning's strategy for several processes seeds the generators, so that all processes draw the same numbers.
        """
        before = GeneratorStates.of(self.root_device)
        super().setup_environment()
        if self.world_size == 1:
            before.restore(self.root_device)

    def setup(self, trainer: Any) -> None:
        """Builds the engine, or checks that the engine of an earlier call can serve this call of the Trainer.

        Raises:
            ConfigError: if the config and the Trainer disagree.
            UsageError: if the call needs another engine.
        """
        self.accelerator.setup(trainer)
        # Otherwise the loader of a single process, too, would use the shuffling sampler for ranks. Not public in
        # Lightning.
        if self.world_size == 1:
            trainer._accelerator_connector.use_distributed_sampler = False
        module, fits = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        if self.engine is None:
            self._build(trainer)
        elif self.engine.module is not module:
            raise UsageError(
                "this strategy has the engine of another model: call strategy.engine.destroy(), and give the "
                "Trainer of the next model a strategy of its own"
            )
        elif fits and self.engine.global_steps and trainer.ckpt_path is None:
            raise UsageError(
                "a second fit() would begin with new optimizer states, and the engine has those of the first: raise "
                "max_epochs or max_steps of one fit(), or give a checkpoint as ckpt_path"
            )
        # A Trainer runs the steps of a wrapped model through the wrapper. So the engine handles inputs, autocast and
        # memory errors.
        self.model = self.engine

    def _build(self, trainer: Any) -> None:
        """Builds the engine, with the optimizer of the model even if an evaluation comes before the training."""
        module = self.lightning_module
        config = self._config()
        # The engine moves parameters and buffers, but metrics also keep other tensors.
        for submodule in module.modules():
            if next(submodule.parameters(), None) is None:
                submodule.to(self.root_device)
        optimizer = None
        if not is_overridden("configure_optimizers", module):
            module.requires_grad_(False)
        if any(parameter.requires_grad for parameter in module.parameters()):
            self.setup_optimizers(trainer)
            if len(self.optimizers) != 1:
                raise UsageError(
                    f"OffloadStrategy trains with one optimizer, and configure_optimizers made {len(self.optimizers)}: "
                    "put their parameters into groups of one, each with its own learning rate"
                )
            optimizer = self.optimizers[0]
        self.engine = initialize(model=module, optimizer=optimizer, config=config).engine
        # Lightning alone decides which micro-batch ends a step, also at the end of an epoch.
        self.engine.set_gradient_accumulation_boundary(True)
        self.precision_plugin = EnginePrecision(self.engine, self.precision_plugin.precision)

    def _config(self) -> dict[str, Any]:
        """Returns the config with the values of the Trainer; raises `ConfigError` if the two disagree."""
        trainer, plugin = self.lightning_module.trainer, self.precision_plugin
        plain = type(plugin) in (Precision, HalfPrecision, MixedPrecision, EnginePrecision)
        if not plain or plugin.precision not in _PRECISION:
            raise ConfigError(
                f"OffloadStrategy expects precision to be one of {', '.join(_PRECISION)}, got {plugin.precision}; "
                "fp16 with a loss scale is 16-true"
            )
        if self._layer_sync is not None:
            raise ConfigError(
                "OffloadStrategy cannot be combined with sync_batchnorm: convert the model before, by "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm"
            )
        refuse_shared_batches(self._content, "Lightning")
        values = [
            ScriptValue("gradient_accumulation_steps", trainer.accumulate_grad_batches, "accumulate_grad_batches"),
            ScriptValue("offload.device", self.root_device.type, "the device of the accelerator"),
            ScriptValue("offload.durability", "none", "that of a Trainer"),  # see [Note: two ways to resume]
        ]
        # Without either number nothing is clipped, as in Lightning.
        if trainer.gradient_clip_val is not None or value_of(self._content, "gradient_clipping") is None:
            values.append(ScriptValue("gradient_clipping", trainer.gradient_clip_val or 0, "gradient_clip_val"))
        if block := _PRECISION[plugin.precision]:
            values.append(ScriptValue(f"{block}.enabled", True, f"that of precision={plugin.precision}"))
        return filled(self._content, values)

    # -- a step -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Opens the context of a micro-batch that does not end a step."""
        assert self.engine is not None
        with self.engine.no_sync():
            yield

    # -- checkpoints --------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: a checkpoint is loaded into the engine."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: the engine's checkpoint has the optimizer states."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns nothing: the engine writes the weights."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns nothing: the engine writes the states."""
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Does nothing: `load_checkpoint` has loaded the weights."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes the folder `filepath`.

        Collective: the engine writes its checkpoint, and Lightning its loops and callbacks.
        """
        assert self.engine is not None
        folder, tag = Path(self.broadcast(filepath)), f"global_step{self.engine.global_steps}"
        # The engine's files are written last, so that `latest` names a checkpoint with both parts.
        if self.is_global_zero:
            loops = without(checkpoint, *_OF_THE_ENGINE)
            self.checkpoint_io.save_checkpoint(loops, _loops(folder, tag), storage_options=storage_options)
        self.engine.save_checkpoint(folder, tag, keep_last=1)
        if self.is_global_zero:
            for path in set(folder.glob(_loops(folder, "*").name)) - {_loops(folder, tag)}:
                path.unlink()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a folder of `save_checkpoint` into the engine: all of it for `fit`, weights alone for an evaluation.

        Returns Lightning's part of the checkpoint. `weights_only` is ignored: the file of loops and callbacks is always
        read by torch's restricted unpickler.

        Raises:
            StoreError: if there is no checkpoint of this strategy, or it is damaged or belongs to another model.
        """
        assert self.engine is not None
        module, folder = self.lightning_module, Path(checkpoint_path)
        if not (folder / LATEST).is_file():
            raise StoreError(
                f"{folder} is no checkpoint of OffloadStrategy, a folder with a file {LATEST}: of a checkpoint of "
                "another strategy load the weights into the model, before fit()"
            )
        newest = find(folder, None)
        assert newest is not None, "there is a file latest"
        tag = Path(newest).name
        # Read before the engine changes, and without executing a pickle's code.
        loops: dict[str, Any] = self.checkpoint_io.load_checkpoint(_loops(folder, tag), weights_only=True)
        self.engine.load_checkpoint(
            folder,
            tag,
            load_module_strict=module.strict_loading,
            load_module_only=module.trainer.state.fn != TrainerFn.FITTING,
        )
        return loops

    # -- end ----------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Ends a call of the Trainer. The engine stays for the next; see [Note: one engine]."""
        self.model = self.lightning_module
        self.precision_plugin.teardown()
        for part in (self.cluster_environment, self.accelerator, self.checkpoint_io):
            assert part is not None
            part.teardown()


def _loops(folder: Path, tag: str) -> Path:
    return folder / f"lightning-{tag}.ckpt"
