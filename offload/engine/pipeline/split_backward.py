"""The two halves of a backward: gradients of a stage's inputs first, those of its weights when the schedule has time.

    loss ─► D ─► C ─► B ─► A ─► inputs      the path: the first half goes along it, and keeps the gradients that arrive
            │         │    │                at D, B and A, below which weights are
         weights   weights weights          the second half begins at D, B and A, one after the other, and leaves it

A node of the path that has weights beside it computes both gradients, each in its half: torch's nodes compute what is
asked for. A function of Python computes all at once, and one that recomputes a forward gives gradients of weights by
itself, so a graph with such a function is not split.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle


@dataclass(eq=False)
class _Branch:
    """Weights that are reached from the same nodes of the path, and what has arrived at those."""

    weights: list[torch.Tensor]
    nodes: list[Node]
    gradients: dict[int, tuple[torch.Tensor | None, ...]] = field(default_factory=dict)
    """By the position of the node."""

    def keep(self, position: int) -> RemovableHandle:
        """Keeps what arrives at a node; the caller removes the hook."""

        def hook(gradients: tuple[torch.Tensor | None, ...]) -> None:
            self.gradients[position] = gradients

        return self.nodes[position].register_prehook(hook)

    def run(self) -> None:
        """Gives the weights their gradients."""
        found = [
            (GradientEdge(node, output), gradient)
            for position, node in enumerate(self.nodes)
            for output, gradient in enumerate(self.gradients.get(position, ()))
            if gradient is not None
        ]
        handles = []
        if len(self.nodes) > 1:
            # One of them may be below another, whose gradient would arrive there once more.
            handles = [node.register_prehook(_instead(self.gradients[n])) for n, node in enumerate(self.nodes)]
        try:
            if found:
                edges, gradients = zip(*found, strict=True)
                # Not `autograd.grad`: the engine takes gradients where a backward leaves them.
                # Between two nodes are those of other branches, which still need what they have saved.
                torch.autograd.backward(edges, gradients, retain_graph=len(self.nodes) > 1, inputs=self.weights)
        finally:
            for handle in handles:
                handle.remove()


def _instead(gradients: tuple[torch.Tensor | None, ...]) -> Callable[[Any], tuple[torch.Tensor | None, ...]]:
    """Returns a hook that puts gradients in the place of those that arrive."""
    return lambda _: gradients


class SplitBackward:
    """The backward of a micro-batch through one stage, in two halves."""

    def __init__(self, branches: Sequence[_Branch]) -> None:
        # Those of several nodes go through others, which must not have freed what they have saved by then.
        self._branches = sorted(branches, key=lambda branch: len(branch.nodes) == 1)

    def inputs(
        self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], inputs: Sequence[Any]
    ) -> tuple[torch.Tensor | None, ...]:
        """Runs the first half, and returns the gradient of each input; None for one that needs none.

        Args:
            outputs: Outputs of the stage that need gradients, or its loss.
            gradients: Their gradients; None for that of the loss.
            inputs: Its inputs, as the forward received them.
        """
        wanted = [each for each in inputs if _needs(each)]
        handles = [branch.keep(n) for branch in self._branches for n in range(len(branch.nodes))]
        try:
            found = iter(torch.autograd.grad(outputs, wanted, gradients, retain_graph=True, allow_unused=True))
        finally:
            for handle in handles:
                handle.remove()
        return tuple(next(found) if _needs(each) else None for each in inputs)

    def weights(self) -> None:
        """Runs the second half, whose graph is freed branch by branch."""
        while self._branches:
            self._branches.pop(0).run()


def split(
    outputs: Sequence[torch.Tensor], inputs: Sequence[Any], weights: Iterable[torch.Tensor]
) -> SplitBackward | None:
    """Returns the backward of a graph in two halves; None if it can only run as one.

    Args:
        outputs: Outputs of the stage that need gradients, or its loss.
        inputs: Its inputs, as the forward received them.
        weights: Its parameters.
    """
    users = _users([output.grad_fn for output in outputs if output.grad_fn is not None])
    if any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in users):
        return None
    ends = {id(each) for each in inputs if _needs(each)}
    # Nodes of leaves have the leaf, so that none has to be made by an operation on a weight, which may be elsewhere.
    leaves = [node for node in users if getattr(node, "variable", None) is not None]
    path = _above([node for node in leaves if id(_leaf(node)) in ends], users)
    mine = {id(each) for each in weights}
    branches: list[_Branch] = []
    for leaf in leaves:
        if id(_leaf(leaf)) not in mine:
            continue
        nodes = _borders(leaf, path, users)
        if not nodes:
            return None  # an output that does not depend on the inputs: no half would reach this weight
        shared = [branch for branch in branches if any(node in branch.nodes for node in nodes)]
        # All weights at one node are in one branch, as its gradient is freed with it.
        merged = _Branch([_leaf(leaf)], [])
        for branch in shared:
            branches.remove(branch)
            merged.weights = branch.weights + merged.weights
            nodes = [*branch.nodes, *(node for node in nodes if node not in branch.nodes)]
        merged.nodes = nodes
        branches.append(merged)
    return SplitBackward(branches) if path else None


def _needs(value: Any) -> bool:
    """Returns True for a tensor that needs a gradient."""
    return isinstance(value, torch.Tensor) and value.requires_grad


def _leaf(node: Any) -> torch.Tensor:
    """Returns the leaf whose gradient a node accumulates."""
    leaf: torch.Tensor = node.variable
    return leaf


def _users(roots: Sequence[Node]) -> dict[Node, list[Node]]:
    """Returns all nodes of a graph, those near the roots first, each with the nodes that pass gradients to it."""
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
    """Returns the nodes through which gradients reach `leaves`, with those."""
    found, queue = set(leaves), list(leaves)
    for node in queue:
        for user in users[node]:
            if user not in found:
                found.add(user)
                queue.append(user)
    return found


def _borders(leaf: Node, path: set[Node], users: Mapping[Node, Sequence[Node]]) -> list[Node]:
    """Returns the nodes of the path from which gradients leave it for `leaf`; none if some come from elsewhere."""
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
