"""The model of the complete config: its keys at the top level, and its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from offload.config.blocks import (
    CHANGES_TRAINING,
    CHUNK_SIZE,
    SIGNED,
    ActivationCheckpointing,
    Aio,
    Bf16,
    Block,
    CommsLogger,
    Compile,
    Count,
    CsvMonitor,
    DataTypes,
    ExpertParallel,
    FlopsProfiler,
    Fp8,
    Fp16,
    Number,
    OffloadBlock,
    OptimizerBlock,
    SchedulerBlock,
    SumDtype,
    TensorBoard,
    TensorParallel,
    Tier,
    TorchAutocast,
    Wandb,
    ZeroOptimization,
    all_blocks,
    key,
    missing,
    split_names,
    steps_or_never,
)
from offload.errors import ConfigError

# -- elsewhere -----------------------------------------------------------------------------------------
#
# Blocks of DeepSpeed whose keys change nothing here.


class Checkpoint(Block):
    """How DeepSpeed writes and reads checkpoints: none of it has an effect on the ones of this library."""

    UNSUPPORTED = split_names("tag_validation use_node_local_storage parallel_write checkpoint_serialization writer")

    load_universal: bool = key(
        "universal checkpoints are recognized by their files, with this key and without it", False
    )


# -- schema --------------------------------------------------------------------------------------------


class Findings(NamedTuple):
    """Dotted names of keys that a file contains but the values of the config do not show."""

    tuning: list[str]
    unsupported: list[str]
    auto: list[str]
    """Keys that have an effect and whose value was "auto"."""
    honoured: list[str]
    """Keys that have an effect and a value of their own."""
    errors: list[ConfigError]
    """What is wrong."""
    off: dict[str, str]
    """Keys that ask for nothing, each with the reason."""


def no_findings() -> Findings:
    """Returns an empty `Findings`, which the caller may extend."""
    return Findings([], [], [], [], [], {})


class Config(Block):
    """The top level of a config: values, and blocks with further keys.

    Properties derive from several keys what they mean together.
    """

    TUNING = split_names("zero_allow_untested_optimizer zero_force_ds_cpu_optimizer")
    # Accepted without effect: features that are missing and would not change a bit of the results.
    UNSUPPORTED = split_names(
        """dump_state log_level vocabulary_size timers prescale_gradients gradient_predivide_factor
        sparse_gradients disable_allgather seq_parallel_communication_data_type
        seq_parallel_comm_data_type use_data_before_expert_parallelism graph_harvesting nebula comet autotuning
        datastates_ckpt chunk_size"""
    )
    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "prescale_gradients": "each rank adds in fp32 what it receives and divides then: no number need be smaller",
        "gradient_predivide_factor": "each rank adds in fp32 what it receives and divides then, once",
        "sparse_gradients": "gradients of embeddings are dense, with the same numbers; ranks send them whole",
        "chunk_size": CHUNK_SIZE,
    }
    # Refused if switched on: without these features the training would be different.
    REFUSED: ClassVar[dict[str, str]] = {
        **dict.fromkeys(
            split_names(
                """sparse_attention compression_training weight_quantization quantize_training data_efficiency
                curriculum_learning elasticity progressive_layer_drop eigenvalue zenflow"""
            ),
            CHANGES_TRAINING,
        ),
        "amp": missing("is apex's mixed precision", 'set "bf16", "fp16" or "torch_autocast"'),
        "hybrid_engine": missing(
            "generates text by kernels of DeepSpeed", "model.generate works under the engine without it; remove it"
        ),
        "load_universal_checkpoint": (
            "is checkpoint.load_universal of DeepSpeed; remove it: load_checkpoint recognizes universal checkpoints by "
            "their files"
        ),
        "tensor_parallel_size": 'is no key of DeepSpeed; set "tensor_parallel": {"autotp_size": …} in its place',
        "pipeline": (
            "splits the layers over ranks; remove it: here deepspeed.pipe.PipelineModule does, or stages of torch, as "
            "the guide to pipeline parallelism says"
        ),
        "data_parallel_size": (
            "is the number of processes, which the launcher sets (torchrun --nproc-per-node); remove it"
        ),
    }
    # Older spellings that DeepSpeed still accepts.
    OLD_NAMES: ClassVar[dict[str, str]] = {"bfloat16": "bf16"}

    train_batch_size: Count | None = key("samples of a step on all ranks")
    train_micro_batch_size_per_gpu: Count | None = key("samples of a forward on one rank")
    gradient_accumulation_steps: Count | None = key("micro-batches of a step")
    managed_gradient_accumulation: Literal[True] = key(
        "only true; a loop ends steps itself by `engine.set_gradient_accumulation_boundary`", True
    )
    sequence_parallel_size: Count = key(
        "ranks that share each sequence, a divisor of their number; each computes a part of it, and a part of the "
        "heads in attention; for causal language models of transformers",
        1,
    )
    gradient_clipping: Number = key("largest global norm of the gradient; 0 leaves it as it is", 1.0)
    gradient_allreduce_op: Literal["mean"] = key("of several ranks' gradients: only mean", "mean")
    communication_data_type: SumDtype | None = key(
        "dtype in which ranks send gradients, which each adds up in fp32; default: that of a backward's gradients, or "
        "of their sums where several micro-batches are reduced at once"
    )
    dataloader_drop_last: bool = key(
        "whether the loader of `training_data` leaves the last incomplete batch out", False
    )
    optimizer: OptimizerBlock | None = key("see below")
    scheduler: SchedulerBlock | None = key("see below")
    bf16: Bf16 = key("bf16 weights with split fp32 masters; older name: bfloat16", Bf16())
    fp16: Fp16 = key("fp16 weights with fp32 masters, and a scaled loss", Fp16())
    activation_checkpointing: ActivationCheckpointing = key("see below", ActivationCheckpointing())
    checkpoint: Checkpoint = key("see below", Checkpoint())
    torch_autocast: TorchAutocast = key("fp32 weights, and torch's autocast around each forward", TorchAutocast())
    expert_parallel: ExpertParallel = key(
        "each rank owns whole experts of a layer, to which tokens travel", ExpertParallel()
    )
    fp8: Fp8 = key("linear layers of the blocks multiply in fp8, by torchao", Fp8())
    tensor_parallel: TensorParallel = key(
        "each layer is divided over ranks by the plan of transformers", TensorParallel()
    )
    compile: Compile = key("each block of the model as torch.compile makes it", Compile())
    data_types: DataTypes = key("see below", DataTypes())
    aio: Aio = key("see below", Aio())
    steps_per_print: Annotated[int, BeforeValidator(steps_or_never), Field(ge=0)] | None = key(
        "steps from one line about training to the next; 0 or Infinity: none; default: none, and 10 with one of the "
        "next two"
    )
    wall_clock_breakdown: bool = key("measure the phases and the waits of a step; see guides/monitor-a-run.md", False)
    memory_breakdown: bool = key("add the peaks of memory to the line", False)
    flops_profiler: FlopsProfiler = key("see below", FlopsProfiler())
    comms_logger: CommsLogger = key("see below", CommsLogger())
    tensorboard: TensorBoard = key("see below", TensorBoard())
    csv_monitor: CsvMonitor = key("see below", CsvMonitor())
    wandb: Wandb = key("see below", Wandb())
    zero_optimization: ZeroOptimization = key("see below", ZeroOptimization())
    offload: OffloadBlock = key("see below", OffloadBlock())

    @model_validator(mode="before")
    @classmethod
    def _whole_where_signs_are_sent(cls, content: Any) -> Any:
        """Returns the content. Each rank is a replica if the optimizer sends signs, in stage 1 too, as in DeepSpeed."""
        optimizer, zero = (content.get(name, {}) for name in ("optimizer", "zero_optimization"))
        if not isinstance(optimizer, Mapping) or not isinstance(zero, Mapping) or "mics_shard_size" in zero:
            return content
        signed = str(optimizer.get("type")).lower() in [name.lower() for name in SIGNED]
        return {**content, "zero_optimization": {**zero, "mics_shard_size": 1}} if signed else content

    # Set by `load_config`, once, before anybody reads the config.
    _findings: Findings = PrivateAttr(default_factory=no_findings)

    @property
    def weight_tier(self) -> Tier:
        """Tier of the weights between uses: "none" (the compute device), "cpu" or "nvme"."""
        return self.zero_optimization.offload_param.device

    @property
    def optimizer_tier(self) -> Tier:
        """Tier of the optimizer states between steps: "none" (the compute device), "cpu" or "nvme"."""
        return self.zero_optimization.offload_optimizer.device

    @property
    def drives(self) -> tuple[str, ...]:
        zero = self.zero_optimization
        # The folders of the block "offload" count only if neither of the two blocks names one.
        named = (*zero.offload_optimizer.nvme_path, *zero.offload_param.nvme_path)
        return tuple(dict.fromkeys(named or self.offload.nvme_path))

    @property
    def wants_store(self) -> bool:
        """True if the config asks for a store. A resumed run, or one with little memory, may use one in any case."""
        return "nvme" in (self.weight_tier, self.optimizer_tier) or self.offload.wants_store

    @property
    def activation_tier(self) -> Literal["device", "cpu", "nvme", "auto"] | None:
        """Tier of the inputs of blocks that are computed again in backward; None if no block is."""
        if self.offload.activations is not None:
            return self.offload.activations
        block = self.activation_checkpointing
        return ("cpu" if block.cpu_checkpointing else "device") if block.computes_again else None

    @property
    def dtype(self) -> Literal["bf16", "fp16", "fp32"]:
        return "bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else "fp32"

    @property
    def moments(self) -> Literal["fp32", "bf16", "int8"]:
        if self.offload.moments is not None:
            return self.offload.moments
        return "bf16" if self.bf16.enabled and self.bf16.bf16_optimizer_states else "fp32"

    @property
    def casts_inputs(self) -> bool | None:
        """True if inputs are cast to the dtype of 16-bit weights; None if the file does not say; False with fp32."""
        block = self.bf16 if self.bf16.enabled else self.fp16
        return block.auto_cast if block.enabled else False

    @property
    def left_open(self) -> tuple[str, ...]:
        """Dotted names of keys that have an effect and whose value was "auto"."""
        return tuple(self._findings.auto)

    @property
    def steps_per_line(self) -> int:
        """Steps from one log line about training to the next; 0 for no lines."""
        if self.steps_per_print is None:
            return 10 if self.wall_clock_breakdown or self.memory_breakdown else 0
        return self.steps_per_print

    @property
    def units(self) -> tuple[str, ...]:
        """Modules that the user names as units, DeepSpeed's leaf modules included."""
        leaf = self.zero_optimization.leaf_module
        return tuple(dict.fromkeys((*self.offload.units, *leaf.classes, *leaf.names)))

    @property
    def notices(self) -> tuple[str, ...]:
        """One line for each kind of key that has no effect in this library."""
        zero, tuning, unsupported = self.zero_optimization, self._findings.tuning, self._findings.unsupported
        named = zero.offload_optimizer.nvme_path or zero.offload_param.nvme_path
        lines = (
            (
                tuning,
                "config keys without effect, since this library chooses these values itself: "
                f"{', '.join(sorted(tuning))}",
            ),
            (unsupported, f"config keys that are not supported and are ignored: {', '.join(sorted(unsupported))}"),
            (
                "stage" in zero.model_fields_set and zero.stage < 3 and zero.offload_param.device != "none",
                f"offload_param is honoured at ZeRO stage {zero.stage} too, as at stage 3",
            ),
            (
                named and not self.wants_store and self.activation_tier in (None, "device"),
                "nvme_path is used only if memory is short or a run is resumed: no tier is nvme",
            ),
            (
                self.offload.activation_memory is not None and self.activation_tier in (None, "device"),
                'activation_memory has no effect: it limits inputs in host memory, and "activations" is '
                f"{self.activation_tier or 'not set'}",
            ),
            (
                self.offload.keep_attention and self.activation_tier is None,
                'keep_attention has no effect: no block is computed again, since "activations" is not set',
            ),
            (
                self.activation_checkpointing.profile and self.activation_tier is None,
                "activation_checkpointing.profile has no effect: no block is computed again; set "
                '"number_checkpoints" beside it, or "activations" in the "offload" block',
            ),
        )
        return tuple(line for holds, line in lines if holds)


def reasons() -> Iterator[tuple[str, str]]:
    """Yields each key without effect whose reason users ask for, by its dotted name, and the reason."""
    for path, model in all_blocks(Config, ""):
        prefix = f"{path}." if path else ""
        for name, reason in model.WITHOUT_EFFECT.items():
            yield f"{prefix}{name}", reason
