"""The chunked loss for a model of transformers, whose own forward computes logits and loss.

A model of transformers ends in two lines: `logits = self.lm_head(hidden_states)` and `self.loss_function(logits,
labels, …)`. In training, in calls with labels, `chunk_loss_of` changes both lines. The head computes the logits of no
token. The loss function computes the loss from the hidden states that the head received. Inputs, router losses of
mixtures and adapters stay as they are.

Code that reads or changes logits would have no effect. So all code from the call of the model to its loss must be known
by identity (`provenance.py`): transformers' class with its own forward, torch's head, transformers' loss, and no
foreign hook. A cap of the logits, as Gemma has it, becomes that of `causal_lm`. Models that scale their logits, or
compute another term from them, are refused. Each call checks the path again, since a hook may be added later. A call
with such a hook computes all logits and logs the reason.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from offload.errors import UsageError
from offload.losses.chunked import CHUNK_TOKENS, causal_lm
from offload.notices import announce
from offload.provenance import change_of_call, described, forward_text, is_causal_lm_loss, is_class_of, is_of

_HIDDEN = re.compile(r"\w+(\[:, slice_indices(, :)?\])?")
"""The hidden states as a forward passes them to its head; in transformers 5.0 only the ones of `logits_to_keep`."""
_CAPPED = """\
if {0} is not None:
    logits = logits / {1}
    logits = torch.tanh(logits)
    logits = logits * {1}"""
_CAPS: dict[str, Callable[[Any], float | None]] = {
    _CAPPED.format(*["self.config.final_logit_softcapping"] * 2): lambda config: config.final_logit_softcapping,
    _CAPPED.format(
        "(final_logit_softcapping := self.config.get_text_config().final_logit_softcapping)", "final_logit_softcapping"
    ): lambda config: config.get_text_config().final_logit_softcapping,
}
"""The cap of logits as forwards of transformers write it, and the limit that a config of the model contains."""


def chunk_loss_of(
    model: nn.Module,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    training: bool = True,
    evaluation: bool = False,
    by_row: bool = False,
) -> Callable[[], None]:
    """Makes a causal language model of transformers compute its training loss by `causal_lm`.

    In training, a call with labels then returns the loss and the logits of no token, (..., 0, words). Calls without
    labels, under `torch.no_grad()` or in evaluation are as before. Call this function before `offload.initialize`.

    If the model or its head is changed later, for example by a hook, calls compute all logits, with a warning.

    Args:
        model: a causal language model of transformers, or a model of peft around one.
        chunk_tokens: tokens whose logits are in memory at a time.
        training: False to compute chunks only inside `offload.losses.causal_model.without_logits`.
        evaluation: True to compute chunks also in evaluation and under `torch.no_grad()`, in calls with labels.
        by_row: True for the sum of each row's losses, (rows,) fp32, in place of their mean. Each sum is the negative
            log-likelihood of its row.

    Returns:
        A function that makes the model compute all logits again.

    Raises:
        UsageError: if the model is no causal language model of transformers, if its head is no linear layer, if other
            code reads or changes its logits, or if its loss function is not the one of transformers.
    """
    inner = inside_adapters(model)
    head = _plain_head(model, inner)
    return _LossOfModel(model, inner, head, chunk_tokens, training, evaluation, by_row).compute_all_logits


def line_on_all_logits(reason: str) -> str:
    """Returns the log line that gives the reason why a loss is not computed in chunks."""
    return f"the loss is not computed in chunks of tokens: {reason}"


def undo_of(model: nn.Module) -> Callable[[], None] | None:
    """Returns the function that `chunk_loss_of` returned for the model; None if the model computes all logits."""
    loss = getattr(inside_adapters(model), "_loss_function", None)
    return loss.compute_all_logits if isinstance(loss, _LossOfModel) else None


@contextlib.contextmanager
def without_logits(model: nn.Module) -> Iterator[None]:
    """Makes all calls with labels compute their loss in chunks inside the context, where nothing may read logits.

    A model on which `chunk_loss_of` was not called still computes all logits.
    """
    loss = getattr(inside_adapters(model), "_loss_function", None)
    with loss.inside() if isinstance(loss, _LossOfModel) else contextlib.nullcontext():
        yield


def inside_adapters(model: nn.Module) -> Any:
    """Returns the model inside of a model of peft; any other model is returned as it is."""
    base: Callable[[], nn.Module] | None = getattr(model, "get_base_model", None)
    return base() if base is not None and hasattr(model, "peft_config") else model


@dataclass(slots=True)
class _ModelCall:
    has_labels: bool
    """True if the call will compute a loss in chunks."""
    hidden: torch.Tensor | None = None
    """The hidden states that the head received."""
    logits: torch.Tensor | None = None
    """The logits of no token."""


class _LossOfModel:
    """The hooks and the loss function of one model. All run on the thread that runs the model.

    Each thread may be in a call of its own. In a layer-major step each micro-batch runs on its own thread: one may be
    between the model's beginning and its head while another computes its loss.
    """

    def __init__(
        self,
        outer: nn.Module,
        model: Any,
        head: nn.Linear,
        chunk_tokens: int,
        training: bool,
        evaluation: bool,
        by_row: bool,
    ) -> None:
        self._model, self._head, self._chunk_tokens, self._by_row = model, head, chunk_tokens, by_row
        self._training, self._evaluation, self._inside = training, evaluation, False
        self._outer, self._head_path, self._told = outer, _path_of(model, head), False
        # Up to peft 0.18, a model with adapters calls the inner model's `forward` directly, so the inner model's hooks
        # do not run.
        self._signatures = {module: inspect.signature(type(module).forward) for module in (outer, model)}
        self._usual: Callable[..., Any] = model.loss_function
        if not by_row:
            self.__wrapped__ = self._usual  # both compute the same loss, and other code may unwrap this one
        self._before: Callable[..., Any] | None = model.__dict__.get("_loss_function")
        self._calls: dict[int, _ModelCall] = {}
        """The calls under way, by thread."""
        self._hooks = [
            *(module.register_forward_pre_hook(self.before_model, with_kwargs=True) for module in self._signatures),
            *(module.register_forward_hook(self.after_model, always_call=True) for module in self._signatures),
            head.register_forward_pre_hook(self.before_head),
            head.register_forward_hook(self.after_head),
        ]
        model.loss_function = self

    def compute_all_logits(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._model.__dict__.get("_loss_function") is self:
            if self._before is None:
                del self._model._loss_function
            else:
                self._model.loss_function = self._before

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def before_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model not in self._signatures:  # a deep copy has the same hooks
            return
        bound = self._signatures[model].bind_partial(model, *args, **kwargs).arguments
        labels = kwargs.get("labels", bound.get("labels"))
        trains = self._training and model.training and torch.is_grad_enabled()
        wanted = (trains or self._evaluation or self._inside) and labels is not None
        self._calls[threading.get_ident()] = _ModelCall(wanted and self._is_known())

    def _is_known(self) -> bool:
        """Returns True unless code that was added later may read or change the logits; then logs the reason once."""
        loss = vars(self._model).get("_loss_function")
        if loss is self:
            reason = _why_not_path(self._outer, self._model, self._usual, self._head, self._head_path)
        else:
            reason = f"the loss of {type(self._model).__name__} has been replaced by {described(loss)}"
        if reason is None:
            return True
        if self._by_row:
            raise UsageError(f"{reason}, so that losses by row cannot be computed without logits; remove it")
        if not self._told:
            self._told = True
            announce(line_on_all_logits(reason))
        return False

    def after_model(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forgets the call; after an exception between head and loss its tensors would otherwise stay in memory."""
        if model in self._signatures:
            self._calls.pop(threading.get_ident(), None)

    def _call(self, head: nn.Module) -> _ModelCall | None:
        """Returns the call whose loss is computed in chunks, if `head` is the head of its model."""
        call = self._calls.get(threading.get_ident())
        return call if head is self._head and call is not None and call.has_labels else None

    def before_head(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Returns the head's arguments without any token, and keeps the hidden states for the loss."""
        call = self._call(head)
        if call is None:
            return None
        call.hidden = args[0]
        return (args[0][..., :0, :], *args[1:])

    def after_head(self, head: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keeps the empty logits, so that the loss can check that no code replaced them."""
        call = self._call(head)
        if call is not None:
            call.logits = output

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Returns the loss of the hidden states that the head received; arguments as in transformers."""
        call = self._calls.get(threading.get_ident())
        if call is None or call.hidden is None:
            usual: torch.Tensor = self._usual(
                logits,
                labels,
                vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **kwargs,
            )
            return usual
        softcap = softcap_of(self._model)
        if softcap is None and logits is not call.logits:
            raise UsageError(
                f"{type(self._model).__name__} changes its logits before the loss, so its loss cannot be computed in "
                "chunks; do not call offload.losses.chunk_loss_of for it"
            )
        hidden, call.hidden, call.logits = call.hidden, None, None
        wanted = labels if shift_labels is None else shift_labels
        assert wanted is not None, "a call without labels computes all logits"
        chunked = partial(
            causal_lm,
            head=self._head,
            shift=shift_labels is None,
            ignore_index=ignore_index,
            softcap=softcap,
            chunk_tokens=self._chunk_tokens,
        )
        wanted = wanted.reshape(hidden.shape[:-1])
        if self._by_row:
            rows = zip(hidden, wanted, strict=True)
            return torch.stack([chunked(row, labels=theirs, num_items_in_batch=1) for row, theirs in rows])
        return chunked(hidden, labels=wanted, num_items_in_batch=num_items_in_batch)


def _plain_head(outer: nn.Module, model: Any) -> nn.Linear:
    """Returns the head of a model whose loss is the cross entropy of the head's own output."""
    name = type(model).__name__
    embeddings: Callable[[], nn.Module | None] | None = getattr(model, "get_output_embeddings", None)
    head = None if embeddings is None else embeddings()
    if type(head) is not nn.Linear:
        kind = type(head)
        what = "has no head" if head is None else f"has the head {kind.__module__}.{kind.__qualname__}"
        raise UsageError(f"{name} {what}; a loss in chunks needs a causal language model with a linear head")
    usual = getattr(model, "loss_function", None)
    if isinstance(usual, _LossOfModel):
        raise UsageError(f"{name} computes its loss in chunks already; call chunk_loss_of once for a model")
    reason = _why_not_path(outer, model, usual, head, _path_of(model, head))
    if reason is not None:
        raise UsageError(f"{reason}; a loss in chunks computes no logits")
    return head


def _path_of(model: nn.Module, head: nn.Module) -> str:
    """Returns the name of the head in its model, or a description if the head is not part of the model."""
    return next((path for path, module in model.named_modules() if module is head), "its head")


def _why_not_path(outer: nn.Module, model: Any, loss: Any, head: nn.Linear, path: str) -> str | None:
    """Returns a clause that names code which may read or change logits before the loss is computed; None without any.

    `outer` is the model that is called, which may be one of peft around `model`; `path` is the name of the head.
    """
    name = type(model).__name__
    if not is_causal_lm_loss(loss):
        return (
            f"the loss of {name} is {described(loss)}, which is not transformers' own of a causal language model, or "
            "calls functions that were replaced"
        )
    adapters: list[Any] = (
        [] if outer is model else [outer, outer.base_model]
    )  # with prompt tuning, `base_model` is the model
    around = [(f"the {type(adapter).__name__} around {name}", adapter) for adapter in adapters if adapter is not model]
    for words, module in (*around, (name, model), (f"{path} of {name}", head)):
        if change := change_of_call(module, words):
            return f"{change}, which may read or change logits"
    for words, module in around:
        if not is_of(type(module).forward, "peft"):
            return f"the forward of {words} is not that of peft"
    if not is_class_of(type(model), "transformers"):
        return f"{name} is no class of transformers, and may read or change logits"
    if not is_of(getattr(type(model).loss_function, "fget", None), "transformers"):
        return f"{name} has a loss_function of its own"
    if not is_of(nn.Linear.forward, "torch.nn"):
        return "the forward of torch.nn.Linear was replaced"
    if not is_of(type(model).forward, "transformers"):
        return f"the forward of {name} is {described(type(model).forward)}, not that of transformers"
    if not _ends_in_loss_of(forward_text(model, "transformers"), path):
        return (
            f"{name} does not compute its loss from the output of {path} itself: it scales its logits, reads them for "
            "another term, or its forward has another form; compute its loss with offload.losses.causal_lm"
        )
    return None


@functools.cache
def _ends_in_loss_of(text: ast.AST | None, head: str) -> bool:
    """Returns True if a forward has `logits = self.<head>(…)`, and passes `logits` only to the loss and the output.

    A cap may stand between them. The function reads the source text, since a run would need a batch and the model's
    weights.
    """
    if text is None:
        return False
    calls, assignments, reads, in_output, uses_of_head, line_of_loss = [], [], 0, 0, 0, 0
    cap = _cap_in(text)
    in_cap = set() if cap is None else set(ast.walk(cap))
    for node in ast.walk(text):
        if node in in_cap:
            continue
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == "logits" for target in targets):
                assignments.append(node.value)
        elif isinstance(node, ast.Name) and node.id == "logits":
            reads += isinstance(node.ctx, ast.Load)
        elif isinstance(node, ast.Tuple):  # the output with return_dict=False
            in_output += any(map(_is_logits, node.elts))
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
            in_output += any(_is_logits(keyword.value) for keyword in node.value.keywords if keyword.arg == "logits")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "self.loss_function":
            line_of_loss = node.lineno
            calls.append(
                node.args[0] if node.args else next((k.value for k in node.keywords if k.arg == "logits"), None)
            )
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.{head}":
            uses_of_head += 1
    return (
        len(calls) == len(assignments) == uses_of_head == 1
        and _is_logits(calls[0])
        and reads == 1 + in_output
        and isinstance(assignments[0], ast.Call)
        and ast.unparse(assignments[0].func) == f"self.{head}"
        and len(assignments[0].args) == 1
        and _HIDDEN.fullmatch(ast.unparse(assignments[0].args[0])) is not None
        and (cap is None or assignments[0].lineno < cap.lineno < line_of_loss)
    )


def _cap_in(text: Any) -> ast.If | None:
    """Returns the statement of a forward that caps its logits; None if the forward has none, or several."""
    caps = [
        statement
        for statement in text.body[0].body
        if isinstance(statement, ast.If) and ast.unparse(statement) in _CAPS
    ]
    return caps[0] if len(caps) == 1 else None


def softcap_of(model: Any) -> float | None:
    """Returns the limit of the absolute values of the logits of a model of transformers; None without a limit."""
    text = forward_text(inside_adapters(model), "transformers")
    cap = None if text is None else _cap_in(text)
    return None if cap is None else _CAPS[ast.unparse(cap)](inside_adapters(model).config)


def _is_logits(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Name) and node.id == "logits"


@dataclass(frozen=True, kw_only=True)
class ChosenLoss:
    """The choice of the loss with which a model trains."""

    chunked: bool
    line: str | None = None
    """A sentence on the choice, for the log; None for no line."""
    undo: Callable[[], None] | None = None
    """Makes the model compute all logits again, also between steps of an engine; None if the script made the choice."""


def choose_loss(
    model: nn.Module,
    wanted: bool | None,
    *,
    off: str,
    training: bool = True,
    evaluation: bool = False,
    reason: str | None = None,
) -> ChosenLoss:
    """Makes the model compute its loss in chunks, unless the model or its user needs the model's own loss.

    `wanted` is True for chunks or an error, False for all logits, None for chunks where the model allows them. The log
    line names `off`, the option with which a user chooses all logits. Without `training`, chunks are computed only
    inside `without_logits`; with `evaluation`, in evaluation as well. With a `reason`, the model keeps its own loss.
    """
    undo = undo_of(model)
    if wanted is False:
        if undo is not None:
            undo()
        return ChosenLoss(chunked=False)
    if undo is not None:  # the script has called `chunk_loss_of` itself
        return ChosenLoss(chunked=True)
    if reason is not None:
        return as_it_is(reason)
    try:
        undo = chunk_loss_of(model, training=training, evaluation=evaluation)
    except UsageError as error:
        if wanted:
            raise
        # No line for a model without words, such as an image classifier: nobody expects chunks there.
        embeddings = getattr(model, "get_output_embeddings", None)
        has_words = embeddings is not None and embeddings() is not None
        return as_it_is(str(error)) if has_words else ChosenLoss(chunked=False)
    line = f"the loss is computed from the logits of {CHUNK_TOKENS} tokens at a time; {off} computes all at once"
    return ChosenLoss(chunked=True, line=line, undo=undo)


def would_be_chunked(model: nn.Module, wanted: bool | None) -> bool:
    """Returns True if `choose_loss` would compute the loss in chunks. The model stays as it is."""
    if wanted is not None or undo_of(model) is not None:
        return wanted is not False
    chosen = choose_loss(model, None, off="")
    if chosen.undo is not None:
        chosen.undo()
    return chosen.chunked


def as_it_is(reason: str) -> ChosenLoss:
    """Returns the choice to keep the model's own loss, with a log line that gives the reason."""
    return ChosenLoss(chunked=False, line=line_on_all_logits(reason))


def as_begun(chosen: ChosenLoss, wanted: bool | None, began_chunked: bool) -> ChosenLoss:
    """Returns the loss of a resumed run: the loss with which the run began, unless the user chooses the other one.

    Both losses differ only by rounding. But a run that changed its loss would not equal an uninterrupted run. The
    choice for this model is undone if the run began with all logits, or with a version without chunked losses.
    """
    if wanted is not None or began_chunked or chosen.undo is None:
        return chosen
    chosen.undo()
    return as_it_is("the run has begun with all logits")
