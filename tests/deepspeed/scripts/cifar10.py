"""An image classifier by `deepspeed.initialize`, with a script's own config: prints the losses and the accuracy.

The images are drawn, each class about a pattern of its own: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch import nn

CLASSES, SIZE = 4, 16


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="image classification")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--dtype", choices=("fp32", "fp16", "bf16"), default="fp32")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=0)
    parser.add_argument("--nvme", help="folder for parameters and states, in stage 3")
    return deepspeed.add_config_arguments(parser).parse_args()


def config(args: argparse.Namespace) -> dict[str, object]:
    zero: dict[str, object] = {
        "stage": args.stage,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 50000000,
        "reduce_bucket_size": 50000000,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "cpu_offload": False,
    }
    if args.nvme:
        del zero["cpu_offload"]
        place = {"device": "nvme", "nvme_path": args.nvme}
        zero |= {"offload_param": place, "offload_optimizer": place}
    return {
        "train_batch_size": args.batch_size,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.002, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.002, "warmup_num_steps": 4},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {
            "enabled": args.dtype == "fp16",
            "fp16_master_weights_and_grads": False,
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 10,
        },
        "wall_clock_breakdown": False,
        "zero_optimization": zero,
    }


class Images(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Patterns with noise, each image the same whenever it is read."""

    def __init__(self, count: int, first: int = 0) -> None:
        self._count, self._first = count, first
        self._patterns = torch.randn(CLASSES, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(3, SIZE, SIZE, generator=torch.Generator().manual_seed(100 + self._first + index))
        return self._patterns[index % CLASSES] + noise, index % CLASSES


class Net(nn.Module):
    """Two convolutions and three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 8, 3)
        self.fc1 = nn.Linear(8 * 2 * 2, 32)
        self.fc2 = nn.Linear(32, 16)
        self.fc3 = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 8 * 2 * 2)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


def main(args: argparse.Namespace) -> None:
    deepspeed.init_distributed()
    get_accelerator().set_device(int(args.local_rank) if args.local_rank >= 0 else 0)
    torch.manual_seed(0)
    if torch.distributed.get_rank() != 0:
        torch.distributed.barrier()  # the first process would download
    trainset, testset = Images(48), Images(16, first=48)
    if torch.distributed.get_rank() == 0:
        torch.distributed.barrier()

    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    model_engine, _, trainloader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=trainset, config=config(args)
    )
    local_device = get_accelerator().device_name(model_engine.local_rank)
    target_dtype = None
    if model_engine.bfloat16_enabled():
        target_dtype = torch.bfloat16
    elif model_engine.fp16_enabled():
        target_dtype = torch.half
    criterion = nn.CrossEntropyLoss()

    losses = []
    for _ in range(args.epochs):
        for data in trainloader:
            inputs, labels = data[0].to(local_device), data[1].to(local_device)
            if target_dtype is not None:
                inputs = inputs.to(target_dtype)
            loss = criterion(model_engine(inputs), labels)
            model_engine.backward(loss)
            model_engine.step()
            losses.append(loss.item())

    net.eval()
    right = 0
    with torch.no_grad():
        for images, labels in torch.utils.data.DataLoader(testset, batch_size=4):
            images = images.to(local_device)
            outputs = model_engine(images if target_dtype is None else images.to(target_dtype))
            right += int((outputs.argmax(dim=1) == labels.to(local_device)).sum())
    print(json.dumps({"losses": losses, "right": right}))


if __name__ == "__main__":
    main(arguments())
