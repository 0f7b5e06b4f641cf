"""The block "offload"."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from offload.config.blocks.block import Block
from offload.config.blocks.values import (
    Count,
    DeviceName,
    Integer,
    Memory,
    Name,
    Names,
    Number,
    Paths,
    Ratio,
    Tiles,
    expanded,
)


class Debug(Block):
    """Switches that find faults."""

    poison: bool = Field(False, description="fill freed device memory with NaN and place weights at random addresses")
    overlap: bool = Field(True, description="run updates while the next forward runs")


class Every(Block):
    """The interval of commits; takes the place of a word such as "step"."""

    every: Count = Field(description="steps from one commit to the next; a kill loses the steps since the last commit")


class OffloadBlock(Block):
    """All keys that DeepSpeed does not have."""

    OWN_AUTO = ("run", "resume", "io_backend", "activations", "speculate", "tile_mlp")

    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)] = Field(
        "default", description="name of the run: its folder under each nvme_path"
    )
    nvme_path: Paths = Field(
        (), description="folder or list of folders for swap files, used if the blocks above name none"
    )
    device: DeviceName = Field(
        "auto",
        description="compute device: auto, cpu, cuda (ROCm too), or another accelerator of torch, such as xpu or npu; "
        "auto: the accelerator if there is one",
    )
    host_memory: Memory | None = Field(
        None,
        description="host budget of the process, as '16GiB'; default: as needed, at most 80 % of the free memory",
    )
    device_memory: Memory | None = Field(
        None, description="device budget for weights; default: states in the tier none, and three of the largest unit"
    )
    durability: Literal["auto", "step", "none"] | Every = Field(
        "auto",
        description='step: every step survives a kill; {"every": 10}: every tenth; none: half the disk, no resume; '
        "auto: step where it fits",
    )
    resume: Literal["never", "auto", "must", "restart"] = Field(
        "never",
        description="auto: resume the run in the swap files, if there is one; must: an error if there is none; "
        "restart: replace it by a new run; never: the same, but an error if the earlier run was killed and not closed "
        "by `destroy()`, or was another job whose last step was not saved",
    )
    seed: Annotated[Integer, Field(ge=0, lt=2**63)] = Field(
        0, description="seed of weights made by offload.init and of the loader"
    )
    frozen: Literal["int8", "nf4"] | None = Field(
        None,
        description="store the frozen matrices of linear layers and of stacked experts as blocks of codes, int8 or nf4 "
        "(4 bits): a half or about a quarter of the bytes on disk, in RAM and on the bus; the device makes weights of "
        "them for each use. Default: in the dtype of the model; see guides/frozen-weights.md",
    )
    activations: Literal["device", "cpu", "nvme", "auto"] | None = Field(
        None,
        description="blocks of the model are computed again in backward, and their inputs wait on the device, in host "
        "memory, in files, or (auto) where there is room; default: as activation_checkpointing says, else not at all",
    )
    activation_memory: Memory | None = Field(
        None,
        description="host memory for these inputs, part of host_memory; default: half of what host_memory leaves, or "
        "80 % of what is free",
    )
    experts: Literal["each", "visited", "whole"] = Field(
        "each",
        description="experts that transformers stacks in one parameter. each: each is a unit of its own, read only if "
        "a token visits it; visited: also, one without a token in a step is not updated; whole: the stack is part of "
        "its layer. See guides/mixtures-of-experts.md",
    )
    io_backend: Literal["auto", "io_uring", "libaio", "threads"] = Field(
        "auto", description="I/O interface of the swap files; auto: the first that the system allows"
    )
    speculate: Literal["auto"] | bool = Field(
        "auto",
        description="update a unit under the backward, as soon as its gradients are complete, before the norm is "
        "known; a step that clips makes the update again, with the same result. auto: on a GPU, until a step clips, "
        "and again after 8 steps that did not; true: on a CPU too. Needs two slots and states on nvme; see "
        "concepts/updates-and-commits.md",
    )
    moments: Literal["fp32", "bf16", "int8"] | None = Field(
        None,
        description="form of the optimizer's moments; bf16: half their bytes; int8: a quarter, in blocks of 256 with a "
        "scale each; both are rounded stochastically, with the same bits wherever they are stored; default: fp32, or "
        "bf16 with bf16_optimizer_states. See "
        "guides/which-states-which-bytes.md",
    )
    master: Literal["fp32", "bf24"] = Field(
        "fp32",
        description="form of the master of a bf16 weight; bf24: the upper 24 bits of an fp32, which are the weight and "
        "8 more bits in place of 16, rounded stochastically in each step. See guides/which-states-which-bytes.md",
    )
    units: Names = Field((), description="names or classes of modules that are one unit each")
    schedule: Literal["auto", "layer_major", "micro_batch_major"] = Field(
        "auto",
        description="order of several micro-batches: layer_major: all of them pass through a block before the next "
        "block is fetched; micro_batch_major: one after the other; auto: layer_major where blocks are computed again "
        "and weights come and go",
    )
    tile_mlp: Tiles = Field(
        False,
        description="compute the MLPs of a decoder of transformers chunk by chunk of the sequence, and again in the "
        "backward: a number of chunks, or auto: as many tokens each as the model has features, at least 1024; see "
        "reference/python/tiles.md",
    )
    trace: Annotated[Name, BeforeValidator(expanded)] | None = Field(
        None, description="file for a timeline of the run; see guides/find-the-bottleneck.md"
    )
    log: Annotated[Name, BeforeValidator(expanded)] | None = Field(
        None, description="file for a JSON object a step, for `offload report`; see guides/find-the-bottleneck.md"
    )
    drive_tbw: Annotated[Number, Field(gt=0)] | None = Field(
        None,
        description="rated endurance of each drive, in TB written (its data sheet's TBW; the least of several); "
        "see concepts/drive-wear.md",
    )
    drive_share: Annotated[Ratio, Field(gt=0)] = Field(
        0.1, description="fraction of drive_tbw above which a run is warned"
    )
    on_nonfinite: Literal["raise", "skip"] = Field("raise", description="response to a gradient norm of inf or NaN")
    debug: Debug = Field(Debug(), description="see below")

    @property
    def wants_store(self) -> bool:
        """True if a store is requested, whatever tier the states have."""
        return self.durability == "step" or isinstance(self.durability, Every)

    @property
    def commit_every(self) -> int:
        """Steps from one commit to the next, if there is a store with two slots."""
        return self.durability.every if isinstance(self.durability, Every) else 1
