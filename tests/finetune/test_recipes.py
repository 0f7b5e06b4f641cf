"""`offload train --recipe FILE.yaml`: values of a file where no option is given; the recipes fit their cards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
import typer
from typer.testing import CliRunner

from offload.cli.main import app
from tests import ROOT

COMMANDS: Any = typer.main.get_command(app)
_WIDTHS = {"vocab_size": 151936, "max_position_embeddings": 40960, "head_dim": 128, "num_key_value_heads": 8}
SIZES = {  # hidden, inner, layers, heads
    "Qwen/Qwen3-8B": (4096, 12288, 36, 32),
    "Qwen/Qwen3-14B": (5120, 17408, 40, 40),
    "Qwen/Qwen3-32B": (5120, 25600, 64, 64),
    "Qwen/Qwen3-30B-A3B": (2048, 6144, 48, 32),
}
EXPERTS = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_key_value_heads": 4,
}
RECIPES = sorted(path.name for path in (ROOT / "recipes").glob("*.yaml"))


def parsed(recipe: Path, *more: str) -> dict[str, Any]:
    with COMMANDS.commands["train"].make_context("train", ["--recipe", str(recipe), *more]) as context:
        return dict(context.params)


def test_a_recipe_that_is_missing_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "nothing.yaml"
    with pytest.raises(typer.BadParameter, match=f"cannot read the recipe {path}: No such file or directory$"):
        parsed(path)


def test_values_are_those_of_the_file_where_no_option_is_given(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: mine\nlearning-rate: 2e-4\nmax_steps: 7\nload_in_4bit: true\n"
        "data: [a, b]\nnvme_path: /mnt\nchunked_loss: false\ndurability: 10\n"
    )
    params = parsed(path, "--steps", "9", "--batch-size", "3")
    wanted = {"model": "mine", "lr": 2e-4, "steps": 9, "batch_size": 3, "load_in_4bit": True, "seq_len": None}
    assert {name: params[name] for name in wanted} == wanted
    assert list(params["data"]) == [Path("a"), Path("b")] and list(params["nvme_path"]) == ["/mnt"]
    assert params["chunked_loss"] is False and params["epochs"] is None
    assert params["durability"] == {"every": 10}


def test_an_option_takes_the_place_of_the_other_way_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("epochs: 1\ntext: [a]\nbatch_size: 4\n")
    params = parsed(path, "--steps", "9", "--data", "b")
    assert (params["steps"], params["epochs"], params["batch_size"]) == (9, None, 4)
    assert list(params["data"]) == [Path("b")] and not params["text"]
    assert parsed(path)["epochs"] == 1 and list(parsed(path)["text"]) == [Path("a")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lerning_rate: 1", "'lerning_rate' is no option; did you mean learning_rate"),
        ("steps: 1\nmax_steps: 2", "'max_steps' sets an option twice"),
        ("steps: 1\nsteps: 2", "'steps' sets an option twice"),
        ("recipe: other.yaml", "'recipe' is no option"),
        ("steps: {a: 1}", "expected the value of an option as 'steps'"),
        ("data: [[a]]", "expected the value of an option as 'data'"),
        ("steps: many", "invalid value for '--steps"),
        ("- steps", "expected a line KEY: VALUE"),
        ("", "expected a line KEY: VALUE"),
        ("steps: [", "is no recipe: while parsing"),
        ("!!python/object/apply:os.system [ls]", "is no recipe: could not determine a constructor"),
        ("1: 2", "'1' is no option"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_key(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    failed = CliRunner().invoke(app, ["train", "--recipe", str(path)])
    assert failed.exit_code == 2 and message.lower() in failed.stderr.lower(), failed.output


@pytest.mark.sample(1)  # seconds each
@pytest.mark.parametrize("gpu", ["12GB", "16GB", "24GB"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_its_cards(name: str, gpu: str, tmp_path: Path) -> None:
    params = parsed(ROOT / "recipes" / name)
    hidden, inner, layers, heads = SIZES[params["model"]]
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    dense = "A3B" not in params["model"]
    config = transformers.Qwen3Config if dense else transformers.Qwen3MoeConfig
    architecture = "Qwen3ForCausalLM" if dense else "Qwen3MoeForCausalLM"
    config(
        **shape, num_attention_heads=heads, architectures=[architecture], **(_WIDTHS if dense else _WIDTHS | EXPERTS)
    ).save_pretrained(tmp_path)
    names = (
        "lora",
        "load_in_4bit",
        "dtype",
        "moments",
        "master",
        "seq_len",
        "batch_size",
        "accumulation",
        "activations",
        "gradient_checkpointing",
    )
    # The disk is that which the recipe names.
    first_line = (ROOT / "recipes" / name).read_text().splitlines()[0]
    disk = first_line.rpartition(", ")[2].removesuffix(" of NVMe.").replace(" ", "")
    command = ["plan", str(tmp_path), "--gpu", gpu, "--ram", "64GB", "--drive", f"5GB/s,4GB/s,{disk}"]
    for option in names:
        value, flag = params[option], f"--{option.replace('_', '-')}"
        command += [flag] if value is True else [flag, str(value)] if value else []
    planned = CliRunner().invoke(app, command)
    assert planned.exit_code == 0 and planned.stdout.startswith("fits "), planned.output
