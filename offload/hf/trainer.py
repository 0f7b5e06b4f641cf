"""`OffloadTrainer`: transformers' `Trainer` on an engine that holds the model, the gradients and the optimizer states.

    trainer = OffloadTrainer(model=model, args=args, train_dataset=dataset, offload_config="ds_config.json")

The loop is the Trainer's own. It passes model and optimizer to `accelerator.prepare`, which builds the engine. The
`Accelerator` of this package runs each backward, clip and step in the engine. The mixin completes the config, writes
and reads the engine's part of the Trainer's checkpoints, and refuses arguments that an engine cannot honour
(`arguments.py`).

[Note: names that are not public] The mixin overrides these methods, although transformers does not promise them:

    _move_model_to_device            the engine places weights: a model larger than the device never moves as a whole
    _wrap_model                      the last call before the engine is built: the loss is chosen (`_choose_loss`)
    _save                            weights are streamed into safetensors
    _save_optimizer_and_scheduler    writes the engine's checkpoint in place of optimizer.pt
    _load_from_checkpoint            loads nothing yet: the engine does not exist
    _load_optimizer_and_scheduler    loads the engine's checkpoint, or weights only
    _load_best_model                 loads the weights of the engine's checkpoint
    _get_num_items_in_batch          computes in fp32: transformers uses the default dtype, and bf16 has no value 257
    get_batch_samples                its batches belong to the `training_step` calls that follow (`micro_batches.py`)

`accelerator.py` sets Accelerate's mark `_is_accelerate_prepared`. A test checks that all these names exist. `_tr_loss`,
the sum of the losses until the next log, becomes fp32 if transformers creates it in another default dtype.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Trainer

from offload.config import Config, load_config
from offload.config.script_values import content_of, filled, without
from offload.engine.build_optimizer import choose_scheduler, from_config
from offload.engine.engine import Engine
from offload.engine.setup import initialize
from offload.errors import ConfigError
from offload.hf.accelerator import Accelerator
from offload.hf.arguments import (
    check_arguments,
    check_kinds,
    check_model,
    check_optim,
    schedule_values,
    values_of_arguments,
)
from offload.hf.checkpoint_folder import (
    SCHEDULER,
    LastCheckpoint,
    announced_end,
    check_resumable,
    has_engine,
    last_complete,
    load_into,
)
from offload.hf.micro_batches import StepAtOnce, losses_to_hand_over, own_method
from offload.losses.causal_model import ChosenLoss, as_begun, choose_loss, without_logits
from offload.provenance import is_of

logger = logging.getLogger("offload")

OVERRIDDEN = (
    "_move_model_to_device",
    "_wrap_model",
    "_save",
    "_save_optimizer_and_scheduler",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_best_model",
    "_get_num_items_in_batch",
    "get_batch_samples",
)
_ARGUMENTS = "training_args.bin"

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class _TrainersAccelerator(Accelerator):
    """The Trainer's accelerator, whose config is completed by the Trainer's arguments.

    Accelerate's gradient accumulation is not merged into the config: the Trainer counts micro-batches itself.
    """

    def _config(self, micro: int | None) -> dict[str, Any]:
        """Returns the complete config, whatever `micro` is."""
        config: dict[str, Any] = self.offload_config
        return config

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Runs the backward of a loss, or hands the loss to the step that runs all micro-batches at once."""
        losses = losses_to_hand_over()
        if losses is None:
            super().backward(loss, **kwargs)
        else:
            losses.append(loss / self.gradient_accumulation_steps)


class OffloadMixin(_Base):
    """Mixin to put before a Trainer: `class MyTrainer(OffloadMixin, SFTTrainer)`."""

    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, offload_config: Any = None, chunked_loss: bool | None = None, **kwargs: Any) -> None:
        """Constructs the Trainer.

        Args:
            *args: as in the Trainer.
            offload_config: path of a DeepSpeed-style JSON file, or its content as a dict. It must be given.
            chunked_loss: True to compute the training loss from the logits of a chunk of tokens at a time, False to
                compute all logits at once. By default in chunks, if the model is a causal language model of
                transformers with a plain linear head, and nothing else of the Trainer reads the logits.
            **kwargs: as in the Trainer.

        Raises:
            ConfigError: if there is no config; if it has an optimizer or a schedule and the Trainer received one too;
                if an argument is not compatible with an engine.
        """
        if offload_config is None:
            raise ConfigError(
                f"{type(self).__name__} needs offload_config=, the path of a DeepSpeed-style JSON or its content"
            )
        self._content = content_of(offload_config)
        self._schedule: Any = None
        self._chunked_loss, self._loss = chunked_loss, ChosenLoss(chunked=False)
        self._step_at_once, self._last_checkpoint = StepAtOnce(), LastCheckpoint()
        super().__init__(*args, **kwargs)
        self.add_callback(self._last_checkpoint)
        for block, given in (
            ("optimizer", self.optimizer or self.optimizer_cls_and_kwargs),
            ("scheduler", self.lr_scheduler),
        ):
            if given is not None and self._content.get(block) is not None:
                raise ConfigError(
                    f'the config has a block "{block}", and the Trainer was given one of its own; remove one of them'
                )

    @property
    def engine(self) -> Engine | None:
        """The engine, from the first `train()`, `evaluate()` or `predict()` on; None before."""
        engine: Engine | None = self.accelerator.engine
        return engine

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains as the Trainer does. If a Ctrl-C or an error ends the training, logs the checkpoint that is kept.

        `resume_from_checkpoint=True` resumes from the last checkpoint whose save was complete.
        """
        with announced_end(self, self._last_checkpoint):
            return super().train(last_complete(resume_from_checkpoint, self.args), *args, **kwargs)

    # -- beginning ----------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Checks the arguments and completes the config.

        Called by the Trainer's `__init__` as soon as its arguments are known.

        Raises:
            ConfigError: if an argument is not compatible with an engine, or if Accelerate was launched with DeepSpeed
                or FSDP.
        """
        check_arguments(self.args)
        check_model(self.model)
        check_kinds(self._content, self.args)
        self._content = filled(self._content, values_of_arguments(self._content, self.args))
        # Raises for invalid values now. The schedule may still need the number of steps.
        load_config(without(self._content, "scheduler"))
        super().create_accelerator_and_postprocess()
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ConfigError("Accelerate was launched with DeepSpeed or FSDP; launch OffloadTrainer by torchrun")
        # The object stays and only its class changes: the Trainer's `gather_function` is bound to the object already.
        self.accelerator.__class__ = _TrainersAccelerator
        # `create_optimizer` and `create_scheduler` construct objects from these two blocks. The engine receives the
        # objects, so its config has neither block.
        self.accelerator.offload_config = without(self._content, "optimizer", "scheduler")
        # The engine handles precision: Accelerate must neither autocast nor scale the loss a second time.
        self.accelerator.native_amp, self.accelerator.scaler = False, None
        # Nor may it compile the whole model: the engine compiles the blocks.
        self.accelerator.state.dynamo_plugin.backend = "NO"

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Does nothing: the engine places weights."""
        return

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of the Trainer's method; before the engine is built, chooses the loss."""
        if self.engine is None:
            self._loss = _choose_loss(self, self._chunked_loss)
        return super()._wrap_model(model, *args, **kwargs)

    def call_model_init(self, *args: Any, **kwargs: Any) -> Any:
        """Ends the engine of the previous model, removes its run, and returns a new model."""
        if self.accelerator.engine is not None:
            # Otherwise two engines would use the same run folder and the same device memory.
            self.accelerator.engine.destroy(remove=True)
            self.accelerator.engine = None
        return super().call_model_init(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Creates the config's optimizer over all trainable parameters, or the optimizer of the Trainer's arguments."""
        if self.optimizer is None:
            config = self._config(self.state.max_steps)  # raises now if the schedule is invalid
            if config.optimizer is not None:
                trainable = [p for p in self.model.parameters() if p.requires_grad]
                self.optimizer = from_config(trainable, config.optimizer, self.model)
            elif self.optimizer_cls_and_kwargs is None:
                check_optim(getattr(self.args.optim, "value", self.args.optim))
        return super().create_optimizer(*args, **kwargs)

    def create_scheduler(self, num_training_steps: int, *args: Any, **kwargs: Any) -> Any:
        """Creates the config's schedule, or the schedule of the Trainer's arguments."""
        block = self._config(num_training_steps).scheduler
        if block is None:
            return super().create_scheduler(num_training_steps, *args, **kwargs)
        if self.lr_scheduler is None or self.lr_scheduler is self._schedule:  # a second train() starts a new schedule
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
            self.lr_scheduler = self._schedule = choose_scheduler(block, None, optimizer).schedule
        return self.lr_scheduler

    def _config(self, steps: int) -> Config:
        """Returns the complete config of a training of `steps` steps; without a schedule if `steps` <= 0 (unknown)."""
        if steps <= 0:
            return load_config(without(self._content, "scheduler"))
        return load_config(filled(self._content, schedule_values(self._content, self.args, steps)))

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Fetches the micro-batches of a step, and the number of their items, as the Trainer does."""
        batches, items = super().get_batch_samples(*args, **kwargs)
        self._step_at_once.fetched(self, batches)
        return batches, items

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the number of items of a step in fp32, whatever the default dtype of the process is."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            return super()._get_num_items_in_batch(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs forward and backward of a micro-batch, or of all micro-batches of the step if this is the first.

        Returns the loss of this micro-batch, detached.
        """
        step = super().training_step
        sums = vars(self).get("_tr_loss")
        if sums is not None and sums.dtype is not torch.float32:
            self._tr_loss = sums.float()
        with without_logits(self.model):
            return self._step_at_once.result(self, inputs, lambda batch: step(model, batch, *args, **kwargs))

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates as the Trainer does. A call before `train()` builds the engine, which `train()` then uses."""
        if self.engine is None:
            # An engine is built only once for a model, so it must have the optimizer that `train()` will need.
            if any(p.requires_grad for p in self.model.parameters()):
                self._loss = _choose_loss(self, self._chunked_loss)
                _, self.optimizer = self.accelerator.prepare(self.model, self.create_optimizer())
            else:
                config = self.accelerator.beside_references(self.accelerator.offload_config)
                self.accelerator.use(initialize(model=self.model, config=config).engine)
        assert self.engine is not None
        with self.engine.evaluation() as evaluation:
            output = super().evaluation_loop(*args, **kwargs)
            # Predictions, and evaluations on one of several data sets, name the loss otherwise; the log leaves it out.
            evaluation.loss = (output.metrics or {}).get("eval_loss")
        return output

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any) -> Any:
        """Evaluates a batch, without logits if only the loss is asked for."""
        step = super().prediction_step
        # transformers' own method reads no logits if only the loss is asked for; an overriding method may.
        plain = getattr(step, "__func__", None) is Trainer.prediction_step and is_of(step, "transformers")
        with without_logits(self.model) if prediction_loss_only and plain else nullcontext():
            return step(model, inputs, prediction_loss_only, *args, **kwargs)

    def autocast_smart_context_manager(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the context for each forward: autocast if `torch_autocast` of the config enables it."""
        if self.engine is None:
            return super().autocast_smart_context_manager(*args, **kwargs)
        return self.engine.autocast()

    # -- checkpoints --------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Saves the model by the engine, or the weights `state_dict`, and the rest as the Trainer does."""
        if self.engine is None or state_dict is not None:
            super()._save(output_dir, state_dict)
            return
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        # A collective: every rank calls it, while only one process saves the arguments.
        self.engine.save_pretrained(folder, tokenizer=tokenizer)
        if self.args.should_save:
            torch.save(self.args, folder / _ARGUMENTS)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.engine is not None
        self.engine.save_checkpoint(
            output_dir,
            client_state={_CHUNKED: self._loss.chunked},
            exclude_frozen_parameters=hasattr(self.model, "peft_config"),  # the adapters alone, as peft saves them
        )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Checks a checkpoint that will be loaded as soon as the engine exists; raises `StoreError`."""
        check_resumable(Path(resume_from_checkpoint), self.args)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads the engine's checkpoint from the Trainer's; only weights if the Trainer saved only weights."""
        if checkpoint is None:
            return
        assert self.engine is not None
        if not has_engine(Path(checkpoint)):
            logger.warning(
                "%s contains only weights (save_only_model): the optimizer starts with empty states", checkpoint
            )
            super()._load_from_checkpoint(checkpoint)
            return
        state = load_into(self.engine, checkpoint, self.args.device)
        self._last_checkpoint.folder = Path(checkpoint)
        # By default the loss with which the training began. Checkpoints of earlier versions do not record the loss.
        begun = as_begun(self._loss, self._chunked_loss, bool(state.get(_CHUNKED)))
        if begun is not self._loss:
            self._loss = _logged(begun)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER), weights_only=True))
        if hasattr(self.lr_scheduler, "get_last_lr"):
            self.engine.set_lr(self.lr_scheduler.get_last_lr())

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if self.engine is None or not has_engine(Path(best)):
            super()._load_best_model()
            return
        logger.info("the best model is that of %s, with a metric of %s", best, self.state.best_metric)
        self.engine.load_checkpoint(best, load_module_only=True)


OFF = "chunked_loss=False"
"""The argument that turns the chunks off."""
_CHUNKED = "chunked_loss"
"""Key of the loss in the state of the engine's checkpoint."""


def _choose_loss(trainer: Any, wanted: bool | None) -> ChosenLoss:
    """Returns the loss of a Trainer's model, before its engine is built, and logs a line about it."""
    # An argument of the Trainer may need all logits, or set another loss.
    reason = None
    if trainer.compute_loss_func is not None:
        reason = "compute_loss_func receives all logits"
    elif trainer.label_smoother is not None:
        reason = "label_smoothing_factor is computed from all logits"
    elif trainer.args.use_liger_kernel:
        reason = "use_liger_kernel brings a loss of its own"
    if wanted and reason is not None:
        raise ConfigError(f"chunked_loss=True computes no logits, but {reason}; leave one of the two out")
    # Code of a subclass may read the logits. Only the subclass's author knows, and decides by the argument.
    if wanted is None and reason is None:
        for name in ("compute_loss", "training_step"):
            if own_method(trainer, name) is not None:
                reason = f"{type(trainer).__name__}.{name} may read the logits (chunked_loss=True if it does not)"
                break
    # By default only the Trainer's own steps use chunks: a callback that calls the model may read the logits.
    return _logged(choose_loss(trainer.model, wanted, off=OFF, training=wanted is True, reason=reason))


def _logged(loss: ChosenLoss) -> ChosenLoss:
    if loss.line is not None:
        logger.info(loss.line)
    return loss


class OffloadTrainer(OffloadMixin, Trainer):
    """transformers' `Trainer`, with weights, gradients and optimizer states placed by `offload_config`."""
