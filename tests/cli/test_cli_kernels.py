"""`offload train` in Liger's kernels and in compiled blocks: a run keeps the kernels with which it began.

Liger itself needs Triton, so a module of its names stands in for it.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.model_folders import make_folder
from tests.support.processes.cli_in_process import all_lines, call, log, run_folder

__all__ = ["run_folder"]


LIGER = """
import torch

def forward(norm, hidden):
    mean = (hidden * hidden).sum(-1, keepdim=True) / hidden.shape[-1]
    return norm.weight * (hidden / torch.sqrt(mean + 1e-6))

def apply_liger_kernel_to_llama(
    rope=True, cross_entropy=False, fused_linear_cross_entropy=True, rms_norm=True, swiglu=True, model=None
):
    assert rope and rms_norm and not cross_entropy and not fused_linear_cross_entropy
    assert swiglu == (model.config.hidden_act == "silu"), "it does not look at the activation itself"
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = forward.__get__(module)
"""
RUN = (
    *("--model", "Llama", "--dtype", "fp32", "--schedule", "constant", "--warmup", "0", "--eval-every", "1"),
    *("--accumulation", "2", "--batch-size", "1"),
)


@pytest.fixture(autouse=True)
def within_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_folder(Path("Llama"), weights=False)
    for name in ("liger_kernel", "liger_kernel.transformers"):
        path = tmp_path / "installed" / name.replace(".", "/") / "__init__.py"
        path.parent.mkdir(parents=True)
        path.write_text(LIGER if "." in name else "")
        monkeypatch.delitem(sys.modules, name, raising=False)


def losses(path: str) -> list[float]:
    return [line.get("loss", line.get("eval_loss")) for line in all_lines(path)]


@pytest.mark.slow
def test_a_run_keeps_liger_s_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    call(*RUN, "--steps", "4", "--log", "eager", "--run", "eager", "--keep")
    refused = call(*RUN, "--kernels", "liger")
    assert refused.exit_code == 2 and "cannot run here: Liger's kernels need a GPU" in refused.stderr

    monkeypatch.syspath_prepend("installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "run in Liger's kernels; --kernels eager" in call(*RUN, "--steps", "4", "--log", "whole").stdout
    call(*RUN, "--steps", "2", "--log", "log", "--run", "again", "--keep")
    done = call(*RUN, "--steps", "4", "--log", "log", "--run", "again", "--resume", "must", "--keep")
    assert done.exit_code == 0 and "Liger" not in done.stdout
    assert losses("log") == losses("whole") != losses("eager") and len(losses("log")) == 8
    assert log()[0]["about"]["kernels"] == "liger"
    kept = call(*RUN, "--steps", "5", "--run", "eager", "--resume", "must").stdout
    assert "blocks run in torch's own kernels, with which the run has begun" in kept

    make_folder(Path("Other"), weights=False, hidden_act="gelu")
    assert call(*RUN, "--model", "Other", "--steps", "1", "--run", "other").exit_code == 0

    monkeypatch.delenv("TRITON_INTERPRET")
    resumed = (*RUN, "--steps", "5", "--run", "again", "--resume", "must")
    lost = call(*resumed)
    assert lost.exit_code == 2 and "the run has begun with --kernels liger, which cannot run here" in lost.stderr
    changed = call(*resumed, "--kernels", "eager")
    assert changed.exit_code == 0 and "resumed, and --kernels was liger, is eager" in changed.stdout


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch.compile itself
def test_a_run_keeps_its_compiled_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend=backend))
    torch.compiler.reset()
    call(*RUN, "--steps", "2", "--log", "eager", "--run", "eager")
    assert not graphs
    call(*RUN, "--steps", "1", "--log", "log", "--kernels", "compile", "--keep", "--activations", "device")
    assert any("scaled_dot_product" in str(graph.graph) and "silu" in str(graph.graph) for graph in graphs), (
        "all of one"
    )
    torch.compiler.reset()
    graphs.clear()
    done = call(*RUN, "--steps", "2", "--log", "log", "--resume", "must")
    assert "blocks run as torch.compile makes them, which the first step waits for, with which" in done.stdout
    assert graphs and losses("log") == losses("eager")
    torch.compiler.reset()
