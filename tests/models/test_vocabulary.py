"""Tables of a vocabulary in pieces train as whole ones do, in less device memory than a table takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

import offload
from offload import testing
from offload.config import load_config
from offload.errors import BudgetError, ConfigError, IoError, UsageError
from offload.finetune.corpus.documents import find_data, read_records
from offload.layout.memory_plan import division_of
from offload.losses import causal_lm, chunk_loss_of
from offload.offline.open_model import open_model
from offload.offline.options import ModelOptions
from offload.offline.score import scores
from offload.planner.activations import Load
from offload.planner.hardware import described, parse_drive
from offload.planner.model_shape import drawn, from_training
from offload.planner.recommend import plan
from offload.sizes import MIB, PAGE
from offload.states import State
from tests import device
from tests.support import models, rounding_bounds
from tests.support.model_folders import make_folder, write_lines
from tests.support.oracle import (
    Job,
    accumulated_step,
    assert_same,
    assert_same_tensors,
    config,
    kill_and_resume,
    least_host_memory,
    plain_loop,
    run,
    same_bits,
    small_pieces,
    start,
    train_step,
    trained,
    weights_of,
)
from tests.support.ranks.rank_jobs import my_rows
from tests.support.ranks.rank_pool import RankPool, train
from tests.support.ranks.rank_pool import start as start_ranks

MEMORY, CPU, DISK = ("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")
WORDS = 1040
ROOM = 16 << 10
"""Bytes of device memory, for the block of `llama` or a piece: in fp32 a table takes eight times as many."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    testing.replace(monkeypatch, "size.row_request", 0)  # else a lookup in a tiny table reads one range of each piece


def llama(tied: bool = False, chunked: bool = True, layers: int = 1, words: int = WORDS) -> nn.Module:
    """Returns a Llama whose tables are most of it, with its loss in chunks of tokens, or from all logits."""
    widths = {"hidden_size": 32, "intermediate_size": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape = transformers.LlamaConfig(
        **widths, num_hidden_layers=layers, vocab_size=words, tie_word_embeddings=tied, use_cache=False
    )
    model = transformers.LlamaForCausalLM(shape)
    if chunked:
        chunk_loss_of(model, chunk_tokens=24)
    return model


def gemma(words: int = WORDS) -> nn.Module:
    """Returns a Gemma 3, whose table is tied, with a cap of its logits and its loss in chunks of tokens."""
    widths = {"hidden_size": 32, "intermediate_size": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape = transformers.Gemma3TextConfig(
        **widths, head_dim=16, num_hidden_layers=1, vocab_size=words, final_logit_softcapping=0.5, use_cache=False
    )
    model = transformers.Gemma3ForCausalLM(shape)
    chunk_loss_of(model, chunk_tokens=24)
    return model


def loss(model: Any, step: int, micro: int, words: int = WORDS) -> torch.Tensor:
    ids = models.tokens(step, micro, (2, 20), words)
    result: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return result


def pieces_of(engine: offload.Engine) -> int:
    """Returns how many units of the engine are pieces."""
    return sum(layout.name.endswith("]") for layout in testing.inspect(engine).layouts)


# -- numbers ------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("make", [llama, partial(llama, tied=True), gemma], ids=["untied", "tied", "gemma3"])
def test_the_bits_do_not_depend_on_the_tier(make: Callable[[], nn.Module], dtype: str, tmp_path: Path) -> None:
    """Nor on device memory of an eighth of a table. And the numbers are those of plain PyTorch, but for roundings."""
    job = Job(make, loss, steps=2, dtype=dtype, accumulation=1 if make is llama else 2)
    pieces = same_bits(job, tmp_path, (MEMORY, CPU, DISK), vocabulary="pieces")
    room = ROOM if dtype == "fp32" else ROOM // 2
    assert_same(pieces, run(job, DISK, tmp_path / "small", device_memory=room))
    if dtype == "fp32":
        rounding_bounds.same_training(pieces, plain_loop(job), job, reordered=True)
    else:
        whole = run(job, MEMORY, tmp_path / "whole")
        rounding_bounds.same_training(pieces, whole, job, reordered=True)


class Classified(nn.Module):
    """An embedding with a row of padding, and a head of few classes, which is no table."""

    def __init__(self, frozen: bool = False, words: int = WORDS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 32, padding_idx=5)
        self.embedding.requires_grad_(not frozen)
        self.layers = nn.ModuleList([nn.Linear(32, 32)])
        self.head = nn.Linear(32, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[0](self.embedding(ids)).relu())  # type: ignore[no-any-return]


def classes(model: Any, step: int, micro: int) -> torch.Tensor:
    ids = models.tokens(step, micro, (2, 20), WORDS)
    ids[0, :4] = 5
    logits = model(ids).flatten(0, 1)
    return functional.cross_entropy(logits, ids.flatten().to(logits.device) % 3)


@pytest.mark.sample(2)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_lookup_has_the_bits_of_a_whole_table(dtype: str, frozen: bool, tmp_path: Path) -> None:
    """Rows without a token too: their moments fade, and their weights decay. A clip would add in another order."""
    model = partial(Classified, frozen)
    job = Job(model, classes, steps=3, clip=0.0, dtype=dtype, accumulation=2, lr=1e-2)
    whole, pieces = (run(job, DISK, tmp_path / how, vocabulary=how) for how in ("whole", "pieces"))
    assert pieces.losses == whole.losses
    assert_same_tensors(pieces.weights, whole.weights)


def test_a_lookup_reads_the_rows_of_its_tokens(tmp_path: Path) -> None:
    """From the drive whole pages, which are compared with their checksums; nothing where the table is in memory."""
    model = partial(Classified, words=16 * WORDS)
    ids = torch.tensor([[3, 3, 40, 2000, 9000], [9001, 12345, 3, 16639, 2000]])
    pages = {row * 32 * 4 // PAGE for row in ids.flatten().tolist()}
    with torch.no_grad():
        torch.manual_seed(0)
        expected = model()(ids)
    for placement, nbytes in ((CPU, 0), (DISK, len(pages) * PAGE)):
        engine = start(Job(model, classes), placement, tmp_path, vocabulary="pieces").eval()
        inspected = testing.inspect(engine)
        read = []
        for _ in range(3):
            before = engine.io_bytes().read
            with torch.no_grad():
                assert torch.equal(engine(ids).cpu(), expected)
            read.append(engine.io_bytes().read - before)
        assert read[1:] == [nbytes] * 2, "all but the table is in host memory since the first forward"
        moving = [unit for unit in inspected.access_order if not inspected.sizes[unit].device_resident]
        names = [inspected.layouts[unit].name for unit in moving]
        assert not any(name.endswith("]") for name in names), "nothing prefetches a piece"
        assert not any(inspected.unaccounted_memory().values())
        if placement == DISK:
            unit = next(unit for unit, layout in enumerate(inspected.layouts) if layout.name.endswith("[0:1040]"))
            path, offset = inspected.state_place(unit, State.WEIGHT, 3 * 32 * 4)
            with open(path, "r+b") as file:
                file.seek(offset)
                file.write(b"damage")
            with pytest.raises(IoError):
                engine(ids)
        engine.destroy(remove=True)


def test_all_terms_of_a_loss_are_those_of_a_whole_head(tmp_path: Path) -> None:
    terms = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0}

    class Capped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return causal_lm(self.embedding(ids), self.head, ids, chunk_tokens=7, num_items_in_batch=30, **terms)

    job = Job(Capped, lambda model, step, micro: model(models.tokens(step, micro, (2, 20), WORDS)), steps=2)
    whole, pieces = (run(job, CPU, tmp_path / how, vocabulary=how) for how in ("whole", "pieces"))
    rounding_bounds.same_training(pieces, whole, job, reordered=True)


class HiddenStates(nn.Module):
    """A Llama that returns its hidden states, or its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama(tied=True, chunked=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        hidden: torch.Tensor = self.inner.model(input_ids=ids).last_hidden_state
        return hidden if labels is None else causal_lm(hidden, self.inner.lm_head, labels, chunk_tokens=24)


def test_a_loss_outside_of_the_model_has_the_same_gradients(tmp_path: Path) -> None:
    """There it needs one piece at a time as well, and a step in between is an error."""
    job, ids, gradients = Job(HiddenStates, loss), models.tokens(0, 0, (2, 20), WORDS), []
    for inside in (True, False):
        engine = start(job, DISK, tmp_path / str(inside), device_memory=ROOM)
        head = engine.module.inner.lm_head
        engine.backward(engine(ids, ids) if inside else causal_lm(engine(ids), head, ids, chunk_tokens=24))
        gradients.append(offload.safe_get_full_grad(head.weight).clone())
        old = causal_lm(torch.randn(1, 20, 32, device=head.weight.device), head, ids[:1])
        engine.step()
        with pytest.raises(UsageError, match="made before step"):
            old.backward()
        engine.destroy(remove=True)
    assert torch.equal(*gradients) and gradients[0].any()


def test_all_logits_are_computed_if_they_are_wanted(tmp_path: Path) -> None:
    job = Job(partial(llama, tied=True, chunked=False), loss, steps=2)
    whole, pieces = (run(job, CPU, tmp_path / how, vocabulary=how) for how in ("whole", "pieces"))
    rounding_bounds.same_training(pieces, whole, job, reordered=True)
    engine = start(job, DISK, tmp_path / "again", vocabulary="pieces")
    ids = models.tokens(0, 0, (2, 20), WORDS)
    with torch.no_grad():
        logits = engine(input_ids=ids).logits.cpu()
        torch.manual_seed(job.seed)
        assert torch.equal(logits.argmax(-1), job.model()(input_ids=ids).logits.argmax(-1))
    # Between steps a lookup by the module alone reads the whole table, and its gradient becomes the parameter's.
    table = engine.module.get_input_embeddings()
    engine.backward(table(ids.to(table.weight.device)).sum())
    gradient = offload.safe_get_full_grad(table.weight)
    assert gradient is not None and torch.equal(gradient.cpu().sum(-1), ids.flatten().bincount(minlength=WORDS) * 32.0)
    engine.destroy(remove=True)


def test_what_is_no_word_is_refused_as_in_torch(tmp_path: Path) -> None:
    engine = start(Job(llama, loss), CPU, tmp_path, vocabulary="pieces")
    ids = models.tokens(0, 0, (2, 20), WORDS)
    with pytest.raises(IndexError):
        engine(input_ids=ids + WORDS)
    with pytest.raises(IndexError):
        engine(input_ids=ids, labels=ids + WORDS)
    engine.destroy(remove=True)


# -- memory -------------------------------------------------------------------------------------------


def test_a_table_larger_than_the_device_trains(tmp_path: Path) -> None:
    """By default, and where the config asks for whole tables it is an error. A plan decides as the run does."""
    job = Job(llama, loss, steps=2)
    small = run(job, DISK, tmp_path / "small", device_memory=ROOM)
    assert_same(small, run(job, MEMORY, tmp_path / "memory", vocabulary="pieces"))
    with pytest.raises(BudgetError, match="device_memory"):
        start(job, DISK, tmp_path / "whole", device_memory=ROOM, vocabulary="whole")
    machine = described("24GB", 1 << 34, [parse_drive("7GB/s,5GB/s")])
    cached = {"vocabulary": "pieces", "host_memory": 4_000_000}
    for options, in_pieces in (({"device_memory": ROOM}, True), ({}, False), (cached, True)):
        content = config(job, DISK, tmp_path, **options)
        shape = from_training(llama(), 20, torch.float32, division_of(load_config(content)), {})
        engine = start(job, DISK, tmp_path / "planned", **options)
        assert (pieces_of(engine) > 0) is in_pieces
        planned = plan(shape, machine, Load(2), content)
        assert planned.shape.layouts == testing.inspect(engine).layouts
        if options is cached:
            ids, read = models.tokens(0, 0, (2, 20), WORDS).to(engine.device), [0]
            for _ in range(3):  # the first forward leaves all but the table in host memory
                with torch.no_grad():
                    engine.module.model(input_ids=ids)
                read.append(engine.io_bytes().read)
            expected = sum(use.row_nbytes or 0 for use in drawn(planned.shape, ids.numel(), 0).uses)
            assert read[3] - read[2] == read[2] - read[1] == pytest.approx(expected, rel=0.25)
        engine.destroy(remove=True)


@pytest.mark.test_device
def test_an_eighth_of_262_144_words_is_enough_on_a_device(tmp_path: Path) -> None:
    """With the bits of a device that holds all pieces. Its memory never holds half of the table."""
    words = 262_144
    job = Job(partial(gemma, words), partial(loss, words=words), steps=1)
    table = words * 32 * 4
    whole = run(job, MEMORY, tmp_path / "memory", vocabulary="pieces")
    assert device.memory()["max_allocated"] > table
    device.reset_peak_memory()
    assert_same(run(job, DISK, tmp_path / "disk", device_memory=table // 8), whole)
    assert device.memory()["max_allocated"] < table // 2


@pytest.mark.slow
def test_a_tied_table_takes_micro_batches_one_by_one(tmp_path: Path) -> None:
    """Layer by layer both uses would add up in another order; a table of one use has the same bits in either."""
    for tied in (False, True):
        job = Job(partial(llama, tied, layers=2), loss, steps=1, dtype="bf16", accumulation=2)
        plain = run(job, MEMORY, tmp_path / "plain", vocabulary="pieces")
        order = "auto" if tied else "layer_major"
        assert_same(run(job, DISK, tmp_path / order, accumulated_step, vocabulary="pieces", schedule=order), plain)
    with pytest.raises(ConfigError, match="both uses add to one gradient"):
        start(job, DISK, tmp_path / "refused", vocabulary="pieces", schedule="layer_major")


def test_an_optimizer_that_looks_at_whole_parameters_leaves_tables_whole(tmp_path: Path) -> None:
    engine = start(Job(llama, loss, optimizer="LAMB"), CPU, tmp_path, vocabulary="pieces")
    assert not pieces_of(engine) and any('"vocabulary": "pieces" has no effect' in line for line in engine.notices)
    engine.destroy(remove=True)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_lookup_writes_its_rows_of_a_gradient_on_the_drive(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head has written the gradient by then: of each piece, only pages with a token's row are written again."""
    small_pieces(monkeypatch)
    job = Job(partial(llama, tied=True, words=8 * WORDS), partial(loss, words=8 * WORDS), steps=2, dtype=dtype)
    in_memory = run(job, MEMORY, tmp_path / "memory", vocabulary="pieces")
    least = least_host_memory(job, tmp_path, vocabulary="pieces")
    engine = start(job, DISK, tmp_path / "disk", vocabulary="pieces", host_memory=least)
    report = testing.inspect(engine)
    pieces = [unit for unit, layout in enumerate(report.layouts) if layout.name.endswith("]")]
    gradients = [report.state_bytes[unit][State.GRAD] for unit in pieces]
    assert all(report.gradients_spill(unit) for unit in pieces)
    written = dict.fromkeys(pieces, 0)

    def count(real: Any, spill: Any, unit: int, first: int, buffer: memoryview) -> Any:
        if unit in written:
            written[unit] += len(buffer)
        return real(spill, unit, first, buffer)

    testing.intercept(monkeypatch, "spill.write", count)
    assert_same(in_memory, trained(engine, job))
    tokens = models.tokens(0, 0, (2, 20), 8 * WORDS).numel()
    again = sum(written.values()) - job.steps * sum(gradients)
    assert 0 < again <= job.steps * tokens * 2 * PAGE
    assert all(count >= job.steps * nbytes for count, nbytes in zip(written.values(), gradients, strict=True))
    engine.destroy(remove=True)


def test_the_head_s_gradients_of_a_tied_table_are_kept_in_the_first_step_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the lookup are added to them, in host memory that holds pages from then on."""
    testing.replace(monkeypatch, "size.kept_gradient", 1)
    job, counts = Job(partial(llama, tied=True), loss, steps=3), list[int]()
    engine = start(job, CPU, tmp_path, vocabulary="pieces")
    report = testing.inspect(engine)
    pieces = [unit for unit, layout in enumerate(report.layouts) if layout.name.endswith("]")]

    def watch(module: nn.Module, inputs: Any, hidden: torch.Tensor) -> None:
        hidden.register_hook(lambda _: counts.append(sum(len(report.gradients_kept(unit)) for unit in pieces)))

    engine.module.model.norm.register_forward_hook(watch)
    for step in range(job.steps):
        train_step(engine, job, step)
    assert counts[0] > 1 and counts[1:] == [0, 0]
    engine.destroy(remove=True)


# -- files --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_run_resumes_in_its_own_division(tmp_path: Path) -> None:
    job = Job(partial(llama, tied=True), loss, steps=6, dtype="bf16")
    unbroken = run(job, MEMORY, tmp_path / "unbroken", vocabulary="pieces")
    (tmp_path / "killed").mkdir()
    assert_same(kill_and_resume(job, DISK, tmp_path / "killed", kills=1, device_memory=ROOM), unbroken)
    start(job, DISK, tmp_path / "first", device_memory=ROOM).destroy()
    engine = start(job, DISK, tmp_path / "first", resume="must")
    assert pieces_of(engine)
    engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_files_have_the_whole_table(dtype: str, tmp_path: Path) -> None:
    """A saved model is one of transformers', and a checkpoint loads whether tables are whole or not."""
    job = Job(partial(llama, tied=True), loss, steps=2, dtype=dtype, clip=0.0)
    engine = start(job, DISK, tmp_path / "pieces", vocabulary="pieces")
    train_step(engine, job, 0)
    engine.save_pretrained(tmp_path / "model")
    engine.save_checkpoint(tmp_path / "checkpoint")
    weights, state = weights_of(engine), engine.module.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    table = engine.module.get_input_embeddings().weight
    moment = offload.safe_get_full_optimizer_state(table, "exp_avg")
    assert moment is not None and moment.shape == table.shape
    engine.destroy(remove=True)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert_same_tensors(loaded.state_dict(), weights)
    for how, source, target in (("whole", "checkpoint", "again"), ("pieces", "again", "last")):
        engine = start(job._replace(seed=5), DISK, tmp_path / how / "run", vocabulary=how)
        engine.load_checkpoint(tmp_path / source)
        assert_same_tensors(weights_of(engine), weights)
        whole_moment = offload.safe_get_full_optimizer_state(engine.module.get_input_embeddings().weight, "exp_avg")
        assert whole_moment is not None and torch.equal(whole_moment, moment)
        engine.save_checkpoint(tmp_path / target)
        engine.destroy(remove=True)


def test_first_values_do_not_depend_on_where_a_module_makes_them(tmp_path: Path) -> None:
    """A drive lends the memory of a whole table, in which its module makes them."""
    weights = []
    for placement in (CPU, DISK):
        content = config(Job(llama, loss), placement, tmp_path / placement[0], vocabulary="pieces")
        with offload.init(content):
            model = llama(tied=True)
        engine = offload.initialize(model=model, config=content)[0]
        weights.append(weights_of(engine))
        engine.destroy(remove=True)
    assert_same_tensors(*weights)


def test_scores_fit_a_limit_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start counts the logits of a chunk, and takes fewer rows at a time if there is no room for all."""
    files = {"/proc/self/cgroup": "0::/outer", "/sys/fs/cgroup/outer/memory.current": "0"}
    widths = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    folder = make_folder(tmp_path / "model", vocab_size=131_072, tie_word_embeddings=True, **widths)
    write_lines(tmp_path / "records.jsonl", [{"text": "words " * 20}])
    all_scores = []
    for limit, rows in ((None, 16), (100 * MIB, 16), (52 * MIB, 4)):
        if limit is not None:
            files["/sys/fs/cgroup/outer/memory.max"] = str(limit)
            testing.replace(monkeypatch, "machine.system_file", lambda path: files.get(path, ""))
        model = open_model(ModelOptions(model=str(folder)), scores=True, rows=16, batch=32, seq_len=32)
        with model.engine:
            assert any("pieces of rows" in line for line in model.engine.notices) is (limit is not None)
            assert (model.rows, model.batch) == (rows, 32)
            assert any("has no room for 16 of 32 rows" in line for line in model.lines) is (rows < 16)
            records = read_records(find_data([tmp_path / "records.jsonl"]))
            all_scores += scores(model, records, seq_len=32, batch_size=model.batch, micro_batch_size=model.rows)
    for score in all_scores[1:]:
        assert score.log_likelihood == pytest.approx(all_scores[0].log_likelihood, rel=1e-5)


# -- ranks --------------------------------------------------------------------------------------------


def rows_of_tokens(model: Any, step: int, micro: int) -> torch.Tensor:
    ids = my_rows(models.tokens(step, micro, (2, 20), WORDS))
    result: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return result


def in_both_tiers(job: Job, folder: Path) -> tuple[Any, Any]:
    with pytest.raises(ConfigError, match="need whole tables"):
        start_ranks(job._replace(sequence=2), CPU, folder / "refused", vocabulary="pieces")
    large = train(job, CPU, folder / "cpu", vocabulary="pieces")
    return large, train(job, DISK, folder / "disk", device_memory="200KB")


@pytest.mark.numeric
def test_ranks_look_up_pieces_of_their_own(ranks: RankPool, tmp_path: Path) -> None:
    job = Job(partial(llama, tied=True), rows_of_tokens, steps=2)
    (rank0, small), (rank1, _) = ranks.run(in_both_tiers, job, tmp_path / "two")
    assert_same(rank0, rank1, "ranks")
    assert_same(rank0, small, "tiers")
    alone = train(job, CPU, tmp_path / "one", vocabulary="pieces")
    rounding_bounds.same_training(rank0, alone, job, reordered=True)
