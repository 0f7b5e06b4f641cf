"""`offload.init`: a model without memory, whose weights come one unit at a time and depend on the seed alone."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrizations, prune

import offload
from offload.errors import ConfigError, OffloadError
from offload.model_io.deferred import materialize
from tests.support import models
from tests.support.families import FAMILIES, tiny_config
from tests.support.oracle import Job, assert_same_tensors, config
from tests.support.ranks.rank_pool import RankPool


def _weights(job: Job, placement: tuple[str, str], folder: Path, **options: object) -> dict[str, torch.Tensor]:
    with offload.init(None):
        model = job.model()
    engine = offload.initialize(model=model, config=config(job, placement, folder, **options))[0]
    weights = engine.module.state_dict()
    engine.destroy(remove=True)
    return weights


@pytest.mark.sample(1)
@pytest.mark.parametrize("job", [models.SHALLOW, models.MIXTURE, Job(models.mixtral, models.language_loss)])
def test_weights_depend_on_the_seed_alone(job: Job, tmp_path: Path) -> None:
    first = _weights(job, ("none", "none"), tmp_path)
    torch.manual_seed(5)
    again = _weights(job, ("nvme", "nvme"), tmp_path)
    other_weights = _weights(job, ("none", "none"), tmp_path, seed=1)
    assert_same_tensors(first, again)
    assert any(not torch.equal(first[name], other_weights[name]) for name in first)


def test_ties_and_buffers_stay() -> None:
    with offload.init():
        model = models.Mixture()
    assert model.head.weight is model.embedding.weight and model.embedding.weight.is_meta
    assert not model.calls.is_meta
    tied = model.embedding.weight
    materialize(model, ["embedding.weight"], 0)
    assert model.head.weight is tied and not tied.is_meta and isinstance(tied, nn.Parameter)


def test_the_generators_of_the_user_are_not_touched() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with offload.init():
        model = nn.Linear(4, 4)
    materialize(model, ["weight", "bias"], 0)
    assert torch.equal(torch.rand(4), expected)


class Scale(nn.Module):
    """Has no `reset_parameters`: its constructor's values are all there is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.5))


class Forgetful(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)


def test_values_that_cannot_be_made_again_are_kept() -> None:
    with offload.init():
        model = Scale()
    assert torch.equal(model.weight, torch.full((3,), 2.5))


def test_a_parameter_that_nobody_initializes_is_an_error() -> None:
    with offload.init():
        model = nn.Sequential(Forgetful(2, 2))
    with pytest.raises(ConfigError, match=r"0\.weight of Forgetful"):
        materialize(model, ["0.weight", "0.bias"], 0)


class Block(nn.Module):
    """Makes tensors in its constructor: a buffer, an attribute, and one from the shape of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("scale", torch.arange(3.0))
        self.table = torch.eye(3)
        self.width = torch.tensor(self.layer.weight.shape[0])


def test_constructors_make_real_tensors() -> None:
    with offload.init():
        block = Block()
    assert torch.equal(block.scale, torch.arange(3.0)) and torch.equal(block.table, torch.eye(3))
    assert int(block.width) == 3 and block.layer.weight.is_meta


def test_contexts_are_nested_and_end_with_an_exception() -> None:
    with pytest.raises(KeyError), offload.init():
        with offload.init():
            inner = nn.Linear(2, 2)
        outer = nn.Linear(2, 2)
        raise KeyError
    assert inner.weight.is_meta and outer.weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_context_counts_for_its_thread() -> None:
    made: list[nn.Module] = []
    with offload.init():
        thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
    assert not made[0].weight.is_meta and bool(made[0](torch.ones(2)).isfinite().all())


class Shared(nn.Module):
    """One parameter in two modules, each of which registers it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        shared = nn.Parameter(torch.zeros(3, 3))
        self.one.weight = shared
        self.other.weight = shared
        self.third = nn.Linear(3, 3)
        self.third.weight = self.one.weight


def test_a_parameter_that_is_registered_twice_stays_one() -> None:
    with offload.init():
        model = Shared()
    assert model.one.weight is model.other.weight is model.third.weight
    assert len(list(model.parameters())) == 4


def _on_ranks(folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(torch.distributed.get_rank())
    return _weights(models.SHALLOW, ("nvme", "nvme"), folder)


def test_weights_do_not_depend_on_the_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    alone = _weights(models.SHALLOW, ("nvme", "nvme"), tmp_path)
    for weights in ranks.run(_on_ranks, tmp_path / "ranks"):
        assert_same_tensors(weights, alone)


def test_an_adapter_beside_absent_weights_begins_as_peft_has_it(tmp_path: Path) -> None:
    """Not on meta, where its zeros would be lost."""
    peft = pytest.importorskip("peft")
    with offload.init():
        model = models.llama()
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    engine = offload.initialize(model=model, config=config(models.SHALLOW, ("none", "none"), tmp_path))[0]
    weights = engine.module.state_dict()
    assert not any(value.any() for name, value in weights.items() if "lora_B" in name)
    assert all(value.any() for name, value in weights.items() if "lora_A" in name)
    engine.destroy()


def test_meta_buffers_are_an_error(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = models.Mixture()
    with pytest.raises(ConfigError, match=r"calls.*offload\.init"):
        offload.initialize(model=model, config=config(models.MIXTURE, ("none", "none"), tmp_path))


class Weighed(nn.Module):
    """Its constructor wants to know a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.scale = self.layer.weight.sum().item()


def test_a_constructor_that_needs_values_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"^Weighed \(.*test_deferred_init\.py:\d+\) computes with .* outside of offload\.init"
    ):
        with offload.init():
            nn.Sequential(Weighed())
    with pytest.raises(RuntimeError, match="cannot be multiplied"), offload.init():
        torch.ones(2, 3) @ torch.ones(2, 3)  # what is wrong otherwise is told as ever


def test_a_family_that_needs_values_is_trained_from_a_complete_model(tmp_path: Path) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 2}
    complete = transformers.RwkvForCausalLM(transformers.RwkvConfig(**sizes, context_length=16))
    with pytest.raises(ConfigError, match=r"^Rwkv\w+ \(.*build this model outside"), offload.init():
        transformers.RwkvForCausalLM(complete.config)
    complete.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="build this model outside of offload"):
        offload.load_pretrained(transformers.AutoModelForCausalLM, tmp_path)
    ids = torch.arange(8)[None]
    expected = complete.train()(input_ids=ids, labels=ids).loss
    job = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "train_micro_batch_size_per_gpu": 1}
    engine = offload.initialize(model=complete, config={**job, "offload": {"device": "cpu"}})[0]
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    assert torch.equal(loss, expected)
    engine.destroy()


_LARGEST = 20_000_000
"""Parameters of a model that is built here; a few families stay large whatever their config says."""


def built(name: str, settings: Any, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = getattr(transformers, name)(copy.deepcopy(settings))
    return model


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: value.detach().to("cpu", copy=True) for name, value in named}


def begins_with(name: str, settings: Any, folder: Path) -> dict[str, torch.Tensor]:
    with offload.init(None):
        model = built(name, settings, 0)
    engine = offload.initialize(model=model, config=config(models.SHALLOW, ("none", "none"), folder))[0]
    try:
        return tensors_of(engine.module)
    finally:
        engine.destroy(remove=True)


def assert_begins_as_plain(name: str, settings: Any, folder: Path) -> None:
    left, right = (tensors_of(built(name, settings, seed)) for seed in (1, 2))
    weights = begins_with(name, settings, folder)
    for name_of_weight, values in left.items():
        shared = (values == right[name_of_weight]) | (values.isnan() & right[name_of_weight].isnan())
        # Of random values a few may be equal by chance.
        if float(shared.float().mean()) > 0.01:
            assert torch.equal(weights[name_of_weight][shared].nan_to_num(), values[shared].nan_to_num()), (
                name_of_weight
            )
        if int((~shared).sum()) > 1000 and values.is_floating_point():
            assert 0.8 < float(weights[name_of_weight][~shared].std() / values[~shared].std()) < 1.25, name_of_weight


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_no_draw_is_equal(family: str, tmp_path: Path) -> None:
    name, settings = FAMILIES[family]
    try:
        tiny = tiny_config(getattr(transformers, settings))
        with torch.device("meta"):
            size = sum(each.numel() for each in built(name, tiny, 0).parameters())
        if size > _LARGEST:
            pytest.skip(f"{size} parameters")
        built(name, tiny, 0)
    except Exception as error:  # a family that asks for more than sizes
        pytest.skip(f"no tiny config: {error}")
    try:
        assert_begins_as_plain(name, tiny, tmp_path)
    except OffloadError as error:  # and one that needs values is refused by name
        assert "outside of offload.init" in str(error)


@pytest.mark.parametrize("family", ["whisper", "gpt2"])
def test_what_a_parent_writes_is_there(family: str, tmp_path: Path) -> None:
    name, settings = FAMILIES[family]
    assert_begins_as_plain(name, tiny_config(getattr(transformers, settings)), tmp_path)


def _begins_with(model: Callable[[], nn.Module], folder: Path) -> dict[str, torch.Tensor]:
    with offload.init(None):
        built = model()
    engine = offload.initialize(model=built, config=config(models.SHALLOW, ("nvme", "nvme"), folder))[0]
    weights = engine.module.state_dict()
    engine.destroy(remove=True)
    return weights


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_modules_begin_as_in_torch(kind: Callable[..., nn.Module], tmp_path: Path) -> None:
    weights = _begins_with(lambda: nn.Sequential(kind(8, 8, num_layers=2)), tmp_path)
    torch.manual_seed(0)  # the seed of the first unit
    assert_same_tensors(weights, nn.Sequential(kind(8, 8, num_layers=2)).state_dict())


def test_weights_of_recurrent_modules_are_written_by_hand(tmp_path: Path) -> None:
    def model() -> nn.Module:
        gru = nn.GRU(4, 4)
        nn.init.constant_(gru.weight_ih_l0, 3.0)
        gru.bias_hh_l0.data.uniform_(5.0, 6.0)
        nn.init.orthogonal_(gru.weight_hh_l0)
        return nn.Sequential(gru)

    weights = _begins_with(model, tmp_path)
    square = weights["0.weight_hh_l0"].t() @ weights["0.weight_hh_l0"]
    assert torch.allclose(square, torch.eye(4), atol=1e-5)
    assert bool((weights["0.weight_ih_l0"] == 3).all())
    assert 5 <= float(weights["0.bias_hh_l0"].min()) and float(weights["0.bias_hh_l0"].max()) <= 6


class Head(nn.Module):
    """A head with a bias, whose weight is that of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in "12")
        self.head = nn.Linear(16, 500)
        self.head.weight = self.embedding.weight


def test_the_bias_of_a_tied_head_has_the_range_of_torch(tmp_path: Path) -> None:
    weights = _begins_with(Head, tmp_path)
    bias = weights["head.bias"]
    assert 0.24 < float(bias.max()) <= 0.25 and -0.25 <= float(bias.min()) < -0.24
    assert torch.equal(weights["head.weight"], weights["embedding.weight"])


def _weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_weight_norm, r"^Linear makes its parameter weight_g .*outside of offload\.init"),
        (
            lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8))),
            r"makes its parameter original0 .*outside of offload\.init",
        ),
        (lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 8))), r"buffer .*outside\s+of it"),
        (
            lambda: nn.Sequential(prune.random_unstructured(nn.Linear(8, 8), "weight", 0.3)),
            r"buffer 0\.weight_mask .*outside\s+of it",
        ),
    ],
)
def test_modules_that_compute_with_weights_are_named(model: Callable[[], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        _begins_with(model, tmp_path)


class Parent(nn.Module):
    """Writes the weights of modules below it, which are units of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in "123")
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 2)


def _table() -> torch.Tensor:
    return torch.arange(64.0).view(8, 8)


class ByReset(Parent):
    def __init__(self) -> None:
        super().__init__()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.layers[1].weight.copy_(_table())
            self.head.weight[1].fill_(-2.5)


class ByName(Parent):
    def __init__(self) -> None:
        super().__init__()
        self.init_weights(1)

    def init_weights(self, layer: int) -> None:
        self.layers[layer].weight.data.copy_(_table())
        nn.init.constant_(self.head.weight, -2.5)


class ByVisit(Parent):
    def __init__(self) -> None:
        super().__init__()
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, -2.5)
        if module is self:
            nn.init.zeros_(self.layers[1].weight)
            with torch.no_grad():
                self.layers[1].weight.add_(_table())


class ByCopy(nn.Module):
    """Contains a copy of a parent, and not the parent that has written."""

    def __init__(self) -> None:
        super().__init__()
        self.part = copy.deepcopy(ByReset())


class Overwritten(ByReset):
    """Draws the weights once more after its parent has written them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].reset_parameters()


@pytest.mark.parametrize("model", [ByReset, ByName, ByVisit, ByCopy])
def test_what_a_module_writes_into_others_below_it_is_kept(model: Callable[[], nn.Module], tmp_path: Path) -> None:
    weights = _begins_with(model, tmp_path)
    prefix = "part." if model is ByCopy else ""
    assert torch.equal(weights[f"{prefix}layers.1.weight"], _table())
    assert bool((weights[f"{prefix}head.weight"][1] == -2.5).all())
    rest = weights[f"{prefix}layers.0.weight"]
    assert bool((rest == -2.5).all()) if model is ByVisit else 0 < float(rest.abs().max()) <= 8**-0.5


def test_the_last_initializer_counts(tmp_path: Path) -> None:
    weights = _begins_with(Overwritten, tmp_path)
    assert 0 < float(weights["layers.1.weight"].abs().max()) <= 8**-0.5
    assert bool((weights["head.weight"][1] == -2.5).all())


def test_what_a_function_of_the_script_writes_is_kept(tmp_path: Path) -> None:
    def init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 1.5)

    weights = _begins_with(lambda: Parent().apply(init_weights), tmp_path)
    assert all(
        bool((value == 1.5).all()) for name, value in weights.items() if name in ("layers.0.weight", "head.weight")
    )


def test_a_transformer_of_torch_begins_as_in_torch(tmp_path: Path) -> None:
    """Its constructor draws all matrices of its layers anew, which are much wider than those of a Linear."""
    plain = nn.Transformer(32, 4, 2, 2, 256, batch_first=True).state_dict()
    weights = _begins_with(lambda: nn.Transformer(32, 4, 2, 2, 256, batch_first=True), tmp_path)
    for name, values in plain.items():
        bound = (6 / sum(values.shape)) ** 0.5 if values.dim() > 1 else 1.0
        assert float(weights[name].abs().max()) <= bound, name
        if values.dim() > 1:
            assert float(weights[name].abs().max()) > 0.95 * bound, name


def test_values_that_are_computed_from_another_unit_are_an_error(tmp_path: Path) -> None:
    class Doubled(Parent):
        def __init__(self) -> None:
            super().__init__()
            self.reset_parameters()

        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.layers[1].weight.copy_(2 * self.layers[0].weight)

    with pytest.raises(ConfigError, match="reset_parameters of Doubled computes with values of parameters of another"):
        _begins_with(Doubled, tmp_path)
