"""Ray Train starts ranks that train together, and goes on from their swap files after one was killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.oracle import assert_same_tensors

ray = pytest.importorskip("ray", reason="Ray is in none of our extras: pip install 'ray[train]'")
# Of Ray itself, about its own settings.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore::DeprecationWarning")]
STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False)
    yield
    ray.shutdown()


def train(settings: dict[str, Any]) -> None:
    """Rank 1 kills itself in the first start, if it is told a step."""
    import offload

    torch.manual_seed(0)
    torch.set_num_threads(1)
    folder = Path(settings["folder"])
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
    disk = {"device": "nvme", "nvme_path": str(folder / "swap")}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": disk, "offload_optimizer": disk},
        "offload": {"resume": "auto"},
    }
    engine, *_ = offload.initialize(model=model, config=config)
    rank = engine.global_rank
    with (folder / f"starts{rank}").open("a") as starts:
        print(engine.global_steps, file=starts)
    while engine.global_steps < STEPS:
        step, mark = engine.global_steps, folder / "killed"
        torch.manual_seed(100 * step + rank)
        engine.backward(loss := engine(torch.randn(4, 32)).square().mean())
        mean = engine.mean(float(loss.detach()))
        if rank == 1 and step == settings["dies"] and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        engine.step()
        with (folder / f"losses{rank}").open("a") as losses:
            print(json.dumps([step, mean]), file=losses)
        ray.train.report({"loss": mean})
    engine.save_pretrained(folder / "model")
    engine.destroy(remove=True)


def run(folder: Path, dies: int) -> tuple[dict[int, float], dict[str, torch.Tensor], list[int]]:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    folder.mkdir()
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "dies": dies},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=1)),
    )
    trainer.fit()
    lines = [json.loads(line) for line in (folder / "losses0").read_text().splitlines()]
    losses: dict[int, float] = {}
    for step, loss in lines:
        assert losses.setdefault(step, loss) == loss, "a step that ran twice gave the same"
    return (
        losses,
        load_file(folder / "model" / "model.safetensors"),
        [int(n) for n in (folder / "starts0").read_text().split()],
    )


def test_a_killed_worker_resumes_with_the_bits_of_an_unbroken_run(tmp_path: Path) -> None:
    losses, weights, starts = run(tmp_path / "unbroken", -1)
    assert starts == [0] and sorted(losses) == list(range(STEPS))
    again, resumed, begun = run(tmp_path / "killed", 3)
    assert len(begun) == 2 and begun[0] == 0 and begun[1] in (2, 3)
    assert again == losses
    assert_same_tensors(resumed, weights)
