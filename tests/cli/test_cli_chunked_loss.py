"""`offload train` computes the loss in chunks where the model allows it, and a resumed run computes it as it began."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from offload import testing
from tests.support import models, rounding_bounds
from tests.support.model_folders import make_folder
from tests.support.oracle import Job
from tests.support.processes.cli_in_process import all_lines, call, facts, run_folder

__all__ = ["run_folder"]

STEPS = ("--steps", "4", "--dtype", "fp32")
IN_CHUNKS, AT_ONCE = (
    "the loss is computed from the logits of 1024 tokens",
    "the loss is not computed in chunks of tokens",
)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the hidden states of each loss in chunks; chunks are of 20 tokens."""
    shapes: list[torch.Size] = []

    def recorded(loss: Callable[..., torch.Tensor], hidden: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        shapes.append(hidden.shape)
        return loss(hidden, *args, **more | {"chunk_tokens": 20})

    testing.intercept(monkeypatch, "loss.in_chunks", recorded)
    return shapes


def losses(path: str = "log") -> list[float]:
    """Returns the losses of all steps and evaluations, in the order of the log."""
    return [line["loss"] if "loss" in line else line["eval_loss"] for line in all_lines(path)]


def folder(kind: str, **more: Any) -> str:
    """Makes a folder with a tokenizer and the config of a small model, and returns its name."""
    make_folder(Path(kind), weights=False)
    settings = {**models.WIDTHS, "vocab_size": 261, "max_position_embeddings": 128, "bos_token_id": 0}
    getattr(transformers, f"{kind}Config")(**settings | {"eos_token_id": 1} | more).save_pretrained(kind)
    return kind


def gpt2() -> Any:
    return models.gpt2(2)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "model",
    [(), ("--model", "Llama"), ("--model", "Qwen3"), ("--model", "Llama", "--lora", "r=4,targets=q_proj")],
    ids=["gpt2", "llama", "qwen3", "adapters"],
)
@pytest.mark.numeric
def test_losses_of_steps_and_evaluations_are_those_of_all_logits(
    model: tuple[str, ...], calls: list[torch.Size]
) -> None:
    for kind in ("Llama", "Qwen3"):
        folder(kind, num_key_value_heads=2, head_dim=8)
    done = call(*STEPS, *model, "--log", "chunks", "--json")
    assert facts(done) and IN_CHUNKS in done.stderr and "--no-chunked-loss" in done.stderr, done.stderr
    # Two rows a step; three rows are held out, in two batches of each of four evaluations.
    assert len(calls) == 4 + 4 * 2 and {shape[1] for shape in calls} == {32}
    calls.clear()
    done = call(*STEPS, *model, "--log", "all", "--no-chunked-loss")
    assert done.exit_code == 0 and "the loss is " not in done.stdout and not calls
    job = Job(gpt2, lambda *_: torch.zeros(()), 4)
    rounding_bounds.same_losses(losses("chunks"), losses("all"), job)
    assert losses("chunks") != losses("all"), "the bits tell which loss it was"


def test_a_model_that_scales_its_logits_keeps_all_of_them(calls: list[torch.Size]) -> None:
    cohere = ("--model", folder("Cohere", num_key_value_heads=2))
    done = call("--steps", "1", *cohere)
    assert done.exit_code == 0 and f"{AT_ONCE}: CohereForCausalLM does not compute its loss from" in done.stdout
    refused = call("--steps", "1", *cohere, "--chunked-loss", "--run", "other")
    assert refused.exit_code == 2 and "error: CohereForCausalLM does not compute its loss from" in refused.stderr
    assert not calls and not Path("swap/other").exists()


# -- resumed ------------------------------------------------------------------------------------------


RUN = (*STEPS, "--schedule", "constant", "--warmup", "0", "--eval-every", "1")


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("typed", [(), ("--no-chunked-loss",)], ids=["in chunks", "from all logits"])
def test_a_resumed_run_computes_its_loss_as_it_began(typed: tuple[str, ...], calls: list[torch.Size]) -> None:
    """Bit for bit, though the command of the resumed run leaves the loss open."""
    call(*RUN, *typed, "--log", "whole", "--run", "whole")
    call(*RUN, *typed, "--log", "log", "--steps", "2", "--keep")
    calls.clear()
    done = call(*RUN, "--log", "log", "--resume", "must")
    assert done.exit_code == 0 and "resuming after step 2" in done.stdout, done.output
    assert losses("log") == losses("whole") and len(losses("log")) == 8
    assert bool(calls) == (not typed) == (f"{AT_ONCE}: the run has begun with all logits" not in done.stdout)
