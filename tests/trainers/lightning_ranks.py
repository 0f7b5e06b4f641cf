"""A fit of `tests/trainers/test_lightning.py` on the ranks that torchrun starts: `lightning_ranks.py FOLDER`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from offload.integrations.lightning import OffloadStrategy
from tests.trainers.test_lightning import Net, config, rows, trainer


class Divided(Net):
    """Takes each batch of `rows` apart, so that the ranks together have the batches of one."""

    def train_dataloader(self) -> Any:
        mine = slice(self.trainer.global_rank, None, self.trainer.world_size)
        return torch.utils.data.DataLoader(torch.utils.data.Subset(rows().dataset, range(10)[mine]), batch_size=1)


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    model = Divided()
    runner = trainer(OffloadStrategy(config(folder / "ranks")), folder, devices=2, use_distributed_sampler=False)
    runner.fit(model, val_dataloaders=rows())
    runner.validate(model, rows(), ckpt_path="best", verbose=False)
    torch.save((model.losses, runner.strategy.engine.state_dict()), folder / f"rank{runner.global_rank}.pt")
    runner.strategy.engine.destroy()


if __name__ == "__main__":
    main()
