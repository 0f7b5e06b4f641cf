"""Ranks that share each sequence (`sequence_parallel_size`) train as one rank with the whole of it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import offload
from offload.distributed.process_group import Sent
from offload.errors import ConfigError, OffloadError
from tests.support import models, rounding_bounds
from tests.support.oracle import Job, Result, assert_same, assert_same_tensors, room_for, weights_of
from tests.support.ranks import sequence_parallel as sp
from tests.support.ranks.rank_pool import RankPool, rank_and_size, steps
from tests.support.ranks.rank_pool import train as train_alone
from tests.support.sampling import drawn

MEMORY, HOST, DISK = ("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")
LLAMA = sp.JOBS["llama"]
FAST = ("gpt2",)


def train_in_placements(job: Job, size: int, folder: Path) -> Result:
    """All placements have the same bits, and so have blocks that are computed again.

    On disk the device has room for few units, so that units come and go.
    """
    first = sp.train(job, size, MEMORY, folder / "memory")
    # Beside two units for what ranks exchange of the gradients of the largest, four times.
    dense = job.model is not models.mixtral
    few = {"device_memory": 3 * room_for(job, 2)} if job.stage == 3 and job.dtype == "fp32" and dense else {}
    for placement, options in drawn([(HOST, {"activations": "device"}), (DISK, few)], 1):
        result = sp.train(job, size, placement, folder / placement[0], **options)
        assert_same(first, result, f"{placement}")
    return first


@pytest.mark.works(
    "Several ranks", "sequence parallelism (`sequence_parallel_size`) with models of transformers", "right"
)
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in FAST else pytest.mark.slow) for each in sp.JOBS]
)
@pytest.mark.numeric
def test_two_ranks_that_share_sequences_equal_one_rank(name: str, ranks: RankPool, tmp_path: Path) -> None:
    """Also where most tokens that count are in one part: the loss is a mean over tokens, and no mean of means."""
    job = sp.JOBS[name]._replace(steps=2)
    alone = train_alone(job, DISK, tmp_path / "one")
    results = ranks.run(train_in_placements, job, 2, tmp_path / "two")
    assert_same(results[0], results[1], "the two ranks")
    rounding_bounds.same_training(results[0], alone, job, reordered=True)


def train_and_count(job: Job, size: int, folder: Path) -> tuple[Result, list[int], int]:
    """Returns the training, the samples that this rank loads, and the samples of a step."""
    engine = sp.start(job, size, DISK, folder)
    result = steps(engine, job, 0, job.steps)
    rows = [
        int(row) for batch in engine.deepspeed_io(TensorDataset(torch.arange(8)), collate_fn=list) for (row,) in batch
    ]
    total = engine.train_batch_size()
    engine.destroy(remove=True)
    return result, rows, total


@pytest.mark.works("Several ranks", "sequence parallelism beside ZeRO, on two by two ranks", "right")
@pytest.mark.parametrize("shard_size", [-1, 2])
@pytest.mark.numeric
@pytest.mark.slow
def test_two_by_two_ranks_equal_one_rank(shard_size: int, four: RankPool, tmp_path: Path) -> None:
    job = Job(sp.llama, functools.partial(sp.grouped_loss, size=2), steps=3, lr=3e-4, accumulation=2)
    alone = train_alone(job, DISK, tmp_path / "one")
    results = four.run(train_and_count, job._replace(shard_size=shard_size), 2, tmp_path / "four")
    for result, _, total in results:
        assert_same(results[0][0], result, "the ranks")
        assert total == 2 * 2
    rounding_bounds.same_training(results[0][0], alone, job, reordered=True)
    rows = [each for _, each, _ in results]
    # Ranks of a group load the same samples, groups different ones.
    assert rows[0] == rows[1] and rows[2] == rows[3] and sorted(rows[0] + rows[2]) == list(range(8))


def evaluate_and_count(folder: Path) -> tuple[float, tuple[int, ...], int, Sent, int]:
    """Returns the loss of an evaluation, its logits' shape, the tokens of a block, what was sent, and the ranks."""
    engine = sp.start(LLAMA, 2, MEMORY, folder)
    seen: list[int] = []
    engine.module.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    engine.eval()
    before = engine.communication()
    with torch.no_grad():
        output = engine(**sp.batch(0, 0))
    sent = engine.communication().since(before).sequence
    engine.train()
    before = engine.communication()
    engine.backward(engine(**sp.batch(0, 0)).loss)
    both = engine.communication().since(before).sequence
    assert both.nbytes == 2 * sent.nbytes and both.collectives == 2 * sent.collectives
    engine.destroy(remove=True)
    assert output.past_key_values is None
    return float(output.loss), tuple(output.logits.shape), seen[0], sent, engine.world_size


@pytest.mark.works("Several ranks", "evaluation with sequence parallelism", "right")
def test_an_evaluation_has_the_loss_of_the_sequence_and_the_logits_of_a_part(ranks: RankPool, tmp_path: Path) -> None:
    torch.manual_seed(LLAMA.seed)
    whole = float(LLAMA.model().eval()(**sp.batch(0, 0)).loss.detach())
    for loss, logits, tokens, sent, size in ranks.run(evaluate_and_count, tmp_path):
        rounding_bounds.same_losses([loss], [whole], LLAMA)
        assert logits == (2, 16, 128) and tokens == 16 and size == 2
        # In each of two layers 4 + 2 + 2 heads of 16 numbers of each of 2 * 16 tokens, and back 4: half to the other.
        assert sent == Sent(2 * 2 + 1, 2 * (4 + 2 + 2 + 4) * 16 * 2 * 16 * 4 // 2 + 4)


def stop_and_resume(job: Job, folder: Path) -> None:
    unbroken = sp.train(job, 2, DISK, folder / "unbroken")
    engine = sp.start(job, 2, DISK, folder / "run")
    model = engine.module
    steps(engine, job, 0, 1)
    engine.destroy()
    assert model.config._attn_implementation == "sdpa"
    engine = sp.start(job, 2, DISK, folder / "run", resume="must")
    rest = steps(engine, job, 1, job.steps)
    engine.destroy()
    assert rest.losses == unbroken.losses[1:]
    assert_same_tensors(rest.weights, unbroken.weights)
    # Swap files know nothing of sequences: another size goes on from them.
    engine = sp.start(job, 1, DISK, folder / "run", resume="must")
    assert engine.global_steps == job.steps
    assert_same_tensors(weights_of(engine), unbroken.weights)
    engine.destroy(remove=True)


@pytest.mark.slow
def test_a_run_resumes_and_a_destroyed_engine_leaves_the_model_its_own_attention(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(stop_and_resume, LLAMA, tmp_path)


# -- what is refused -----------------------------------------------------------------------------------


def with_router_loss() -> nn.Module:
    model = models.mixtral()
    model.config.output_router_logits = True
    return model


def with_convolution() -> nn.Module:
    model = sp.llama()
    model.model.layers[1].conv = nn.Conv1d(64, 64, 3)
    return model


def with_hook() -> nn.Module:
    """A hook that would take the mean of a part in place of the sequence's."""
    model = sp.llama()
    model.model.layers[1].register_forward_hook(lambda layer, args, output: output - output.mean(1, keepdim=True))
    return model


def with_hook_on_the_outputs() -> nn.Module:
    model = sp.llama()
    model.register_forward_hook(lambda model, args, output: output)
    return model


def with_wrapped_loss() -> nn.Module:
    """A loss that carries the name of transformers' own."""
    model: Any = sp.llama()
    usual = model.loss_function
    model.loss_function = functools.wraps(usual)(lambda *args, **kwargs: usual(*args, **kwargs) ** 2)
    return model  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no model of transformers": (lambda: nn.Linear(4, 4), "Linear is no model of transformers"),
    "an encoder": (models.t5, "T5ForConditionalGeneration does not"),
    "heads": (lambda: models.gpt2(heads=1), "has 1 head, which 2 ranks cannot divide evenly"),
    "flex attention": (lambda: sp.llama(2, "flex_attention"), "attn_implementation='flex_attention'"),
    "a router's loss": (with_router_loss, "adds a loss of its router"),
    "a hook": (with_hook, "on model.layers.1, which would see a part of each sequence"),
    "a hook on outputs": (with_hook_on_the_outputs, "which would see a part of the sequence"),
    "another loss": (with_wrapped_loss, "does not end in transformers' loss of a causal language model"),
    "a convolution": (with_convolution, "has the Conv1d model.layers.1.conv, which mixes tokens"),
}


def message_of(make: Callable[[], Any]) -> str:
    with pytest.raises(OffloadError) as raised:
        make()
    return f"{type(raised.value).__name__}: {raised.value}"


def start_refused(folder: Path) -> dict[str, str]:
    """Starts that are refused leave the model as it was."""
    messages = {}
    for name, (make, _) in REFUSED.items():
        model = make()
        before = {key: value.clone() for key, value in model.state_dict().items()}
        own = getattr(getattr(model, "config", None), "_attn_implementation", None)
        job = LLAMA._replace(model=lambda model=model: model)
        messages[name] = message_of(lambda job=job: sp.start(job, 2, DISK, folder))
        assert_same_tensors(before, model.state_dict())
        assert getattr(getattr(model, "config", None), "_attn_implementation", None) == own
    mixture = LLAMA._replace(model=models.mixtral)
    messages["experts"] = message_of(lambda: sp.start(mixture, 2, DISK, folder, experts="each"))
    messages["schedule"] = message_of(lambda: sp.start(LLAMA, 2, DISK, folder, schedule="layer_major"))
    messages["divisor"] = message_of(lambda: sp.start(LLAMA, 4, DISK, folder))
    return messages


@pytest.mark.works(
    "Several ranks", "sequence parallelism with other models than causal ones of transformers", "refused"
)
def test_what_cannot_be_divided_is_refused_before_anything_changes(ranks: RankPool, tmp_path: Path) -> None:
    for result in ranks.run(start_refused, tmp_path):
        assert all(message.startswith("ConfigError: ") for message in result.values())
        for name, (_, expected) in REFUSED.items():
            assert expected in result[name], name
        assert "experts are units of their own" in result["experts"]
        assert '"schedule": "layer_major"' in result["schedule"]
        assert "sequence_parallel_size is 4" in result["divisor"] and "2 ranks cannot" in result["divisor"]


def test_a_single_rank_has_nobody_to_share_with(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sequence_parallel_size is 2, .* and 1 rank cannot be divided"):
        sp.start(LLAMA, 2, MEMORY, tmp_path)


def start_differently(folder: Path) -> str:
    return message_of(lambda: sp.start(LLAMA, 1 + rank_and_size()[0], MEMORY, folder))


def test_ranks_with_different_sizes_are_an_error_on_all(ranks: RankPool, tmp_path: Path) -> None:
    for message in ranks.run(start_differently, tmp_path):
        assert "the sequence_parallel_size of rank 1 and of rank 0 differ: 2, not 1" in message


def call_wrongly(folder: Path) -> dict[str, str]:
    """The errors of calls that cannot be divided, after which the engine trains as ever."""
    engine = sp.start(LLAMA, 2, MEMORY, folder)
    ids = models.tokens(0, 0)
    ids_of_rank = ids[:, : 1 + rank_and_size()[0]]
    packed = torch.cat([torch.arange(16), torch.arange(16)])[None]
    calls: dict[str, dict[str, Any]] = {
        "differ": {"input_ids": ids_of_rank, "labels": ids_of_rank},
        "odd": {"input_ids": ids[:, :31]},
        "packed": {"input_ids": ids, "position_ids": packed.expand(2, -1)},
        "kept": {"input_ids": ids, "logits_to_keep": 1},
        "weights": {"input_ids": ids, "output_attentions": True},
        "unknown": {"input_ids": ids, "cu_seq_lens_q": torch.tensor([0, 32])},
    }
    messages = {name: message_of(lambda inputs=inputs: engine(**inputs)) for name, inputs in calls.items()}
    messages["generate"] = message_of(lambda: engine.generate(ids, max_new_tokens=2))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    engine.destroy(remove=True)
    return messages


@pytest.mark.works("Several ranks", "generation with sequence parallelism", "refused")
def test_calls_that_cannot_be_divided_are_errors_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    for result in ranks.run(call_wrongly, tmp_path):
        assert all(message.startswith("UsageError: ") for message in result.values())
        assert "ranks 0 and 1 share each sequence" in result["differ"].replace("ranks 1 and 0", "ranks 0 and 1")
        assert "tokens a multiple of sequence_parallel_size, 2, got [2, 31]" in result["odd"]
        assert "packed documents" in result["packed"]
        assert "logits_to_keep" in result["kept"] and "output_attentions" in result["weights"]
        assert "cu_seq_lens_q, of which no part is known" in result["unknown"]
        assert "generat" in result["generate"]


def other_layers(folder: Path) -> str:
    """A model one of whose layers computes attention by itself."""
    engine = sp.start(LLAMA, 2, MEMORY, folder)
    engine.module.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    message = message_of(lambda: engine(**sp.batch(0, 0)))
    engine.destroy(remove=True)
    return message


def test_a_layer_with_attention_of_its_own_is_an_error(ranks: RankPool, tmp_path: Path) -> None:
    for message in ranks.run(other_layers, tmp_path):
        assert "1 of 2 layers of LlamaForCausalLM" in message


def copy_and_compare(folder: Path) -> tuple[str, torch.Tensor, torch.Tensor, str]:
    """Returns the error of a copy's first call, its logits by its own attention, and what is left on the model."""
    engine = sp.start(LLAMA, 2, MEMORY, folder)
    twin = copy.deepcopy(engine.module)
    ids = models.tokens(0, 0)
    message = message_of(lambda: twin(input_ids=ids))
    twin.set_attn_implementation("sdpa")
    with torch.no_grad():
        whole, part = twin(input_ids=ids).logits, engine(input_ids=ids).logits
    engine.module.set_attn_implementation("sdpa")
    replaced = message_of(lambda: engine(input_ids=ids))
    engine.destroy(remove=True)
    return message, whole, part, replaced


def test_a_copy_of_the_model_computes_whole_sequences_once_it_has_its_own_attention(
    ranks: RankPool, tmp_path: Path
) -> None:
    """And the model itself does not lose its attention without an error."""
    parts = []
    for message, whole, part, replaced in ranks.run(copy_and_compare, tmp_path):
        assert "call set_attn_implementation on a copy" in message and whole.shape == (2, 32, 128)
        assert "0 of 2 layers" in replaced
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_the_key_is_part_of_the_config() -> None:
    assert offload.config.load_config({"sequence_parallel_size": 4}).sequence_parallel_size == 4
    with pytest.raises(ConfigError, match="sequence_parallel_size"):
        offload.config.load_config({"sequence_parallel_size": 0})
