"""A stage of `torch.distributed.pipelining` over modules that an engine pages.

    schedule ─► forward_one_chunk ─► the module, whose hooks fetch weights
             ─► backward_one_chunk ─► autograd, whose gradients the engine takes; the loss is divided and scaled before
             ─► backward_weight_one_chunk ─► the second half, where a zero-bubble schedule asked for the first alone
             ─► scale_grads ─► nothing to divide: no parameter has a `.grad`

A graph that cannot be split (`split`) runs as a whole when its first half is due, and its second half is empty.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node
from torch.distributed.pipelining import PipelineStage
from torch.utils.hooks import RemovableHandle

from offload.engine.micro_batches import StageCalls
from offload.errors import OffloadError, UsageError
from offload.parallel.stage_run import StageRun

# -- split backward ------------------------------------------------------------------------------------
# The two halves of a backward: gradients of a stage's inputs first, gradients of its weights when the schedule has
# time.
#
#     loss ─► D ─► C ─► B ─► A ─► inputs      the path: the first half goes along it, and keeps the gradients that
#             arrive │         │    │                at D, B and A, below which weights are
#          weights   weights weights          the second half begins at D, B and A, one after the other, and leaves it
# A node of the path that also leads to weights computes each of its gradients in the half that needs it: torch's nodes
# compute only the requested gradients. A function of Python computes all gradients at once, and a function that
# recomputes a forward gives weights their gradients by itself. So a graph with such a function is not split.


@dataclass(eq=False)
class _Branch:
    """Weights that are reached from the same nodes of the path, and the gradients that have arrived at these nodes."""

    weights: list[torch.Tensor]
    nodes: list[Node]
    gradients: dict[int, tuple[torch.Tensor | None, ...]] = field(default_factory=dict)
    """Gradients that have arrived, by the position of their node in `nodes`."""

    def keep(self, position: int) -> RemovableHandle:
        """Returns a new hook that keeps the gradients that arrive at a node; the caller removes the hook."""

        def hook(gradients: tuple[torch.Tensor | None, ...]) -> None:
            self.gradients[position] = gradients

        return self.nodes[position].register_prehook(hook)

    def run(self) -> None:
        pairs = [
            (GradientEdge(node, output), gradient)
            for position, node in enumerate(self.nodes)
            for output, gradient in enumerate(self.gradients.get(position, ()))
            if gradient is not None
        ]
        handles = []
        if len(self.nodes) > 1:
            # A node may be below another node, whose gradient would arrive there a second time.
            # The hooks replace it by those that have arrived.
            handles = [
                node.register_prehook(lambda _, kept=self.gradients[number]: kept)
                for number, node in enumerate(self.nodes)
            ]
        try:
            if pairs:
                edges, gradients = zip(*pairs, strict=True)
                # Not `autograd.grad`: the engine takes gradients where a backward leaves them.
                # Between two nodes are nodes of other branches, which still need their saved tensors.
                torch.autograd.backward(edges, gradients, retain_graph=len(self.nodes) > 1, inputs=self.weights)
        finally:
            for handle in handles:
                handle.remove()


class SplitBackward:
    """The backward of a micro-batch through one stage, in two halves."""

    def __init__(self, branches: Sequence[_Branch]) -> None:
        # Branches with several nodes come first: they go through nodes of others, whose saved tensors must still exist.
        self._branches = sorted(branches, key=lambda branch: len(branch.nodes) == 1)

    def inputs(
        self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], inputs: Sequence[Any]
    ) -> tuple[torch.Tensor | None, ...]:
        """Runs the first half, and returns the gradient of each input; None for an input that needs no gradient.

        `outputs` of the stage need gradients, or are its loss, which has a gradient of None; `inputs` are as the
        forward received them.
        """
        wanted = [value for value in inputs if _needs(value)]
        handles = [branch.keep(n) for branch in self._branches for n in range(len(branch.nodes))]
        try:
            slopes = iter(torch.autograd.grad(outputs, wanted, gradients, retain_graph=True, allow_unused=True))
        finally:
            for handle in handles:
                handle.remove()
        return tuple(next(slopes) if _needs(value) else None for value in inputs)

    def weights(self) -> None:
        """Runs the second half, whose graph is freed branch by branch."""
        while self._branches:
            self._branches.pop(0).run()


def split(
    outputs: Sequence[torch.Tensor], inputs: Sequence[Any], weights: Iterable[torch.Tensor]
) -> SplitBackward | None:
    """Returns the backward of a graph in two halves; None if it can only run as one.

    `outputs` of the stage need gradients, or are its loss; `inputs` are as the forward received them.
    """
    users = _users([output.grad_fn for output in outputs if output.grad_fn is not None])
    if any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in users):
        return None
    ends = {id(value) for value in inputs if _needs(value)}
    # A leaf's node has the leaf as `variable`. To make the node by an operation on the weight would need its memory.
    leaves = [node for node in users if getattr(node, "variable", None) is not None]
    path = _above([node for node in leaves if id(_leaf(node)) in ends], users)
    weight_ids = {id(weight) for weight in weights}
    branches: list[_Branch] = []
    for leaf in leaves:
        if id(_leaf(leaf)) not in weight_ids:
            continue
        nodes = _borders(leaf, path, users)
        if not nodes:
            return None  # an output that does not depend on the inputs: no half would reach this weight
        shared = [branch for branch in branches if any(node in branch.nodes for node in nodes)]
        # All weights at one node are in one branch, since a node's saved tensors are freed with the branch.
        merged = _Branch([_leaf(leaf)], [])
        for branch in shared:
            branches.remove(branch)
            merged.weights = branch.weights + merged.weights
            nodes = [*branch.nodes, *(node for node in nodes if node not in branch.nodes)]
        merged.nodes = nodes
        branches.append(merged)
    return SplitBackward(branches) if path else None


def _needs(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _leaf(node: Any) -> torch.Tensor:
    leaf: torch.Tensor = node.variable
    return leaf


def _users(roots: Sequence[Node]) -> dict[Node, list[Node]]:
    """Returns all nodes of a graph, nodes near the roots first, with the nodes that pass gradients to each."""
    users: dict[Node, list[Node]] = defaultdict(list)
    queue = list(dict.fromkeys(roots))
    for root in queue:
        users[root]  # makes an entry: nothing passes gradients to a root
    for node in queue:
        for following, _ in node.next_functions:
            if following is not None:
                if following not in users:
                    queue.append(following)
                users[following].append(node)
    return dict(users)


def _above(leaves: Sequence[Node], users: Mapping[Node, Sequence[Node]]) -> set[Node]:
    """Returns the nodes through which gradients reach `leaves`, and `leaves` themselves."""
    above, queue = set(leaves), list(leaves)
    for node in queue:
        for user in users[node]:
            if user not in above:
                above.add(user)
                queue.append(user)
    return above


def _borders(leaf: Node, path: set[Node], users: Mapping[Node, Sequence[Node]]) -> list[Node]:
    """Returns the path's nodes that pass gradients on to `leaf`; none if some gradients come from elsewhere."""
    borders: dict[Node, None] = {}
    seen, queue = {leaf}, [leaf]
    for node in queue:
        if not users[node]:
            return []
        for user in users[node]:
            if user in path:
                borders[user] = None
            elif user not in seen:
                seen.add(user)
                queue.append(user)
    return list(borders)


# -- torch stage ---------------------------------------------------------------------------------------


class EngineStage(PipelineStage):
    """A stage whose weights and gradients are an engine's. Belongs to the thread that runs the model."""

    def __init__(
        self,
        module: nn.Module,
        index: int,
        num_stages: int,
        device: torch.device,
        group: Any,
        calls: StageCalls,
        run: StageRun,
    ) -> None:
        super().__init__(module, index, num_stages, device, group=group)
        self._calls, self._run = calls, run

    def clear_runtime_states(self) -> None:
        """Begins a run of the schedule."""
        super().clear_runtime_states()
        self._run.begin(self.stage_index)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        """Returns the receipt of a micro-batch's inputs.

        Raises `UsageError` if the schedule has another number of micro-batches than a step.
        """
        self._check()  # before this stage waits for the one before it, which finds the same error
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward of a micro-batch.

        Raises `UsageError` if the schedule has another number of micro-batches than a step.
        """
        self._check()
        with _own_errors():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Runs the backward of a micro-batch, or its first half, and counts it when all of it has run."""
        if not self.has_backward:
            return
        # Torch would divide `.grad` at the end of the schedule, and there is none: gradients are in the engine.
        begins = loss if loss is None else self._calls.divided(loss)

        def run() -> None:
            super(EngineStage, self).backward_one_chunk(bwd_chunk_id, begins, full_backward, last_backward)

        # The schedule's own thread runs all nodes, so that the engine's collectives keep their order.
        with _own_errors():
            self._calls.run_backward(run)
        if full_backward:
            self._count(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Runs the second half of the backward of a micro-batch, and counts it."""
        if not self.has_backward:
            return

        def run() -> None:
            super(EngineStage, self).backward_weight_one_chunk(bwd_chunk_id, last_backward)

        with _own_errors():
            self._calls.run_backward(run)
        self._count(bwd_chunk_id)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], Any]:
        """Runs a backward, or one half of it.

        Returns the gradients of the inputs, and for "input" the second half; None if nothing is left to do.
        """
        if backward_type == "weight":
            if bwd_kwargs["param_groups"] is not None:
                bwd_kwargs["param_groups"].weights()
            return (), None
        if backward_type == "input":
            outputs, gradients = bwd_kwargs["stage_output"], bwd_kwargs["output_grads"]
            slopes = gradients or (None,) * len(outputs)
            pairs = [(output, slope) for output, slope in zip(outputs, slopes, strict=True) if output.requires_grad]
            needed = [output for output, _ in pairs]
            halves = split(needed, bwd_kwargs["input_values"], self.submod.parameters())
            if halves is not None:
                return halves.inputs(needed, [slope for _, slope in pairs], bwd_kwargs["input_values"]), halves
            # The whole backward takes the loss itself, which torch has put into a tuple.
            bwd_kwargs = {**bwd_kwargs, "stage_output": outputs if gradients else outputs[0]}
        return super().backward_maybe_with_nosync("full", bwd_kwargs, last_backward)

    def _count(self, micro_batch: int) -> None:
        if self._run.end_backward(self.stage_index, micro_batch, divides=self.chunks != 1):
            self._calls.count_micro_batch()

    def _check(self) -> None:
        accumulation = self._calls.accumulation()
        if self.has_backward and self.chunks not in (None, accumulation):
            raise UsageError(
                f"the schedule has n_microbatches={self.chunks}, and gradient_accumulation_steps is {accumulation} in "
                "the config: a step is one run of the schedule, so give both the same number"
            )

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Records that gradients are a mean over micro-batches. They are one already, since each loss was divided."""
        self._run.divided(self.stage_index)


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Raises an error of this package that torch has wrapped in its own `RuntimeError`."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__cause__, OffloadError):
            raise error.__cause__ from error.__cause__.__cause__
        raise
