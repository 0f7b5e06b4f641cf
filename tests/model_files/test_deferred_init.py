"""`offload.init`: a model without memory, whose weights come one unit at a time and depend on the seed alone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import offload
from offload.engine.deferred import materialize
from offload.errors import ConfigError, UsageError
from tests.support import models
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
@pytest.mark.parametrize("job", [models.GPT2, models.MIXTURE, Job(models.mixtral, models.language_loss)])
def test_weights_depend_on_the_seed_alone(job: Job, tmp_path: Path) -> None:
    first = _weights(job, ("none", "none"), tmp_path)
    torch.manual_seed(5)
    again = _weights(job, ("nvme", "nvme"), tmp_path)
    other = _weights(job, ("none", "none"), tmp_path, seed=1)
    assert_same_tensors(first, again)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_they_are_distributed_as_the_library_wants(tmp_path: Path) -> None:
    """Standard deviation of each matrix, ones of each norm, zeros of each bias: as when built the usual way."""
    weights = _weights(models.GPT2, ("none", "none"), tmp_path)
    torch.manual_seed(0)
    for name, usual in models.gpt2().state_dict().items():
        found = weights[name]
        assert found.shape == usual.shape
        if usual.std() == 0:
            assert torch.equal(found, usual), name
        else:
            assert abs(float(found.std() / usual.std()) - 1) < 0.2, name


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


def test_copies_within_a_constructor_are_equal(tmp_path: Path) -> None:
    """`nn.TransformerEncoder` copies its layer, which is itself in no model."""

    def encoder() -> nn.Module:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)

    weights = _weights(Job(encoder, models.language_loss), ("none", "none"), tmp_path)
    first, second = (weights[f"layers.{layer}.linear1.weight"] for layer in range(2))
    assert first.isfinite().all() and first.std() > 0 and torch.equal(first, second)


def test_a_model_without_weights_cannot_be_used() -> None:
    with offload.init():
        model = nn.Linear(2, 2)
    for use in (lambda: model(torch.ones(2)), lambda: model.weight.data.zero_(), lambda: model.weight.sum()):
        with pytest.raises(UsageError, match=r"offload\.initialize"):
            use()


def _on_ranks(folder: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(torch.distributed.get_rank())
    return _weights(models.GPT2, ("nvme", "nvme"), folder)


def test_weights_do_not_depend_on_the_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    alone = _weights(models.GPT2, ("nvme", "nvme"), tmp_path)
    for weights in ranks.run(_on_ranks, tmp_path / "ranks"):
        assert_same_tensors(weights, alone)


def test_an_adapter_beside_absent_weights_begins_as_peft_has_it(tmp_path: Path) -> None:
    """Not on meta, where its zeros would be lost."""
    peft = pytest.importorskip("peft")
    with offload.init():
        model = models.llama()
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    engine = offload.initialize(model=model, config=config(models.GPT2, ("none", "none"), tmp_path))[0]
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
