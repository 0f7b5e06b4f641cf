"""A loop of accelerate on several CPU ranks trains, saves and resumes; what accelerate loses on the way is an error.

accelerate is the real one. Its launcher itself takes too long for every run; ranks of torchrun's environment do here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

from tests import ROOT
from tests.support import rounding_bounds
from tests.support.processes import warm_process
from tests.support.ranks.rank_pool import free_port

pytest.importorskip("accelerate")

SCRIPT = ROOT / "tests" / "deepspeed" / "scripts" / "accelerate_ranks.py"

_RANK = """
import os, runpy, sys
import torch
torch.set_num_threads(1)
# The server of these processes has imported both, and they have looked for DeepSpeed.
for name in [name for name in sys.modules if name.split(".")[0] in ("accelerate", "transformers")]:
    del sys.modules[name]
import offload.deepspeed
offload.deepspeed.install()
from accelerate.state import AcceleratorState
script, folder, config = sys.argv[1:]

def message(config, *backend):
    sys.argv = [script, folder, *backend]
    os.environ.pop("ACCELERATE_DEEPSPEED_CONFIG_FILE", None)
    os.environ.update({} if config is None else {"ACCELERATE_DEEPSPEED_CONFIG_FILE": config})
    AcceleratorState._reset_state(True)
    try:
        runpy.run_path(script, run_name="__main__")
    except offload.ConfigError as error:
        return str(error)

for places in (["PARAM", "OPTIMIZER"], ["OPTIMIZER"]):
    for place in ("PARAM", "OPTIMIZER"):
        os.environ[f"ACCELERATE_DEEPSPEED_OFFLOAD_{place}_DEVICE"] = "nvme" if place in places else "none"
    wanted = f"ACCELERATE_DEEPSPEED_OFFLOAD_{places[0]}_NVME_PATH=/mnt/nvme in the environment"
    found = message(None, "gloo")
    assert found and wanted in found and f"does not pass offload_{places[0].lower()}_nvme_path" in found, found
for backend, wanted in ((), "accelerate counts 1 process, and there are 2 ranks"), (("gloo",), ""):
    found = message(config, *backend)
    assert wanted in found if wanted else found is None, found
"""


def config(folder: Path) -> str:
    place = {"device": "nvme", "nvme_path": str(folder / "drive")}
    content = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
    }
    (folder / "drive").mkdir()
    (folder / "ds.json").write_text(json.dumps(content))
    return str(folder / "ds.json")


def check(line: str) -> None:
    """Compares what the script has printed: the plain run on one rank, and the steps behind the saved state."""
    found: dict[str, Any] = json.loads(line)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    steps = len(found["plain"])
    error = 2 * steps * rounding_bounds.sum_error(rounding_bounds.roundings(model))
    assert found["ranks"] == 2 and steps == 4
    rounding_bounds.same_numbers(found["losses"], found["plain"], error)
    assert found["resumed"] == found["losses"][steps // 2 :]


@pytest.mark.numeric
def test_ranks_divide_the_rows_or_say_what_accelerate_lacks(tmp_path: Path) -> None:
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = {**os.environ, **meeting, "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
    ranks = [
        warm_process.begin(
            ["-c", _RANK, SCRIPT, tmp_path, config(tmp_path) if rank == 0 else tmp_path / "ds.json"],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    results = [rank.communicate(120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(str(errors)[-3000:] for _, errors in results)
    check(str(results[0][0]).splitlines()[-1])


@pytest.mark.slow  # four processes that import torch
@pytest.mark.works("Trainers", "`offload run accelerate launch` with its YAML, two CPU ranks, `save_state`", "right")
def test_the_launcher_with_its_own_file(tmp_path: Path) -> None:
    settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_config_file": config(tmp_path), "zero3_init_flag": False},
        "num_machines": 1,
        "num_processes": 2,
        "main_process_port": free_port(),
    }
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(settings))
    tools = Path(sys.executable).parent
    launcher = [tools / "accelerate", "launch", "--config_file", tmp_path / "accelerate.yaml"]
    done = subprocess.run(
        [tools / "offload", "run", *launcher, SCRIPT, tmp_path, "gloo"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    check(done.stdout.splitlines()[-1])
