"""Construction of a model without its weights, and initialization of the weights one unit at a time.

Inside of `deferring_weights`, parameters are registered on the meta device and buffers stay real. `materialize` then
makes the parameters of one unit real, by the initialization of the modules that own them. The unit determines the seed,
so the weights do not depend on budgets, placements or the number of ranks. Parameters that are read from files (see
`model_io.load_pretrained`) stay as they are.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
import traceback
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from offload.engine.params.building.contexts import building, building_a_model
from offload.engine.params.building.draws import Draw
from offload.engine.params.building.writes import Initializer
from offload.engine.params.deferred_parameter import DeferredParameter, origin_of
from offload.errors import ConfigError
from offload.torch_internals import swap_parameters


@contextlib.contextmanager
def deferring_weights() -> Iterator[None]:
    """Registers parameters on the meta device, in this thread, while a model is built inside of the context.

    Raises:
        ConfigError: if a constructor needs values that do not exist yet, or changes them.
    """
    thread = threading.get_ident()
    seen = WeakTensorKeyDictionary()  # a parameter registered twice is replaced by the same object: tied

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:  # torch's stub says None
        """Returns the parameter to register: deferred if its module can make the values again later."""
        if parameter is None or threading.get_ident() != thread:
            return parameter
        if isinstance(parameter, DeferredParameter) and parameter.whole is not None:
            return _of_its_own(module, name, parameter)
        if type(parameter) is not nn.Parameter:
            return parameter
        if parameter not in seen:
            keep = parameter.is_meta or not _can_initialize(module) or _is_given(module, name, parameter)
            seen[parameter] = None if keep else _deferred(module, name, parameter)
        found: nn.Parameter | None = seen[parameter]
        return parameter if found is None else found

    removal = register_module_parameter_registration_hook(register)
    try:
        with building_a_model():
            yield
    except (RuntimeError, NotImplementedError) as error:
        # torch raises no class of its own for an operation without values: only the message shows the cause.
        if "meta" not in str(error).lower():
            raise
        raise ConfigError(
            f"{_handle_of(error)} computes with values of parameters, but offload.init fills parameters later "
            f"({error}); build this model outside of offload.init, or load it with its own from_pretrained, and pass "
            "it to offload.initialize"
        ) from error
    finally:
        removal.remove()


def _deferred(module: nn.Module, name: str, parameter: nn.Parameter) -> DeferredParameter:
    """Returns a parameter of the same shape that `module` will initialize later."""
    deferred = DeferredParameter(parameter.detach().to("meta"), parameter.requires_grad)
    deferred.draw = Draw(module, name)
    return deferred


def _of_its_own(module: nn.Module, name: str, alias: DeferredParameter) -> DeferredParameter:
    """Returns the parameter to register for `nn.Parameter(weight.data)`, which must replace that weight.

    Raises:
        ConfigError: if the weight stays, or was not taken whole, so that this one would be initialized by itself.
    """
    if alias.is_part or alias.whole is not module._parameters.get(name):
        raise ConfigError(
            f"{type(module).__name__} makes its parameter {name} from another parameter, but offload.init fills "
            "parameters later: build this module outside of offload.init (weight_norm and other parametrizations too)"
        )
    assert alias.whole is not None
    parameter = DeferredParameter(alias.detach().as_subclass(torch.Tensor), alias.requires_grad)
    parameter.origin, parameter.draw = alias.whole.origin, alias.whole.draw
    return parameter


def _is_given(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Returns True if a parameter comes with values, and is not memory allocated by the constructor of `module`.

    A tensor among the constructor's arguments that shares the parameter's memory is such a value. A parameter that
    replaces another one, or is registered outside of the constructor, counts as given too.
    """
    if module._parameters.get(name) is not None:
        return True
    # Skips this function and `register`, and searches the stack for the constructor of `module`.
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        code, known = frame.f_code, frame.f_locals
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        # The first argument of a constructor is its module, whatever the argument's name.
        if code.co_name == "__init__" and names and known.get(names[0]) is module:
            return any(_same_memory(known.get(each), parameter) for each in names[1:])
        frame = frame.f_back
    return True


def _same_memory(value: Any, parameter: nn.Parameter) -> bool:
    """Returns True if `value` is a tensor over the parameter's storage."""
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return False
    return value.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()


def _handle_of(error: BaseException) -> str:
    """Returns the model class and the line that an error comes from: the innermost module frame outside of torch."""
    found = "the model"
    for frame, line in traceback.walk_tb(error.__traceback__):
        file, module = frame.f_code.co_filename, frame.f_locals.get("module", frame.f_locals.get("self"))
        if f"{os.sep}torch{os.sep}" not in file and isinstance(module, nn.Module):
            found = f"{type(module).__name__} ({file}:{line})"
    return found


def _can_initialize(module: nn.Module) -> bool:
    """Returns True if the values of this module's parameters can be made again later."""
    return _resetter(module) is not None or type(module).__module__.startswith("transformers.")


def _resetter(module: nn.Module) -> str | None:
    """Returns the name of the method by which a module initializes its parameters, or None."""
    return next((name for name in ("reset_parameters", "_reset_parameters") if getattr(module, name, None)), None)


def materialize(
    model: nn.Module, names: Sequence[str], seed: int, shapes: Mapping[int, torch.Size] | None = None
) -> None:
    """Makes the deferred parameters `names` of `model` real, on the CPU, and initializes them. Identity and ties stay.

    Parameters that will be read from an origin stay as they are.

    Args:
        model: the model.
        names: names of the parameters of one unit.
        seed: seed of torch's CPU generator for this unit; the generator's state is restored afterwards.
        shapes: shape of each parameter of the model that may have been emptied, by its id.

    Raises:
        ConfigError: if the owning module does not initialize a parameter.
    """
    parameters = {name: model.get_parameter(name) for name in names}
    absent = {name: each for name, each in parameters.items() if each.is_meta and origin_of(each) is None}
    if not absent:
        return
    made = {id(parameter) for parameter in absent.values()}
    draws = {name: each.draw for name, each in absent.items() if isinstance(each, DeferredParameter) and each.draw}
    # NaN marks a value as not yet set, for the check at the end.
    for parameter in absent.values():
        real = nn.Parameter(torch.full_like(parameter, torch.nan, device="cpu"), parameter.requires_grad)
        swap_parameters(parameter, real)
    # Forked, so that making the weights leaves the user's random state as it was.
    with torch.random.fork_rng(devices=[]), torch.no_grad(), building():
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would change the GPU's seed for good
        for call in _calls(model, absent, draws):
            with _apart(call.target, made, shapes or {}):
                _run(call)
    for name, parameter in absent.items():
        # A minimum is NaN where any value is, and takes no tensor of the parameter's size.
        if parameter.numel() and bool(parameter.detach().amin().isnan()):
            raise ConfigError(
                f"parameter {name} of {type(model.get_submodule(name.rpartition('.')[0])).__name__} has no initial "
                "value: its module has no reset_parameters that sets the parameter; add that method, or build the "
                "model outside of offload.init"
            )


def _run(call: Initializer) -> None:
    """Lets an initializer make values; raises `ConfigError` if it needs those of parameters that are not in memory."""
    try:
        call()
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error).lower():
            raise
        raise ConfigError(
            f"{call.name} of {type(call.target).__name__} computes with values of parameters of another unit, but "
            f"offload.init fills one unit after the other ({error}); build this model outside of offload.init"
        ) from error


@contextlib.contextmanager
def _apart(module: nn.Module, made: Collection[int], shapes: Mapping[int, torch.Size]) -> Iterator[None]:
    """Lets an initializer of `module` change no other parameters than those that are made, and no buffers.

    An initializer sets all parameters of its module, and may set those of modules below it. Those of other units are
    shown in their shapes, on meta: the range of a bias is computed from the shape of a weight, which may be that of an
    earlier unit and emptied by now.

    Args:
        module: the module.
        made: ids of the parameters that are made.
        shapes: shape of each parameter of the model that may have been emptied, by its id.
    """
    others: list[tuple[dict[str, Any], str, Any]] = []
    copied: list[tuple[nn.Parameter, torch.Tensor]] = []
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is None or id(parameter) in made:
                continue
            shape = shapes.get(id(parameter), parameter.shape)
            if each is module and not parameter.is_meta and parameter.shape == shape:
                copied.append((parameter, parameter.detach().clone()))  # may be computed with
            elif not parameter.is_meta:
                others.append((each._parameters, name, parameter))
        others += [(each._buffers, name, buffer) for name, buffer in each._buffers.items() if buffer is not None]
    for place, name, tensor in others:
        if isinstance(tensor, nn.Parameter):
            empty = torch.empty(shapes.get(id(tensor), tensor.shape), dtype=tensor.dtype, device="meta")
            place[name] = DeferredParameter(empty, tensor.requires_grad)
        else:
            place[name] = tensor.clone()
    try:
        yield
    finally:
        for place, name, tensor in others:
            place[name] = tensor
        for parameter, values in copied:
            parameter.copy_(values)


def _calls(model: nn.Module, absent: Mapping[str, nn.Parameter], draws: Mapping[str, Draw]) -> list[Initializer]:
    """Returns the initializers of the parameters `absent`: of the modules that own them, and of those above.

    Those of the modules that own parameters, and of the modules between them, run children first: a parent's may
    overwrite a child's values. If others have written values too, as `_init_weights` of a Whisper encoder writes the
    positions of its embedding, all run in the order in which they ran while the model was built.

    Args:
        model: the model.
        absent: the parameters.
        draws: what is known of their values.
    """
    own = list(_initializers(model, absent))
    written: dict[Initializer, int] = {}
    for name, draw in draws.items():
        for call, number in draw.writers.items():
            within = _within(model, name, call) if call not in own else call
            written[within] = max(number, written.get(within, -1))
    if written.keys() <= set(own):
        return own
    return sorted([*own, *(written.keys() - set(own))], key=lambda call: written.get(call, -1))


def _within(model: nn.Module, name: str, call: Initializer) -> Initializer:
    """Returns the call that writes parameter `name` of `model`, where `call` has written the one that it copies.

    Raises:
        ConfigError: if the model does not contain such a module.
    """
    above = [model]
    for part in name.split(".")[:-1]:
        above.append(above[-1].get_submodule(part))

    def same(value: Any) -> Any:
        if not isinstance(value, nn.Module) or value in above:
            return value
        return next((each for each in reversed(above) if type(each) is type(value)), value)

    found = Initializer(same(call.owner), call.name, tuple(map(same, call.arguments)))
    parameter = model.get_parameter(name)
    if found.target not in above and not any(each is parameter for each in found.target.parameters()):
        raise ConfigError(
            f"parameter {name} is a copy of one that {call.name} of {type(call.target).__name__} has written, and this "
            "model contains no such module; build this model outside of offload.init"
        )
    return found


def _initializers(model: nn.Module, names: Mapping[str, nn.Parameter]) -> Iterator[Initializer]:
    """Yields the initializers of the modules that own `names` and of those between them, children first."""
    paths: set[str] = set()
    shared = _common_prefix(list(names))
    for name in names:
        path = name.rpartition(".")[0]
        while path not in paths and len(path) >= len(shared):
            paths.add(path)
            if not path or path == shared:
                break
            path = path.rpartition(".")[0]
    modules = dict(model.named_modules(remove_duplicate=False))
    order = {path: position for position, path in enumerate(modules)}
    # Deepest first, and equally deep modules in the order of construction.
    for path in sorted(paths, key=lambda path: (-path.count(".") - bool(path), order[path])):
        module = modules[path]
        reset = _resetter(module)
        if reset is not None and any(not p.is_meta for p in module.parameters(recurse=False)):
            yield Initializer(module, reset)
        library = _library_model(modules, path)
        if library is not None:
            yield Initializer(library, "_init_weights", (module,))


def _common_prefix(names: list[str]) -> str:
    """Returns the path of the deepest module that contains all `names`."""
    parts = [name.split(".")[:-1] for name in names]
    shared: list[str] = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    return ".".join(shared)


def _library_model(modules: Mapping[str, nn.Module], path: str) -> nn.Module | None:
    """Returns the innermost module at or above `path` with `_init_weights(module)`, as models of transformers have."""
    while True:
        initializer = getattr(type(modules[path]), "_init_weights", None)
        if initializer is not None and len(inspect.signature(initializer).parameters) > 1:
            return modules[path]
        if not path:
            return None
        path = path.rpartition(".")[0]
