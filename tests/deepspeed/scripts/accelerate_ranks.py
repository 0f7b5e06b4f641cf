"""A loop of accelerate on the ranks of a launcher: `accelerate_ranks.py FOLDER [gloo]`. Prints a JSON line.

With `gloo` it names the backend, as accelerate needs on a CPU. It saves after half of the steps, and goes on from there
in a second pass.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import nn

FOLDER, BACKEND = Path(sys.argv[1]), sys.argv[2:]
DATA = [(torch.randn(4, generator=torch.Generator().manual_seed(row)), torch.ones(1)) for row in range(16)]


def parts(rows: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.utils.data.DataLoader(DATA, batch_size=rows)


def plain(rows: int) -> list[float]:
    """Returns the losses of the loop of torch with the batch of all ranks; the engine clips to 1 by itself."""
    model, optimizer, loader = parts(rows)
    losses = []
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(accelerator: Any, model: Any, optimizer: Any, batches: Any, save_behind: int) -> list[float]:
    """Returns the mean loss of all ranks for each batch."""
    losses = []
    for number, (x, y) in enumerate(batches, start=1):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        if number == save_behind:
            accelerator.save_state(str(FOLDER / "saved"))
    return losses


def main() -> None:
    handlers = [InitProcessGroupKwargs(backend=name) for name in BACKEND]
    accelerator = Accelerator(kwargs_handlers=handlers)
    model, optimizer, loader = accelerator.prepare(*parts(rows=2))
    half = len(loader) // 2
    losses = trained(accelerator, model, optimizer, loader, save_behind=half)
    accelerator.load_state(str(FOLDER / "saved"))
    resumed = trained(accelerator, model, optimizer, accelerator.skip_first_batches(loader, half), save_behind=0)
    accelerator.end_training()
    model.destroy()
    if accelerator.is_main_process:
        ranks = accelerator.num_processes
        print(json.dumps({"ranks": ranks, "losses": losses, "resumed": resumed, "plain": plain(2 * ranks)}), flush=True)


if __name__ == "__main__":
    main()
