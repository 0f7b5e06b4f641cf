"""`"audit": "random"`: a random block's gradient is computed again, and its weights and states in memory are compared.

    update      of the step before, where the block is drawn already: checksums of what no file contains
    forward     the drawn call of the drawn block: its inputs, its random generators, a checksum of its output
    backward    the gradient of that output arrives ─► the block runs again, forward and backward: checksums
                ─► checksums of the copies of its weights in memory, with which both have computed
                the block's own backward makes its parts of the gradients of its parameters ─► checksums
                their sums with those of other micro-batches are stored ─► checksums
    step        checksums of all its weights and states in memory, and of its gradients wherever they wait
                all are equal, and those that the last update has written; or `AuditError` before anything is updated

So a bit that flips in the block's weights or states since their update, in what autograd has saved, in a gradient that
waits for its update, or in a processor, is found where the step is not applied yet. The draw depends on the seed and on
the number of the step: all ranks draw alike, a step that is made again draws the same, and an update knows the draw of
the next step.

[Note: share] N blocks and M micro-batches make N M calls of about a step's compute together. So a step is audited with
the probability min(1, 0.003 N M), and the expected share of audited calls in the blocks' compute is at most 0.3 %. With
checksums, and threads that wait, that measured 0.2 to 0.5 % of a step (docs/concepts/bits.md). Of the states in memory
an update and the next step compute the checksums of a share of 0.003 M at most. All of them would take 1.4 times
the processor time of AdamW's kernel: 12 bytes of a bf16 parameter, twice. Further copies of weights take 6 bytes more,
and a gradient in fp32 takes 4, twice. Of a gradient, the last micro-batch alone leaves checksums: those of all
micro-batches would take a share that grows with their number.

[Note: memory] The store has checksums of what it contains. For states in memory alone, the update computes them, after
its kernel (`LocalShards.record_sum`). Frozen weights never change, so each audit of a block compares them with the
first. Units outside of the blocks are compared with one of these.

[Note: compared] A call is compared if the block is called once in each micro-batch, one tensor of its output has a
gradient, and nothing in it changes an input or a buffer in place, but for the statistics of a norm. All other calls
pass without a comparison. So does a call within, or with, a checkpoint of the user's own that is reentrant.

[Note: edges] The second gradient is asked for by the edges of the parameters in the graph: autograd then calls no hook
that takes gradients, and no code sees a placeholder as a plain tensor.

[Note: parts] A parameter that is tied to another block, or used by the model's own code, has a gradient with parts of
all uses, in an order that only autograd knows. So hooks read what each node of the call's own graph adds. These are the
nodes from its output back to its inputs, and the backward is the first that comes to its output.

[Note: alone] A block may also hand on a tensor by an attribute or a hook, such as a router's logits, whose gradient the
second backward lacks. A node that receives only what other nodes of the call have sent receives the same tensor, or the
bits of their sum in the order of arrival. If one receives something else, the output alone is compared.

Threads. As for `UnitCheckpoints`: forward hooks on the thread that runs the model, others on autograd's, one at a time.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from offload.activations.checkpoints import without_cache
from offload.engine.callbacks import EngineCallbacks, Extension
from offload.engine.gradients import GradientAccumulator
from offload.engine.params import handle_of
from offload.engine.shards import LocalShards, PartitionSum, checksum
from offload.errors import AuditError
from offload.interrupts import uninterrupted
from offload.states import State, Tier
from offload.torch_internals import (
    graph_task,
    inside_backward,
    is_reentrant_checkpoint,
    outside_of_compiled_code,
    plain_tensors,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    under_transforms,
)

SHARE = 0.003
"""Expected share of the audited calls in the compute of the blocks."""


class Choice(NamedTuple):
    """The call that a step audits."""

    block: int
    """Index of the block."""
    micro_batch: int


def choose(seed: int, step: int, blocks: int, micro_batches: int) -> Choice | None:
    """Returns the call that the audit of a step computes again, or None for a step without one; see [Note: share]."""
    calls = blocks * micro_batches
    drawn = random.Random(f"audit {seed} {step}")
    if not calls or drawn.random() >= SHARE * calls:
        return None
    return Choice(*divmod(drawn.randrange(calls), micro_batches))


def different(first: Mapping[str, int], again: Mapping[str, int]) -> list[str]:
    """Returns the names whose checksums differ, of those that both calls have."""
    return [name for name in again if first.get(name, again[name]) != again[name]]


class _Call:
    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> None:
        leaves, self._tree = tree_flatten(without_cache(args, kwargs))
        # Detached and not copied: a copy would have another layout, with which kernels may round differently.
        self._leaves = [leaf.detach() if _is_activation(leaf) else leaf for leaf in leaves]
        self._gradients = [_is_activation(leaf) and leaf.requires_grad for leaf in leaves]
        self._origins = [leaf.grad_fn for leaf in leaves if _is_activation(leaf) and leaf.grad_fn is not None]
        """The nodes of the inputs, at which the call's own graph ends; empty after the forward."""
        self._versions = [leaf._version for leaf in self._leaves if _is_activation(leaf)]
        self._buffers = [(owner, buffer, buffer._version) for owner, buffer in _buffers_of(module)]
        self._device = None if device.type in ("cpu", "meta") else device
        self._generators = self._read_generators()
        kinds = dict.fromkeys(("cpu", device.type))
        self._autocasts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        self.output: int | None = None
        """Position of the tensor with a gradient in the output; None before the forward has ended."""
        self.first: dict[str, int] = {}
        """Checksums of the training: of the output, and of what the call adds to each parameter's gradient, by name."""
        self.again: dict[str, int] = {}
        """The same, computed again; empty before the backward has come to the call."""
        self.backward: int | None = None
        """The backward that has come to the call, as `graph_task` tells it."""
        self._alone = True
        """False if something else than the output has given the call's graph a gradient."""

    @property
    def unchanged(self) -> bool:
        """True if no input and no buffer was changed in place since the call, as far as torch knows."""
        return self._versions == [leaf._version for leaf in self._leaves if _is_activation(leaf)] and all(
            buffer._version == version or isinstance(owner, nn.modules.batchnorm._NormBase)
            for owner, buffer, version in self._buffers
        )

    def different(self) -> list[str]:
        """Returns what came out with other bits; see [Note: alone]."""
        output = {"the output": self.first["the output"]}
        return different(self.first if self._alone else output, self.again)

    def _is_read(self) -> bool:
        return self._alone and graph_task() == self.backward

    def _end_alone(self) -> None:
        self._alone = False

    def end(self, module: nn.Module, output: torch.Tensor) -> list[Callable[[], None]] | None:
        """Ends the forward, and returns what removes the hooks on the graph of the call.

        Returns None if it contains a checkpoint whose backward serves `.backward()` alone, and so no second gradient.
        """
        edges, origins, self._origins = _edges_of(module), self._origins, []
        nodes = _nodes_between(output.grad_fn, {*origins, *(edge.node for edge in edges.values())})
        if any(is_reentrant_checkpoint(node) for node in nodes):
            return None
        self.first["the output"] = _checksum(output)
        return [
            *_watch(nodes, output.output_nr, self._is_read, self._end_alone),
            *_read_parts(nodes, edges, self.first, self._is_read),
        ]

    def compute(self, module: nn.Module, gradient: torch.Tensor) -> None:
        """Runs the block again as in its forward, and its backward from `gradient`, that of the output."""
        self.backward = graph_task()
        leaves = [
            leaf.detach().requires_grad_() if gradient_wanted else leaf
            for leaf, gradient_wanted in zip(self._leaves, self._gradients, strict=True)
        ]
        args, kwargs = tree_unflatten(leaves, self._tree)
        with self._as_in_forward():
            output = _tensors(module(*args, **kwargs))
        assert self.output is not None
        again = {"the output": _checksum(output[self.output])}
        edges = _edges_of(module)
        if edges:  # of a block that does not train, the output alone is compared
            nodes = _nodes_between(output[self.output].grad_fn, {edge.node for edge in edges.values()})
            _read_parts(nodes, edges, again, lambda: True)
            torch.autograd.grad(output[self.output], [*edges.values()], gradient, allow_unused=True)
        self.again = again

    @contextlib.contextmanager
    def _as_in_forward(self) -> Iterator[None]:
        """Sets the generators and autocast of the forward, and restores generators and buffers afterwards."""
        outside, values = self._read_generators(), [(buffer, buffer.clone()) for _, buffer, _ in self._buffers]
        with contextlib.ExitStack() as entered:
            entered.enter_context(torch.enable_grad())
            for kind, enabled, dtype in self._autocasts:
                entered.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            self._put_generators(self._generators)
            try:
                yield
            finally:
                self._put_generators(outside)
                for buffer, before in values:
                    # Not by the buffer itself, whose version would rise: the block's own backward compares it.
                    buffer.data.copy_(before)

    def _read_generators(self) -> tuple[Any, torch.Tensor, torch.Tensor | None]:
        of_device = None
        if self._device is not None:
            of_device = torch.get_device_module(self._device).get_rng_state(self._device)
        return random.getstate(), torch.get_rng_state(), of_device

    def _put_generators(self, states: tuple[Any, torch.Tensor, torch.Tensor | None]) -> None:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        if self._device is not None:
            torch.get_device_module(self._device).set_rng_state(states[2], self._device)


class _Copy(NamedTuple):
    """Bytes that the audit has read in memory."""

    unit: int
    state: State
    updates: int
    """Number of changes of the unit's weights before; see `Pager.updates`."""
    own: PartitionSum
    """Checksum of the trainable elements, which updates write."""
    frozen: int | None
    """CRC-32C of the frozen elements, which follow them; None without any."""


class RandomAudit(Extension):
    """The audit of one engine; see the module."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        blocks: Sequence[str],
        seed: int,
        micro_batches: int,
        device: torch.device,
        callbacks: EngineCallbacks,
        shards: LocalShards,
        gradients: GradientAccumulator,
        exact: bool,
    ) -> None:
        """Installs hooks on `blocks`, names in `modules`; a step has `micro_batches`.

        `exact` is False if ranks gather codes of weights: the weights on the device then have other bits.
        """
        self._exact, self._gradients = exact, gradients
        self._names, self._modules, self._shards = list(blocks), [modules[name] for name in blocks], shards
        self._inside: list[set[int]] = [set() for _ in blocks]
        """The units with parameters of each block."""
        for unit, layout in enumerate(shards.layouts):
            for block, name in enumerate(blocks):
                if any(segment.parameter.startswith(f"{name}.") for segment in layout.segments):
                    self._inside[block].add(unit)
        others = sorted(set(range(len(shards.layouts))).difference(*self._inside))
        self._units = [units.union(others[block :: len(blocks)]) for block, units in enumerate(self._inside)]
        """The units that are compared with each block: its own, and its part of those outside of all blocks."""
        self._copies: list[_Copy] = []
        """The copies that this step has read."""
        self._seed, self._micro_batches, self._device, self._callbacks = seed, micro_batches, device, callbacks
        self._step = -1
        """Steps before the one whose choice is known."""
        self._choice: Choice | None = None
        self._calls = 0
        """Calls of the chosen block in this step."""
        self._call: _Call | None = None
        self._open: int | None = None
        """Thread of the audited call while it runs forward: where micro-batches take turns, others come in between."""
        self._removers: list[Callable[[], None]] = []
        self._installed: list[Callable[[], None]] = []
        for position, module in enumerate(self._modules):
            self._install(position, module)

    def _install(self, position: int, module: nn.Module) -> None:
        def before(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if called is module:
                self._begin(position, args, kwargs)

        def after(called: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._open == threading.get_ident() and called is module and not inside_backward():
                self._end(position, output)

        pre, post = outside_of_compiled_code(before), outside_of_compiled_code(after)
        self._installed.append(module.register_forward_pre_hook(pre, prepend=True, with_kwargs=True).remove)
        self._installed.append(module.register_forward_hook(post).remove)

    def remove(self) -> None:
        self._forget()
        while self._installed:
            self._installed.pop()()

    def abandon(self) -> None:
        self._open = None

    # -- forward ------------------------------------------------------------------------------------

    @uninterrupted
    def _begin(self, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if inside_backward() or not torch.is_grad_enabled() or under_transforms():
            return
        if self._step != (step := self._callbacks.steps_so_far()):
            self._forget()
            self._step = step
            self._choice = choose(self._seed, step + 1, len(self._modules), self._micro_batches)
            if self._choice is not None:
                self._gradients.watch(self._units[self._choice.block])
        if self._choice is None or self._choice.block != position:
            return
        self._calls += 1
        if self._calls == self._choice.micro_batch + 1:
            self._call = _Call(self._modules[position], args, kwargs, self._device)
            self._open = threading.get_ident()

    @uninterrupted
    def _end(self, position: int, output: Any) -> None:
        if self._choice is None or self._choice.block != position:
            return
        self._open = None
        call, tensors = self._call, _tensors(output)
        with_gradient = [position for position, tensor in enumerate(tensors) if tensor.requires_grad]
        if call is None or len(with_gradient) != 1 or not call.unchanged:
            self._call = None
            return
        call.output = with_gradient[0]
        removers = call.end(self._modules[position], tensors[call.output])
        if removers is None:
            self._call = None
            return
        self._removers += removers
        self._removers.append(tensors[call.output].register_hook(self._compute_again).remove)

    # -- backward -----------------------------------------------------------------------------------

    @uninterrupted
    def _compute_again(self, gradient: torch.Tensor) -> None:
        """Computes the audited call again, once the gradient of its output has come."""
        call = self._call
        if call is None or call.again or not call.unchanged:
            return
        assert self._choice is not None
        call.compute(self._modules[self._choice.block], gradient)
        # autograd thread: now, since these copies may leave memory before `step()`.
        for unit in sorted(self._inside[self._choice.block]):
            self._copies += self._weights(unit)

    # -- weights and states in memory -----------------------------------------------------------------

    def _weights(self, unit: int) -> list[_Copy]:
        """Returns the checksums of all copies of a unit's weights that are in memory."""
        shards, copies = self._shards, list[_Copy]()
        itemsize = shards.mode_of(unit).weight_dtype.itemsize
        own, updates = len(shards.shares[unit][0]) * itemsize, shards.pager.updates(unit)

        def read(pieces: Sequence[torch.Tensor]) -> None:
            trainable, frozen, left = 0, None, own
            for piece in pieces:
                if left:
                    trainable = checksum(piece[:left], trainable)
                if len(piece) > left:
                    frozen = checksum(piece[left:], frozen or 0)
                left = max(0, left - len(piece))
            copies.append(_Copy(unit, State.WEIGHT, updates, PartitionSum(trainable, own), frozen))

        shards.pager.read_copies(unit, read, on_device=self._exact)
        return copies

    def _states(self, unit: int) -> Iterator[_Copy]:
        """Yields the checksums of the other states of a unit that are in memory."""
        for state in self._shards.states(unit):
            resident = None if state is State.WEIGHT else self._shards.resident_of(unit, state)
            expected = self._shards.sum_of(unit, state)
            if resident is not None and expected is not None:
                own = resident.tensor.view(torch.uint8)[: expected.nbytes]
                updates = self._shards.pager.updates(unit)
                yield _Copy(unit, state, updates, PartitionSum(checksum(own), expected.nbytes), None)

    def _compare_memory(self, step: int, block: int, copies: list[_Copy]) -> None:
        """Compares `copies`, and what is in memory of a block's units now, with what was written there.

        Raises `AuditError` if a copy has other bits.
        """
        shards = self._shards
        # The update begins with what is in memory now, wherever the model has computed.
        for unit in sorted(self._units[block]):
            copies += [*self._weights(unit), *self._states(unit)]
        for copy in copies:
            # An edit between two micro-batches has replaced what the first of them has used.
            if copy.updates != shards.pager.updates(copy.unit):
                continue
            expected = shards.sum_of(copy.unit, copy.state) if copy.own.nbytes else None
            frozen = copy.frozen if copy.frozen is None else shards.frozen_sums.setdefault(copy.unit, copy.frozen)
            if (expected is not None and expected != copy.own) or frozen != copy.frozen:
                self._refuse(step, copy)

    def _refuse(self, step: int, copy: _Copy) -> None:
        """Raises `AuditError` for a copy in memory with other bits; the engine stops if no file has them."""
        shards, unit = self._shards, copy.unit
        in_files = shards.store.keeps(unit, copy.state) and not shards.stale
        cached = copy.state is State.WEIGHT and shards.sizes[unit].tier is Tier.DISK
        restored = self._callbacks.read_back() and (in_files or cached)
        what = f"{copy.state.value} of {shards.sizes[unit].title}"
        cure = (
            "The files were read again: drop the gradients by zero_grad() and make the step again"
            if restored
            else "No file has its bits, so the engine has stopped: resume from the last commit, or from a checkpoint"
        )
        error = AuditError(
            f"step {step}: {what} in memory has other bits than were written there. Nothing was updated: a bit has "
            f"flipped since step {step - 1}. {cure}. If it happens again, test the memory"
        )
        if not restored:
            # Nothing of this memory may be committed, also not at the end of the process.
            shards.pager.fail(error)
        raise error

    # -- step ---------------------------------------------------------------------------------------

    def check_step(self, step: int, micro_batches: int) -> None:
        call, calls, copies = self._call, self._calls, self._copies
        choice, following = (
            choose(self._seed, number, len(self._modules), self._micro_batches) for number in (step, step + 1)
        )
        flipped = self._gradients.flipped() if choice is not None else None
        self._forget()
        if choice is not None:
            self._compare_memory(step, choice.block, copies)
            if flipped is not None:
                unit, segment = flipped
                raise AuditError(
                    f"step {step}: the gradient of {self._shards.layouts[unit].segments[segment].parameter} has other "
                    "bits than when it began to wait for its update. Nothing was updated: the weights are those of "
                    f"step {step - 1}. Resume from the last commit; or, in a run of one process, drop the gradients by "
                    "zero_grad() and make the step again. If it happens again, test the memory"
                )
            if call is not None and call.again and calls == micro_batches and (wrong := call.different()):
                # The bit may have flipped in a copy of the weights, with which the step would be made again.
                self._callbacks.read_back()
                what = wrong[0] if wrong[0] == "the output" else f"the gradient of {wrong[0]}"
                others = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
                raise AuditError(
                    f"step {step}: {what}{others} of {self._names[choice.block]}, micro-batch {choice.micro_batch}, "
                    "came out with other bits when it was computed again. Nothing was updated: the weights are those "
                    f"of step {step - 1}. Resume from the last commit. If it happens again in other layers, test the "
                    "memory and the processors; if always in this one, its kernels are not deterministic: leave "
                    '"audit" out'
                )
        # calling thread: the update worker is idle, and reads this during the updates of the step.
        self._shards.watched.clear()
        self._shards.watched.update(() if following is None else self._units[following.block])

    def _forget(self) -> None:
        """Drops the audited call and all checksums of the step, and the hooks on its tensors."""
        self._call, self._open, self._calls, self._step, self._copies = None, None, 0, -1, []
        self._gradients.watch(())
        with plain_tensors():
            while self._removers:
                self._removers.pop()()


def _is_activation(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and handle_of(value) is None and not isinstance(value, nn.Parameter)


def _tensors(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _buffers_of(module: nn.Module) -> Iterator[tuple[nn.Module, torch.Tensor]]:
    for owner in module.modules():
        yield from ((owner, buffer) for buffer in owner._buffers.values() if buffer is not None)


def _edges_of(module: nn.Module) -> dict[str, GradientEdge]:
    with plain_tensors():
        return {
            name: get_gradient_edge(parameter)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }


def _nodes_between(output: Node | None, ends: Collection[Node]) -> list[Node]:
    """Returns the nodes of a graph from `output` back to `ends`, without these."""
    nodes, left = dict[Node, None](), [output]
    while left:
        node = left.pop()
        if node is not None and node not in nodes and node not in ends:
            nodes[node] = None
            left += [following for following, _ in node.next_functions]
    return list(nodes)


def _watch(
    nodes: Sequence[Node], output_number: int, wanted: Callable[[], bool], tell: Callable[[], None]
) -> list[Callable[[], None]]:
    """Calls `tell` where a node receives a gradient from outside of `nodes`, while `wanted`; see [Note: alone].

    The first node has the output of the call as its result `output_number`. Returns what removes the hooks.
    """
    # By their places: a reference to a node from its own hook would keep the graph.
    places, sent = {node: place for place, node in enumerate(nodes)}, dict[tuple[int, int], torch.Tensor]()

    def hook(place: int, targets: Sequence[tuple[int, int] | None]) -> Callable[[Any, Any], None]:
        @uninterrupted
        def check(results: Sequence[torch.Tensor | None], received: Sequence[torch.Tensor | None]) -> None:
            if not wanted():
                return
            for number, gradient in enumerate(received):
                expected = sent.pop((place, number), None)
                if (place, number) != (0, output_number) and not _equal(gradient, expected):
                    sent.clear()
                    tell()
                    return
            with torch.no_grad():
                for target, result in zip(targets, results, strict=True):
                    if target is not None and result is not None:
                        sent[target] = sent[target] + result if target in sent else result

        return check

    return [
        node.register_hook(
            hook(place, [(places[end], number) if end in places else None for end, number in node.next_functions])
        ).remove
        for node, place in places.items()
    ]


def _equal(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    return left is right or (left is not None and right is not None and _checksum(left) == _checksum(right))


def _read_parts(
    nodes: Iterable[Node], edges: Mapping[str, GradientEdge], sums: dict[str, int], wanted: Callable[[], bool]
) -> list[Callable[[], None]]:
    """Adds the checksums of what `nodes` add to the gradients of `edges` to `sums`, by name, while `wanted`.

    Returns what removes the hooks that do so; see [Note: parts].
    """
    names = {edge.node: name for name, edge in edges.items()}

    def hook(parts: Mapping[int, str]) -> Callable[[Sequence[torch.Tensor | None], Any], None]:
        @uninterrupted
        def read(inputs: Sequence[torch.Tensor | None], outputs: Any) -> None:
            for position, name in parts.items():
                if (part := inputs[position]) is not None and wanted():
                    # Added up: two parts of one parameter may come in either order.
                    sums[name] = sums.get(name, 0) + _checksum(part)

        return read

    return [
        node.register_hook(hook(parts)).remove
        for node in nodes
        if (parts := {at: names[end] for at, (end, _) in enumerate(node.next_functions) if end in names})
    ]


def _checksum(tensor: torch.Tensor) -> int:
    """Returns the CRC-32C of the local part of a DTensor, of the values of a sparse tensor, or of all other bytes."""
    values = tensor.detach()
    values = values.to_local() if hasattr(values, "to_local") else values
    return checksum(values.coalesce().values() if values.is_sparse else values)
