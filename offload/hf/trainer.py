"""`OffloadTrainer`: transformers' `Trainer` whose model, gradients and optimizer states are an engine's.

    trainer = OffloadTrainer(model=model, args=args, train_dataset=dataset, offload_config="ds_config.json")

The loop is the Trainer's own. It gives its model and optimizer to `accelerator.prepare`, and there the engine comes in:
`Accelerator` of this package does a backward, a clip and a step by it. What is left for the mixin is to fill in the
config, to give the Trainer's checkpoints what the engine holds, and to refuse what cannot be (`arguments.py`).

[Note: names that are not public] Overridden here, though transformers does not promise them, each with what it is for:

    _move_model_to_device            the engine places weights: a model larger than the device never goes there whole
    _save                            weights are streamed into safetensors
    _save_optimizer_and_scheduler    the engine's checkpoint, in place of optimizer.pt
    _load_from_checkpoint            nothing is loaded yet: there is no engine
    _load_optimizer_and_scheduler    the engine's checkpoint, or weights alone
    _load_best_model                 the weights of the engine's checkpoint

and Accelerate's mark `_is_accelerate_prepared` is set, in `accelerator.py`. A test holds that all of them exist.
"""

from __future__ import annotations

import json
import logging
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Trainer

from offload.config import Config, load_config
from offload.engine.build.initialize import initialize
from offload.engine.checkpoint.files import LATEST
from offload.engine.engine import Engine
from offload.engine.optim.build_optimizer import from_config
from offload.engine.training.build_scheduler import choose
from offload.errors import ConfigError, StoreError
from offload.hf.accelerator import Accelerator
from offload.hf.arguments import check_arguments, check_kinds, check_model, check_optim, said_by_arguments
from offload.hf.auto_values import content_of, filled, said_of_schedule, without

logger = logging.getLogger("offload")

OVERRIDDEN = (
    "_move_model_to_device",
    "_save",
    "_save_optimizer_and_scheduler",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_best_model",
)
_SCHEDULER, _ARGUMENTS, _STOCK_OPTIMIZER = "scheduler.pt", "training_args.bin", "optimizer.pt"
_STATE = "trainer_state.json"

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class _TrainersAccelerator(Accelerator):
    """Its config is complete: the Trainer's arguments have said all, and the accumulation is not Accelerate's."""

    def _config(self, micro: int | None) -> dict[str, Any]:
        config: dict[str, Any] = self.offload_config
        return config


class OffloadMixin(_Base):
    """Put before a Trainer: `class MyTrainer(OffloadMixin, SFTTrainer)`. It takes `offload_config` beside all else."""

    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, offload_config: Any, **kwargs: Any) -> None:
        """`offload_config` is the path of a DeepSpeed-style JSON file, or its content as a dict."""
        self._content = content_of(offload_config)
        self._schedule: Any = None
        super().__init__(*args, **kwargs)
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
        """The engine, from the first `train()`, `evaluate()` or `predict()` on."""
        engine: Engine | None = self.accelerator.engine
        return engine

    # -- beginning ----------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Called by `__init__` as soon as it knows its arguments: the first moment to refuse them."""
        check_arguments(self.args)
        check_model(self.model)
        check_kinds(self._content, self.args)
        self._content = filled(self._content, said_by_arguments(self._content, self.args))
        load_config(without(self._content, "scheduler"))  # which may wait for the number of steps
        super().create_accelerator_and_postprocess()
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ConfigError("Accelerate was launched with DeepSpeed or FSDP; launch OffloadTrainer by torchrun")
        self.accelerator.__class__ = _TrainersAccelerator  # `gather_function` is bound to this very object
        self.accelerator.offload_config = without(self._content, "optimizer", "scheduler")
        self.accelerator.native_amp, self.accelerator.scaler = False, None  # precision is the engine's

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        return

    def call_model_init(self, *args: Any, **kwargs: Any) -> Any:
        """A new model: the engine of the one before ends."""
        if self.accelerator.engine is not None:
            self.accelerator.engine.destroy(remove=True)
            self.accelerator.engine = None
        return super().call_model_init(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The config's optimizer over all parameters that train, or that of the arguments in the Trainer's groups."""
        if self.optimizer is None:
            config = self._config(self.state.max_steps)  # a schedule that is wrong is an error now
            if config.optimizer is not None:
                trainable = [p for p in self.model.parameters() if p.requires_grad]
                self.optimizer = from_config(trainable, config.optimizer)
            elif self.optimizer_cls_and_kwargs is None:
                check_optim(getattr(self.args.optim, "value", self.args.optim))
        return super().create_optimizer(*args, **kwargs)

    def create_scheduler(self, num_training_steps: int, *args: Any, **kwargs: Any) -> Any:
        """The config's schedule, or that of the arguments."""
        block = self._config(num_training_steps).scheduler
        if block is None:
            return super().create_scheduler(num_training_steps, *args, **kwargs)
        if self.lr_scheduler is None or self.lr_scheduler is self._schedule:  # a second train() begins anew
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
            self.lr_scheduler = self._schedule = choose(block, None, optimizer).schedule
        return self.lr_scheduler

    def _config(self, steps: int) -> Config:
        """All of the config, for a training of so many steps; without the schedule where they are not known."""
        if steps <= 0:
            return load_config(without(self._content, "scheduler"))
        return load_config(filled(self._content, said_of_schedule(self._content, self.args, steps)))

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; before `train()` it makes the engine, with which `train()` goes on."""
        if self.engine is None:
            if any(p.requires_grad for p in self.model.parameters()):
                _, self.optimizer = self.accelerator.prepare(self.model, self.create_optimizer())
            else:
                config = self.accelerator.beside_references(self.accelerator.offload_config)
                self.accelerator.use(initialize(model=self.model, config=config).engine)
        return super().evaluation_loop(*args, **kwargs)

    def autocast_smart_context_manager(self, *args: Any, **kwargs: Any) -> Any:
        """What `torch_autocast` of the config asks for, round each forward."""
        if self.engine is None:
            return super().autocast_smart_context_manager(*args, **kwargs)
        return self.engine.autocast()

    # -- checkpoints --------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.engine is None or state_dict is not None:
            super()._save(output_dir, state_dict)
            return
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        self.engine.save_pretrained(folder, tokenizer=tokenizer)
        if self.args.should_save:
            torch.save(self.args, folder / _ARGUMENTS)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.engine is not None
        self.engine.save_checkpoint(output_dir, exclude_frozen_parameters=_has_adapters(self.model))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, _SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        if not folder.is_dir():
            raise StoreError(f"resume_from_checkpoint is {folder}, which is no folder")
        if (folder / _STOCK_OPTIMIZER).exists() and not _has_engine(folder):
            raise StoreError(
                f"{folder} is a checkpoint of the stock Trainer, whose optimizer.pt an engine does not read: begin "
                f"with its weights, from_pretrained({str(folder)!r}), and without resume_from_checkpoint"
            )
        _check_whole(folder, self.args)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self.engine is not None
        if not _has_engine(Path(checkpoint)):
            logger.warning("%s holds weights alone (save_only_model): the optimizer begins anew", checkpoint)
            super()._load_from_checkpoint(checkpoint)
            return
        self.engine.load_checkpoint(checkpoint)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, _SCHEDULER), weights_only=True))
        if hasattr(self.lr_scheduler, "get_last_lr"):
            self.engine.set_lr(self.lr_scheduler.get_last_lr())

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if self.engine is None or not _has_engine(Path(best)):
            super()._load_best_model()
            return
        logger.info("the best model is that of %s, with a metric of %s", best, self.state.best_metric)
        self.engine.load_checkpoint(best, load_module_only=True)


class OffloadTrainer(OffloadMixin, Trainer):
    """transformers' `Trainer`, with weights, gradients and optimizer states where `offload_config` says."""


def _has_engine(folder: Path) -> bool:
    """Whether an engine's checkpoint is in the Trainer's. Raises `StoreError` where it cannot be told."""
    if (folder / LATEST).is_file():
        return True
    if left := sorted(folder.glob("global_step*")):
        raise StoreError(
            f"{folder} has the engine's states in {left[-1].name}, but not the file {LATEST} that names it; write it: "
            f"echo {left[-1].name} > {folder / LATEST}"
        )
    return False


def _check_whole(folder: Path, args: Any) -> None:
    """Raise `StoreError` where a file that the Trainer itself reads is not there, or is cut short."""
    rng = f"rng_state_{args.process_index}.pth" if args.world_size > 1 else "rng_state.pth"
    goes_on = _has_engine(folder)  # else only its weights are taken
    needed = (_STATE, _SCHEDULER) if goes_on else (_STATE,)
    for name in (_STATE, _SCHEDULER, rng):
        there = (folder / name).exists()
        if (there and not _is_whole(folder / name)) or (not there and name in needed):
            raise StoreError(
                f"{folder} has no whole {name}: the save was cut short, or the file is lost; remove the folder and go "
                f"on from the checkpoint before, or begin with its weights, from_pretrained({str(folder)!r}), and "
                f"without resume_from_checkpoint"
            )
    if goes_on and not (folder / rng).exists():
        logger.warning("%s has no %s: dropout goes on with other random numbers than the unbroken run", folder, rng)


def _is_whole(path: Path) -> bool:
    """Whether a file of the Trainer's can be read to its end."""
    if path.suffix != ".json":
        return zipfile.is_zipfile(path)  # as torch.save writes it: its table of contents is the last part
    try:
        json.loads(path.read_bytes())
    except ValueError:
        return False
    return True


def _has_adapters(model: Any) -> bool:
    """Whether only adapters are saved as weights, so that frozen ones come from where the base model does."""
    return hasattr(model, "peft_config")
