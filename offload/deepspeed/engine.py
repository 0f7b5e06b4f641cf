"""`deepspeed.DeepSpeedEngine`: the engine, with the methods that only DeepSpeed's engine has."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from offload.engine import step
from offload.engine.data import map_tensors
from offload.engine.engine import Engine
from offload.engine.optimizer import Optimizer
from offload.errors import UsageError
from offload.torch_internals.graphs import adds_up

__all__ = ["DeepSpeedEngine", "DeepSpeedOptimizer", "DeepSpeedOptimizerCallable", "DeepSpeedSchedulerCallable"]

DeepSpeedOptimizer = Optimizer
DeepSpeedOptimizerCallable = Callable[[Any], torch.optim.Optimizer]
DeepSpeedSchedulerCallable = Callable[[torch.optim.Optimizer], Any]


class DeepSpeedEngine(Engine):
    """An `offload.Engine` with the methods that only DeepSpeed's engine has. Created by `deepspeed.initialize`."""

    _names_page = (
        "; the names of DeepSpeed that there are have the page reference/deepspeed-names, and what there is in their "
        "place the page reference/deepspeed-compatibility"
    )

    def __init__(self, engine: Engine) -> None:
        """Replaces `engine`, an engine of `offload.initialize`: both act on the same components."""
        # The core holds all state; an engine only adds methods.
        super().__init__(engine._core, engine.notices)
        self._divides = True
        """False while `backward` runs, since `backward` itself divides the loss."""
        self._one = torch.ones((), dtype=torch.float32, device="cpu", requires_grad=True)
        """Factor of gradients that `torch.autograd.grad` returns with create_graph. Its hook catches their backward."""
        self._one.register_hook(self._refuse_second_order)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model as `offload.Engine` does.

        In a plain `loss.backward()`, the gradients that enter the model's outputs are divided by
        gradient_accumulation_steps, as in DeepSpeed 0.19. In `torch.autograd.grad` and torch.func they are not, since
        these functions accumulate no gradient.
        """
        # Without accumulation there is nothing to divide, and the output stays the model's own.
        if not torch.is_grad_enabled() or self.gradient_accumulation_steps() == 1:
            return super().__call__(*args, **kwargs)
        return map_tensors(self._watched, super().__call__(*args, **kwargs))

    forward = __call__

    def _watched(self, output: torch.Tensor) -> torch.Tensor:
        """Returns a view of an output. A plain backward divides the gradient that reaches the view."""
        if not output.requires_grad:
            return output
        # A view, since the model may have computed a loss from its logits: each path to the logits divides only once.
        view = output.view_as(output)
        assert view.grad_fn is not None
        ((behind, _),) = view.grad_fn.next_functions
        view.register_hook(lambda gradient: self._entering(gradient, behind))
        return view

    def _entering(self, gradient: torch.Tensor, behind: Any) -> torch.Tensor:
        """Returns the gradient that enters the model for an output; `behind` is the output's node in the graph."""
        if not self._divides:
            return gradient
        trained = (parameter for parameter in self.module.parameters() if parameter.requires_grad)
        if adds_up(trained, behind):
            return gradient / self.gradient_accumulation_steps()
        # With create_graph the gradient depends on the weights, and its backward to them does not pass this hook.
        return gradient * self._one if torch.is_grad_enabled() else gradient

    def _refuse_second_order(self, _: torch.Tensor) -> None:
        if self._divides:
            raise UsageError(
                "loss.backward() of a gradient that was taken through the engine with create_graph, as of a gradient "
                f"penalty, would leave a part undivided by the {self.gradient_accumulation_steps()} "
                "gradient_accumulation_steps; call engine.backward(loss), which divides the whole loss"
            )

    def _run_backward(self, loss: torch.Tensor, retain_graph: bool, scale_wrt_gas: bool) -> torch.Tensor:
        self._divides = False
        try:
            return super()._run_backward(loss, retain_graph, scale_wrt_gas)
        finally:
            self._divides = True

    def eval_batch(self, data_iter: Iterator[Any], num_micro_batches: int | None = None) -> torch.Tensor:
        """Returns the mean loss of some micro-batches, without gradients and in evaluation mode.

        Args:
            data_iter: an iterator of micro-batches, as for `train_batch`.
            num_micro_batches: number of micro-batches; by default as many as in a step.

        Returns:
            () fp32, on the device of the losses, of this rank.

        Raises:
            UsageError: if `data_iter` is no iterator, or the model returns no loss of one element.
            StopIteration: if the data end too early.
        """
        step.check_batches(data_iter)
        # After an error the model must be in its previous mode.
        mode = self.module.training
        self.eval()
        try:
            with torch.no_grad():
                # As many as in a step, so that the losses can be compared.
                count = self.gradient_accumulation_steps() if num_micro_batches is None else num_micro_batches
                losses = [step.run(self, next(data_iter)) for _ in range(count)]
        finally:
            self.train(mode)
        return torch.stack([loss.float() for loss in losses]).mean()

    @property
    def _modules(self) -> dict[str, torch.nn.Module]:
        """The model under the name of a wrapper's submodule: accelerate reads it to look for compiled regions."""
        return {"module": self.module}

    # -- weights in one place -----------------------------------------------------------------------

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Returns the result of `module_state_dict` on rank 0, and None on other ranks; for transformers' Trainer."""
        self._core.components.refuse_shards("a state dict on rank 0")
        state = self.module_state_dict(exclude_frozen_parameters) if self.global_rank == 0 else None
        self._core.state.mark_saved()  # the callers, the Trainer and accelerate, save the result
        return state

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the weights in the compute dtype into one file: safetensors, or a pickle as DeepSpeed does.

        Args:
            save_dir: the folder of the file, created if it does not exist.
            save_filename: name of the file. A name that ends with ".safetensors" is streamed, as by `offload.Engine`;
                for any other, such as the default, all weights are in memory at one time.
            exclude_frozen_parameters: True to leave out frozen parameters.

        Returns:
            False, after a warning, if the config sets stage3_gather_16bit_weights_on_model_save to false in stage 3;
            True otherwise.

        Raises:
            BudgetError: if the weights of a pickle do not fit into the RAM.
            UsageError: for a pickle of a model that a pipeline or tensor parallelism divides.
        """
        # The parent warns if nothing is written, and streams safetensors.
        gathers = self.zero_gather_16bit_weights_on_model_save() or self.zero_optimization_stage() != 3
        if save_filename.endswith(".safetensors") or not gathers:
            return super().save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)
        self._core.components.refuse_shards("a pickle of save_16bit_model")
        # Rank 0 may read weights without the other ranks.
        if self.global_rank == 0:
            folder = Path(save_dir)
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.module_state_dict(exclude_frozen_parameters), folder / save_filename)
        return True

    save_fp16_model = save_16bit_model

    # -- the config ---------------------------------------------------------------------------------

    def get_batch_info(self) -> tuple[int, int, int]:
        """Returns the samples in a step, the samples in this rank's micro-batch, and the micro-batches in a step."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def gradient_clipping(self) -> float:
        """Returns the largest norm of a step's gradient; 0 for no clip."""
        return self._settings.clip

    def zero_optimization(self) -> bool:
        """Returns True if the config names a stage of ZeRO above 0."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Returns True from stage 2 on."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Returns True in stage 3."""
        return self.zero_optimization_stage() >= 3

    def optimizer_name(self) -> str:
        """Returns the name of the first group's optimizer."""
        return self.get_type()[0]

    def dynamic_loss_scale(self) -> bool:
        """Returns True if the loss scale adapts, as in fp16 without a fixed one."""
        return self.fp16_enabled() and not self._settings.config.fp16.loss_scale

    def steps_per_print(self) -> int:
        """Returns the number of steps between two log lines; 0 for none."""
        return self._settings.config.steps_per_line

    def wall_clock_breakdown(self) -> bool:
        """Returns True if the log lines contain the seconds of each phase."""
        return self._settings.config.wall_clock_breakdown

    def zero_cpu_offload(self) -> bool:
        """Returns True if states of the optimizer are in host memory, by the config."""
        return self._settings.config.zero_optimization.offload_optimizer.device == "cpu"

    @property
    def dp_world_size(self) -> int:
        """Number of ranks that ZeRO divides states over."""
        return self._core.components.world.ranks.size

    def get_data_parallel_rank(self) -> int:
        """Returns the rank of this process among the ranks that ZeRO divides states over."""
        return self._core.components.world.ranks.rank

    def get_model_parallel_rank(self) -> int:
        """Returns the coordinate of this process in tensor parallelism; 0 without it."""
        return self._core.components.world.coordinate

    get_tensor_parallel_rank = get_model_parallel_rank

    # -- not here -----------------------------------------------------------------------------------

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Raises `UsageError`: activations were planned for the micro-batch of the config."""
        raise UsageError(
            f"the micro-batch size cannot become {micro_batch_size}: it is that of the config; change the number of "
            "micro-batches by set_train_batch_size"
        )
