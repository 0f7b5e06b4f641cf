"""A parameter that is copied from another one inside `offload.init` begins with its values, or is an error."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import offload
from offload import testing
from offload.errors import ConfigError
from tests.support import models
from tests.support.oracle import config
from tests.support.ranks.rank_pool import RankPool

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


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
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
    engine = offload.initialize(model=built, config=config(models.GPT2, placement, folder))[0]
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
@pytest.mark.parametrize("way", WAYS)
def test_copies_of_other_units_are_equal(way: str, last: bool, tmp_path: Path) -> None:
    _assert_copied(_begins_with(lambda: Twins(WAYS[way], last), ("nvme", "nvme"), tmp_path))


@pytest.mark.parametrize("placement", [("none", "none"), ("cpu", "nvme"), ("nvme", "nvme")], ids="-".join)
def test_copies_are_equal_in_every_tier_and_in_chunks(
    placement: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    testing.replace(monkeypatch, "size.first_weights", 4096)
    _assert_copied(_begins_with(lambda: Twins(copy.deepcopy), placement, tmp_path))


def _on_rank(folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(torch.distributed.get_rank())
    return _begins_with(lambda: Twins(copy.deepcopy), ("nvme", "nvme"), folder)


def test_copies_are_equal_on_several_ranks(ranks: RankPool, tmp_path: Path) -> None:
    for weights in ranks.run(_on_rank, tmp_path):
        _assert_copied(weights)


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


def _copied_and_drawn_again(one: nn.Linear, other: nn.Linear) -> None:
    other.load_state_dict(one.state_dict())
    other.reset_parameters()


def _copied_before_the_source_is_drawn_again(one: nn.Linear, other: nn.Linear) -> None:
    values = one.weight.data.clone()
    one.reset_parameters()
    other.weight.data = values


def _copied_and_orthogonal(one: nn.Linear, other: nn.Linear) -> None:
    other.load_state_dict(one.state_dict())
    nn.init.orthogonal_(other.weight)


@pytest.mark.parametrize(
    "change", [_copied_and_drawn_again, _copied_before_the_source_is_drawn_again, _copied_and_orthogonal]
)
def test_a_parameter_that_is_drawn_again_is_no_copy_any_more(change: Callable[..., None], tmp_path: Path) -> None:
    weights = _begins_with(lambda: Pair(change), ("nvme", "nvme"), tmp_path)
    assert bool(weights["other.weight"].any()) and not torch.equal(weights["one.weight"], weights["other.weight"])


def test_a_copy_of_values_written_by_hand_has_them(tmp_path: Path) -> None:
    def change(one: nn.Linear, other: nn.Linear) -> None:
        early = one.weight.data
        nn.init.constant_(one.weight, 3.0)
        other.weight.copy_(early)

    weights = _begins_with(lambda: Pair(change), ("nvme", "nvme"), tmp_path)
    assert bool((weights["other.weight"] == 3).all())


def _parameter_of_data(one: Any, other: Any) -> None:
    other.weight = nn.Parameter(one.weight.data)


def _parameter_of_a_product(one: Any, other: Any) -> None:
    other.weight = nn.Parameter(one.weight.detach() * 0.5)


def _shared_data(one: Any, other: Any) -> None:
    other.weight.data = one.weight.data


def _transposed_data(one: Any, other: Any) -> None:
    other.weight.data = one.weight.data.t()


def _changed_clone(one: Any, other: Any) -> None:
    other.weight.data = one.weight.data.clone().mul_(2)


@pytest.mark.parametrize(
    "change",
    [
        lambda one, other: other.weight.copy_(one.weight * 2),
        lambda one, other: other.weight.copy_(one.weight.t()),
        lambda one, other: other.weight.copy_(one.bias),
        lambda one, other: torch._foreach_copy_([other.weight], [one.weight * 2]),
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
    def change(one: Any, other: Any) -> None:
        other.weight = nn.Parameter(other.weight.data, requires_grad=False)

    weights = _begins_with(lambda: Pair(change), ("nvme", "nvme"), tmp_path)
    assert bool(weights["other.weight"].any())
