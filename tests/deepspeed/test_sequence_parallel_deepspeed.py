"""DeepSpeed's names for sequences that ranks share: a loop of its ALST trains as one rank with all batches in turn."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload.errors import OffloadError
from tests.support import models, rounding_bounds
from tests.support.oracle import Job, Result, config, weights_of
from tests.support.ranks import sequence_parallel as sp
from tests.support.ranks.rank_pool import RankPool, rank_and_size
from tests.support.ranks.rank_pool import train as train_alone

MEMORY = ("none", "none")
LLAMA = sp.JOBS["llama"]


def message_of(make: Callable[[], Any]) -> str:
    with pytest.raises(OffloadError) as raised:
        make()
    return str(raised.value)


def batches_of(rank: int) -> list[dict[str, torch.Tensor]]:
    """Returns the two batches that a rank's own loader yields."""
    batches = [models.tokens(step, rank) for step in range(2)]
    return [{"input_ids": ids, "labels": ids.masked_fill(ids < 40, sp.IGNORED)} for ids in batches]


def train_with_deepspeeds_names(job: Job, folder: Path) -> Result:
    """Trains as the tutorial of DeepSpeed's ALST does."""
    import torch.distributed.nn.functional as over_ranks
    from offload.deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter

    import offload.deepspeed as deepspeed
    from offload.deepspeed.utils import groups

    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path="llama",
        core_attn_implementation="sdpa",
        sequence_parallel_size=2,
        micro_batch_size=2,
        seq_length_is_variable=True,
    )
    torch.manual_seed(job.seed)
    model = job.model()
    engine, *_ = deepspeed.initialize(model=model, config=config(job, MEMORY, folder), mpu=mpu)
    group, size = groups._get_sequence_parallel_group(), groups._get_sequence_parallel_world_size()
    loader = UlyssesSPDataLoaderAdapter(
        batches_of(rank_and_size()[0]),
        sp_rank=groups._get_sequence_parallel_rank(),
        sp_group=group,
        sp_world_size=size,
        device=engine.device,
    )
    assert len(loader) == 4
    losses, norms = [], []
    for batch in loader:
        shift_labels, logits = batch["shift_labels"], engine(**batch).logits
        loss = engine.module.loss_function(
            logits=logits, labels=None, shift_labels=shift_labels, vocab_size=engine.module.config.vocab_size
        )
        good = (shift_labels != sp.IGNORED).sum().float()
        rank_losses, counts = over_ranks.all_gather(loss, group=group), over_ranks.all_gather(good, group=group)
        loss = sum(one * count for one, count in zip(rank_losses, counts, strict=True)) / sum(counts)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        norms.append(engine.get_global_grad_norm() or 0.0)
    weights = weights_of(engine)
    engine.destroy()
    UlyssesSPAttentionHF.unregister_from_transformers("sdpa")
    return Result(losses, norms, weights)


def loss_of_one_after_the_other(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    return model(**batches_of(step % 2)[step // 2]).loss


@pytest.mark.slow
@pytest.mark.works("Several ranks", "DeepSpeed's `UlyssesSPAttentionHF` and `UlyssesSPDataLoaderAdapter`", "right")
@pytest.mark.numeric
def test_a_loop_of_deepspeeds_trains_on_each_ranks_batches_in_turn(ranks: RankPool, tmp_path: Path) -> None:
    job = LLAMA._replace(loss=loss_of_one_after_the_other, steps=4)
    alone = train_alone(job, MEMORY, tmp_path / "one")
    for result in ranks.run(train_with_deepspeeds_names, job, tmp_path / "two"):
        rounding_bounds.same_training(result, alone, job, reordered=True)


def refused_names() -> list[str]:
    from offload.deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    register = functools.partial(UlyssesSPAttentionHF.register_with_transformers, "llama")
    return [
        message_of(lambda: register("flex_attention", 2)),
        message_of(lambda: register("sdpa", 2, disable_in_eval=True)),
        message_of(lambda: register("sdpa", 2, seq_length=31)),
        message_of(lambda: register("sdpa", 3)),
    ]


def test_what_deepspeeds_names_do_not_do_here_says_what_to_do(ranks: RankPool) -> None:
    for attention, evaluation, length, size in ranks.run(refused_names):
        assert "attn_implementation" in attention and "disable_in_eval" in evaluation
        assert "a multiple of sequence_parallel_size, 2, got 31" in length
        assert "a divisor of the number of ranks, 2, got 3" in size


# -- tiled compute of ALST ----------------------------------------------------------------------------


class Tiled(nn.Module):
    """An MLP and a head over tokens, whole or by the tiled names of ALST."""

    def __init__(self, tiled: bool) -> None:
        super().__init__()
        self.mlp, self.head = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)), nn.Linear(6, 9)
        self.tiled = tiled

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        from offload.deepspeed.runtime.sequence_parallel import ulysses_sp as alst

        if not self.tiled:
            scaled = self.mlp(hidden) * hidden.sin()
            return self.loss(scaled.flatten(0, 1), labels.flatten(), torch.ones(14, dtype=torch.bool)) / 14
        weights = list(self.mlp.parameters())
        made = alst.TiledMLP.apply(lambda module, x: module(x), self.mlp, hidden, 3, weights)
        made = alst.sequence_tiled_compute(
            lambda x, factor: x * factor.sin(), 7, 2, {"x": made, "factor": hidden}, {}, "x", None, 1, None
        )
        mask = torch.ones_like(labels, dtype=torch.bool)
        total = alst.TiledFusedLogitsLoss.apply(Tiled.loss, self, made, labels, mask, 4, [self.head.weight], "sum")
        return total / 14

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(hidden)[mask], labels[mask], reduction="sum")


def tiled_rows(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(3)
    return torch.randn(2, 7, 6, generator=drawn, dtype=dtype), torch.randint(9, (2, 7), generator=drawn)


def test_tiled_names_of_alst_have_the_gradients_of_the_whole_computation() -> None:
    gradients = []
    for tiled in (False, True):
        torch.manual_seed(0)
        model = Tiled(tiled).double()
        hidden, labels = tiled_rows(torch.float64)
        loss = model(hidden.requires_grad_(), labels)
        loss.backward()
        gradients.append([loss.detach(), hidden.grad, *(parameter.grad for parameter in model.parameters())])
    for whole, tiles in zip(*gradients, strict=True):
        torch.testing.assert_close(tiles, whole, rtol=1e-12, atol=1e-14)


def test_tiled_names_of_alst_have_equal_bits_in_memory_and_on_a_drive(tmp_path: Path) -> None:
    import offload.deepspeed as deepspeed

    weights = []
    for place in ("none", "nvme"):
        torch.manual_seed(0)
        content = config(LLAMA, (place, place), tmp_path / place)
        engine, *_ = deepspeed.initialize(model=Tiled(tiled=True), config=content)
        for _ in range(2):
            engine.backward(engine(*tiled_rows(torch.float32)))
            engine.step()
        weights.append(weights_of(engine))
        engine.destroy(remove=True)
    first, second = weights
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_tiled_names_of_alst_refuse_what_they_cannot_join() -> None:
    from offload.deepspeed.runtime.sequence_parallel import ulysses_sp as alst

    hidden, labels = tiled_rows(torch.float32)
    loss = functools.partial(alst.TiledFusedLogitsLoss.apply, Tiled.loss, Tiled(tiled=False), hidden)
    assert "'none'; give" in message_of(lambda: loss(labels, None, 2, None, "none"))
    assert "[2, 7, 6], [2, 5]" in message_of(lambda: loss(labels[:, :5], None, 2))
