"""Accelerate's `Accelerator`, whose `prepare` puts a model under an engine.

    accelerator = Accelerator(offload_config="ds_config.json")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

`prepare` returns the model itself. Hooks of the model fetch the weights, so code that reads the model's class, unwraps
the model or calls `generate` works unchanged. The training loop stays the one in Accelerate's documentation.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from offload.config.script_values import ScriptValue, content_of, filled, refuse_blocks, refuse_shared_batches, value_of
from offload.engine.engine import Engine
from offload.engine.optimizer import Optimizer
from offload.engine.params import handle_of
from offload.engine.setup import initialize
from offload.errors import BudgetError, ConfigError, UsageError
from offload.hf.arguments import as_reference
from offload.sizes import count_of, format_size, parse_percent, parse_size

logger = logging.getLogger("offload")

_PREPARED = "_is_accelerate_prepared"
"""Accelerate's mark of objects that `prepare` returns unchanged."""


class EngineOptimizer(AcceleratedOptimizer):
    """An engine's optimizer in Accelerate's wrapper. It steps only when the gradients of a step are complete."""

    def __init__(self, engine: Engine) -> None:
        # Accelerate's device placement replaces the parameter groups. The user's schedule holds the present groups, so
        # placement is off.
        super().__init__(engine.optimizer, device_placement=False, scaler=None)
        self.engine = engine
        self.norms: list[torch.Tensor] = []
        """Tensors returned by `clip_grad_norm_` that the next step fills."""

    def step(self, closure: Any = None) -> None:
        """Steps if gradients are complete, and fills the norms that `clip_grad_norm_` has returned."""
        super().step(closure)
        if self.gradient_state.sync_gradients:
            norm = self.engine.get_global_grad_norm()
            for tensor in self.norms:
                tensor.fill_(math.nan if norm is None else norm)
            self.norms.clear()

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped: in fp16 after an overflow, else by `"on_nonfinite": "skip"`."""
        return bool(self.optimizer.overflow)


class Accelerator(accelerate.Accelerator):
    """Accelerate's `Accelerator`, which trains one model through an engine.

    A model passed to `prepare_model(model, evaluation_mode=True)` is paged by a frozen engine. Other models are
    prepared as in Accelerate.
    """

    offload_config: Any = None
    """Config of `offload.initialize`, a path or a dict. None if `prepare` receives an engine or no model is paged."""
    engine: Engine | None = None
    """The engine of the model that trains; None before `prepare`."""
    references: tuple[Engine, ...] = ()
    """Frozen engines that `prepare_model(model, evaluation_mode=True)` has built, such as that of a reference model."""
    _optimizer: EngineOptimizer | None = None
    _clipping_logged = False

    def __init__(self, *args: Any, offload_config: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.offload_config = offload_config

    # -- preparing ----------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Builds the engine of the model that trains. Then prepares all objects as Accelerate does, and returns them.

        Args:
            *args: models, optimizers, loaders and schedules. The model that trains and its optimizer must come in one
                call. An engine may take the place of the model.
            device_placement: as in Accelerate.

        Raises:
            UsageError: if another model trains already, or the call does not contain one model that trains and one
                optimizer.
            ConfigError: if the config and the Accelerator disagree.
            BudgetError: if the models that do not train leave no device memory.
        """
        self._make_engine(args)
        return super().prepare(*args, device_placement=device_placement)

    def _make_engine(self, objects: Iterable[Any]) -> None:
        """Takes the engine in `objects`. Without an engine there, builds one for the model in `objects` that trains."""
        engines = [item for item in objects if isinstance(item, Engine)]
        if engines:
            if any(engine is not (self.engine or engines[0]) for engine in engines):
                raise _second_engine()
            accumulation = engines[0].gradient_accumulation_steps()
            if accumulation != self.gradient_accumulation_steps:
                raise ConfigError(
                    f"gradient_accumulation_steps is {accumulation} in the engine's config and "
                    f"{self.gradient_accumulation_steps} in the Accelerator; make them equal"
                )
            # An engine that was prepared before keeps its optimizer wrapper, because the user's loop holds it.
            if self.engine is None:
                self.use(engines[0])
            return
        trained = None if self.engine is None else self.engine.module
        models = [item for item in objects if isinstance(item, nn.Module) and item is not trained]
        # The call may also contain frozen models, such as a reference. Accelerate prepares them.
        models = [model for model in models if any(p.requires_grad for p in model.parameters())]
        optimizers = [item for item in objects if isinstance(item, torch.optim.Optimizer)]
        if self.offload_config is None or not models:
            return
        if self.engine is not None:
            raise _second_engine()
        if len(models) != 1 or len(optimizers) != 1:
            raise UsageError(
                f"prepare expects one model that trains and one optimizer in one call, got {len(models)} and "
                f"{len(optimizers)}: prepare(model, optimizer, loader). A second model that trains needs an "
                f"Accelerator of its own; a model that does not train needs requires_grad_(False)"
            )
        loaders = [item for item in objects if isinstance(item, torch.utils.data.DataLoader)]
        # References were built first and share the device memory of the config with the model that trains.
        config = self.beside_references(self._config(self._micro_batch(loaders[0]) if loaders else None))
        self.use(initialize(model=models[0], optimizer=optimizers[0], config=config).engine)

    def _micro_batch(self, loader: torch.utils.data.DataLoader[Any]) -> int | None:
        """Returns the number of samples in a rank's batch; None if the loader has a batch sampler of the user's own."""
        size: int | None = loader.batch_size
        # With `split_batches` Accelerate divides each batch of the loader among the ranks.
        return size // self.num_processes if size and self.split_batches else size

    def use(self, engine: Engine) -> None:
        """Makes `engine` the engine of the model that trains, and wraps its optimizer."""
        self.engine = engine
        # The optimizer of a frozen engine has no parameters to step. All groups are checked, because a Trainer's first
        # group, the weights that decay, may be empty while the second group holds norms and biases.
        trains = any(group["params"] for group in engine.optimizer.param_groups)
        self._optimizer = EngineOptimizer(engine) if trains else None

    def _is_paged(self, model: nn.Module) -> bool:
        return any(handle_of(parameter) is not None for parameter in model.parameters())

    def beside_references(self, config: Any) -> dict[str, Any]:
        """Returns `config` with `device_memory` reduced by the device memory of the reference engines."""
        content = content_of(config)
        budget = value_of(content, "offload.device_memory")
        reference_bytes = sum(engine.device_memory for engine in self.references)
        # A percentage is of this model's weights.
        if budget is None or not reference_bytes or parse_percent(budget) is not None:
            return content
        left_bytes = parse_size(budget) - reference_bytes
        if left_bytes <= 0:
            raise BudgetError(
                f'"device_memory" is {format_size(parse_size(budget))}, of which the models that do not train take '
                f'{format_size(reference_bytes)}; raise it, or move "offload_param" from the device to cpu or nvme'
            )
        content["offload"] = {**content["offload"], "device_memory": left_bytes}
        return content

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Returns a paged model unchanged: it is not moved, and not wrapped in DDP or autocast.

        Accelerate prepares any other model.

        Args:
            model: the model.
            device_placement: as in Accelerate.
            evaluation_mode: True for a model that does not train from then on, such as a reference model of trl. If no
                engine holds the model, this call builds a frozen engine for it.

        Raises:
            UsageError: if the config sets `device_memory` and the model that trains was prepared before, since an
                engine takes all of the device memory that is left.
        """
        if evaluation_mode and self.offload_config is not None and not self._is_paged(model):
            config = self._config(None)
            if self.engine is not None and value_of(config, "offload.device_memory") is not None:
                raise UsageError(
                    "the model that trains occupies all of device_memory already: call prepare_model(model, "
                    'evaluation_mode=True) before prepare, or take "device_memory" out of the "offload" block'
                )
            model.requires_grad_(False)
            engine = initialize(model=model, config=as_reference(config, len(self.references))).engine
            self.references = (*self.references, engine)
        if self._is_paged(model):
            # Accelerate returns a marked object as it is. An unmarked model would be moved to the device or wrapped in
            # DDP.
            setattr(model, _PREPARED, True)
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Returns `EngineOptimizer` for the engine's optimizer, and for the user's optimizer that the engine replaced.

        Accelerate prepares any other optimizer. Raises `UsageError` for the optimizer of an unknown engine.
        """
        wrapper = self._optimizer
        # Accelerate would wrap the optimizer that the engine replaced, copy all states to RAM, and return no norm.
        if wrapper is not None and optimizer in (wrapper.optimizer, wrapper.optimizer.replaced):
            setattr(wrapper, _PREPARED, True)
            optimizer = wrapper
        elif isinstance(optimizer, Optimizer):
            raise UsageError(
                "this optimizer belongs to an engine that the Accelerator does not have; prepare the engine too"
            )
        return super().prepare_optimizer(optimizer, device_placement)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Returns Accelerate's wrapper of a schedule, and registers it for the engine's commits and checkpoints."""
        known = scheduler in self._schedulers
        prepared = super().prepare_scheduler(scheduler)
        # The engine saves the schedule, because Accelerate's `save_state` is refused. The engine's own schedule is
        # registered already.
        if self.engine is None or known or scheduler is self.engine.lr_scheduler:
            return prepared
        try:
            self.engine.register_for_checkpointing(prepared)
        except UsageError as error:
            # A warning is enough: a loop needs the schedule's state only when it loads a checkpoint, which it may never
            # do.
            name = type(scheduler).__name__
            logger.warning("checkpoints will not contain the state of %s, the schedule: %s", name, error)
        return prepared

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the model inside a wrapper; an engine counts as a wrapper."""
        return super().unwrap_model(model.module if isinstance(model, Engine) else model, *args, **kwargs)

    def _config(self, micro: int | None) -> dict[str, Any]:
        """Returns the config with the values of the Accelerator.

        `micro` is the loader's batch size; None without a loader.
        """
        content = content_of(self.offload_config)
        refuse_shared_batches(content, "Accelerate")
        content = refuse_blocks(content, "optimizer", "scheduler")
        if value_of(content, "torch_autocast.enabled"):
            raise ConfigError(
                "torch_autocast applies to calls of engine(...), and prepare returns the model; make the engine by "
                "offload.initialize, and prepare(engine, optimizer, loader)"
            )
        values = [
            ScriptValue("gradient_accumulation_steps", self.gradient_accumulation_steps, "that of the Accelerator")
        ]
        if micro is not None:
            values.append(ScriptValue("train_micro_batch_size_per_gpu", micro, "the loader's batch_size"))
        if self.mixed_precision in ("bf16", "fp16"):
            values.append(ScriptValue(f"{self.mixed_precision}.enabled", True, "that of mixed_precision"))
        if value_of(content, "gradient_clipping") is None:
            # The script clips through `clip_grad_norm_`; a config without the key must not clip in addition.
            values.append(ScriptValue("gradient_clipping", 0, "clip_grad_norm_"))
        values.append(ScriptValue("offload.device", self.device.type, "the Accelerator's device"))
        return filled(content, values)

    # -- a step -------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Runs the backward of a loss in the engine. Without an engine, runs it as Accelerate does.

        The loss is divided by the accumulation, and in fp16 multiplied by the loss scale.

        Args:
            loss: a tensor of one element.
            **kwargs: keywords of `Engine.backward`.
        """
        if self.engine is None:
            super().backward(loss, **kwargs)
            return
        # Accelerate decides which micro-batch ends a step, also at the end of a loader. The engine must not count.
        self.engine.set_gradient_accumulation_boundary(bool(self.sync_gradients))
        # The division is done here, as in Accelerate, so the engine must not divide again.
        self.engine.backward(loss / self.gradient_accumulation_steps, scale_wrt_gas=False, **kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Sets the norm to which the engine clips the next step. Without an engine, clips as Accelerate does.

        Args:
            parameters: all parameters that train, in any order; the norm is over all of them.
            max_norm: largest norm; 0 for no clip.
            norm_type: must be 2.

        Returns:
            A tensor () that holds the norm as soon as `optimizer.step()` has run, and NaN until then.

        Raises:
            UsageError: if `norm_type` is not 2, or a parameter that trains is missing.
        """
        if self.engine is None or self._optimizer is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        if norm_type != 2:
            raise UsageError(f"the engine clips the 2-norm, got norm_type={norm_type}")
        clipped = {id(p) for p in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)}
        missing = sum(p.requires_grad and id(p) not in clipped for p in self.engine.module.parameters())
        if missing:
            raise UsageError(
                f"the engine clips the norm of all parameters that train, and "
                f"{count_of(missing, 'of them was', 'of them were')} not given to "
                f"clip_grad_norm_; give model.parameters()"
            )
        self._log_clipping(max_norm)
        self.engine.clip_grad_norm_(max_norm)
        # The norm is known only in the step, when the gradients of all ranks are complete. Until then it is NaN.
        norm = torch.full((), math.nan, dtype=torch.float32, device="cpu")
        self._optimizer.norms.append(norm)
        return norm

    def _log_clipping(self, max_norm: float) -> None:
        assert self.engine is not None
        if not self._clipping_logged:
            other = self.engine.config["gradient_clipping"]
            instead = f", in place of the config's gradient_clipping, {other:g}" if other and other != max_norm else ""
            done = f"are clipped by the engine, to a norm of {max_norm:g}" if max_norm else "are not clipped"
            logger.info("gradients %s%s", done, instead)
        self._clipping_logged = True

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Without an engine, clips as Accelerate does. With an engine, raises `UsageError`: it clips only the norm."""
        if self.engine is None:
            super().clip_grad_value_(parameters, clip_value)
            return
        raise UsageError("gradients are in the engine, which clips their norm alone: call clip_grad_norm_")

    # -- checkpoints --------------------------------------------------------------------------------

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Without an engine, saves as Accelerate does. With one, raises `UsageError`: call `engine.save_checkpoint`."""
        if self.engine is None:
            return super().save_state(*args, **kwargs)
        raise UsageError(
            "weights and states are in the engine: call accelerator.engine.save_checkpoint(folder), with the "
            "script's counters as client_state; other objects are registered by engine.register_for_checkpointing"
        )

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """Without an engine, loads as Accelerate does. With one, raises `UsageError`: call `engine.load_checkpoint`."""
        if self.engine is None:
            return super().load_state(*args, **kwargs)
        raise UsageError("weights and states are in the engine: call accelerator.engine.load_checkpoint(folder)")


def _second_engine() -> UsageError:
    return UsageError("this Accelerator has an engine already; make another Accelerator for a second model")
