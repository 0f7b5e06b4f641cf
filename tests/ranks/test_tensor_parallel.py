"""A model that torch's tensor parallelism divides trains as a whole one, beside ZeRO, and its run resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import offload
from offload import testing
from offload.errors import ConfigError, OffloadError, StoreError, UsageError
from tests.support import models, rounding_bounds
from tests.support.modules.checkpointed import small_inputs_move
from tests.support.oracle import Job, PlainEngine, Result, assert_same, assert_same_tensors, config, room_for
from tests.support.ranks import tensor_parallel as tp
from tests.support.ranks.rank_pool import RankPool, rank_and_size, shared_pool, train

DISK, MEMORY = ("nvme", "nvme"), ("none", "none")
JOB = Job(tp.Net, tp.one_loss, steps=2, lr=3e-4)
LLAMA = JOB._replace(model=tp.llama)


def train_in_memory_and_on_disk(job: Job, name: str, size: int, folder: Path) -> Result:
    """Both placements have the same bits. The device has room for two units, so that units come and go."""
    first = tp.train(job, name, size, MEMORY, folder / "memory")
    assert_same(first, tp.train(job, name, size, DISK, folder / "disk", device_memory=room_for(job, 2)), "disk")
    return first


CASES = {
    "weights": JOB,
    "sequence": JOB._replace(accumulation=2, clip=0.05),
    "transformers": LLAMA,
    "autotp": JOB._replace(model=tp.qwen3, clip=0.05, accumulation=2),
    "experts": JOB._replace(model=tp.mixture, clip=0.05),
}
QUICK = ("sequence", "autotp", "experts")


@pytest.mark.works("Several ranks", '"expert_parallel": {"autoep_size": 2} beside tensor parallelism', "right")
@pytest.mark.works("Several ranks", '"tensor_parallel": {"autotp_size": 2}, by the plan of transformers', "right")
@pytest.mark.works("Several ranks", "tensor parallelism of torch (`parallelize_module`) and of transformers", "right")
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in CASES]
)
@pytest.mark.numeric
def test_two_divided_ranks_equal_one_rank(name: str, ranks: RankPool, tmp_path: Path) -> None:
    if name == "transformers":
        pytest.importorskip("transformers.distributed")
    job = CASES[name]
    alone = train(job, DISK, tmp_path / "one")
    results = ranks.run(train_in_memory_and_on_disk, job, name, 2, tmp_path / "two")
    assert_same(results[0], results[1], "the two ranks")
    rounding_bounds.same_training(results[0], alone, job, reordered=True)


def train_and_count(job: Job, name: str, folder: Path) -> tuple[Result, list[int], list[int]]:
    """Returns the training of a grid of rows of two, the ranks of this one's column, and the samples that it loads."""
    engine = tp.start(job, name, 2, DISK, folder)
    ranks = testing.inspect(engine).ranks
    assert ranks is not None and (engine.global_rank, engine.world_size) == rank_and_size()
    result = tp.steps(engine, job, 2, 0, job.steps)
    # Data are divided over columns alone: processes of a row compute one batch together.
    data = TensorDataset(torch.arange(8))
    rows = [int(row) for batch in engine.deepspeed_io(data, collate_fn=list) for (row,) in batch]
    sent = engine.communication()
    # ZeRO's volumes for the gradients of this column, once for each micro-batch: within a replica, then between them.
    trained = sum(layout.trainable_stop for layout in testing.inspect(engine).layouts) * 4
    replicas, shards = ranks.mesh
    once = trained * (shards - 1) // shards + 2 * (trained // shards) * (replicas - 1) // replicas
    assert sent.gradients.nbytes == job.steps * job.accumulation * once
    engine.destroy(remove=True)
    return result, list(ranks.members), rows


@pytest.mark.works("Several ranks", "tensor parallelism beside replicas of shards (`mics_shard_size`)", "right")
@pytest.mark.works("Several ranks", "tensor parallelism beside ZeRO, on two by two ranks", "right")
@pytest.mark.numeric
@pytest.mark.slow
@pytest.mark.parametrize(("size", "shard_size"), [(4, -1), (4, 1), (8, 2)])
def test_rows_of_two_beside_zero_equal_one_rank(size: int, shard_size: int, tmp_path: Path) -> None:
    """A column has a mesh of its own: of four ranks one replica of two shards, or two replicas of one shard."""
    job = CASES["sequence"]
    alone = train(job, DISK, tmp_path / "one")
    with shared_pool(size) as grid:
        results = grid.run(train_and_count, job._replace(shard_size=shard_size), "sequence", tmp_path / "grid")
    for result, _, _ in results:
        assert_same(results[0][0], result, "the ranks")
    rounding_bounds.same_training(results[0][0], alone, job, reordered=True)
    assert [members for _, members, _ in results] == [[*range(rank % 2, size, 2)] for rank in range(size)]
    rows = [each for _, _, each in results]
    assert rows[::2] == rows[1::2] and sorted(row for each in rows[::2] for row in each) == list(range(8))


def stop_and_resume(job: Job, name: str, folder: Path) -> str:
    """The bits of an unbroken run, whose own folders a start without its division, or with another, leaves alone."""
    unbroken = tp.train(job, name, 2, DISK, folder / "unbroken")
    engine = tp.start(job, name, 2, DISK, folder / "run")
    tp.steps(engine, job, 2, 0, 1)
    engine.destroy()
    coordinate = rank_and_size()[0]
    assert (folder / "run" / f"default-tp{coordinate}of2" / "rank0").is_dir()
    with pytest.raises(StoreError) as whole:
        train(job, DISK, folder / "run", resume="auto")
    engine = tp.start(job, name, 2, DISK, folder / "run", resume="must")
    assert engine.global_steps == 1
    rest = tp.steps(engine, job, 2, 1, job.steps)
    engine.destroy(remove=True)
    assert rest.losses == unbroken.losses[1:]
    assert_same_tensors(rest.weights, unbroken.weights)
    return str(whole.value)


@pytest.mark.works("Several ranks", "resume of a run with tensor parallelism from its swap files", "right")
@pytest.mark.parametrize("name", ["sequence", "autotp", "experts"])
@pytest.mark.slow
def test_a_run_resumes_with_its_own_tensor_parallelism_alone(name: str, ranks: RankPool, tmp_path: Path) -> None:
    for message in ranks.run(stop_and_resume, CASES[name]._replace(accumulation=1, steps=3), name, tmp_path):
        assert "is a run with tensor parallelism of 2, and this start has no tensor parallelism" in message


def load_whole_and_divided(folder: Path) -> None:
    """State dicts have DTensors, and are loaded from DTensors, from whole tensors, and from shards."""
    from torch.distributed.tensor import DTensor

    engine = tp.start(JOB, "sequence", 2, ("cpu", "cpu"), folder)
    state = engine.module.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    given = {name: tp.whole(value) for name, value in state.items()}
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.zero_()
    assert not tp.whole(engine.module.state_dict()["head.weight"]).any()
    engine.module.load_state_dict(given)
    for source in (state, {name: value.to_local() for name, value in state.items()}):
        assert_same_tensors({name: tp.whole(value) for name, value in engine.module.state_dict().items()}, given)
        engine.module.load_state_dict(source)
    assert_same_tensors({name: tp.whole(value) for name, value in engine.module.state_dict().items()}, given)
    call_a_layer(engine, given)
    with torch.no_grad():
        engine(torch.zeros(1, 2, dtype=torch.long))
    call_a_layer(engine, given)  # which has lost the engine's own hooks
    engine.destroy(remove=True)


def go_back_through_an_old_graph(folder: Path) -> None:
    engine = tp.start(JOB, "sequence", 2, MEMORY, folder)
    old, new = (tp.row_loss(engine, 0, 0, 2) for _ in range(2))
    engine.backward(new)
    engine.step()
    with pytest.raises(UsageError, match="through a graph made before step"):
        engine.backward(old)
    engine.destroy(remove=True)


def test_a_graph_of_before_a_step_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    """A DTensor in a graph has a version of its own: torch alone would not notice that its weights have changed."""
    ranks.run(go_back_through_an_old_graph, tmp_path)


def call_a_layer(engine: offload.Engine, given: dict[str, torch.Tensor]) -> None:
    """A layer by itself, outside of any forward of the model. The plan divides its input by the sequence."""
    output = engine.module.blocks[0].up(torch.ones(1, 2, 32))
    weight, bias = (given[f"blocks.0.up.{name}"] for name in ("weight", "bias"))
    expected = torch.nn.functional.linear(torch.ones(1, 4, 32), weight, bias)
    assert torch.allclose(output, expected.chunk(2, -1)[rank_and_size()[0]], atol=1e-6)


def test_state_dicts_are_divided_and_whole_ones_are_loaded(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(load_whole_and_divided, tmp_path)


def on_both_dimensions(model: nn.Module) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    two = tp.mesh(2)
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), two, [Replicate(), Shard(0)]))


def as_a_sum(model: nn.Module) -> None:
    from torch.distributed.tensor import DTensor, Partial

    weight = DTensor.from_local(model.head.weight.detach(), tp.mesh(2)["tp"], [Partial()])
    model.head.weight = nn.Parameter(weight)


def with_a_hook(model: nn.Module) -> None:
    model.blocks[0].up.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def on_one_rank_alone(model: nn.Module) -> None:
    if rank_and_size()[0]:
        for block in model.blocks:
            for layer in (block.up, block.down):
                for name, weight in list(layer.named_parameters()):
                    setattr(layer, name, nn.Parameter(weight.full_tensor()))
    else:
        for block in model.blocks:
            for weight in (*block.up.parameters(), *block.down.parameters()):
                weight.full_tensor()


def unchanged(_: nn.Module) -> None:
    """Leaves the model as the plan has made it."""


REFUSED: dict[str, tuple[Callable[[nn.Module], None], dict[str, Any], str]] = {
    "both dimensions": (on_both_dimensions, {}, r"head\.weight is a DTensor over 2 dimensions"),
    "a sum": (as_a_sum, {}, r"head\.weight is a DTensor with the placements \[Partial"),
    "a hook": (with_a_hook, {}, r"up\.weight is a DTensor with gradient hooks"),
    "one rank": (on_one_rank_alone, {}, r"divides 2 processes into \[\(0, 1\), \(1,\)\]; expected groups of one size"),
    "replicas of more than a column": (unchanged, {"shard_size": 2}, r"1 rank with the same part of each divided"),
    "LAMB": (unchanged, {"optimizer": "Lamb"}, "does not go together with an optimizer that needs whole parameters"),
    "codes": (unchanged, {"quantized": "gradients"}, "does not go together with codes of weights and gradients"),
}


def refuse(folder: Path) -> None:
    """Starts fail, after which the model is as it was."""
    for change, given, message in REFUSED.values():
        model = tp.divided(tp.Net(), "weights", 2)
        change(model)
        before = dict(model.named_parameters())
        with pytest.raises(ConfigError, match=message):
            offload.initialize(model=model, config=config(JOB._replace(**given), DISK, folder))
        assert all(before[name] is parameter for name, parameter in model.named_parameters())
        assert not list(folder.glob("*"))


@pytest.mark.works(
    "Several ranks", "a mesh, a placement or an optimizer that tensor parallelism cannot have here", "refused"
)
def test_refused_before_anything_changes(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    ranks.run(refuse, tmp_path / "run")


# -- inputs of blocks ----------------------------------------------------------------------------------


def train_with_checkpoints(
    job: Job, name: str, tier: str, divides: bool, folder: Path
) -> tuple[Result, int, tuple[int, int]]:
    """Returns a training whose blocks are computed again, the bytes of their inputs, and what gathered them."""
    patch = pytest.MonkeyPatch()
    with patch.context() as within:
        small_inputs_move(within)
        keys = {"number_checkpoints": 2, "partition_activations": divides}
        engine = tp.start(job, name, 2, DISK, folder, keys, activations=tier)
        loss = tp.row_loss(engine, 0, 0, 2)
        nbytes = testing.inspect(engine).activation_bytes
        del loss
        before = engine.communication()
        result = tp.steps(engine, job, 2, 0, job.steps)
        sent = engine.communication().since(before).activations
        engine.destroy(remove=True)
    return result, nbytes, (sent.collectives, sent.nbytes)


def divide_inputs(job: Job, name: str, tier: str, folder: Path) -> Any:
    return [train_with_checkpoints(job, name, tier, divides, folder / str(divides)) for divides in (False, True)]


@pytest.mark.works("Activation checkpointing", "`partition_activations` over ranks of tensor parallelism", "right")
@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_ranks_of_a_row_keep_parts_of_inputs(tier: str, ranks: RankPool, tmp_path: Path) -> None:
    """Two blocks with an input of (4, 16, 32) in fp32 each, of which a rank keeps a half and sends it once."""
    job = CASES["autotp"]._replace(steps=1)
    whole, half = 4 * 16 * 32 * 4, 4 * 16 * 32 * 4 // 2
    for (plain, kept, unsent), (divided, part, sent) in ranks.run(divide_inputs, job, "autotp", tier, tmp_path):
        assert_same(plain, divided, "divided inputs")
        calls = 2 * job.steps * job.accumulation
        assert unsent == (0, 0) and sent == (calls, calls * half)
        assert (kept, part) == ((2 * whole, 2 * half) if tier == "nvme" else (0, 0))


@pytest.mark.slow
@pytest.mark.works("Activation checkpointing", "`partition_activations` where the sequence is divided already", "right")
def test_inputs_that_differ_on_the_ranks_stay(ranks: RankPool, tmp_path: Path) -> None:
    for (plain, kept, _), (divided, part, sent) in ranks.run(
        divide_inputs, CASES["sequence"], "sequence", "nvme", tmp_path
    ):
        assert_same(plain, divided, "inputs of a part of the sequence")
        assert kept == part and sent == (0, 0)


# -- plans of transformers ------------------------------------------------------------------------------


def train_a_user_optimizer(folder: Path) -> None:
    """An optimizer over the whole parameters, of which rank 1 has other values, steps the parts of rank 0's."""
    results = []
    for seed in (0, rank_and_size()[0]):
        torch.manual_seed(seed)
        model = tp.qwen3(tied=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        content = {**config(JOB, MEMORY, folder), "tensor_parallel": {"tp": {"tp_size": 2}}}
        del content["optimizer"]
        engine, groups, *_ = offload.initialize(model=model, optimizer=optimizer, config=content)
        assert groups.param_groups[0]["lr"] == 1e-2
        results.append(tp.steps(engine, JOB, 2, 0, 2))
        heads = engine.module.model.layers[0].self_attn.q_proj.weight
        assert heads.shape == (16, 32) and not hasattr(heads, "full_tensor")
        engine.destroy(remove=True)
    assert_same(*results, "a model whose ranks begin with other values")


@pytest.mark.works("Several ranks", '`"autotp_size"` with an optimizer of torch over the whole parameters', "right")
def test_a_users_optimizer_steps_the_parts(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(train_a_user_optimizer, tmp_path)


def named_scale() -> nn.Module:
    model = tp.llama()
    model.tp_plan = {**model.tp_plan, "model.layers.*.mlp.down_proj": "packed_rowwise"}
    return model


def with_adapters() -> nn.Module:
    from peft import LoraConfig

    model: Any = tp.llama()
    model.add_adapter(LoraConfig(target_modules=["q_proj"]))
    return model


def with_a_hooked_layer() -> nn.Module:
    model: Any = tp.llama()
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


PLANS: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "no plan": (tp.Net, 2, "Net has no tensor-parallel plan of transformers"),
    "a style": (named_scale, 2, r"the style 'packed_rowwise' for model\.layers\.0\.mlp\.down_proj"),
    "heads": (tp.llama, 4, "does not divide num_key_value_heads, 2"),
    "adapters": (with_adapters, 2, r"q_proj is a Linear; expected a torch\.nn\.Linear"),
    "a hook": (with_a_hooked_layer, 2, r"lm_head\.weight has gradient hooks"),
    "ranks": (tp.llama, 2, "autotp_size is 2, .* and 1 rank cannot be divided into such groups"),
}


@pytest.mark.works("Several ranks", "a plan of transformers that offload cannot follow", "refused")
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    build, size, message = PLANS[name]
    model = build()
    before = dict(model.named_parameters())
    content = {**config(JOB, MEMORY, tmp_path), "tensor_parallel": {"autotp_size": size}}
    with pytest.raises(ConfigError, match=message):
        offload.initialize(model=model, config=content)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())


# -- experts -------------------------------------------------------------------------------------------


def send_all_tokens_to_one_rank(folder: Path) -> tuple[list[float], list[float]]:
    """Equal tokens choose one expert each layer, so that the other rank computes none, and takes part all the same."""
    ids = torch.full((1, 2), 5)
    losses: list[list[float]] = []
    for name in ("whole", "experts"):
        torch.manual_seed(0)
        job = JOB._replace(model=lambda: tp.mixture(chosen=1))
        if name == "whole":
            engine: Any = PlainEngine(job)
        else:
            engine = tp.start(job, name, 2, DISK, folder, {"partition_activations": True})
            own = [segment for layout in testing.inspect(engine).layouts for segment in layout.segments]
            assert {tuple(part.shape) for part in own if "experts" in part.name} == {(2, 32, 32), (2, 32, 16)}
        losses.append([])
        for _ in range(3):
            loss = models.token_loss(engine(ids).logits, ids)
            engine.backward(loss)
            engine.step()
            losses[-1].append(float(loss.detach()))
    engine.destroy(remove=True)
    return losses[0], losses[1]


@pytest.mark.works("Several ranks", "expert parallelism where one rank has no token, with recomputed blocks", "right")
def test_a_rank_without_a_token_takes_part(ranks: RankPool, tmp_path: Path) -> None:
    for alone, divided in ranks.run(send_all_tokens_to_one_rank, tmp_path):
        assert divided == pytest.approx(alone, rel=1e-5) and divided[2] < divided[0]


EXPERTS: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "sizes": (tp.mixture, 4, "autoep_size is 4, and tensor_parallel.autotp_size is 2; expected one number"),
    "no experts": (tp.llama, 2, "LlamaForCausalLM has no module that transformers marks as stacked experts"),
    "rows": (lambda: tp.mixture(3), 2, "does not divide the 3 experts of model.layers.0.mlp.experts"),
}


@pytest.mark.works("Several ranks", "expert parallelism that does not fit the model or the ranks", "refused")
def test_experts_that_cannot_be_divided_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(refuse_experts, tmp_path)


def refuse_experts(folder: Path) -> None:
    for build, size, message in EXPERTS.values():
        content = {**config(JOB, MEMORY, folder), "tensor_parallel": {"autotp_size": 2}}
        content["expert_parallel"] = {"enabled": True, "autoep_size": size}
        with pytest.raises(ConfigError, match=message):
            offload.initialize(model=build(), config=content)


def test_experts_stay_whole_by_default_and_as_units_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(choose_experts, tmp_path)


def choose_experts(folder: Path) -> None:
    units = []
    for experts in ("whole", "auto"):
        content = config(JOB, DISK, folder / experts, experts=experts) | {"tensor_parallel": {"autotp_size": 2}}
        engine = offload.initialize(model=tp.mixture(), config=content).engine
        units.append([layout.name for layout in testing.inspect(engine).layouts])
        engine.destroy(remove=True)
    assert units[0] == units[1]
    for experts in ("grouped", "each"):
        content = config(JOB, MEMORY, folder, experts=experts) | {"tensor_parallel": {"autotp_size": 2}}
        with pytest.raises(ConfigError, match='set "experts" to "whole" or leave it out'):
            offload.initialize(model=tp.mixture(), config=content)


# -- Megatron ------------------------------------------------------------------------------------------


class Sum(torch.autograd.Function):
    """The sum over the ranks, in the forward or in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forwards: bool) -> torch.Tensor:
        ctx.backwards = not forwards
        return summed(x) if forwards else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (summed(gradient) if ctx.backwards else gradient), None


def summed(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    torch.distributed.all_reduce(x)
    return x


class MegatronBlock(tp.Block):
    """The shards of a block as ordinary parameters, marked as Megatron marks them."""

    def __init__(self, whole: tp.Block) -> None:
        super().__init__(32)
        self.load_state_dict(whole.state_dict())
        rank, size = rank_and_size()
        for layer, name, dim in ((self.up, "weight", 0), (self.up, "bias", 0), (self.down, "weight", 1)):
            part = nn.Parameter(getattr(layer, name).detach().chunk(size, dim)[rank].clone())
            part.tensor_model_parallel = True  # type: ignore[attr-defined]
            setattr(layer, name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = torch.nn.functional.gelu(self.up(Sum.apply(self.norm(x), False)))
        return x + Sum.apply(torch.nn.functional.linear(inside, self.down.weight), True) + self.down.bias


class Mpu:
    """Megatron's parallel_state of two ranks, both of which compute one layer together."""

    def __init__(self) -> None:
        size = rank_and_size()[1]
        self._model = torch.distributed.new_group(list(range(size)))
        self._data, _ = torch.distributed.new_subgroups_by_enumeration([[each] for each in range(size)])

    def get_model_parallel_group(self) -> Any:
        return self._model

    def get_data_parallel_group(self) -> Any:
        return self._data


def train_as_megatron(job: Job, folder: Path) -> Result:
    torch.manual_seed(job.seed)
    model: Any = job.model()
    model.blocks = nn.ModuleList(map(MegatronBlock, model.blocks))
    mpu = Mpu()
    engine = offload.initialize(model=model, mpu=mpu, config=config(job, DISK, folder))[0]
    result = tp.steps(engine, job, 2, 0, job.steps)
    engine.destroy(remove=True)
    return result


@pytest.mark.slow
@pytest.mark.works("Several ranks", "Megatron's `mpu` in `initialize`: shards that it has marked", "right")
@pytest.mark.numeric
def test_shards_of_megatron_equal_one_rank(ranks: RankPool, tmp_path: Path) -> None:
    job = JOB._replace(clip=0.05)
    alone = train(job, DISK, tmp_path / "one")
    parts = ranks.run(train_as_megatron, job, tmp_path / "two")
    assert parts[0].norms == parts[1].norms
    joined = {name: join(name, [part.weights[name] for part in parts]) for name in alone.weights}
    rounding_bounds.same_training(parts[0]._replace(weights=joined), alone, job, reordered=True)


def join(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Returns a whole parameter of the shards of all ranks, or the one that all of them have."""
    if name.endswith((".up.weight", ".up.bias")):
        return torch.cat(parts)
    if name.endswith(".down.weight"):
        return torch.cat(parts, 1)
    assert torch.equal(parts[0], parts[1]), name
    return parts[0]


def test_an_mpu_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match=r"mpu= expects Megatron's parallel_state.*got object without"):
        offload.initialize(model=nn.Linear(2, 2), mpu=object(), config=config(JOB, MEMORY, tmp_path))
