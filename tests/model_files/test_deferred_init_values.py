"""Values that a parameter gets inside `offload.init`, or shares with others, are those with which training begins."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import nn
from torch.optim.swa_utils import AveragedModel

import offload
from offload import testing
from offload.errors import ConfigError
from offload.model_io.deferred import DeferredParameter, origin_of
from offload.model_io.load import _LEFT_OUT_IF_NONE
from tests.support import models
from tests.support.oracle import assert_same_tensors, config


def begins_with(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the model once it is under an engine."""
    engine = offload.initialize(model=model, config=config(models.SHALLOW, ("nvme", "nvme"), folder / "store"))[0]
    try:
        return {name: value.clone() for name, value in engine.module.state_dict().items()}
    finally:
        engine.destroy(remove=True)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder of a GPT-2 whose weights no initialization would give, and its tensors."""
    folder = tmp_path_factory.mktemp("given")
    model = models.shallow()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    model.save_pretrained(folder)
    return folder, {name: value.clone() for name, value in model.state_dict().items()}


def _assign_each(model: nn.Module, tensors: dict[str, torch.Tensor], how: str) -> None:
    for name, _ in model.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        module, value = model.get_submodule(path), nn.Parameter(tensors[name].clone())
        if how == "register_parameter":
            module.register_parameter(leaf, value)
        elif how == "setattr":
            setattr(module, leaf, value)
        elif how == "data":
            getattr(module, leaf).data = tensors[name].clone()
        else:
            with torch.no_grad():
                getattr(module, leaf).copy_(tensors[name])


WAYS: dict[str, Callable[[nn.Module, Path, dict[str, torch.Tensor]], Any]] = {
    "load_state_dict": lambda model, folder, tensors: model.load_state_dict(tensors),
    "load_state_dict, assigned": lambda model, folder, tensors: model.load_state_dict(tensors, assign=True),
    "safetensors": lambda model, folder, tensors: safetensors.torch.load_model(
        model, folder / "model.safetensors", strict=False
    ),
    **{
        how: lambda model, folder, tensors, how=how: _assign_each(model, tensors, how)
        for how in ("register_parameter", "setattr", "data", "copy_")
    },
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS)
def test_loaded_values_are_kept(way: str, given: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, tensors = given
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with offload.init():
            model = models.shallow()
            WAYS[way](model, folder, tensors)
    assert_same_tensors(begins_with(model, tmp_path), tensors)


@pytest.mark.sample(2)
@pytest.mark.parametrize("by", ["auto class", "class", "with the model's config", "with info"])
def test_from_pretrained_is_streamed(by: str, given: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, tensors = given
    kind = transformers.AutoModelForCausalLM if by == "auto class" else transformers.GPT2LMHeadModel
    its = transformers.GPT2Config.from_pretrained(folder)
    options: dict[str, Any] = {"config": its} if by == "with the model's config" else {}
    with offload.init():
        model = kind.from_pretrained(folder, output_loading_info=by == "with info", low_cpu_mem_usage=True, **options)
    if by == "with info":
        model, info = model
        assert not info["missing_keys"] and not info["mismatched_keys"]
    assert all(origin_of(parameter) is not None for parameter in model.parameters()), "nothing is read yet"
    assert not model.training
    assert_same_tensors(begins_with(model, tmp_path), tensors)
    assert not isinstance(kind.from_pretrained(folder).lm_head.weight, DeferredParameter), "outside it is as ever"


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", sorted(_LEFT_OUT_IF_NONE))
def test_a_keyword_that_is_none_is_as_if_left_out(
    name: str, given: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    with offload.init():
        model = transformers.GPT2LMHeadModel.from_pretrained(given[0], **{name: None})
    assert all(origin_of(parameter) is not None for parameter in model.parameters()), "nothing is read yet"


def test_from_pretrained_of_what_cannot_be_streamed(
    given: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    folder, tensors = given
    complete = {name: value + 1 for name, value in tensors.items()}
    with offload.init():
        model = transformers.GPT2LMHeadModel.from_pretrained(
            None, config=transformers.GPT2Config.from_pretrained(folder), state_dict=complete
        )
    assert_same_tensors(begins_with(model, tmp_path), complete)


class Written(nn.Module):
    """Its constructor sets weights of other modules by hand, and takes one that it is given."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(table, freeze=False)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in "1234567")
        nn.init.constant_(self.layers[0].weight, 1.0)
        nn.init.trunc_normal_(self.layers[1].weight, 5.0, 0.1, 4.0, 6.0)
        self.layers[2].weight.data.fill_(2.0)
        nn.init.xavier_uniform_(self.layers[3].weight, gain=100.0)
        self.layers[4].weight.data.normal_(3.0, 0.01).mul_(2)
        nn.init.orthogonal_(self.layers[5].weight)
        with torch.no_grad():
            nn.init.zeros_(self.layers[6].weight)[1].add_(7.0)


def test_what_a_constructor_writes_by_hand(tmp_path: Path) -> None:
    table = torch.arange(12.0).view(3, 4)
    torch.manual_seed(1)
    with offload.init():
        model = Written(table)
    assert all(isinstance(layer.bias, DeferredParameter) for layer in model.layers), "what nobody wrote is made later"
    begun = begins_with(model, tmp_path)
    weights = [begun[f"layers.{layer}.weight"] for layer in range(7)]
    assert torch.equal(begun["embedding.weight"], table)
    assert bool((weights[0] == 1).all()) and bool((weights[2] == 2).all())
    assert 4 <= float(weights[1].min()) and float(weights[1].max()) <= 6
    assert float(weights[3].abs().max()) > 10 and abs(float(weights[4].mean()) - 6) < 0.1
    assert torch.allclose(weights[5] @ weights[5].t(), torch.eye(4), atol=1e-5)
    assert bool((weights[6][1] == 7).all()) and int(weights[6].count_nonzero()) == 4
    assert bool(begun["layers.0.bias"].isfinite().all()) and bool(begun["layers.0.bias"].any())


@pytest.mark.parametrize(
    "question",
    [
        lambda weight: nn.init._calculate_fan_in_and_fan_out(weight),
        lambda weight: nn.init._calculate_fan_in_and_fan_out(weight.data),
        lambda weight: nn.init._calculate_fan_in_and_fan_out(weight.view(16, 1)),
        lambda weight: nn.init._calculate_correct_fan(weight, "fan_in"),
        lambda weight: _fails(nn.init.xavier_uniform_, weight[0].detach()),
        lambda weight: _fails(nn.init.kaiming_uniform_, weight, mode="none"),
        lambda weight: _fails(nn.init.normal_, weight, std=-1.0),
        lambda weight: _fails(weight.data.normal_, std=-1.0),
        lambda weight: _fails(weight.data.copy_, torch.ones(3)),
    ],
)
def test_a_question_and_a_failed_write_leave_a_weight_to_its_module(
    question: Callable[[torch.Tensor], Any], tmp_path: Path
) -> None:
    """Such a weight would otherwise be whatever is in new memory."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            with torch.no_grad():
                question(self.layer.weight)

    with offload.init():
        model = Asks()
    assert isinstance(model.layer.weight, DeferredParameter)
    weight = begins_with(model, tmp_path)["layer.weight"]
    assert bool(weight.any()) and float(weight.abs().max()) <= 0.5, "as reset_parameters of a Linear makes it"


def _fails(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        function(*args, **kwargs)


@pytest.mark.parametrize("of", [lambda weight: weight, lambda weight: weight.data], ids=["weight", "data"])
def test_initializers_that_ask_before_they_write(of: Callable[[nn.Parameter], torch.Tensor]) -> None:
    with offload.init():
        eye, dirac, sparse, orthogonal = nn.Linear(3, 3), nn.Conv1d(2, 2, 3), nn.Linear(4, 4), nn.Linear(4, 4)
        nn.init.eye_(of(eye.weight))
        nn.init.dirac_(of(dirac.weight))
        nn.init.sparse_(of(sparse.weight), 0.5, std=1.0)
        nn.init.orthogonal_(of(orthogonal.weight))
    assert torch.equal(eye.weight, torch.eye(3))
    assert int(dirac.weight.count_nonzero()) == 2 and float(dirac.weight.detach().sum()) == 2
    assert int(sparse.weight.count_nonzero()) == 8
    assert torch.allclose(orthogonal.weight @ orthogonal.weight.t(), torch.eye(4), atol=1e-5)


_EARLIER = """
def rows_of_qr(weight):
    fresh = weight.new(*weight.shape).normal_()
    rows, _ = torch.linalg.qr(fresh)
    with torch.no_grad():
        weight.view_as(rows).copy_(rows)
"""
"""An initializer as in versions of torch that do not ask whether a tensor is on meta."""


@pytest.mark.parametrize("of", [lambda weight: weight, lambda weight: weight.data], ids=["weight", "data"])
def test_an_initializer_of_an_earlier_torch_writes(of: Callable[[nn.Parameter], torch.Tensor]) -> None:
    names: dict[str, Any] = {"torch": torch}
    exec(compile(_EARLIER, nn.init.__file__, "exec"), names)
    with offload.init():
        linear = nn.Linear(4, 4)
        names["rows_of_qr"](of(linear.weight))
    assert torch.allclose(linear.weight @ linear.weight.t(), torch.eye(4), atol=1e-5)


def _part(model: nn.Linear) -> None:
    model.weight[0] = 1.0


def test_a_change_of_values_that_are_not_there_is_an_error() -> None:
    change: Callable[[nn.Module], Any]
    for change in (
        _part,
        lambda model: model.weight[0].zero_(),
        lambda model: model.weight.view(-1).fill_(1.0),
        lambda model: model.weight.data.mul_(2),
        lambda model: model.weight.add_(1.0),
        lambda model: model.weight.data.t().copy_(torch.ones(4, 4)),
    ):
        print(change)
        with pytest.raises(ConfigError, match=r"test_deferred_init_values\.py:\d+ changes a weight"):
            with offload.init(), torch.no_grad():
                change(nn.Linear(4, 4))


def test_an_initializer_of_ones_own_is_called_later() -> None:
    class Own(nn.Linear):
        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.weight[0] = 1.0
                self.weight.mul_(2)
                nn.init.zeros_(self.bias)

    with offload.init():
        model = Own(4, 4)
    assert isinstance(model.weight, DeferredParameter) and isinstance(model.bias, DeferredParameter)


WIDTH = 72


def _layers() -> nn.Module:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in "123")


def _each(to: nn.Module, source: nn.Module) -> Iterable[tuple[Any, Any]]:
    return zip(to.parameters(), source.parameters(), strict=True)


def _load(source: nn.Module) -> nn.Module:
    to = _layers()
    to.load_state_dict(source.state_dict())
    return to


def _copy_data(source: nn.Module) -> nn.Module:
    to = _layers()
    for mine, its in _each(to, source):
        mine.data.copy_(its.data)
        mine.requires_grad = False
    return to


def _copy(source: nn.Module) -> nn.Module:
    to = _layers()
    with torch.no_grad():
        for mine, its in _each(to, source):
            mine.copy_(its)
    return to


def _clone(source: nn.Module) -> nn.Module:
    to = _layers()
    for mine, its in _each(to, source):
        mine.data = its.data.clone()
    return to


COPIES_WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "load_state_dict": _load,
    "data.copy_": _copy_data,
    "copy_": _copy,
    "data of a clone": _clone,
    "AveragedModel": AveragedModel,
}


class Twins(nn.Module):
    """The layers of one list are copies of those of the other, which may come first or last."""

    def __init__(self, way: Callable[[nn.Module], nn.Module], last: bool = False) -> None:
        super().__init__()
        if last:
            self.target: nn.Module = nn.Identity()  # the place of a module is that of its first assignment
        self.online = _layers()
        self.target = way(self.online)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.online, *getattr(self.target, "module", self.target)]:
            x = layer(x)
        return x


def _begins_with(model: Callable[[], nn.Module], placement: tuple[str, str], folder: Path) -> dict[str, torch.Tensor]:
    with offload.init(None):
        built = model()
    engine = offload.initialize(model=built, config=config(models.SHALLOW, placement, folder))[0]
    weights = {name.replace("target.module.", "target."): each for name, each in engine.module.state_dict().items()}
    engine.destroy(remove=True)
    return weights


def _assert_copied(weights: dict[str, torch.Tensor]) -> None:
    names = [name for name in weights if name.startswith("online.")]
    assert len(names) == 6
    for name in names:
        assert torch.equal(weights[name], weights[name.replace("online", "target")]), name
        assert bool(weights[name].any()) and float(weights[name].abs().max()) <= WIDTH**-0.5
    assert not torch.equal(weights["online.0.weight"], weights["online.1.weight"])


@pytest.mark.parametrize("last", [False, True], ids=["copies last", "copies first"])
@pytest.mark.parametrize("way", COPIES_WAYS)
@pytest.mark.sample(2)
def test_copies_of_other_units_are_equal(way: str, last: bool, tmp_path: Path) -> None:
    _assert_copied(_begins_with(lambda: Twins(COPIES_WAYS[way], last), ("nvme", "nvme"), tmp_path))


@pytest.mark.sample(1)
@pytest.mark.parametrize("placement", [("none", "none"), ("cpu", "nvme"), ("nvme", "nvme")], ids="-".join)
def test_copies_are_equal_in_every_tier_and_in_chunks(
    placement: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    testing.replace(monkeypatch, "size.first_weights", 4096)
    _assert_copied(_begins_with(lambda: Twins(copy.deepcopy), placement, tmp_path))


class Pair(nn.Module):
    """Two layers, of which a function changes the second."""

    def __init__(self, change: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        with torch.no_grad():
            change(self.one, self.other)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.other(self.one(x))
        return result


def _copied_and_drawn_again(left: nn.Linear, right: nn.Linear) -> None:
    right.load_state_dict(left.state_dict())
    right.reset_parameters()


def _copied_before_the_source_is_drawn_again(left: nn.Linear, right: nn.Linear) -> None:
    values = left.weight.data.clone()
    left.reset_parameters()
    right.weight.data = values


def _copied_and_orthogonal(left: nn.Linear, right: nn.Linear) -> None:
    right.load_state_dict(left.state_dict())
    nn.init.orthogonal_(right.weight)


@pytest.mark.parametrize(
    "change", [_copied_and_drawn_again, _copied_before_the_source_is_drawn_again, _copied_and_orthogonal]
)
def test_a_parameter_that_is_drawn_again_is_no_copy_any_more(change: Callable[..., None], tmp_path: Path) -> None:
    weights = _begins_with(lambda: Pair(change), ("nvme", "nvme"), tmp_path)
    assert bool(weights["other.weight"].any()) and not torch.equal(weights["one.weight"], weights["other.weight"])


def test_a_copy_of_values_written_by_hand_has_them(tmp_path: Path) -> None:
    def change(left: nn.Linear, right: nn.Linear) -> None:
        early = left.weight.data
        nn.init.constant_(left.weight, 3.0)
        right.weight.copy_(early)

    weights = _begins_with(lambda: Pair(change), ("nvme", "nvme"), tmp_path)
    assert bool((weights["other.weight"] == 3).all())


def _parameter_of_data(left: Any, right: Any) -> None:
    right.weight = nn.Parameter(left.weight.data)


def _parameter_of_a_product(left: Any, right: Any) -> None:
    right.weight = nn.Parameter(left.weight.detach() * 0.5)


def _shared_data(left: Any, right: Any) -> None:
    right.weight.data = left.weight.data


def _transposed_data(left: Any, right: Any) -> None:
    right.weight.data = left.weight.data.t()


def _changed_clone(left: Any, right: Any) -> None:
    right.weight.data = left.weight.data.clone().mul_(2)


@pytest.mark.parametrize(
    "change",
    [
        lambda left, right: right.weight.copy_(left.weight * 2),
        lambda left, right: right.weight.copy_(left.weight.t()),
        lambda left, right: right.weight.copy_(left.bias),
        lambda left, right: torch._foreach_copy_([right.weight], [left.weight * 2]),
        _parameter_of_data,
        _parameter_of_a_product,
        _shared_data,
        _transposed_data,
        _changed_clone,
    ],
)
def test_values_made_of_a_parameter_without_any_are_an_error(change: Callable[..., None], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"outside of"):
        _begins_with(lambda: Pair(change), ("nvme", "nvme"), tmp_path)


class Constant(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)


def test_a_copy_that_nobody_could_draw_is_an_error(tmp_path: Path) -> None:
    """The module of the source is not in the model, and the copy's own would initialize it otherwise."""

    def model() -> nn.Module:
        layer = Constant(8, 8)
        layer.load_state_dict(nn.Linear(8, 8).state_dict())
        return nn.Sequential(layer)

    with pytest.raises(ConfigError, match="is a copy of a parameter outside of the model"):
        _begins_with(model, ("nvme", "nvme"), tmp_path)


def test_a_parameter_made_anew_of_its_own_data_is_drawn(tmp_path: Path) -> None:
    def change(left: Any, right: Any) -> None:
        right.weight = nn.Parameter(right.weight.data, requires_grad=False)

    weights = _begins_with(lambda: Pair(change), ("nvme", "nvme"), tmp_path)
    assert bool(weights["other.weight"].any())
