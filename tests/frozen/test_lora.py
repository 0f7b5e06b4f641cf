"""`--lora` accepts the documented options and gives a model those adapters."""

from __future__ import annotations

import sys

import pytest
import torch
import transformers

import offload
from offload.errors import ConfigError
from offload.finetune.model import Lora, adapt, parse_lora
from tests.support.model_folders import llama_config
from tests.support.models import gpt2


def test_options_are_parsed() -> None:
    assert parse_lora("r=16") == Lora(16, 32.0)
    assert parse_lora("r=4,targets=all-linear").targets == ("all-linear",)
    assert parse_lora("r=4,targets=q_proj + v_proj").targets == ("q_proj", "v_proj")
    assert parse_lora("r=4, alpha=2.5,dropout=0.05,targets=q_proj+v_proj") == Lora(4, 2.5, 0.05, ("q_proj", "v_proj"))


WRONG = {
    "": "each once and with its value",
    "16": "each once and with its value, got '16'",
    "r=4,r=8": "each once",
    "rank=4": "got 'rank=4'",
    "alpha=4": "needs a rank r",
    "r=0": "r must be a whole number of at least 1, got 0",
    "r=1.5": "r must be a whole number",
    "r=lots": "r must be a number, got lots",
    "r=4,alpha=nan": "alpha must be a number",
    "r=4,alpha=0": "alpha must be above 0",
    "r=4,targets=+": r"targets are names joined by \+, got '\+'",
    "r=4,targets=q_proj++v_proj": r"targets are names joined by \+, got",
    "r=4,targets=all-linear+q_proj": "all-linear is every linear layer and stands alone, got 'all-linear[+]q_proj'",
    "r=4,dropout=1": "dropout must be at least 0 and below 1",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_options_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=WRONG[text]):
        parse_lora(text)


def llama() -> torch.nn.Module:
    return transformers.LlamaForCausalLM(llama_config())


def trained(model: torch.nn.Module) -> set[str]:
    """The layers whose adapters train."""
    return {name.split(".lora_")[0].rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad}


def test_only_adapters_train() -> None:
    assert trained(adapt(llama(), Lora(4, 8.0))) == {"q_proj", "v_proj"}, "what peft has for a Llama"
    assert trained(adapt(llama(), Lora(4, 8.0, 0.0, ("down_proj",)))) == {"down_proj"}
    assert len(trained(adapt(llama(), Lora(4, 8.0, 0.0, ("all-linear",))))) == 7
    assert trained(adapt(gpt2(), Lora(4, 8.0))) == {"c_attn"}


def test_a_model_without_memory_gets_adapters_with_values() -> None:
    with offload.init():
        model = llama()
    torch.manual_seed(1)
    first = {name: p for name, p in adapt(model, Lora(4, 8.0)).named_parameters() if p.requires_grad}
    assert first and not any(p.is_meta for p in first.values())
    assert any(bool(p.any()) for p in first.values()) and not all(bool(p.any()) for p in first.values())


def test_a_target_that_the_model_has_not() -> None:
    with pytest.raises(
        ConfigError, match=r"LlamaForCausalLM has no c_attn; its linear layers are down_proj, gate_proj"
    ):
        adapt(llama(), Lora(4, 8.0, 0.0, ("q_proj", "c_attn")))


def test_a_rank_above_that_of_every_matrix_is_refused_before_it_takes_memory() -> None:
    with pytest.raises(
        ConfigError, match=r"r=999999999999 is more than \d+, the highest rank of a matrix of this Llama"
    ):
        adapt(llama(), parse_lora("r=999999999999"))


def test_the_layers_of_gpt2_count_as_linear() -> None:
    """They are of transformers' class Conv1D."""
    linear = {"c_attn", "c_fc", "c_proj"}
    assert trained(adapt(gpt2(), Lora(4, 8.0, 0.0, ("all-linear",)))) == linear
    with pytest.raises(ConfigError, match="has no q_proj; its linear layers are c_attn, c_fc, c_proj, lm_head, or"):
        adapt(gpt2(), Lora(4, 8.0, 0.0, ("q_proj",)))


def test_without_peft_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'offload\[hf\]'"):
        adapt(llama(), Lora(4, 8.0))
