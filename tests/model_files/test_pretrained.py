"""A model comes from a folder and goes into one: any family of models, with the bits that `transformers` has."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import offload
from offload import testing
from offload.engine.deferred import DeferredParameter
from offload.errors import ConfigError, UsageError
from tests.support import models
from tests.support.oracle import Job, assert_same_tensors, config, train_step
from tests.support.pretrained_models import CAUSAL, DISK, FAMILIES, SMALL, Plain, T, engine_of, loaded, written

pytestmark = pytest.mark.usefixtures("engines_end")


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_comes_and_goes(name: str, dtype: str, tmp_path: Path) -> None:
    """Loaded, trained, asked for words, saved, and loaded by transformers, which gives the same logits."""
    family = FAMILIES[name]
    job = family.job(dtype)
    given = written(tmp_path / "given", family.model().to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]))
    model, info = offload.load_pretrained(
        family.auto, tmp_path / "given", config(job, DISK, tmp_path), output_loading_info=True
    )
    assert info == ((), (), ()) and all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    engine = engine_of(model, tmp_path / "swap", job)
    state = engine.module.state_dict()
    assert_same_tensors(state, given)
    assert torch.equal(family.logits(engine), family.logits(family.auto.from_pretrained(tmp_path / "given")))
    engine.train()
    assert all(train_step(engine, job, step) > 0 for step in range(2))
    engine.eval()
    expected = family.logits(engine)
    if engine.module.can_generate():
        ids = models.tokens(9, 9)[:, :4].to(engine.device)
        assert engine.generate(ids, max_new_tokens=2, do_sample=False).shape[0] == 2
    engine.save_pretrained(tmp_path / "out")
    engine.destroy(remove=True)
    back, report = family.auto.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(family.logits(back), expected)
    assert (tmp_path / "out" / "generation_config.json").exists() == back.can_generate()
    again = offload.load_pretrained(family.auto, tmp_path / "out", output_loading_info=True)[1]
    assert again == ((), (), ())


# -- what comes in ------------------------------------------------------------------------------------


def test_a_folder_of_shards_is_read(tmp_path: Path) -> None:
    given = written(tmp_path / "given", max_shard_size="20KB")
    assert len(list((tmp_path / "given").glob("*.safetensors"))) > 3
    state = loaded(tmp_path / "given", tmp_path / "swap").module.state_dict()
    assert_same_tensors(state, given)


@pytest.mark.parametrize("files", [1, 2])
def test_files_of_torch_save_are_read(files: int, tmp_path: Path) -> None:
    """In one file, or in two with an index; a tied head is in them under both names."""
    folder, model = tmp_path / "given", models.gpt2()
    given = written(folder, model)
    (folder / "model.safetensors").unlink()
    tensors = list(model.state_dict().items())
    names = ["pytorch_model.bin"] if files == 1 else ["pytorch_model-00001.bin", "pytorch_model-00002.bin"]
    for index, name in enumerate(names):
        torch.save(dict(tensors[index::files]), folder / name)
    if files > 1:
        places = {name: names[index % files] for index, (name, _) in enumerate(tensors)}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    state = loaded(folder, tmp_path / "swap").module.state_dict()
    assert_same_tensors({name: state[name] for name in given}, given)


@pytest.mark.sample(5)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_master_has_all_the_precision_that_the_files_have(dtype: str, stored: torch.dtype, tmp_path: Path) -> None:
    given = written(tmp_path / "given", models.llama().to(stored))
    engine = loaded(tmp_path / "given", tmp_path / "swap", dtype)
    for name, parameter in engine.module.named_parameters():
        master = offload.safe_get_full_fp32_param(parameter)
        assert master is not None and torch.equal(master.cpu(), given[name].float()), name


def test_experts_that_a_folder_has_one_by_one_are_joined(tmp_path: Path) -> None:
    written(tmp_path / "given", models.mixtral())
    names = safetensors.torch.load_file(tmp_path / "given" / "model.safetensors").keys()
    assert any(".experts.3." in name for name in names), "the folder has them one by one"
    model = offload.load_pretrained(CAUSAL, tmp_path / "given")
    assert any(name.endswith("experts.gate_up_proj") for name, _ in model.named_parameters())
    stored = safetensors.torch.load_file(tmp_path / "given" / "model.safetensors")
    lost = next(name for name in names if ".experts.3." in name)
    del stored[lost]
    safetensors.torch.save_file(stored, tmp_path / "given" / "model.safetensors")
    with pytest.raises(ConfigError, match="experts"):
        offload.load_pretrained(CAUSAL, tmp_path / "given")


@pytest.mark.parametrize("to_head", [True, False])
def test_a_base_model_and_one_with_a_head_load_each_other(to_head: bool, tmp_path: Path) -> None:
    """`transformer.h.0` in the one is `h.0` in the other."""
    full, base = models.gpt2(), T.GPT2Model(models.gpt2().config)
    given = written(tmp_path / "given", base if to_head else full)
    cls = T.GPT2LMHeadModel if to_head else T.GPT2Model
    model, info = offload.load_pretrained(cls, tmp_path / "given", output_loading_info=True)
    assert info == ((), (), ())  # the head of a GPT-2 is its embedding
    job = models.GPT2
    state = engine_of(model, tmp_path / "swap", job).module.state_dict()
    for name, value in given.items():
        if to_head or name.startswith("transformer."):
            mine = f"transformer.{name}" if to_head else name.removeprefix("transformer.")
            assert torch.equal(state[mine], value), name


def test_a_model_that_is_built_is_loaded_and_keeps_what_the_folder_has_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Real weights are let go of, where the folder has them; identity and ties stay."""
    given = written(tmp_path / "given", models.Mixture())
    del given["unused.weight"], given["head.weight"]
    torch.manual_seed(7)
    model = models.Mixture()
    mine = model.unused.weight.detach().clone()
    identities = [id(parameter) for parameter in model.parameters()]
    model.calls.fill_(3)
    given["calls"] = torch.tensor(5)
    safetensors.torch.save_file({**given, "new.weight": torch.ones(2)}, tmp_path / "given" / "model.safetensors")
    with caplog.at_level(logging.WARNING, "offload"):
        same, info = offload.load_pretrained(model, tmp_path / "given", output_loading_info=True)
    assert same is model and [id(parameter) for parameter in model.parameters()] == identities
    assert model.head.weight is model.embedding.weight and isinstance(model.head.weight, DeferredParameter)
    assert info.missing_keys == ("unused.weight",) and info.unexpected_keys == ("new.weight",)
    assert "unused.weight" in caplog.text and "new.weight" in caplog.text
    assert model.calls == 5
    state = engine_of(model, tmp_path / "swap", models.MIXTURE).module.state_dict()
    assert torch.equal(state["unused.weight"], mine)
    assert_same_tensors({name: state[name] for name in given}, given)


def test_what_is_missing_is_initialized_from_the_seed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path / "given", T.LlamaModel(models.llama().config))
    heads = []
    for attempt, (placement, seed) in enumerate([(DISK, 0), (("none", "cpu"), 0), (DISK, 1)]):
        with caplog.at_level(logging.WARNING, "offload"):
            model, info = offload.load_pretrained(T.LlamaForCausalLM, tmp_path / "given", output_loading_info=True)
        assert info == (("lm_head.weight",), (), ()) and "lm_head.weight" in caplog.text
        job = FAMILIES["llama"].job()
        engine = engine_of(model, tmp_path / f"swap{attempt}", job, placement, seed=seed)
        heads.append(engine.module.state_dict()["lm_head.weight"])
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert 0.01 < heads[0].std() < 0.03, "as transformers initializes it"


def test_a_bias_that_is_missing_beside_its_weight_is_initialized(tmp_path: Path) -> None:
    """Its module's own initialization sees the weight, which is not read yet."""
    given = written(tmp_path / "given", Plain())
    del given["layer.bias"]
    safetensors.torch.save_file(given, tmp_path / "given" / "model.safetensors")
    with offload.init():
        model = Plain()
    offload.load_pretrained(model, tmp_path / "given")
    state = engine_of(model, tmp_path / "swap", Job(Plain, models.language_loss)).module.state_dict()
    assert torch.equal(state["layer.weight"], given["layer.weight"])
    assert state["layer.bias"].abs().max() <= 0.5 and state["layer.bias"].std() > 0


def test_other_shapes_are_an_error_or_initialized_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path / "given", T.LlamaForCausalLM(T.LlamaConfig(**SMALL)))
    with pytest.raises(ConfigError, match=r"2 tensors .*lm_head\.weight: \[128, 32\], not \[130, 32\]"):
        offload.load_pretrained(CAUSAL, tmp_path / "given", vocab_size=130)
    with caplog.at_level(logging.WARNING, "offload"):
        model, info = offload.load_pretrained(
            CAUSAL, tmp_path / "given", vocab_size=130, ignore_mismatched_sizes=True, output_loading_info=True
        )
    assert {name for name, *_ in info.mismatched_keys} == {"model.embed_tokens.weight", "lm_head.weight"}
    assert "[128, 32] for [130, 32]" in caplog.text
    engine_of(model, tmp_path / "swap", FAMILIES["llama"].job())


@pytest.mark.parametrize("piece_nbytes", [64, 1 << 23])
def test_a_tied_weight_that_the_folder_has_in_two_dtypes(
    piece_nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal numbers are equal values; chunks of the two dtypes differ in length."""
    testing.replace(monkeypatch, "size.safetensors_piece", piece_nbytes)
    given = written(tmp_path / "given", models.gpt2())
    file = tmp_path / "given" / "model.safetensors"
    stored = safetensors.torch.load_file(file)
    low = given["lm_head.weight"].bfloat16()
    both = {**stored, "transformer.wte.weight": low.float(), "lm_head.weight": low.clone()}
    safetensors.torch.save_file(both, file, {"format": "pt"})
    assert offload.load_pretrained(CAUSAL, tmp_path / "given", output_loading_info=True)[1] == ((), (), ())
    both["lm_head.weight"][-1, -1] += 1
    safetensors.torch.save_file(both, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"different values .* tie_word_embeddings=False"):
        offload.load_pretrained(CAUSAL, tmp_path / "given")


def test_a_tied_weight_that_the_folder_has_twice(tmp_path: Path) -> None:
    given = written(tmp_path / "given", models.gpt2())
    file = tmp_path / "given" / "model.safetensors"
    stored = safetensors.torch.load_file(file)
    both = {**stored, "lm_head.weight": given["lm_head.weight"].clone()}
    safetensors.torch.save_file(both, file, {"format": "pt"})
    assert offload.load_pretrained(CAUSAL, tmp_path / "given", output_loading_info=True)[1] == ((), (), ())
    both["lm_head.weight"][3, 3] += 1
    safetensors.torch.save_file(both, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"different values .* tie_word_embeddings=False"):
        offload.load_pretrained(CAUSAL, tmp_path / "given")
    untied = offload.load_pretrained(CAUSAL, tmp_path / "given", tie_word_embeddings=False)
    state = engine_of(untied, tmp_path / "swap", models.GPT2).module.state_dict()
    assert torch.equal(state["lm_head.weight"], both["lm_head.weight"])
    assert torch.equal(state["transformer.wte.weight"], given["transformer.wte.weight"])


def test_buffers_come_at_once(tmp_path: Path) -> None:
    model = models.resnet()
    model.resnet.embedder.embedder.normalization.running_mean.fill_(0.25)
    given = written(tmp_path / "given", model)
    model = offload.load_pretrained(T.AutoModelForImageClassification, tmp_path / "given")
    assert all(torch.equal(value, given[name]) for name, value in model.named_buffers())
    job = Job(models.resnet, models.language_loss)
    state = engine_of(model, tmp_path / "swap", job).module.state_dict()
    assert_same_tensors(state, given)


# -- before and after initialize ----------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "use",
    [
        lambda model: model(models.tokens(0, 0)),
        lambda model: model.lm_head.weight.norm(),
        lambda model: model.lm_head.weight[0],
        lambda model: model.lm_head.weight.data.mul_(2),
        lambda model: nn.init.zeros_(model.lm_head.weight),
        lambda model: model.lm_head.weight.detach().numpy(),
        lambda model: model.lm_head.weight + 1,
        lambda model: model.resize_token_embeddings(140),
        lambda model: torch.optim.SGD([model.lm_head.weight.clone()]),
        lambda model: torch.save(model, "never"),
        lambda model: model.save_pretrained("never"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_use_before_initialize_is_an_error(use: Callable[[Any], Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "given")
    model = offload.load_pretrained(CAUSAL, tmp_path / "given")
    with pytest.raises(UsageError, match=r"offload\.initialize"):
        use(model)


def test_what_asks_for_no_value_works_before_initialize(tmp_path: Path) -> None:
    given = written(tmp_path / "given")
    model = offload.load_pretrained(CAUSAL, tmp_path / "given")
    assert sum(parameter.numel() for parameter in model.parameters()) == sum(value.numel() for value in given.values())
    assert model.device == torch.device("cpu") and model.dtype == torch.float32
    assert model.bfloat16() is model and model.dtype == torch.bfloat16 and model.to("cpu") is model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert "DeferredParameter" in repr(model.lm_head.weight)
    same = config(FAMILIES["llama"].job(), DISK, tmp_path / "swap")
    engine = offload.initialize(model=model, optimizer=optimizer, config=same)[0]
    state = engine.module.state_dict()
    assert_same_tensors(state, given, "the file has more bits than bf16")
    engine.destroy(remove=True)


def test_a_copy_of_the_model_is_read_too(tmp_path: Path) -> None:
    """DPO's reference model: never one of random numbers."""
    given = written(tmp_path / "given", models.gpt2())
    model = offload.load_pretrained(CAUSAL, tmp_path / "given")
    other = copy.deepcopy(model)
    assert other.lm_head.weight is other.transformer.wte.weight
    for index, each in enumerate((model, other)):
        state = engine_of(each, tmp_path / f"swap{index}", models.GPT2).module.state_dict()
        assert_same_tensors(state, given)


def test_a_resume_reads_nothing_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    written(tmp_path / "given")
    job = FAMILIES["llama"].job()
    engine = loaded(tmp_path / "given", tmp_path / "swap")
    train_step(engine, job, 0)
    trained = engine.module.state_dict()
    engine.destroy()

    def never(*_: object) -> None:
        raise AssertionError("a weight was read")

    testing.replace(monkeypatch, "safetensors.fill", never)
    model = offload.load_pretrained(CAUSAL, tmp_path / "given")
    engine = engine_of(model, tmp_path / "swap", job, resume="auto")
    assert engine.global_steps == 1
    assert_same_tensors(engine.module.state_dict(), trained)
    train_step(engine, job, 1)
