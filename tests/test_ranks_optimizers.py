"""Two ranks in fp16, and with every optimizer, have the same bits in every placement; what they cannot do, they say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.errors import ConfigError
from tests import models, rank_pool
from tests.oracle import Job, Result, assert_same
from tests.test_ranks import JOBS, train

PLACES = (("none", "none"), ("nvme", "nvme"), ("cpu", "nvme"))
MIXTURE = JOBS["mixture"]._replace(steps=3)
TRIED = {
    "fp16": MIXTURE._replace(dtype="fp16"),
    "lion, bf16": MIXTURE._replace(dtype="bf16", optimizer="Lion", lr=1e-4),
    "momentum, fp16": MIXTURE._replace(dtype="fp16", optimizer="SGD", lr=0.05, params=(("momentum", 0.9),)),
    "sgd": MIXTURE._replace(optimizer="SGD", lr=0.05),
    "adagrad": MIXTURE._replace(optimizer="Adagrad", lr=1e-2),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[rank_pool.RankPool]:
    with rank_pool.pool(2) as pool:
        yield pool


def everywhere(job: Job, folder: Path) -> Result:
    results = [train(job, placement, folder / "-".join(placement)) for placement in PLACES]
    for each in results[1:]:
        assert_same(results[0], each, "placements")
    return results[0]


@pytest.mark.parametrize("name", TRIED)
def test_same_bits_in_some_placements(name: str, ranks: rank_pool.RankPool, tmp_path: Path) -> None:
    one, other = ranks.run(everywhere, TRIED[name], tmp_path)
    assert_same(one, other, "ranks")
    alone = train(TRIED[name], ("nvme", "nvme"), tmp_path / "alone")
    bound = 1e-5 if TRIED[name].dtype == "fp32" else 1e-2
    assert one.losses == pytest.approx(alone.losses, rel=bound)


def refused(folder: Path) -> str:
    job = models.MIXTURE._replace(optimizer="Lamb")
    with pytest.raises(ConfigError) as caught:
        rank_pool.start(job, ("nvme", "nvme"), folder)
    return str(caught.value)


def test_lamb_is_refused(ranks: rank_pool.RankPool, tmp_path: Path) -> None:
    assert all("Lamb needs the norm of each parameter" in words for words in ranks.run(refused, tmp_path))
