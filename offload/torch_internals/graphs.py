"""Private names of torch for autograd and the checkpointing of activations."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

# `torch.autograd.graph.saved_tensors_hooks` is a context manager. Our hooks are pushed in one hook of a module and
# popped in another, and must know whose hooks are on top of the stack.


class _CountedHooks(threading.local):
    """The pairs of hooks that were pushed on a thread, in order."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []


def count_saved_tensor_hooks() -> Callable[[], Any]:
    """Counts what torch's Python code pushes and pops from now on, where torch 2.6 does not tell the active pair.

    Returns:
        A function that returns the active pair of hooks of its thread, or None.
    """
    # Torch hands the hooks of a thread to those of autograd, which this count does not see. `engine.backward` needs
    # none there: it runs on the thread that calls it.
    counted = _CountedHooks()
    torch_hooks: Any = torch._C._autograd
    push, pop = torch_hooks._push_saved_tensors_default_hooks, torch_hooks._pop_saved_tensors_default_hooks

    def counting_push(pack: Any, unpack: Any) -> None:
        push(pack, unpack)  # raises where hooks are disabled
        counted.pairs.append((pack, unpack))

    def counting_pop() -> None:
        pop()
        counted.pairs.pop()

    torch_hooks._push_saved_tensors_default_hooks = counting_push
    torch_hooks._pop_saved_tensors_default_hooks = counting_pop
    return lambda: counted.pairs[-1] if counted.pairs else None


_told = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
top_saved_tensor_hooks: Callable[[], Any] = functools.partial(_told, True) if _told else count_saved_tensor_hooks()
"""Returns the active pair of hooks of this thread, or None."""


def graph_is_retained() -> bool:
    """Returns True if the backward that runs keeps its graph, so that saved tensors may be read once more."""
    told = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if told is None else bool(told())  # an older torch does not tell


def push_saved_tensor_hooks(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
    """Activates a pair of hooks on this thread. Raises `RuntimeError` under torch.func."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_tensor_hooks() -> None:
    """Removes the active pair of hooks, which must exist."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Takes all hooks of this thread away within the context, for what keeps the state of the thread that starts it."""
    pairs = []
    # Under torch.func they cannot be pushed again.
    if torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        while (pair := top_saved_tensor_hooks()) is not None:
            pairs.append(pair)
            pop_saved_tensor_hooks()
    try:
        yield
    finally:
        for pair in reversed(pairs):
            push_saved_tensor_hooks(*pair)


def call_after_backward(function: Callable[[], None]) -> None:
    """Calls `function` when the backward that runs on this thread has ended, as DDP and FSDP do."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def inside_backward() -> bool:
    """Returns True if this thread runs a backward."""
    return graph_task() != -1


def graph_task() -> int:
    """Returns the number of the backward that this thread runs, the innermost; -1 outside of one."""
    # Thread-local, and set on the engine's own threads too.
    return torch._C._current_graph_task_id()


def adds_up(parameters: Iterable[torch.Tensor], behind: Any) -> bool:
    """Returns True if the backward that runs on this thread adds gradients up in leaves, of the parameters or any.

    `torch.autograd.grad` and the transforms of torch.func return gradients instead. A backward that names its inputs
    counts if one of the parameters is among them.

    Args:
        behind: the node of the graph that comes behind the node whose hook calls this.
    """
    if torch._C._are_functorch_transforms_active():
        return False
    # A compiled backward runs hooks outside of a graph task, and serves `.backward()` alone.
    if not inside_backward():
        return True
    runs = torch._C._will_engine_execute_node
    # Valid in a pass over the whole graph. Where the pass ends at the node of the hook, torch has not set it yet.
    if torch.autograd._is_checkpoint_valid():
        return bool(runs(behind))
    try:
        return any(runs(torch.autograd.graph.get_gradient_edge(parameter).node) for parameter in parameters)
    # Torch's answer on a leaf whose gradient is returned.
    except RuntimeError:
        return False


# -- checkpointing of activations ---------------------------------------------------------------------

# `torch.utils.checkpoint.checkpoint` calls the function that it checkpoints. A hook before a module and one after it
# need the two halves apart: the generator below is what torch's own composable `checkpoint(module)` uses.
_generator = torch_checkpoint._checkpoint_without_reentrant_generator
_KNOWS_EARLY_STOP = "early_stop" in inspect.signature(_generator).parameters  # torch 2.6 does not

_FRAMES = 4
"""Python frames between a pack hook and the code of checkpointing, at most."""


_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
"""Operations of torch that compute attention in one kernel. Some are missing from some versions."""


def _keeping_attention() -> Any:
    """Returns the contexts of a forward and of its recomputation that gives each output of attention once more."""
    known = [getattr(torch.ops.aten, name).default for name in _ATTENTION if hasattr(torch.ops.aten, name)]
    return torch_checkpoint.create_selective_checkpoint_contexts(known)


def checkpointing(
    recompute: Callable[..., Any], *inputs: Any, keeps_attention: bool = False
) -> Generator[None, None, None]:
    """Returns a generator: from its first `next` to its second, the graph keeps `inputs` instead of what it saves.

    Non-reentrant checkpointing of torch, with its random generators, autocast, early stop, and check of shapes.

    Args:
        inputs: tensors are saved through the active saved-tensor hooks, other values by reference.
        keeps_attention: True to keep outputs of attention too. The graph then serves one backward.
    """
    context = _keeping_attention if keeps_attention else torch_checkpoint.noop_context_fn
    early_stop = (True,) if _KNOWS_EARLY_STOP else ()
    generator: Generator[None, None, None] = _generator(
        recompute, True, context, "default", False, *early_stop, *inputs
    )
    return generator


def are_of_checkpoint(hooks: Any) -> bool:
    """Returns True if a pair of saved-tensor hooks belongs to non-reentrant checkpointing; False for None."""
    return hooks is not None and getattr(hooks[0], "__module__", None) == torch_checkpoint.__name__


def is_reentrant_checkpoint(node: torch.autograd.graph.Node) -> bool:
    """Returns True if a node of the graph is the backward of a reentrant checkpoint, which serves no `inputs`."""
    return isinstance(node, torch_checkpoint.CheckpointFunction._backward_cls)


def saves_checkpoint_input() -> bool:
    """Returns True if the pack hook that calls this runs because checkpointing, of either kind, saves its inputs.

    Torch has no such query; the callers of the hook tell.
    """
    # A double backward on a thread of autograd's saves tensors without a Python function below.
    frame = sys._getframe(1).f_back
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_filename == torch_checkpoint.__file__:
            return True
        frame = frame.f_back
    return False
