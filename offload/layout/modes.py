"""Modes, which fix a parameter's states and their dtypes: precision of the weights, moments, dtype of the moments."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch

from offload.kernels.lamb import BLOCK as LAMB_BLOCK
from offload.sizes import PAGE, align_up
from offload.states import State


class RuleLayout(NamedTuple):
    """Facts about an update rule that the layout of memory needs."""

    moments: tuple[State, ...]
    """States of the optimizer, in the kernel's order of arguments; PACKED if its own code decides which."""
    elementwise: bool = True
    """True if the step of an element depends on no other element."""
    passes: int = 1
    """Largest number of passes over the states of a unit."""
    block: int = 1
    """Elements of a block of sums. A tile's number of elements is a multiple of it."""
    not_of_matrices: tuple[State, ...] = ()
    """States that a matrix does not have, if the rule steps matrices in its own way, each as a whole."""
    on_device: bool = False
    """True if the device has a kernel for the rule."""
    of_one_rank: tuple[State, ...] = ()
    """States that belong to one rank and have no meaning on another, even if each rank holds whole units."""


class Mode(NamedTuple):
    """Precision of the weights, states that complete a weight to its fp32 master, and the optimizer's moments."""

    precision: str
    optimizer: str
    weights: Mapping[State, torch.dtype]
    """WEIGHT, and MASTER_LOW_BITS or MASTER if the weight is not its own master."""
    moments: tuple[State, ...]
    """States of the optimizer, in the kernel's order of arguments; PACKED if its own code decides which."""
    moment_dtype: torch.dtype = torch.float32
    """Dtype of the moments: fp32, bf16 or int8. The kernels round to bf16 and int8 stochastically."""

    @property
    def name(self) -> str:
        """Returns the name in stores and checkpoints: "bf16", "bf16 lion", "bf16 bf24-master int8-moments"."""
        words = [self.precision]
        if self.optimizer != ADAM:
            words.append(self.optimizer)
        if self.master != "fp32":
            words.append(f"{self.master}-master")
        if self.moment_dtype is not torch.float32:
            words.append(f"{moments_name(self.moment_dtype)}-moments")
        return " ".join(words)

    @property
    def states(self) -> dict[State, torch.dtype]:
        """Returns the dtype of every state, in the order of the states in a tile."""
        if not self.in_blocks:
            return {**self.weights, **dict.fromkeys(self.moments, self.moment_dtype)}
        codes = {state: torch.uint8 if state in ROOTS else torch.int8 for state in self.moments}
        return {**self.weights, **codes, State.SCALES: torch.float32}

    @property
    def master(self) -> str:
        """Returns the form of the master, one of `MASTERS`."""
        return "bf24" if self.weights.get(State.MASTER_LOW_BITS) is torch.int8 else "fp32"

    @property
    def rounds(self) -> bool:
        """True if updates round moments or masters stochastically."""
        return self.moment_dtype is not torch.float32 or self.master != "fp32"

    @property
    def in_blocks(self) -> bool:
        """True if moments are codes of 8 bits, in blocks with scales of their own."""
        return self.moment_dtype is torch.int8

    @property
    def in_bytes(self) -> bool:
        """True if a state takes one byte an element: moments in 8 bits, or the low bits of a bf24 master."""
        return any(dtype.itemsize == 1 for dtype in self.states.values())

    @property
    def optimizer_states(self) -> tuple[State, ...]:
        """States that hold the moments: those in `moments`, and the scales of moments in 8 bits."""
        return (*self.moments, State.SCALES) if self.in_blocks else self.moments

    def part(self, state: State, start: int, stop: int) -> range:
        """Returns the values of a state that belong to elements [start, stop) of a partition.

        For SCALES, `start` is the first element of a block.
        """
        if state is not State.SCALES:
            return range(start, stop)
        return range(start // MOMENT_BLOCK * len(self.moments), -(-stop // MOMENT_BLOCK) * len(self.moments))

    def padded_part(self, state: State, start: int, stop: int) -> range:
        """Returns `part`, extended to the end of a page: the values of a tile, or of a partition, that ends there.

        `start` and each `stop` but the partition's end are multiples of `tile_step`.
        """
        part = self.part(state, start, stop)
        return part if state is not State.SCALES else range(part.start, align_up(part.stop, PAGE // _SCALE_NBYTES))

    @property
    def tile_step(self) -> int:
        """Step of a tile's elements, so that each state of a tile begins at a page."""
        return PAGE // _SCALE_NBYTES // len(self.moments) * MOMENT_BLOCK if self.in_blocks else self.page_step

    @property
    def page_step(self) -> int:
        """Elements that fill whole pages of each state except the scales: 4096 if a state takes one byte an element."""
        return PAGE if self.in_bytes else _STEP

    @property
    def rule(self) -> RuleLayout:
        """The layout of the optimizer's rule."""
        return RULE_LAYOUTS[self.optimizer]

    @property
    def one_pass(self) -> bool:
        """True if an update passes once over a unit, in tiles that may be smaller than the unit."""
        return self.rule.passes == 1 and not self.whole_units

    @property
    def whole_units(self) -> bool:
        """True if a tile of an update is a rank's whole partition of a unit, since a step needs whole parameters."""
        return State.PACKED in self.moments

    @property
    def matrix_rule(self) -> bool:
        """True if the optimizer steps each matrix as a whole, and all other parameters by AdamW."""
        return bool(self.rule.not_of_matrices)

    @property
    def steps_whole(self) -> bool:
        """True if the optimizer steps matrices, or all parameters, as a whole."""
        return self.whole_units or self.matrix_rule

    @property
    def partial(self) -> tuple[State, ...]:
        """States that a matrix does not have, if the optimizer has a rule for matrices."""
        return self.rule.not_of_matrices

    @property
    def weight_dtype(self) -> torch.dtype:
        """Returns the dtype of the weights."""
        return self.weights[State.WEIGHT]

    @property
    def in_fp32(self) -> Mode:
        """Returns the mode of a unit whose weights stay in fp32: the same optimizer, and the same form of moments."""
        return _in_fp32(self.optimizer, moments_name(self.moment_dtype))

    @property
    def element_bytes(self) -> int:
        """Returns the bytes of all states of one trainable element outside of matrices.

        PACKED and the scales of blocks are left out.
        With Adam: 12 in bf16 and fp32, 14 in fp16; with bf16 moments 8, 8 and 10; with int8 moments 6, 6 and 8. A bf24
        master takes one byte less.
        """
        uncounted = (State.PACKED, State.SCALES)
        return sum(dtype.itemsize for state, dtype in self.states.items() if state not in uncounted)


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Dtypes of weights, by their names in configs."""


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name in configs of one of `DTYPES`."""
    return next(name for name, candidate in DTYPES.items() if candidate is dtype)


def moments_name(dtype: torch.dtype) -> str:
    """Returns the name in configs of one of `MOMENT_DTYPES`."""
    return next(name for name, candidate in MOMENT_DTYPES.items() if candidate is dtype)


ADAM, LAMB, TORCH = "adam", "lamb", "torch"
ONE_BIT_ADAM, ZERO_ONE_ADAM, ONE_BIT_LAMB = "onebitadam", "zerooneadam", "onebitlamb"
MUON, SINKGD = "muon", "sinkgd"
# States that hold the weights, by precision, and the rules with their moments. A mode combines one of each.
PRECISIONS: dict[str, dict[State, torch.dtype]] = {
    # Weight and low bits together give the master bit for bit: see kernels.split_master.
    "bf16": {State.WEIGHT: torch.bfloat16, State.MASTER_LOW_BITS: torch.int16},
    "fp16": {State.WEIGHT: torch.float16, State.MASTER: torch.float32},
    # The weight is its own master.
    "fp32": {State.WEIGHT: torch.float32},
}
MASTERS: dict[str, dict[State, torch.dtype]] = {
    "fp32": {},
    # The upper 24 bits of an fp32; the kernels round to them stochastically.
    "bf24": {State.MASTER_LOW_BITS: torch.int8},
}
"""Forms of the master of a bf16 weight by their names in configs, with the states that differ from `PRECISIONS`."""
_ADAM = (State.EXP_AVG, State.EXP_AVG_SQ)
_ERRORS = (State.WORKER_ERROR, State.SERVER_ERROR)
SIGN_BLOCK = 2048
"""Elements that share one scale where ranks send signs. The trainable elements of a unit are whole blocks."""
RULE_LAYOUTS: dict[str, RuleLayout] = {
    ADAM: RuleLayout(_ADAM, on_device=True),
    LAMB: RuleLayout(_ADAM, elementwise=False, passes=2, block=LAMB_BLOCK),
    "adagrad": RuleLayout((State.SUM,)),
    "lion": RuleLayout((State.EXP_AVG,)),
    "momentum": RuleLayout((State.MOMENTUM_BUFFER,)),
    "sgd": RuleLayout(()),
    TORCH: RuleLayout((State.PACKED,), elementwise=False),
    # AdamW's moments, for elements outside of matrices. With Muon, the first is also a matrix's momentum.
    MUON: RuleLayout(_ADAM, elementwise=False, not_of_matrices=(State.EXP_AVG_SQ,)),
    SINKGD: RuleLayout(_ADAM, elementwise=False, not_of_matrices=_ADAM),
    ONE_BIT_ADAM: RuleLayout((*_ADAM, *_ERRORS), elementwise=False, block=SIGN_BLOCK, of_one_rank=_ERRORS),
    # The buffer contains what a rank has moved since ranks last exchanged their moves.
    ZERO_ONE_ADAM: RuleLayout(
        (*_ADAM, State.MOMENTUM_BUFFER, *_ERRORS),
        elementwise=False,
        block=SIGN_BLOCK,
        of_one_rank=(State.MOMENTUM_BUFFER, *_ERRORS),
    ),
    # PACKED contains `LAMB_COEFFICIENTS` of each parameter.
    ONE_BIT_LAMB: RuleLayout(
        (*_ADAM, State.EXP_AVG_SQ_FRESH, State.PACKED, *_ERRORS),
        elementwise=False,
        block=SIGN_BLOCK,
        of_one_rank=_ERRORS,
    ),
}
"""Rules by name; `optimizers.registry` has their steps."""
MOMENT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
"""Dtypes of moments, by their names in configs."""
ROOTS = (State.EXP_AVG_SQ, State.SUM)
"""Moments whose 8-bit codes hold the root, without a sign."""
MOMENT_BLOCK = 256
"""Elements of a block of moments in 8 bits, with one scale for each moment. The kernels use the same number."""
_SCALE_NBYTES = 4
_STEP = 2048
"""Step of a tile's elements if each state takes at least 2 bytes an element: 4096 bytes of the smallest state."""


def make_mode(precision: str, optimizer: str, moments: str = "fp32", master: str = "fp32") -> Mode:
    """Returns a mode.

    `moments`, one of `MOMENT_DTYPES`, has no effect if the optimizer has no moments, or its own code keeps them.
    `master`, one of `MASTERS`, has no effect if the weights are not bf16.
    """
    states = RULE_LAYOUTS[optimizer].moments
    dtype = MOMENT_DTYPES[moments] if states and State.PACKED not in states else torch.float32
    stored = PRECISIONS[precision]
    weights = {state: MASTERS[master].get(state, stored[state]) for state in stored}
    return Mode(precision, optimizer, weights, states, dtype)


@functools.cache
def _in_fp32(optimizer: str, moments: str) -> Mode:
    return make_mode("fp32", optimizer, moments)


MODES = {
    mode.name: mode
    for mode in (
        make_mode(precision, optimizer, moments, master)
        for precision in PRECISIONS
        for optimizer in RULE_LAYOUTS
        for moments in MOMENT_DTYPES
        for master in MASTERS
    )
}
