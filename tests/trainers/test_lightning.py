"""PyTorch Lightning's Trainer on an engine trains, evaluates, saves and resumes as with its own strategies."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload.errors import ConfigError, StoreError, UsageError
from tests import ROOT
from tests.support import rounding_bounds

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from offload.integrations.lightning import OffloadStrategy  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::Warning:lightning")


class Counted(nn.Module):
    """As a metric: it keeps a tensor that is no buffer, and moves it with itself."""

    moved = 0

    def _apply(self, function: Any, recurse: bool = True) -> Any:
        self.moved += 1
        return super()._apply(function, recurse)


class Net(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, optimizers: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.head, self.metric = nn.Linear(8, 1), Counted()
        self.gain = nn.Parameter(torch.ones(1))  # of the module whose training_step is called, and not its forward
        self.losses: list[float] = []
        self.optimizers_made, self.automatic_optimization = optimizers, optimizers == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x) * self.gain

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self(batch[0]).float(), batch[1].float())
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("error", nn.functional.mse_loss(self(batch[0]).float(), batch[1].float()))

    test_step = validation_step

    def predict_step(self, batch: Any, number: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        made = [torch.optim.AdamW(self.parameters(), lr=1e-2) for _ in range(self.optimizers_made)]
        schedule = torch.optim.lr_scheduler.StepLR(made[0], 2, 0.5)
        return made, [{"scheduler": schedule, "interval": "step"}]


def rows() -> torch.utils.data.DataLoader[Any]:
    """Five batches, so that the last of three steps has one micro-batch."""
    draw = torch.Generator().manual_seed(1)
    data = [torch.randn(10, width, generator=draw) for width in (8, 1)]
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=2)


def config(folder: Path | None, **blocks: Any) -> dict[str, Any]:
    tier = {"device": "none"} if folder is None else {"device": "nvme", "nvme_path": str(folder / "drive")}
    return {"zero_optimization": {"stage": 3, "offload_param": tier, "offload_optimizer": tier}, **blocks}


def trainer(strategy: Any, folder: Path, epochs: int = 2, **arguments: Any) -> Any:
    usual: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": epochs,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.3,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "callbacks": [ModelCheckpoint(folder / "saved", monitor="error", save_last=True)],
    }
    return pl.Trainer(strategy=strategy, default_root_dir=folder, **{**usual, **arguments})


def net(**arguments: Any) -> Net:
    torch.manual_seed(0)
    return Net(**arguments)


@pytest.fixture(autouse=True)
def _quiet_and_alone() -> Iterator[None]:
    """Lightning logs by the way, and its group of ranks is the process's."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def strategies() -> Iterator[Callable[..., Any]]:
    """Makes strategies, whose engines end with the test."""
    made: list[Any] = []

    def make(content: Any, **arguments: Any) -> Any:
        made.append(OffloadStrategy(content, **arguments))
        return made[-1]

    yield make
    for strategy in made:
        if strategy.engine is not None:
            strategy.engine.destroy()


def test_a_fit_is_that_of_the_plain_trainer_and_its_bits_do_not_depend_on_the_tier(
    tmp_path: Path, strategies: Callable[..., Any]
) -> None:
    """Accumulation with a remainder, a clip, a schedule, an evaluation each epoch; then test and predict."""
    plain, disk, memory = net(), net(), net()
    stock = trainer("auto", tmp_path / "stock")
    stock.fit(plain, rows(), rows())
    states = {}
    for model, place in ((disk, tmp_path / "disk"), (memory, None)):
        runner = trainer(strategies(config(place)), tmp_path / str(place is None))
        runner.fit(model, rows(), rows())
        (tested,) = runner.test(model, rows(), verbose=False)
        guesses = torch.cat(runner.predict(model, rows()))
        assert tested["error"] == pytest.approx(nn.functional.mse_loss(guesses, rows().dataset.tensors[1]).item())
        states[model] = runner.strategy.engine.state_dict()
        assert runner.optimizers[0].param_groups[0]["lr"] == stock.optimizers[0].param_groups[0]["lr"] < 1e-2
        assert runner.strategy.engine.global_steps == stock.global_step == runner.global_step == 6
    assert disk.losses == memory.losses and disk.metric.moved
    assert all(torch.equal(states[disk][name], states[memory][name]) for name in states[memory])
    error = 6 * rounding_bounds.sum_error(rounding_bounds.roundings(plain))
    assert disk.losses == pytest.approx(plain.losses, rel=error)
    for name, weight in plain.state_dict().items():
        assert (states[disk][name] - weight).norm() <= error * weight.norm(), name


def test_one_process_draws_the_random_numbers_of_the_plain_trainer(
    tmp_path: Path, strategies: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `seed_everything` too, which strategies for several processes repeat when `fit` begins."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "")  # put back as it was
    losses = []
    for strategy in ("auto", strategies(config(tmp_path))):
        pl.seed_everything(7, verbose=False)
        model = Net()
        shuffled = torch.utils.data.DataLoader(rows().dataset, batch_size=2, shuffle=True)
        trainer(strategy, tmp_path / str(len(losses))).fit(model, shuffled, rows())
        losses.append(model.losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4), "the same batches"


def test_a_training_resumes_from_a_folder_with_the_bits_of_the_unbroken_one(
    tmp_path: Path, strategies: Callable[..., Any]
) -> None:
    unbroken, first, second, third = net(), net(), net(), Net()
    whole = trainer(strategies(config(tmp_path / "a")), tmp_path / "whole", epochs=3)
    whole.fit(unbroken, rows(), rows())
    begun = trainer(strategies(config(None)), tmp_path / "begun", epochs=1)
    begun.fit(first, rows(), rows())
    last = tmp_path / "begun" / "saved" / "last.ckpt"
    assert {path.name for path in last.iterdir()} == {"latest", "global_step3", "lightning-global_step3.ckpt"}
    resumed = trainer(strategies(config(tmp_path / "b")), tmp_path / "begun", epochs=3)
    resumed.fit(second, rows(), rows(), ckpt_path=last)
    assert first.losses + second.losses == unbroken.losses
    wanted, states = whole.strategy.engine.state_dict(), resumed.strategy.engine.state_dict()
    assert all(torch.equal(states[name], wanted[name]) for name in wanted)
    # The folder was saved anew, and names one moment.
    assert {path.name for path in last.iterdir()} == {"latest", "global_step9", "lightning-global_step9.ckpt"}
    # An evaluation loads weights alone, and the training that follows begins with them.
    evaluated = trainer(strategies(config(tmp_path / "c")), tmp_path / "evaluated", epochs=1, callbacks=[])
    evaluated.validate(third, rows(), ckpt_path=last, verbose=False)
    assert evaluated.callback_metrics["error"] == resumed.callback_metrics["error"]
    evaluated.fit(third, rows())
    assert third.losses[0] < unbroken.losses[0] and evaluated.strategy.engine.global_steps == 3


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_the_precision_is_the_engines(precision: str, tmp_path: Path, strategies: Callable[..., Any]) -> None:
    runner = trainer(strategies(config(tmp_path)), tmp_path, precision=precision, max_steps=2, callbacks=[])
    model = net()
    dtypes = []
    model.head.register_forward_hook(lambda module, inputs, output: dtypes.append((module.weight.dtype, output.dtype)))
    runner.fit(model, rows())
    weights = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert set(dtypes) == {(weights, torch.bfloat16)}


def test_configure_model_makes_modules_without_weights(tmp_path: Path, strategies: Callable[..., Any]) -> None:
    class Late(Net):
        def configure_model(self) -> None:
            if not hasattr(self, "late"):
                self.late = nn.Linear(8, 8)
                assert self.late.weight.is_meta

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.late(x))

    model = Late()
    runner = trainer(strategies(config(tmp_path)), tmp_path, epochs=1, callbacks=[])
    runner.fit(model, rows())
    runner.validate(model, rows(), verbose=False)
    assert runner.strategy.engine.state_dict()["late.weight"].abs().sum() > 0


def test_what_an_engine_cannot_do_is_an_error_with_the_way_out(tmp_path: Path, strategies: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match='the config has a block "optimizer"'):
        OffloadStrategy(config(None, optimizer={"type": "AdamW"}))
    with pytest.raises(ConfigError, match=r"offload.resume is 'auto', but Lightning resumes .* fit\(ckpt_path=...\)"):
        OffloadStrategy(config(None, offload={"resume": "auto"}))

    def fit(content: Any, model: Net, **arguments: Any) -> None:
        trainer(strategies(content), tmp_path, callbacks=[], **arguments).fit(model, rows())

    with pytest.raises(ConfigError, match=r"gradient_clipping is 1.0 in the config, and gradient_clip_val is 0.3"):
        fit(config(None, gradient_clipping=1.0), net())
    with pytest.raises(ConfigError, match=r"OffloadStrategy expects precision to be one of 32-true, .* got 64-true"):
        fit(config(None), net(), precision="64-true")
    with pytest.raises(ConfigError, match="cannot be combined with sync_batchnorm"):
        fit(config(None), net(), sync_batchnorm=True)
    with pytest.raises(UsageError, match="trains with one optimizer, and configure_optimizers made 2"):
        fit(config(None), net(optimizers=2), gradient_clip_val=None, accumulate_grad_batches=1)
    with pytest.raises(UsageError, match='clips their norm alone: gradient_clip_algorithm="norm"'):
        fit(config(None), net(), gradient_clip_algorithm="value")
    model = net()
    runner = trainer(strategies(config(None)), tmp_path, epochs=1, callbacks=[])
    runner.fit(model, rows())
    with pytest.raises(UsageError, match=r"a second fit\(\) would begin with new optimizer states"):
        runner.fit(model, rows())
    with pytest.raises(UsageError, match="has the engine of another model"):
        runner.validate(net(), rows())
    (tmp_path / "plain.ckpt").touch()
    with pytest.raises(StoreError, match=r"plain.ckpt is no checkpoint of OffloadStrategy"):
        runner.validate(model, rows(), ckpt_path=tmp_path / "plain.ckpt")


@pytest.mark.slow  # two processes that import Lightning
def test_two_ranks_train_as_one_with_the_whole_batch(tmp_path: Path, strategies: Callable[..., Any]) -> None:
    script = ROOT / "tests" / "trainers" / "lightning_ranks.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    alone = net()
    runner = trainer(strategies(config(None)), tmp_path / "alone")
    runner.fit(alone, rows(), rows())
    (first, weights), (two, same) = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    error = 6 * rounding_bounds.sum_error(rounding_bounds.roundings(alone))
    assert [(a + b) / 2 for a, b in zip(first, two, strict=True)] == pytest.approx(alone.losses, rel=error)
    for name, weight in runner.strategy.engine.state_dict().items():
        assert torch.equal(weights[name], same[name])
        assert (weights[name] - weight).norm() <= error * weight.norm(), name
