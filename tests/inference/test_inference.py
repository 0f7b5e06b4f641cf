"""A folder's files are read in place, scored and continued with the bits of the model in memory."""

from __future__ import annotations

import itertools
import json
import os
import random
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch.nn import functional as F
from typer.testing import CliRunner

import offload
from offload.cli.main import app
from offload.errors import ConfigError, printable
from offload.fileio.safetensors_stream import SafetensorsWriter, Tensor
from offload.inference_engine import InferenceEngine
from offload.losses import chunk_loss_of
from offload.offline.open_model import cache_nbytes, device_nbytes, is_paged, static_cache
from offload.sizes import MIB, PAGE, format_size
from offload.swapper.store.model_files import FileRange, arrange_in_place
from tests.support.model_folders import MARKING_TEMPLATE, make_folder, tokenizer, write_lines
from tests.support.models import WIDTHS
from tests.support.oracle import processes
from tests.support.processes.process_measures import DiskBytes, peak_in, peak_rss

IDS = torch.arange(24).view(3, 8) * 7 % 251
NARROW = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}


def llama(dtype: str = "float32", **more: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**NARROW | more)).to(getattr(torch, dtype)).eval()


def saved(model: Any, folder: Path, shard: str = "1GB") -> Path:
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def on_cpu(**more: Any) -> dict[str, Any]:
    return {"offload": {"device": "cpu", **more}}


def states_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file below a folder."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.sample(1)
@pytest.mark.works("Without training", "a folder in its files' dtype, sharded or not, tied or not", "right")
@pytest.mark.parametrize(
    ("dtype", "shard", "tied"), [("float32", "1GB", True), ("bfloat16", "100KB", False), ("float16", "100KB", True)]
)
def test_a_folder_gives_the_bits_of_the_model_in_memory(dtype: str, shard: str, tied: bool, tmp_path: Path) -> None:
    folder = saved(llama(dtype, tie_word_embeddings=tied), tmp_path / "model", shard)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    before = states_of(tmp_path)
    with torch.no_grad():
        logits = model(IDS).logits
    words = model.generate(IDS, max_new_tokens=5, do_sample=False, pad_token_id=0)
    training = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "swap")}},
    }
    with offload.inference(folder, on_cpu() | training) as engine:
        assert torch.equal(engine(IDS).logits, logits)
        once = engine.io_bytes()
        assert torch.equal(engine.generate(IDS, max_new_tokens=5, do_sample=False, pad_token_id=0), words)
        assert torch.equal(engine.module.state_dict()["model.norm.weight"], model.model.norm.weight)
    files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert once.read >= sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    # Whole pages: each unit may share its first and its last with a neighbour, in each file that it is in.
    assert once.read <= files + 2 * PAGE * 2 * len(engine.module.model.layers)
    assert once.written == 0
    assert states_of(tmp_path) == before


@pytest.mark.works("Without training", "one safetensors file beside a module of your own", "right")
def test_a_file_alone_fills_a_module_that_init_has_built(tmp_path: Path) -> None:
    folder = saved(model := llama(), tmp_path)
    (folder / "config.json").unlink()
    with pytest.raises(offload.ConfigError, match=r"no config\.json"):
        offload.inference(folder / "model.safetensors")
    with offload.init():
        built = transformers.LlamaForCausalLM(model.config)
    offload.load_pretrained(built, folder / "model.safetensors")
    with offload.inference(built, on_cpu()) as engine, torch.no_grad():
        assert torch.equal(engine(IDS).logits, model(IDS).logits)
        assert "read from 1 file" in " ".join(engine.notices)


@pytest.fixture
def batches() -> Iterator[list[torch.Tensor]]:
    yield [IDS + number for number in range(5)]


@pytest.mark.works("Without training", "several batches, for which the weights are read once", "right")
def test_batches_share_one_pass_over_the_weights(batches: list[torch.Tensor], tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=False)
    with torch.no_grad():
        logits = [model(each).logits for each in batches]
    # Room for one unit: none is on the device from one pass to the next.
    largest = max(sum(p.numel() * 4 for p in unit.parameters()) for unit in (*model.model.layers, model.lm_head))
    with offload.inference(saved(model, tmp_path), on_cpu(device_memory=largest + 2 * PAGE)) as engine:
        passes = []
        for some in (batches[:1], batches, batches):
            before = engine.io_bytes().read
            assert all(map(torch.equal, engine.map(lambda ids: engine(ids).logits, some), logits))
            passes.append(engine.io_bytes().read - before)
        assert engine.pass_seconds().total > 0
    # A unit or two are in host buffers from one pass to the next.
    assert passes[0] / 2 < passes[2] <= passes[0], "five batches read what one reads"
    assert passes[2] < passes[1] < 3 * passes[0], "the first runs alone, for once"


@pytest.mark.works("Without training", "weights that are not in the files as the model has them", "right")
def test_what_cannot_be_read_in_place_is_kept_in_host_memory_and_said(tmp_path: Path) -> None:
    in_files = saved(llama(), tmp_path / "fp32")
    model = transformers.LlamaForCausalLM.from_pretrained(in_files, dtype=torch.bfloat16)
    with offload.inference(in_files, {**on_cpu(), "bf16": {"enabled": True}}) as engine, torch.no_grad():
        # Not bit for bit: torch rounds a value in the middle of two to the even one, a split master away from zero.
        torch.testing.assert_close(engine(IDS).logits, model(IDS).logits, rtol=0, atol=0.02)
        assert "is stored as float32, not as bf16" in " ".join(engine.notices) and engine.io_bytes().read == 0
    given = transformers.LlamaForCausalLM.from_pretrained(in_files, dtype=torch.bfloat16)
    with offload.inference(given, on_cpu()) as engine, torch.no_grad():
        assert torch.equal(engine(IDS).logits, model(IDS).logits)
        assert "is in memory already" in " ".join(engine.notices)
        assert next(engine.module.parameters()).dtype is torch.bfloat16


@pytest.mark.works("Without training", "experts that files have one by one and the model stacks", "right")
def test_experts_are_read_where_the_files_have_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**NARROW, num_local_experts=4)
    model = transformers.MixtralForCausalLM(config).eval()
    with offload.inference(saved(model, tmp_path), on_cpu()) as engine, torch.no_grad():
        assert torch.equal(engine(IDS).logits, model(IDS).logits)
        assert "kept in host memory" not in " ".join(engine.notices)
        experts = [name for name in engine.module.state_dict() if "experts" in name]
        assert experts and all(len(engine.module.get_parameter(name)) == 4 for name in experts)


@pytest.mark.works("Without training", "4 bits without swap files", "refused")
def test_quantized_forms_need_swap_files(tmp_path: Path) -> None:
    folder = saved(llama(), tmp_path / "model")
    with pytest.raises(offload.ConfigError, match="offload_param"):
        offload.inference(folder, on_cpu(frozen="nf4"))
    logits = []
    for tier in ({"device": "cpu"}, {"device": "nvme", "nvme_path": str(tmp_path / "swap")}):
        config = {**on_cpu(frozen="nf4"), "zero_optimization": {"stage": 3, "offload_param": tier}}
        with offload.inference(folder, config) as engine:
            logits.append(engine(IDS).logits)
    assert torch.equal(*logits) and not torch.equal(logits[0], llama()(IDS).logits)
    assert not list((tmp_path / "swap").rglob("states")), "the swap files are removed at the end"


@pytest.mark.sample(1)
@pytest.mark.parametrize("harm", ["truncate", "write", "replace"])
def test_files_that_change_below_an_engine(harm: str, tmp_path: Path) -> None:
    folder = saved(model := llama(), tmp_path)
    file = folder / "model.safetensors"
    engine = offload.inference(folder, on_cpu(device_memory="200KiB"))
    engine(IDS)
    if harm == "replace":  # a new file under the name: what is open stays as it is
        file.with_suffix(".new").write_bytes(bytes(file.stat().st_size))
        os.replace(file.with_suffix(".new"), file)
        with torch.no_grad():
            assert torch.equal(engine(IDS).logits, model(IDS).logits)
        engine.destroy()
        return
    if harm == "truncate":
        os.truncate(file, file.stat().st_size // 2)
    else:
        with file.open("r+b") as open_file:
            open_file.seek(-100, os.SEEK_END)
            open_file.write(b"x")
    with pytest.raises(offload.IoError, match="has changed since its header was read"):
        engine(IDS)
    with pytest.raises(offload.EngineFailed, match="has changed since"):
        engine(IDS)
    engine.destroy()


def test_a_layer_larger_than_the_host_budget_is_read_in_chunks(tmp_path: Path) -> None:
    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(2048, 2600), torch.nn.Linear(2600, 2048))

    model = build()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with offload.init():
        built = build()
    offload.load_pretrained(built, tmp_path / "model.safetensors")
    inputs = torch.ones(2, 2048)
    # Two host buffers of 16 MiB, for layers of 20 MiB each.
    with offload.inference(built, on_cpu(host_memory="33MiB")) as engine, torch.no_grad():
        assert torch.equal(engine(inputs), model(inputs))
        assert engine.host_memory < 2 * 2048 * 2600 * 4


def test_an_in_place_layout_has_every_byte_of_its_tensors_in_whole_pages() -> None:
    draw = random.Random(0)
    for _ in range(50):
        files = {name: draw.randbytes(draw.randint(6, 6 * PAGE)) for name in ("a", "b")}
        cuts = {name: sorted(draw.sample(range(len(content)), k=6)) for name, content in files.items()}
        pairs = [(name, *pair) for name in files for pair in itertools.pairwise(cuts[name]) if draw.random() < 0.7]
        ranges = [FileRange(name, start, stop - start) for name, start, stop in draw.sample(pairs, k=len(pairs))]
        starts = list(itertools.accumulate([each.nbytes for each in ranges], initial=0))
        in_place_layout = arrange_in_place(
            list(zip(ranges, starts, strict=False)), {name: len(files[name]) for name in files}
        )
        content = b"".join(files[each.path][each.start : each.stop] for each in in_place_layout.extents)
        unit = bytearray(starts[-1])
        for start, target in in_place_layout.pieces:
            unit[target.start : target.stop] = content[start : start + len(target)]
        assert unit == b"".join(files[each.path][each.start : each.stop] for each in ranges)
        # Bytes of a file's first page fill the page in which another file has ended.
        extents = [each for each in in_place_layout.extents if each.start % PAGE == 0]
        fillers = [each for each in in_place_layout.extents if each.start % PAGE]
        assert all(each.stop == PAGE for each in fillers) and len(fillers) < len(files)
        pages = [(each.path, page) for each in extents for page in range(each.start, each.stop, PAGE)]
        assert len(pages) == len(set(pages)), "no page is read twice"
        assert all(each.stop % PAGE == 0 or each.stop == len(files[each.path]) for each in extents)
        assert in_place_layout.aligned or any(len(content) < PAGE for content in files.values())
        assert sorted(in_place_layout.tensors) == sorted(pair for pair in zip(ranges, starts, strict=False))


def test_bad_input_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = llama()
    with pytest.raises(offload.BudgetError):
        offload.inference(model, on_cpu(host_memory="4KiB"))
    assert all(parameter.requires_grad and parameter.numel() for parameter in model.parameters())
    with pytest.raises(offload.UsageError, match="a module was given"):
        offload.inference(model, attn_implementation="eager")
    with pytest.raises(offload.UsageError, match="expects a folder"):
        offload.inference(7)
    headless = saved(llama().model, tmp_path / "headless")
    with pytest.raises(offload.ConfigError, match="output would be that of random numbers"):
        offload.inference(headless, model_class=transformers.LlamaForSequenceClassification)
    with offload.inference(torch.nn.Linear(2, 2), on_cpu()) as engine:
        assert isinstance(engine, InferenceEngine)
        with pytest.raises(offload.UsageError, match="has no generate"):
            engine.generate(IDS)
    with pytest.raises(offload.UsageError, match="destroyed"):
        engine(torch.ones(2))


LAYERS = 30
MEMORY_IDS = [[1, 300, 17]] * 2


def config() -> Any:
    return transformers.LlamaConfig(
        hidden_size=640,
        intermediate_size=1792,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=512,
        dtype="bfloat16",
        tie_word_embeddings=False,
        use_cache=False,
        architectures=["LlamaForCausalLM"],
    )


def write_folder(folder: Path) -> int:
    """A Llama of random numbers in two files, made tensor by tensor; bytes of its weights."""
    folder.mkdir()
    config().save_pretrained(folder)
    with torch.device("meta"):
        named = {name: tuple(each.shape) for name, each in transformers.LlamaForCausalLM(config()).named_parameters()}
    files: dict[str, dict[str, Tensor]] = {"one.safetensors": {}, "two.safetensors": {}}
    for number, (name, shape) in enumerate(named.items()):
        files[list(files)[2 * number // len(named)]][name] = Tensor(torch.bfloat16, shape)
    generator = torch.Generator().manual_seed(0)
    for file, tensors in files.items():
        with SafetensorsWriter(folder / file, tensors, {"format": "pt"}) as writer:
            for name, tensor in tensors.items():
                writer.write_tensor(name, torch.randn(tensor.shape, generator=generator).mul_(0.02).bfloat16())
    places = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())


def score(folder: Path, budget: int) -> dict[str, Any]:
    """Losses of two rows, how far the peak RSS grew, and the bytes of the first pass by both counts."""
    warm = torch.nn.Linear(64, 64).bfloat16()
    warm(torch.ones(8, 64).bfloat16()).float().sum()
    ids = torch.tensor(MEMORY_IDS)
    model = offload.load_pretrained(transformers.LlamaForCausalLM, folder)
    chunk_loss_of(model, evaluation=True, by_row=True)
    base = psutil.Process().memory_info().rss
    sizes = {"device": "cpu", "host_memory": budget // 2, "device_memory": budget // 2}
    with offload.inference(model, {"offload": sizes}) as engine:
        drive = DiskBytes()
        losses = engine(input_ids=ids, labels=ids).loss
        figures = {"own": engine.io_bytes().read, "drive": drive.read, "written": drive.written}
        engine(input_ids=ids, labels=ids)
        budgets = engine.host_memory + engine.device_memory
    return {**figures, "losses": losses.tolist(), "grown": peak_rss() - base, "budgets": budgets}


def plain_losses(folder: Path) -> list[float]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    chunk_loss_of(model, evaluation=True, by_row=True)
    ids = torch.tensor(MEMORY_IDS)
    with torch.no_grad():
        losses: list[float] = model(input_ids=ids, labels=ids).loss.tolist()
    return losses


@pytest.mark.works("Without training", "files four times as large as the RAM they may take", "right")
def test_files_of_four_times_the_memory_are_scored_and_read_once(tmp_path: Path) -> None:
    nbytes = write_folder(tmp_path / "model")
    result, _ = peak_in(processes(), score, tmp_path / "model", 40 * MIB)
    assert result["losses"] == plain_losses(tmp_path / "model")
    assert result["budgets"] <= 40 * MIB
    print(f"{nbytes / MIB:.0f} MiB of weights, {result}")
    assert result["grown"] <= nbytes / 4, "budgets, activations, and what the libraries take"
    # Whole pages: a unit shares its first and its last with its neighbours, and each file has a head of its own.
    slack = 4 * PAGE * (LAYERS + 4)
    assert nbytes <= result["own"] <= nbytes + slack
    assert abs(result["drive"] - result["own"]) <= MIB, "the drive has read that too, and little else"
    assert result["written"] == 0


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
    lines = lines_of(result.stdout)
    assert [line["place"] for line in lines] == [f"{tmp_path}/data.jsonl:{number}" for number in range(1, 6)]
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
    assert [line["log_likelihood"] for line in lines] == close
    assert [line["counted"] for line in lines] == [len(text) - 1, len(completion), 0, len(chat) - assistant, 0]
    assert [line.get("cut", False) for line in lines] == [False, False, False, False, True]
    assert "limited by" in result.stderr and "perplexity" in result.stderr and "nothing is written" in result.stderr
    assert "2 records have no token that counts" in result.stderr
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
    lines = lines_of((tmp_path / "out.jsonl").read_text())
    assert [line["reward"] for line in lines] == pytest.approx(rewards, rel=1e-4)
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
    fits = call("generate", folder, "--raw", "--prompt", "a" * 28, "--max-new-tokens", "100")
    assert fits.exit_code == 0, fits.stderr
    result = call("generate", folder, "--raw", "--prompt", "a" * 28, "--max-new-tokens", "101")
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
    assert [line["completion"] for line in lines_of(result.stdout)] == expected
    raw = "--raw", "--prompt", "one, two, "
    alone = call("generate", folder, *raw, "--max-new-tokens", "6")
    assert alone.stdout == f"{expected[0]}\n"
    (facts,) = lines_of(call("generate", folder, *raw, "--max-new-tokens", "6", "--json").stdout)
    assert [each["completion"] for each in facts["completions"]] == expected[:1]
    # With a static cache the tokens are the same.
    cached = call(
        *("generate", folder, "--data", tmp_path / "data.jsonl", "--max-new-tokens", "6", "--batch-size", "2"),
        *("--static-cache", "100", "--device-memory", "64MiB"),
    )
    assert [line["completion"] for line in lines_of(cached.stdout)] == expected
    assert f"take {format_size(2 * cache_nbytes(model.config, 100, 1, 4))} of device memory" in cached.stderr
    there = "--static-cache", "100", "--static-cache-on", "host"
    cached = call("generate", folder, *raw, "--max-new-tokens", "6", *there)
    assert cached.stdout == alone.stdout
    assert f"take {format_size(cache_nbytes(model.config, 100, 1, 4))} of host memory" in cached.stderr
    # Without --raw the prompt is a user's message.
    write_lines(tmp_path / "asked.jsonl", [{"messages": [{"role": "user", "content": "one, two, "}]}])
    (answer,) = lines_of(call("generate", folder, "--data", tmp_path / "asked.jsonl", "--max-new-tokens", "6").stdout)
    answered = call("generate", folder, *raw[1:], "--max-new-tokens", "6").stdout
    assert answered == f"{answer['completion']}\n" != alone.stdout
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


def test_an_answer_has_the_positions_that_the_conversation_leaves(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"max_position_embeddings": 48, "eos_token_id": None}))
    shown = CliRunner().invoke(app, ["chat", str(tmp_path / "model"), "--json"], input="a\n")
    assert shown.exit_code == 0, shown.stderr
    (facts,) = lines_of(shown.stdout)
    assert 0 < facts["tokens"] < 48, "by default an answer may have 512 tokens"
    full = CliRunner().invoke(app, ["chat", str(tmp_path / "model"), "--json"], input="a\nb\n")
    assert full.exit_code == 2 and "no answer has room; begin another one" in full.stderr


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
    held = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
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
        (("score", "{folder}", "--data", "{folder}/config.json", "--output", "/absent/scores"), "there is no folder"),
        (("generate", "{folder}", "--data", "missing", "--raw"), "--raw is for --prompt"),
        (("generate", "{folder}", "--prompt", "a", "--base", "b"), "--base b is the model of an adapter, and"),
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
    done = call("train", "--model", adapter)
    assert done.exit_code == 2 and f"{adapter} contains adapters and no model; merge them" in done.stderr
    program, *command = shlex.split(done.stderr.partition("first: ")[2].rpartition(", then give")[0])
    assert program == "offload" and call(*command).exit_code == 0
    assert call("score", f"{adapter}-merged", "--data", records).exit_code == 0
