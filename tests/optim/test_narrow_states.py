"""With states of fewer bytes every rule has the same bits wherever its states are, and after any interruption."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offload.kernels import _native
from tests.optim.narrow_states import FORMS, JOB, RULES, bytes_of_a_parameter
from tests.support.early_updates import counts
from tests.support.early_updates import train_step as early_step
from tests.support.kernel_inputs import ISAS, default_settings
from tests.support.oracle import (
    Job,
    Result,
    assert_same,
    assert_same_tensors,
    kill_and_resume,
    run,
    same_bits,
    small_pieces,
    start,
    trained,
)
from tests.support.ranks.rank_pool import RankPool
from tests.support.ranks.rank_pool import train as train_on_ranks

__all__ = ["default_settings"]  # fixtures

DISK, HOST = ("nvme", "nvme"), ("cpu", "cpu")
FORM = pytest.mark.parametrize("form", [form for form in FORMS if form != "bf24"])
"""With a master in bf24 moments are in 8 bits; a placement and a kill have it with moments in fp32 too."""


@pytest.mark.numeric
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("dtype", "form"),
    [(dtype, form) for dtype in ("bf16", "fp16", "fp32") for form in FORMS if "bf24" not in form or dtype == "bf16"],
)
@pytest.mark.parametrize("name", RULES)
def test_same_bits_in_every_placement(name: str, dtype: str, form: str, tmp_path: Path) -> None:
    job = RULES[name]._replace(dtype=dtype, steps=3)
    found = same_bits(job, tmp_path, **FORMS[form])
    plain = run(job, DISK, tmp_path / "plain")
    # A master that is rounded as it comes in may round its weight the other way.
    assert ("bf24" in form or found.losses[0] == plain.losses[0]) and any(
        not torch.equal(value, plain.weights[key]) for key, value in found.weights.items()
    ), "moments and masters are those of fp32"


@pytest.mark.sample(2)
@pytest.mark.numeric
@FORM
@pytest.mark.parametrize(("isa", "threads"), [(isa, 1 + number % 2) for number, isa in enumerate(ISAS)])
def test_threads_and_instruction_sets_give_the_same_bits(isa: str, threads: int, form: str, tmp_path: Path) -> None:
    whole = run(JOB, HOST, tmp_path / "default", **FORMS[form])
    _native.configure(isa, threads)
    assert_same(whole, run(JOB, HOST, tmp_path / "other", **FORMS[form]), f"{isa}, {threads} threads")


@pytest.mark.numeric
@FORM
@pytest.mark.slow
def test_accumulated_micro_batches_give_the_same_bits_everywhere(form: str, tmp_path: Path) -> None:
    same_bits(JOB._replace(accumulation=3), tmp_path, [("none", "none"), HOST, DISK], **FORMS[form])


@FORM
@pytest.mark.sample(1)
def test_an_update_under_the_backward_and_its_repetition_round_alike(form: str, tmp_path: Path) -> None:
    """Confirmed, and made again for a step that clips."""
    for clip, kind in ((0.0, "hits"), (1e-3, "misses")):
        job = JOB._replace(clip=clip)
        late = run(job, DISK, tmp_path / f"late-{kind}", speculate=False, **FORMS[form])
        engine = start(job, DISK, tmp_path / f"early-{kind}", speculate=True, **FORMS[form])
        try:
            early = trained(engine, job, early_step)
            assert getattr(counts(engine), kind) > 0
        finally:
            engine.destroy(remove=True)
        assert_same(late, early, kind)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "late"), [("AdamW", 0.02), ("Lamb", 0.0), ("Lion", 0.0)])
def test_killed_and_resumed_is_unbroken(name: str, late: float, form: str, tmp_path: Path) -> None:
    job = RULES[name]._replace(steps=40 if late else 120)
    assert_unbroken(job, form, 3, late, tmp_path)


@pytest.mark.slow
@FORM
def test_twenty_kills_are_unbroken(form: str, tmp_path: Path) -> None:
    assert_unbroken(JOB._replace(steps=150), form, 20, 0.02, tmp_path)


def assert_unbroken(job: Job, form: str, kills: int, late: float, folder: Path) -> None:
    (folder / "killed").mkdir()
    killed = kill_and_resume(job, DISK, folder / "killed", kills=kills, late=late, **FORMS[form])
    assert_same(run(job, DISK, folder / "whole", **FORMS[form]), killed, "unbroken and killed")


@pytest.mark.slow
def test_a_matrix_of_muon_moves_a_moment_less(tmp_path: Path) -> None:
    """In bf16: 14 bytes a step, 12 of disk, and a little for what is no matrix."""
    found = bytes_of_a_parameter(tmp_path, JOB._replace(optimizer="Muon", clip=0.0), moments="bf16")
    assert found.moved <= 14.3 and 12 < found.stored <= 12.2


def on_two_ranks(job: Job, form: str, folder: Path) -> Result:
    """Both ranks have the same rows, so that their mean has the bits of one rank's gradient."""
    results = [train_on_ranks(job, each, folder / "-".join(each), **FORMS[form]) for each in (DISK, HOST)]
    assert_same(*results, "placements")
    return results[0]


@pytest.mark.numeric
@FORM
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["AdamW", "Lion"])
def test_two_ranks_round_as_one(name: str, form: str, ranks: RankPool, tmp_path: Path) -> None:
    """An element has its number in the whole unit, whichever rank has it, and ranks hold whole blocks."""
    job = RULES[name]._replace(clip=0.0)
    one, other = ranks.run(on_two_ranks, job, form, tmp_path / "two")
    assert_same(one, other, "ranks")
    alone = run(job, DISK, tmp_path / "one", **FORMS[form])
    assert_same_tensors(alone.weights, one.weights, "one rank and two")


def in_small_pieces(job: Job, form: str, folder: Path) -> Result:
    """The norms are taken chunk by chunk, of which a parameter has several."""
    with pytest.MonkeyPatch.context() as patch:
        small_pieces(patch)
        return on_two_ranks(job, form, folder)


@pytest.mark.numeric
@FORM
@pytest.mark.slow
def test_lamb_on_two_ranks_moves_by_the_norms_of_rounded_moments(form: str, ranks: RankPool, tmp_path: Path) -> None:
    """The norms come from another pass than the update, on the thread of `step()`."""
    job = RULES["Lamb"]._replace(clip=0.0)
    one, other = ranks.run(in_small_pieces, job, form, tmp_path / "two")
    assert_same(one, other, "ranks")
    # Ranks add the norms up in another order, in double. A ratio differs by some 1e-16, and its rounding to fp32 not.
    alone = run(job, DISK, tmp_path / "one", **FORMS[form])
    assert_same_tensors(alone.weights, one.weights, "one rank and two")
