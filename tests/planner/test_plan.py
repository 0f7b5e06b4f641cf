"""`offload plan` for a described machine: the report, its verdict, defaults, advice, and what its options mean."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

from offload.cli.commands import plan as command
from offload.cli.main import app
from offload.errors import BudgetError, ConfigError
from offload.finetune.model import allows_chunks
from offload.hardware.gpus import GPUS, find_gpu
from offload.planner import activations, memory, recommend
from offload.planner.activations import Load
from offload.planner.hardware import Hardware, described, parse_drive
from offload.planner.model_shape import Shape, from_count
from offload.planner.output import Asked, cautions, summary, wrapped
from offload.sizes import GIB, MIB, format_time, parse_memory
from tests.planner.test_plan_activations import COUNT, config, llama
from tests.planner.test_plan_activations import MACHINE as OWN_MACHINE
from tests.support import models


def run(*arguments: str) -> Any:
    """Returns what `offload plan` did with these arguments."""
    return CliRunner().invoke(app, ["plan", *arguments])


def found(*arguments: str) -> dict[str, Any]:
    """Returns the object that `offload plan --json` prints for these arguments."""
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def shape() -> Shape:
    return from_count(13 * 10**9, 20, 2048)


def plan(shape: Shape, machine: Hardware, load: Load, **options: Any) -> recommend.Planned:
    return recommend.plan(shape, machine, load, memory.settings(**options))


def test_ten_lines_say_what_one_wants_to_know(shape: Shape) -> None:
    planned = plan(shape, described("RTX 4090", 64 * GIB, [parse_drive("7GB/s,4GB/s,2TB")]), Load(1))
    best = recommend.Change("more of something", 1.0, 2.0, "--more 2")
    changes = (best, best._replace(words="another", gain=1.5))
    lines = wrapped(summary(planned, recommend.Advice(changes, 0), Asked(), 0.5))
    assert len(lines) <= 11 and max(map(len, lines)) <= 80
    text = {line[:8].strip(): line[8:] for line in lines if line[:8].strip()}
    assert text["fits"] == "13B in 20 layers on RTX 4090: weights on drive, states on drive"
    seconds = 10**8 / planned.timing.tokens_per_second
    assert text["speed"].endswith(f"100M tokens take {format_time(seconds)}, ${seconds / 7200:,.0f} at $0.5 an hour")
    assert text["limit"].startswith("NVMe limits, busy for ")
    assert text["change"] == "more of something (--more 2): 2.00 times the tokens/s"
    # 32 filled columns of a bar would be a tier that holds more than it has.
    assert text["drive"].startswith("#") and text["drive"].endswith(" of 1.8 TiB") and text["drive"].count("#") < 30
    none = wrapped(summary(planned, recommend.Advice((), 0), Asked()))
    assert any("no change that was tried is more than 5 % faster" in line for line in none)
    cure = next(line for line in lines if "less: " in line)
    assert "--moments int8 writes 50% less, --accumulation 2 writes 50% less" in cure
    halved = plan(shape, planned.hardware, Load(1), moments="int8").timing.moved
    assert 0.45 < halved.written / planned.timing.moved.written < 0.55, "the cure is what a plan of it says"


def test_what_fits_on_the_card_needs_no_offload() -> None:
    lines = run("gpt2-tiny", "--seq-len", "128", *MACHINE).stdout
    assert "you do not need offload" in lines and len(lines.splitlines()) <= 11
    done = run("gpt2-tiny", "--model", "gpt2-tiny", *MACHINE)
    assert done.exit_code == 2 and "give gpt2-tiny or --model gpt2-tiny, not both" in done.stderr


def test_a_plan_chooses_the_micro_batch_and_says_so(shape: Shape) -> None:
    loads = list(recommend.loads(Load(1, 1), 2048, None, None))
    assert [(load.batch, load.accumulation) for load in loads] == [(16, 2), (8, 4), (4, 8), (2, 16), (1, 32)]
    given = list(recommend.loads(Load(1, 1), 2048, 3, None))
    assert [(load.batch, load.accumulation) for load in given] == [(3, 10)], "a number of the user stays"
    machine = described("RTX 4090", 64 * GIB, [parse_drive("7GB/s,4GB/s")])
    chosen = recommend.choose_load(shape, machine, loads, None)
    assert chosen.load.batch * chosen.load.accumulation == 32
    for load in loads[-2:]:
        assert recommend.choose(shape, machine, load, None).timing.seconds >= chosen.timing.seconds * 0.97


def test_the_first_line_names_a_drive_that_is_soon_worn_out(shape: Shape) -> None:
    planned = plan(shape, described("RTX 4090", 64 * GIB, [parse_drive("7GB/s,4GB/s")] * 2), Load(1))
    rate = planned.timing.moved.written / planned.timing.seconds
    days = 86400 * rate

    def named(asked: Asked) -> list[str]:
        return [each for each in cautions(planned, asked) if "worn out" in each]

    # Two drives without a rating are taken as two of a usual one.
    (typical,) = named(Asked())
    assert typical == f"a drive rated for 1200 TB would be worn out in {format_time(2 * 1200e12 / rate)} of training"
    (given,) = named(Asked(endurance=int(9.9 * days)))
    assert given == "the drives would be worn out in 9.9 days of training"
    assert not named(Asked(endurance=int(10.1 * days)))
    # A run of known length is named if it takes more than a tenth of their life.
    day = round(86400 * planned.timing.tokens_per_second)
    assert not named(Asked(tokens=day // 2, endurance=int(9 * days)))
    (long,) = named(Asked(tokens=day, endurance=int(9 * days)))
    assert long.endswith(", and this run takes 11% of its life")


def test_the_first_line_says_that_a_run_cannot_be_resumed(shape: Shape) -> None:
    machine = described("RTX 4090", 64 * GIB, [parse_drive("7GB/s,4GB/s")])
    words = "no resume after a kill (durability none)"
    assert words in cautions(plan(shape, machine, Load(1), durability="none"), Asked())
    assert words not in cautions(plan(shape, machine, Load(1)), Asked())


def test_the_first_line_says_that_the_probe_was_disturbed(shape: Shape) -> None:
    doubts = ("memory: 2 GB/s at the beginning of the probe", "other processes took 60% of the cores during the probe")
    machine = replace(described("RTX 4090", 64 * GIB, [parse_drive("7GB/s,4GB/s")]), doubts=doubts)
    assert cautions(plan(shape, machine, Load(1)), Asked())[0] == doubts[-1]


def test_the_recommended_host_budget_is_what_pays(shape: Shape) -> None:
    machine = described("RTX 4090", 512 * GIB, [parse_drive("7GB/s,4GB/s")])
    by_default, tight = (plan(shape, machine, Load(1, 1, True), host_memory=n) for n in (None, 30 * GIB))
    advised = recommend.recommended_host(by_default)
    assert advised == recommend.recommended_host(tight) > by_default.memory.host
    assert plan(shape, machine, Load(1, 1, True), host_memory=advised).timing.seconds < by_default.timing.seconds / 1.03
    slow = plan(shape, replace(machine, matmul=1e12), Load(1, 1, True))
    assert recommend.recommended_host(slow) == by_default.memory.host, "compute hides it all"


def test_what_fits_in_memory_stays_there() -> None:
    small = from_count(3 * 10**9, 24, 1024)
    for gpu, ram, on_disk in (("A100 80GB", 2, False), ("RTX 4090", 64, False), ("RTX 4090", 2, True)):
        machine = described(gpu, ram * GIB, [parse_drive("7GB/s")])
        assert recommend.choose(small, machine, Load(1), None).memory.placement.on_disk is on_disk


def test_a_gpu_has_room_for_more_layers_the_less_activations_take() -> None:
    """As a run of it does after its first step; half of what they take stays free beside them."""
    shape = from_count(13 * 10**9, 40, 2048)
    sizes = []
    for room in (24 * GIB, 40 * GIB, 80 * GIB):
        machine = replace(described("A100", 128 * GIB, [parse_drive("7GB/s")]), gpu_memory=room)
        planned = plan(shape, machine, Load(2, 1, True))
        beside = activations.beside_weights(planned.memory, shape, planned.load)
        assert planned.memory.device + beside < room
        sizes.append(planned.memory.device)
        if planned.memory.device < planned.memory.placement.device_need.most:
            assert planned.memory.device + beside + beside // 2 <= room - 255 * MIB
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_without_a_drive_no_state_is_placed_there(shape: Shape) -> None:
    machine = replace(described("RTX 4090", 64 * GIB), drives=())
    with pytest.raises(BudgetError):
        recommend.choose(shape, machine, Load(1), None)
    with pytest.raises(ConfigError, match="no drive"):
        plan(shape, machine, Load(1, 1, True))


# -- what options mean, and what is left open --------------------------------------------------------

MACHINE = ("--gpu", "12GB", "--ram", "64GB", "--drive", "7GB/s,4GB/s")
TINY = ("--model", "gpt2-tiny", "--seq-len", "128")


def folder(path: Path, kind: str) -> str:
    """A folder with the config of a small model."""
    settings = {**models.WIDTHS, "vocab_size": 261, "max_position_embeddings": 128}
    getattr(transformers, f"{kind}Config")(**settings).save_pretrained(path)
    return str(path)


# -- the loss -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_loss_is_computed_in_chunks_where_the_model_allows_it_as_in_train(tmp_path: Path) -> None:
    assert found(*TINY, *MACHINE)["step"]["chunked_loss"]
    assert not found(*TINY, *MACHINE, "--no-chunked-loss")["step"]["chunked_loss"]
    assert found("--parameters", "1B", "--layers", "4", *MACHINE)["step"]["chunked_loss"]
    scaled = folder(tmp_path / "scaled", "Cohere")
    assert not allows_chunks(scaled) and allows_chunks(folder(tmp_path / "plain", "Llama"))
    assert not found("--model", scaled, "--seq-len", "32", *MACHINE)["step"]["chunked_loss"]


def test_chunks_that_the_model_does_not_allow_are_an_error(tmp_path: Path) -> None:
    done = run("--model", folder(tmp_path / "scaled", "Cohere"), "--seq-len", "32", *MACHINE, "--chunked-loss")
    assert done.exit_code == 2 and "cannot be computed in chunks" in done.stderr


# -- while it computes --------------------------------------------------------------------------------


def test_a_terminal_is_told_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    @contextmanager
    def recorded(console: Any) -> Iterator[Any]:
        assert console.stderr, "stdout has the plan alone"
        yield shown.append

    monkeypatch.setattr(command, "status_line", recorded)
    expected = ["loading", "reading", "counting", "trying"]
    for more, beside in ((), []), (("--details",), ["searching", "trying"]):
        shown.clear()
        assert run(*TINY, *MACHINE, *more).exit_code == 0
        assert [words.split()[0] for words in shown] == [*expected, *beside]


# -- the machine --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "name"), [("8GB", "RTX 4060"), ("10GB", "RTX 3080"), ("12 GB", "RTX 3060"), ("16GB", "RTX 4060 Ti 16GB")]
)
def test_a_size_below_24_gb_is_the_slowest_card_that_is_sold_with_it(size: str, name: str) -> None:
    gpu, like = find_gpu(size)
    assert like == f"the GPU is as fast as a {name}"
    (card,) = [each for each in GPUS if each.name == name]
    assert (gpu.memory, gpu.flops, gpu.matmul) == (card.memory, card.flops, card.matmul)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("4060", "RTX 4060"),
        ("4060 Ti", "RTX 4060 Ti 16GB"),
        ("4070", "RTX 4070"),
        ("4070 super", "RTX 4070 SUPER"),
        ("4070 ti", "RTX 4070 Ti"),
        ("4070 ti super", "RTX 4070 Ti SUPER"),
        ("4080 super", "RTX 4080 SUPER"),
        ("5070 ti", "RTX 5070 Ti"),
        ("5060ti", "RTX 5060 Ti 16GB"),
        ("T4", "T4"),
        ("a100", "A100 80GB"),
    ],
)
def test_a_part_of_a_name_is_the_card_that_users_mean(text: str, name: str) -> None:
    assert find_gpu(text)[0].name == name


def test_ram_is_as_large_as_it_is_sold() -> None:
    assert parse_memory("64GB") == parse_memory("64GiB") == parse_memory("64 gb") == parse_memory("64G") == 64 * GIB
    assert found(*TINY, *MACHINE)["machine"]["ram"] == int(0.9 * 64 * GIB)


# -- how long -----------------------------------------------------------------------------------------


def test_steps_and_tokens_are_one_question() -> None:
    done = run(*TINY, *MACHINE, "--steps", "500", "--tokens", "1M")
    assert done.exit_code == 2 and "--tokens and --steps both say how long" in done.stderr
    assert run(*TINY, *MACHINE, "--steps", "0").exit_code == 2


# -- adapters -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_a_run_saves_of_adapters_is_their_bytes_alone() -> None:
    pytest.importorskip("peft")
    whole, adapters = found(*TINY, *MACHINE), found(*TINY, *MACHINE, "--lora", "r=4")
    assert whole["export"] == 2 * whole["model"]["parameters"]
    trained = adapters["model"]["parameters"] - whole["model"]["parameters"]
    assert 0 < adapters["export"] == 2 * trained < whole["export"] / 10
    assert adapters["least_host_memory"] <= adapters["host_memory"]
    assert "; the saved adapters take" in run(*TINY, *MACHINE, "--lora", "r=4", "--details").stdout


# -- activations --------------------------------------------------------------------------------------


def test_a_config_with_activations_is_planned_and_written(tmp_path: Path) -> None:
    file, target = tmp_path / "config.json", tmp_path / "written.json"
    file.write_text(json.dumps(config("cpu", 4)))
    report = found(*COUNT, *OWN_MACHINE, "--config", str(file), "--chunked-loss", "--batch-size", "2")
    assert report["activation_tiers"]["inputs"] == {"device": 1, "host": 7, "disk": 0}
    assert report["step"]["tile_tokens"] == 2 * 2048 // 4
    found(*COUNT, *OWN_MACHINE, "--activations", "cpu", "--tile-mlp", "8", "--write", str(target))
    written = json.loads(target.read_text())["offload"]
    assert written["activations"] == "cpu" and written["tile_mlp"] == 8
    done = run(*COUNT, *OWN_MACHINE, "--config", str(file), "--activations", "cpu")
    assert done.exit_code == 2 and "cannot be given beside --config" in done.output


def test_the_search_prints_lengths_and_what_to_set(tmp_path: Path) -> None:
    rows = found(*COUNT, *OWN_MACHINE, "--longest-sequence")["longest"]
    assert [row["sequence_chunked"] > 0 for row in rows] == [True] * 5
    best = max(rows, key=lambda row: row["sequence_chunked"])
    file = tmp_path / "best.json"
    file.write_text(json.dumps(best["config"]))
    length = str(best["sequence_chunked"])
    report = found(*COUNT[:4], *OWN_MACHINE, "--config", str(file), "--chunked-loss", "--seq-len", length)
    assert report["activation_tiers"] == best["activation_tiers"]
    done = run(*COUNT, *OWN_MACHINE, "--longest-sequence")
    assert f"for {best['sequence_chunked']:,} tokens set" in done.stdout and "chunk_loss_of" in done.stdout
    with_file = found(*COUNT, *OWN_MACHINE, "--longest-sequence", "--config", str(file), "--no-chunked-loss")["longest"]
    assert all(not row["chunked_loss"] for row in with_file)


def test_the_search_names_the_positions_of_a_model(tmp_path: Path) -> None:
    done = run("--model", llama(tmp_path), *OWN_MACHINE, "--longest-sequence", "--seq-len", "128")
    assert done.exit_code == 0 and "allows 8,192 positions" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--activations", "ram"), "expected --activations of device, cpu, nvme, auto"),
        (("--tile-mlp", "0"), "expected --tile-mlp of auto, off or a number"),
        (
            ("--durability", "0"),
            "there is no durability '0': expected auto, step, none, or a number of steps from 1 on",
        ),
        (("--activations", "cpu", "--no-gradient-checkpointing"), "leave one of them out"),
        (("--longest-sequence", "--measure"), "writes and measures nothing"),
        (("--batch-size", "4000", "--no-chunked-loss"), "--chunked-loss"),
        (("--activations", "device", "--batch-size", "4000"), "--activations cpu"),
    ],
)
def test_wrong_options_are_named(arguments: tuple[str, ...], message: str) -> None:
    done = run(*COUNT, *OWN_MACHINE, *arguments)
    assert done.exit_code == 2 and message in done.output, done.output


def test_a_micro_batch_that_is_too_large_is_told_with_one_that_fits() -> None:
    done = run(*COUNT, *OWN_MACHINE, "--activations", "device", "--batch-size", "400")
    batch = int(done.output.partition("--batch-size ")[2].split()[0])
    assert batch > 8 and run(*COUNT, *OWN_MACHINE, "--activations", "device", "--batch-size", str(batch)).exit_code == 0
