"""`offload score` and `offload generate` give what the plain model gives, record by record."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F
from typer.testing import CliRunner

from offload.cli.main import app
from offload.errors import ConfigError, printable
from offload.offline.open_model import cache_nbytes, device_nbytes, is_paged, static_cache
from offload.sizes import format_size
from tests.support.model_folders import MARKING_TEMPLATE, make_folder, tokenizer, write_lines
from tests.support.models import WIDTHS

CHAT = {"messages": [{"role": "user", "content": "two and two?"}, {"role": "assistant", "content": "four"}]}
RECORDS: list[dict[str, Any]] = [
    {"text": "def double(number):\n    return 2 * number\n" * 3},
    {"prompt": "one, two, ", "completion": "three"},
    {"text": ""},
    CHAT,
    {"prompt": "q" * 40, "completion": "cut away"},
]
LENGTH = 32

WINDOWS = ["sliding_attention", "full_attention"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), MARKING_TEMPLATE, num_hidden_layers=3)


def call(*arguments: str | Path) -> Any:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def log_likelihood(model: Any, ids: Sequence[int], counted: range) -> float:
    """By torch's own cross entropy over windows of `LENGTH` tokens that share their first token with the one before."""
    total = 0.0
    for start in range(0, max(len(ids) - 1, 1), LENGTH - 1):
        window = torch.tensor([ids[start : start + LENGTH]])
        with torch.no_grad():
            logits = model(input_ids=window).logits[0, :-1].float()
        losses = F.cross_entropy(logits, window[0, 1:], reduction="none")
        total -= sum(float(loss) for at, loss in enumerate(losses, start + 1) if at in counted)
    return total


@pytest.mark.works("Without training", "`offload score`: texts, completions and chats", "right")
def test_score_gives_the_log_likelihood_of_each_record(folder: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "data.jsonl", RECORDS)
    options = ("--seq-len", LENGTH, "--batch-size", 4, "--micro-batch-size", 2, "--device", "cpu")
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    result = call("score", folder, "--data", tmp_path / "data.jsonl", *map(str, options))
    assert result.exit_code == 0, result.stderr
    found = lines_of(result.stdout)
    assert [each["place"] for each in found] == [f"{tmp_path}/data.jsonl:{number}" for number in range(1, 6)]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    coder = tokenizer(MARKING_TEMPLATE)
    text = [*coder(RECORDS[0]["text"])["input_ids"], 1]
    prompt, completion = coder("one, two, ")["input_ids"], [*coder("three")["input_ids"], 1]
    chat = coder.apply_chat_template(CHAT["messages"], tokenize=True, return_dict=True)["input_ids"]
    assistant = chat.index(3) + 1
    expected = [
        log_likelihood(model, text, range(1, len(text))),
        log_likelihood(model, [*prompt, *completion], range(len(prompt), len(prompt) + len(completion))),
        None,
        log_likelihood(model, chat, range(assistant, len(chat))),
        None,
    ]
    # The same numbers but for the order of sums in matrices of other shapes: padded batches, chunks of tokens.
    close = [None if each is None else pytest.approx(each, rel=1e-4) for each in expected]
    assert [each["log_likelihood"] for each in found] == close
    assert [each["counted"] for each in found] == [len(text) - 1, len(completion), 0, len(chat) - assistant, 0]
    assert [each.get("cut", False) for each in found] == [False, False, False, False, True]
    assert "limited by" in result.stderr and "perplexity" in result.stderr and "nothing is written" in result.stderr
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_score_holds_a_tied_head_no_longer_than_its_forward(tmp_path: Path) -> None:
    # The loss in chunks reads the embedding as the head, and the next micro-batch needs that memory for its layers.
    folder = make_folder(tmp_path / "model", vocab_size=2048, tie_word_embeddings=True)
    write_lines(tmp_path / "data.jsonl", [{"text": "one, two, three"}] * 3)
    command = ["score", folder, "--data", tmp_path / "data.jsonl", "--device", "cpu", "--micro-batch-size", "1"]
    whole = call(*command, "--batch-size", "2")
    least = call(*command, "--batch-size", "2", "--device-memory", f"{2048 * WIDTHS['hidden_size'] * 4 + 4096}B")
    assert least.exit_code == 0, least.stderr
    assert lines_of(least.stdout) == lines_of(whole.stdout)


@pytest.mark.works("Without training", "`offload score`: a reward model", "right")
def test_score_gives_the_logits_of_a_classifier(folder: Path, tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path / "reward")
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=1, pad_token_id=2)
    model = transformers.LlamaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "reward")
    texts = ["good", "a rather longer one", "bad"]
    write_lines(tmp_path / "data.jsonl", [{"text": text} for text in texts])
    options = ("--data", tmp_path / "data.jsonl", "--output", tmp_path / "out.jsonl", "--json")
    result = call("score", tmp_path / "reward", *options)
    assert result.exit_code == 0, result.stderr
    (facts,) = lines_of(result.stdout)
    assert facts["records"] == 3 and facts["read_bytes"] > 0 and facts["perplexity"] is None and facts["scores"] == []
    with torch.no_grad():
        rewards = [float(model(torch.tensor([[*tokenizer()(text)["input_ids"], 1]])).logits) for text in texts]
    found = lines_of((tmp_path / "out.jsonl").read_text())
    assert [each["reward"] for each in found] == pytest.approx(rewards, rel=1e-4)
    again = call("score", tmp_path / "reward", *options)
    assert again.exit_code == 2 and "exists already" in again.stderr


def test_too_many_tokens_are_refused_at_the_start_and_leave_no_file(folder: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "data.jsonl", [{"text": "short"}])
    out = ("--data", tmp_path / "data.jsonl", "--output", tmp_path / "out.jsonl")
    long = call("score", folder, *out, "--seq-len", "100000")
    assert long.exit_code == 2 and "--seq-len 100000 is more than the" in long.stderr
    write_lines(tmp_path / "data.jsonl", [{"prompt": "q" * 5000}])
    result = call("generate", folder, *out)
    assert result.exit_code == 2 and "data.jsonl:1 is a prompt of" in result.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_new_tokens_beyond_the_positions_are_refused(folder: Path) -> None:
    fits = call("generate", folder, "--prompt", "a" * 28, "--max-new-tokens", "100")
    assert fits.exit_code == 0, fits.stderr
    result = call("generate", folder, "--prompt", "a" * 28, "--max-new-tokens", "101")
    message = "a prompt of 28 tokens, which with 101 new ones are more than the 128 positions of this model; lower"
    assert result.exit_code == 2 and message in result.stderr and result.stdout == ""
    assert "are read from" not in result.stderr, "the model was opened"


def test_a_model_of_nan_is_an_error_and_not_a_result(tmp_path: Path) -> None:
    make_folder(tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.nn.init.constant_(model.model.norm.weight, torch.nan)
    model.save_pretrained(tmp_path / "model")
    write_lines(tmp_path / "data.jsonl", RECORDS[:2])
    data = "--data", tmp_path / "data.jsonl"
    for command in (
        ("score", *data),
        ("generate", *data, "--max-new-tokens", "2"),
        ("generate", "--prompt", "a", "--do-sample"),
    ):
        result = call(command[0], tmp_path / "model", *command[1:])
        place = "--prompt" if "--do-sample" in command else "data.jsonl:1"
        assert result.exit_code == 1 and result.stdout == "", result.output
        assert f"{place}: its weights contain inf or NaN" in result.stderr.splitlines()[-1]


@pytest.mark.works("Without training", "`offload generate`: prompts and chats", "right")
def test_generate_continues_prompts_as_the_plain_model(folder: Path, tmp_path: Path) -> None:
    prompts = [{"prompt": "one, two, "}, CHAT, {"text": "def"}]
    write_lines(tmp_path / "data.jsonl", prompts)
    result = call("generate", folder, "--data", tmp_path / "data.jsonl", "--max-new-tokens", "6", "--batch-size", "2")
    assert result.exit_code == 0, result.stderr
    model, coder = transformers.AutoModelForCausalLM.from_pretrained(folder), tokenizer(MARKING_TEMPLATE)
    expected = []
    for prompt in prompts:
        ids = coder(prompt.get("prompt", prompt.get("text", "")))["input_ids"]
        if "messages" in prompt:
            ids = coder.apply_chat_template(prompt["messages"], tokenize=True, add_generation_prompt=True)["input_ids"]
        made = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, pad_token_id=1)[0, len(ids) :]
        expected.append(coder.decode(made, skip_special_tokens=True))
    assert [each["completion"] for each in lines_of(result.stdout)] == expected
    alone = call("generate", folder, "--prompt", "one, two, ", "--max-new-tokens", "6")
    assert alone.stdout == f"{expected[0]}\n"
    (facts,) = lines_of(call("generate", folder, "--prompt", "one, two, ", "--max-new-tokens", "6", "--json").stdout)
    assert [each["completion"] for each in facts["completions"]] == expected[:1]
    # With a static cache the tokens are the same.
    cached = call(
        *("generate", folder, "--data", tmp_path / "data.jsonl", "--max-new-tokens", "6", "--batch-size", "2"),
        *("--static-cache", "100", "--device-memory", "64MiB"),
    )
    assert [each["completion"] for each in lines_of(cached.stdout)] == expected
    assert f"take {format_size(2 * cache_nbytes(model.config, 100, 1, 4))} of device memory" in cached.stderr
    there = "--static-cache", "100", "--static-cache-on", "host"
    cached = call("generate", folder, "--prompt", "one, two, ", "--max-new-tokens", "6", *there)
    assert cached.stdout == alone.stdout
    assert f"take {format_size(cache_nbytes(model.config, 100, 1, 4))} of host memory" in cached.stderr
    asked = "--prompt", "a", "--max-new-tokens", "8"
    drawn = [
        call("generate", folder, *asked, "--do-sample", "--temperature", "2.0", "--seed", seed).stdout
        for seed in ("1", "1", "2")
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_conversation_is_that_of_the_plain_model(folder: Path) -> None:
    asked = ["two and two?", "", "and three?"]
    model, coder = transformers.AutoModelForCausalLM.from_pretrained(folder), tokenizer(MARKING_TEMPLATE)
    messages: list[dict[str, str]] = [{"role": "system", "content": "Be brief."}]
    answers = []
    for content in filter(None, asked):
        messages.append({"role": "user", "content": content})
        ids = coder.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)["input_ids"]
        made = model.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False, pad_token_id=1)[0, len(ids) :]
        answers.append(coder.decode(made, skip_special_tokens=True))
        messages.append({"role": "assistant", "content": answers[-1]})
    command = ["chat", str(folder), "--system", "Be brief.", "--max-new-tokens", "5"]
    shown = CliRunner().invoke(app, command, input="\n".join(asked))
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout == "".join(f"{printable(answer)}\n" for answer in answers)
    (facts,) = lines_of(CliRunner().invoke(app, [*command, "--json"], input="\n".join(asked)).stdout)
    assert facts["answers"] == answers and facts["tokens"] == 10
    without = CliRunner().invoke(app, [*command[:1], str(make_folder(folder.parent / "plain")), "--json"], input="a\n")
    assert without.exit_code == 2 and "has no chat template" in without.stderr


def test_generate_keeps_keys_and_values_whatever_the_folder_says(folder: Path, tmp_path: Path) -> None:
    # As trainings write it, in which a cache is of no use: with a static one each token would add the whole row.
    shutil.copytree(folder, tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        file = tmp_path / "model" / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"use_cache": False}))
    asked = "--prompt", "one, two, ", "--max-new-tokens", "6"
    expected = call("generate", folder, *asked).stdout
    assert call("generate", tmp_path / "model", *asked).stdout == expected
    cached = call("generate", tmp_path / "model", *asked, "--static-cache", "20")
    assert cached.stdout == expected, cached.stderr


def test_the_static_cache_takes_the_memory_that_was_said() -> None:
    """Layers with a sliding window keep no more tokens than it. What is no cache of heads is refused."""
    kind = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Gemma3TextConfig(**kind, head_dim=8, sliding_window=8, layer_types=WINDOWS)
    cache = static_cache(config, 20)
    for number in range(2):
        cache.update(torch.zeros(3, 2, 5, 8), torch.zeros(3, 2, 5, 8), number)
    held = sum(each.nbytes for layer in cache.layers for each in (layer.keys, layer.values))
    assert held == cache_nbytes(config, 20, 3, 4) == 2 * 3 * 2 * 8 * (8 + 20) * 4
    # In host memory at most three layers of it are on the device, and transformers moves them to a GPU and back.
    assert device_nbytes(config, 20, held, False) == device_nbytes(config, 20, held, True) == held
    longer = transformers.Gemma3TextConfig(**kind | {"num_hidden_layers": 6}, head_dim=8, layer_types=WINDOWS[1:] * 6)
    assert device_nbytes(longer, 20, cache_nbytes(longer, 20, 3, 4), True) == 3 * 2 * 3 * 2 * 8 * 20 * 4
    if torch.version.cuda is None or torch.cuda.is_available():  # else transformers asks the driver that is not there
        moving = static_cache(longer, 20, paged=True)
        assert moving.offloading and not moving.only_non_sliding
    assert is_paged(True, torch.device("cuda", 0)) and not is_paged(True, torch.device("cpu"))
    assert not is_paged(False, torch.device("cuda", 0))
    with pytest.raises(ConfigError, match="--static-cache-on host is for GPUs of CUDA"):
        is_paged(True, torch.device("xpu", 0))
    with pytest.raises(ConfigError, match="leave --static-cache out"):
        static_cache(transformers.DeepseekV3Config(num_hidden_layers=1), 20)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("score", "{folder}", "--data", "missing"), "there is no data at missing"),
        (("score", "missing", "--data", "{folder}/config.json"), "or OWNER/NAME of a model on the hub"),
        (("score", "{folder}", "--data", "{folder}/config.json", "--batch-size", "0"), "--batch-size is at least 1"),
        (("score", "{folder}", "--data", "{folder}/config.json", "--output", "/absent/scores"), "its folder does not"),
        (("generate", "{folder}"), "expected one of --prompt and --data"),
        (("generate", "{folder}", "--prompt", "a", "--temperature", "2"), "needs --do-sample"),
        (("generate", "{folder}", "--prompt", ""), "is an empty prompt"),
        (("generate", "{folder}", "--prompt", "caf\udce9"), "--prompt is not UTF-8"),
        (("generate", "{folder}", "--prompt", "a", "--seed", "-1"), "--seed is at least 0 and below 2**63, not -1"),
        (("generate", "{folder}", "--prompt", "a", "--seed", f"{2**63}"), "--seed is at least 0 and below 2**63"),
        (("generate", "{folder}", "--prompt", "a", "--static-cache-on", "host"), "needs --static-cache TOKENS"),
        (
            ("generate", "{folder}", "--prompt", "a", "--static-cache", "9999999999"),
            "positions of this model; lower --static-cache",
        ),
        (("generate", "{folder}", "--prompt", "a", "--static-cache", "8"), "more than the 8 of --static-cache"),
        (
            ("generate", "{folder}", "--prompt", "a", "--static-cache", "100", "--device-memory", "1KiB"),
            "and the device budget is 1KiB",
        ),
    ],
)
def test_bad_input_is_one_line(arguments: Sequence[str], words: str, folder: Path) -> None:
    result = call(*(each.format(folder=folder) for each in arguments))
    assert result.exit_code == 2 and words in result.stderr and result.stdout == ""


def test_a_folder_of_adapters_is_refused_with_the_command_that_merges_them(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapter, records = tmp_path / "my adapter", tmp_path / "rows.jsonl"
    write_lines(records, RECORDS[:1])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="CAUSAL_LM")).save_pretrained(adapter)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(adapter)
    done = call("score", adapter, "--data", records)
    assert done.exit_code == 2 and f"{adapter} contains adapters and no model; merge them" in done.stderr
    program, *command = shlex.split(done.stderr.partition("first: ")[2].rpartition(", then give")[0])
    assert program == "offload" and call(*command).exit_code == 0
    assert call("score", f"{adapter}-merged", "--data", records).exit_code == 0
