"""`offload plan` turns descriptions of a model and a machine into bytes, seconds, advice and a usable config."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

import offload
from offload.cli.console import parse_count
from offload.cli.main import app
from offload.errors import BudgetError, ConfigError
from offload.finetune.options import Options, merge, schedule
from offload.hardware.smart import rated_bytes
from offload.planner import advice, config_file, memory
from offload.planner import recommend as choice
from offload.planner import request as ask
from offload.planner.activations import budgets
from offload.planner.activations.load import Load
from offload.planner.hardware import Hardware, described, find_gpu, parse_drive
from offload.planner.model_shape import Shape, from_count, from_name
from offload.planner.report.text import Asked, lines
from offload.planner.step_time import passes, step_order
from offload.planner.step_time import prediction as timing
from offload.sizes import GIB, MIB, format_size, parse_size
from tests.support.plan_command import found, run

MACHINE = ("--gpu", "24GB", "--ram", "64GB", "--drive", "7GB/s,4GB/s")
COUNT = ("--parameters", "13B", "--layers", "10")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def shape() -> Shape:
    return from_count(13 * 10**9, 20, 2048)


def plan(shape: Shape, machine: Hardware, load: Load, **options: Any) -> choice.Planned:
    return choice.plan(shape, machine, load, memory.settings(**options))


# -- the command --------------------------------------------------------------------------------------


def test_a_described_machine_needs_no_measurement() -> None:
    report = found(*COUNT, *MACHINE, "--tokens", "1B", "--tbw", "1200TB")
    *rows, total = report["tiers"]
    for tier in ("device", "host", "disk"):
        assert sum(row[tier] for row in rows) == total[tier]
    assert (total["host"], total["device"], total["disk"]) == (
        report["host_memory"],
        report["device_memory"],
        report["disk"],
    )
    assert report["model"]["parameters"] == 13 * 10**9
    assert report["disk"] == pytest.approx(24 * 13e9, rel=0.001), "two slots"
    assert report["least_host_memory"] < report["host_memory"] < 64 * GIB
    step = report["step"]
    assert step["limit"] == "NVMe" and step["seconds"] > step["compute_seconds"]
    assert step["written_bytes"] == pytest.approx(12 * 13e9, rel=0.001)
    assert report["run_seconds"] == pytest.approx(1e9 / step["tokens_per_second"], rel=0.001)
    steps = 1200e12 / step["written_bytes"]
    assert report["drive_years"] * 365.25 * 86400 == pytest.approx(steps * step["seconds"], rel=1e-3)
    assert any("RTX 3090" in message for message in report["machine"]["assumed"])
    assert report["changes"] == sorted(report["changes"], key=lambda change: -change["gain"])


@pytest.mark.parametrize(
    ("host_memory", "why"),
    [(None, 'without "host_memory" a budget is at most 80%'), (8 * GIB, '"host_memory" of the config is 8.0 GiB')],
)
def test_ram_that_stays_free_beside_gradients_on_disk_has_a_reason(host_memory: int | None, why: str) -> None:
    machine = described("RTX 4090", 16 * GIB, [parse_drive("7GB/s,4GB/s")])
    planned = plan(from_count(13 * 10**9, 10, 128), machine, Load(1), host_memory=host_memory)
    spare = f"{format_size(machine.ram - planned.host_peak)} of RAM stay free beside "
    (line,) = [each for each in lines(planned, advice.Advice((), 0), Asked()) if spare in each]
    assert f"{format_size(planned.memory.spilled)} of gradients on disk: {why}" in line


def test_drives_too_small_for_the_swap_files_are_named(shape: Shape) -> None:
    # One slot of 145.3 GiB, and 100 GB are 93.1.
    small = described("RTX 4090", 64 * GIB, [parse_drive("7GB/s,4GB/s,100GB")])
    with pytest.raises(BudgetError, match=r"the swap files take 52\.2 GiB more than is free on the drives"):
        plan(shape, small, Load(1))


def test_hardware_descriptions_are_parsed() -> None:
    done = run(*COUNT, *MACHINE, "--tokens", "1B", "--tbw", "1200TB")
    assert done.exit_code == 0, done.output
    for message in (
        "weights on",
        "buffers of the optimizer",
        "low bits of masters",
        "minimum",
        "NVMe limits",
        "what to change first",
    ):
        assert message in done.stdout
    assert "assumed:" in done.stdout and "1B tokens take" in done.stdout and "rated 1200 TB" in done.stdout


def test_help_has_an_example() -> None:
    for command in ("plan", "probe"):
        done = CliRunner().invoke(app, [command, "--help"])
        assert done.exit_code == 0 and f"Example: offload {command}" in done.stdout


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "not probed"),
        (MACHINE, "expected a model"),
        ((*MACHINE, "--parameters", "13B"), "--parameters needs --layers"),
        ((*MACHINE, *COUNT, "--model", "llama-1b"), "not both"),
        ((*MACHINE, "--model", "lama-1b"), "did you mean llama-1b"),
        ((*MACHINE, "--model", "owner/name-8B"), "hf download owner/name-8B config.json --local-dir name-8B"),
        ((*COUNT, "--gpu", "9000XT"), "there is no GPU"),
        ((*COUNT, "--gpu", "24GB", "--drive", "fast"), "expected a drive"),
        ((*COUNT, "--gpu", "24GB", "--drive", "7,4"), "expected a drive"),
        ((*COUNT, "--gpu", "24GB", "--drive", "7Gb/s,4Gb/s"), "bits a second"),
        ((*COUNT, "--gpu", "24GB", "--drive", "2TB"), "'2TB' is a size, not a rate; write 2TB/s if it is a rate"),
        ((*COUNT, "--gpu", "24GB", "--drive", "7GB/s,4GB/s,2"), "expected a size with its unit, got '2'"),
        ((*COUNT, "--gpu", "24GB", "--drive", ""), "expected a drive"),
        ((*COUNT, "--gpu", "24GB", "--pcie", "25"), "expected a rate"),
        ((*COUNT, "--gpu", "0GB"), "there is no GPU"),
        ((*COUNT, *MACHINE, "--tbw", "0"), "such as 1200TB"),
        ((*MACHINE, "--model", ""), "unknown model"),
        ((*MACHINE, "--model", "gpt2-tiny", "--seq-len", "2000"), "1024 positions"),
        ((*MACHINE, "--parameters", "1", "--layers", "1"), "too few"),
        ((*MACHINE, "--parameters", "100", "--layers", "40"), "too few"),
        ((*MACHINE, "--parameters", "0.1", "--layers", "1"), "1.5B or 2T"),
        ((*MACHINE, "--parameters", "1e30", "--layers", "4"), "at most 1e15"),
        ((*MACHINE, "--parameters", "13B", "--layers", "1000000"), "at most 1e15"),
        ((*COUNT, "--gpu", "24GB", "--nvme-path", "/x"), "describe drives by --drive"),
        ((*COUNT, *MACHINE, "--batch-size", "0"), "at least 1"),
        ((*COUNT, *MACHINE, "--batch-size", "4096"), "--batch-size"),
        ((*COUNT, *MACHINE, "--dtype", "int4"), "there is no dtype"),
        ((*COUNT, *MACHINE, "--moments", "int4"), "expected --moments of fp32, bf16, int8"),
        ((*COUNT, *MACHINE, "--master", "bf16"), "expected --master of fp32, bf24"),
        ((*COUNT, *MACHINE, "--config", "/none/such.json"), "cannot read the config"),
        ((*COUNT, *MACHINE, "--write", "/none/such/file.json"), "there is no folder"),
    ],
)
def test_wrong_descriptions_are_named(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2 and message in done.output, done.output


def test_the_written_config_contains_the_plan(tmp_path: Path) -> None:
    folder, target = tmp_path / "model", tmp_path / "ds_config.json"
    shape = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=512
    )
    shape.save_pretrained(folder)
    report = found("--model", str(folder), *MACHINE, "--seq-len", "64", "--write", str(target))
    content = json.loads(target.read_text())
    assert run("--model", str(folder), *MACHINE, "--write", str(target)).exit_code == 2, "it is not written over"
    mine, theirs = (schedule(merge(file, Options())[0], Options(), 100)[0] for file in (content, None))
    assert all(mine[key] == theirs[key] for key in ("optimizer", "gradient_clipping", "scheduler")), "as train does"
    content["offload"] |= {"nvme_path": str(tmp_path), "device": "cpu"}
    with offload.init(content):
        model = transformers.LlamaForCausalLM(shape)
    engine = offload.initialize(model=model, config=content)[0]
    try:
        assert engine.parameter_count == report["model"]["parameters"]
        assert "device_memory" not in content["offload"], "of a GPU it is measured in the first step"
        assert engine.host_memory <= report["host_memory"], "no staging where the device is the CPU"
    finally:
        engine.destroy(remove=True)


def test_a_config_is_planned_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    content = memory.settings("cpu", "nvme", durability="none", accumulation=3, batch=2)
    file.write_text(json.dumps(content))
    report = found(*COUNT, *MACHINE, "--config", str(file), "--seq-len", "512", "--gradient-checkpointing")
    assert report["slots"] == 1 and report["config"] == content
    assert report["step"]["tokens"] == 3 * 2 * 512


# -- time ---------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(("speculate", "near"), [(False, 0.02), (True, 0.15)])
@pytest.mark.parametrize(("billions", "layers"), [(13, 40), (70, 80)])
def test_a_step_on_drives_follows_the_formula(billions: int, layers: int, speculate: bool, near: float) -> None:
    shape = from_count(billions * 10**9, layers, 2048)
    machine = described("RTX 4090", 256 * GIB, [parse_drive("7GB/s,4GB/s")])
    planned = plan(shape, machine, Load(1, 1, True, speculate=speculate))
    assert planned.timing.limit == "NVMe"
    assert planned.timing.seconds == pytest.approx(planned.timing.formula_seconds, rel=near)


def test_with_all_in_memory_compute_is_all_there_is(shape: Shape) -> None:
    machine = replace(described("H200", 2048 * GIB), gpu_memory=1024 * GIB)
    planned = plan(shape, machine, Load(8), weights="none", states="none")
    assert planned.timing.limit == "compute"
    assert planned.timing.compute_seconds <= planned.timing.seconds <= 1.05 * planned.timing.compute_seconds
    assert planned.timing.moved.read == planned.timing.moved.written == 0


def test_faster_components_never_make_a_step_slower(shape: Shape) -> None:
    machine = described("RTX 4090", 64 * GIB, [parse_drive("3GB/s")], memory=40e9)
    before = plan(shape, machine, Load(2, 1, True)).timing.seconds
    for name in ("matmul", "weights", "fresh", "elementwise", "upload", "download", "optimizer", "gradient"):
        faster = replace(machine, **{name: 2 * getattr(machine, name)})
        assert plan(shape, faster, Load(2, 1, True)).timing.seconds <= before * 1.001, name
    drives = replace(machine, drives=machine.drives * 2)
    assert plan(shape, drives, Load(2, 1, True)).timing.seconds < 0.6 * before


def test_tokens_that_hide_are_the_least_that_do(shape: Shape) -> None:
    machine = replace(described("RTX 4090", 64 * GIB, [parse_drive("14GB/s")]), gpu_memory=1 << 50)
    planned = plan(shape, machine, Load(1, 1, True), host_memory=50 * GIB)
    tokens = timing.hiding_tokens(planned.memory, shape, machine, planned.load)
    assert tokens is not None and tokens % shape.sequence == 0
    batch = tokens // shape.sequence
    for sequences, hidden in ((batch, True), (batch // 2, False)):
        at = plan(shape, machine, Load(sequences, 1, True), host_memory=50 * GIB).timing
        assert at.hidden is hidden
        assert at.formula_seconds <= 1.05 * at.compute_seconds or not hidden


def test_the_optimizer_on_a_cpu_takes_cores() -> None:
    machine = replace(described("RTX 4090", 1024 * GIB), gpu_memory=0)
    planned = plan(from_count(10**9, 16, 512), machine, Load(1), weights="none", states="none")
    kernel = 10**9 / machine.optimizer
    assert planned.timing.seconds == pytest.approx(planned.timing.compute_seconds + kernel, rel=0.02)


def test_a_frozen_layer_has_no_backward_of_its_weights() -> None:
    machine = replace(described("RTX 4090", 64 * GIB), handed_seconds=0.0)
    trains = from_count(10**9, 4, 512)
    still = tuple(layout._replace(trainable_stop=0) for layout in trains.layouts)
    before = passes.forward(trains, machine, Load(2))
    after = passes.forward(trains._replace(layouts=still), machine, Load(2))
    for use, each, frozen in zip(trains.uses, before, after, strict=True):
        numel = trains.layouts[use.unit].numel
        products = 2 * use.flops / machine.matmul + (2 * numel / machine.weights if use.flops else 0)
        made = 2 * numel / machine.fresh if use.lookup else 0
        assert each.seconds == frozen.seconds and each.backward == pytest.approx(2 * each.seconds + made)
        assert frozen.backward == pytest.approx(2 * each.seconds - products)


def test_a_tied_embedding_makes_two_gradients_and_sums_them() -> None:
    machine = replace(described("RTX 4090", 64 * GIB), handed_seconds=0.0)
    apart = from_count(10**9, 4, 512)
    embedding, head = apart.uses[0], apart.uses[-1]._replace(unit=0)
    tied = apart._replace(uses=(embedding, *apart.uses[1:-1], head))
    (one, *_), (two, *_) = (passes.forward(shape, machine, Load(1)) for shape in (apart, tied))
    nbytes = 2 * apart.layouts[0].numel
    assert two.backward - one.backward == pytest.approx(nbytes / machine.fresh) and one.seconds == two.seconds


def test_advice_is_a_prediction_of_its_own(shape: Shape) -> None:
    machine = described("RTX 4090", 64 * GIB, [parse_drive("7GB/s,4GB/s")])
    planned = choice.choose(shape, machine, Load(1), None)
    found = {change.words: change for change in advice.advise(planned).changes}
    many = planned.load._replace(accumulation=4)
    again = choice.plan(shape, machine, many, planned.content)
    assert found["4 micro-batches a step"].seconds == again.timing.seconds
    assert all(change.gain >= 1.05 for change in found.values())


def test_the_recommended_host_budget_is_what_pays(shape: Shape) -> None:
    machine = described("RTX 4090", 512 * GIB, [parse_drive("7GB/s,4GB/s")])
    by_default, tight = (plan(shape, machine, Load(1, 1, True), host_memory=n) for n in (None, 30 * GIB))
    advised = advice.recommended_host(by_default)
    assert advised == advice.recommended_host(tight) > by_default.memory.host
    assert plan(shape, machine, Load(1, 1, True), host_memory=advised).timing.seconds < by_default.timing.seconds / 1.03
    slow = plan(shape, replace(machine, matmul=1e12), Load(1, 1, True))
    assert advice.recommended_host(slow) == by_default.memory.host, "compute hides it all"


def test_what_fits_in_memory_stays_there() -> None:
    small = from_count(3 * 10**9, 24, 1024)
    for gpu, ram, on_disk in (("A100 80GB", 2, False), ("RTX 4090", 64, False), ("RTX 4090", 2, True)):
        machine = described(gpu, ram * GIB, [parse_drive("7GB/s")])
        assert choice.choose(small, machine, Load(1), None).memory.placement.on_disk is on_disk


def test_a_gpu_has_room_for_more_layers_the_less_activations_take() -> None:
    """As a run of it does after its first step; half of what they take stays free beside them."""
    shape = from_count(13 * 10**9, 40, 2048)
    sizes = []
    for room in (24 * GIB, 40 * GIB, 80 * GIB):
        machine = replace(described("A100", 128 * GIB, [parse_drive("7GB/s")]), gpu_memory=room)
        planned = plan(shape, machine, Load(2, 1, True))
        beside = budgets.beside_weights(planned.memory, shape, planned.load)
        assert planned.memory.device + beside < room
        sizes.append(planned.memory.device)
        if planned.memory.device < planned.memory.placement.device_need.most:
            assert planned.memory.device + beside + beside // 2 <= room - 255 * MIB
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_without_a_drive_no_state_is_placed_there(shape: Shape) -> None:
    machine = replace(described("RTX 4090", 64 * GIB), drives=())
    with pytest.raises(BudgetError):
        choice.choose(shape, machine, Load(1), None)
    with pytest.raises(ConfigError, match="no drive"):
        plan(shape, machine, Load(1, 1, True))


# -- the machine and the model ------------------------------------------------------------------------


def test_a_model_that_is_no_language_model_is_one_line(tmp_path: Path) -> None:
    transformers.T5Config(d_model=64, d_ff=64, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    done = run("--model", str(tmp_path), *MACHINE)
    assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1 and "T5Config" in done.stderr


def test_counts_are_parsed() -> None:
    for message, count in (
        ("13B", 13e9),
        ("13b", 13e9),
        ("1.5e9", 1.5e9),
        ("2T", 2e12),
        ("64Mi", 64 * 2**20),
        ("7", 7),
    ):
        assert parse_count(message) == count
    for message in ("", "nan", "inf", "-3", "0", "0.1", "3 apples", "Mi", "1e999", "9" * 400, "9" * 300 + "T"):
        with pytest.raises(ConfigError, match="expected a number"):
            parse_count(message)


def test_a_rated_life_without_a_unit_is_in_terabytes_as_in_a_config() -> None:
    assert ask.parse_tbw("600") == ask.parse_tbw("600TB") == 600 * 10**12 and ask.parse_tbw("1PB") == 10**15


def test_a_small_model_is_counted_in_its_own_unit() -> None:
    assert "3.49 million parameters" in run("--model", "gpt2-tiny", "--seq-len", "64", *MACHINE).stdout


def test_a_config_that_cannot_be_written_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "written.json"

    def full(path: Path, *options: Any, **more: Any) -> Any:
        path.touch()
        return Path("/dev/full").open("w")

    monkeypatch.setattr(config_file, "open", full, raising=False)
    done = run("--model", "gpt2-tiny", "--seq-len", "64", *MACHINE, "--write", str(target))
    assert done.exit_code == 1 and f"cannot write the config {target}: No space left" in done.stderr
    assert not target.exists()


def test_machines_are_parsed() -> None:
    assert find_gpu("24.5GB")[0].memory == 24.5 * GIB
    assert find_gpu("4090")[0].name == "RTX 4090" and find_gpu("4090")[1] is None
    for smi, name in (
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti SUPER"),
        ("NVIDIA GeForce RTX 4060", "RTX 4060"),
        ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA H200", "H200"),
    ):
        assert find_gpu(smi)[0].name == name, "as nvidia-smi and torch write it"
    with pytest.raises(ConfigError, match="there is no GPU 'NVIDIA GeForce RTX 4070 Laptop GPU' here"):
        find_gpu("NVIDIA GeForce RTX 4070 Laptop GPU")  # a slower card with less memory
    assert find_gpu("a100-80gb")[0].memory == 80 * GIB and find_gpu("A100")[0].memory == 80 * GIB
    assert find_gpu("16GB")[0].memory == 16 * GIB and "as fast as" in (find_gpu("16GB")[1] or "")
    drive = parse_drive("7GB/s,5GB/s,2TB")
    assert (drive.read, drive.write, drive.free) == (7e9, 5e9, parse_size("2TB"))
    assert parse_drive("3GB/s").write == 3e9
    with pytest.raises(ConfigError, match="expected a drive"):
        parse_drive("1,2,3,4")


def test_a_count_is_near_the_model_of_that_size() -> None:
    real = from_name("llama-7b", 256)
    counted = from_count(real.parameters, 32, 256)
    assert counted.parameters == real.parameters

    def total(shape: Shape, name: str) -> float:
        return sum(getattr(use, name) for use in shape.uses)

    assert total(counted, "flops") == pytest.approx(total(real, "flops"), rel=0.05)
    for name in ("nbytes", "saved", "boundary"):
        assert total(counted, name) == pytest.approx(total(real, name), rel=0.2), name


def test_smart_tells_what_a_drive_is_rated_for() -> None:
    log = {"percentage_used": 5, "data_units_written": 2_000_000}
    assert rated_bytes({"nvme_smart_health_information_log": log}) == 20 * 2_000_000 * 512_000
    assert rated_bytes({"nvme_smart_health_information_log": log | {"percentage_used": 0}}) is None


def test_what_is_added_up_on_a_gpu_leaves_it_with_the_last_micro_batch() -> None:
    """Beside a backward that is long; and the totals have their bytes of the device's budget."""
    small, machine = from_count(10**9, 16, 2048), described("H200", 128 * GIB)
    numel = small.layouts[3].trainable_stop
    alone = step_order.backward(passes.forward(small, machine, Load(1)), [0] * len(small.layouts), machine, False)
    for bus, longer in ((1e15, False), (1e9, True)):
        slow = replace(machine, download=bus)
        planned = plan(small, slow, Load(1, 4, schedule="micro_batch_major"), weights="cpu", states="cpu")
        totals = dict(planned.memory.placement.added)
        assert len(totals) == len(small.layouts) and totals[3] == 4 * numel
        first = passes.forward(small, slow, Load(1))
        *some, last = step_order.step_of(small, [first] * 4, planned.memory, slow, planned.load)[1::2]
        assert len(some) == 3 and some[0] == some[1] == some[2]
        mine = next(index for index, each in enumerate(alone) if each.unit == 3)
        added = alone[mine].seconds + 10 * numel / machine.elementwise
        assert some[0][mine].seconds == pytest.approx(added)
        assert last[mine].seconds == pytest.approx(4 * numel / bus if longer else added)
    assert planned.memory.total.device == planned.memory.device
    once = plan(small, machine, Load(1, 1), weights="cpu", states="cpu")
    assert not once.memory.placement.added
    tight = plan(small, machine, Load(1, 4), weights="cpu", states="cpu", device_memory=int(1e9))
    assert not tight.memory.placement.added, "weights come first"


def test_each_unit_is_updated_where_it_lives() -> None:
    """On the GPU where its gradient stays there too; else its states go to the host and come back."""
    small, machine = from_count(10**9, 16, 2048), described("H200", 128 * GIB)

    def rate(weights: str, states: str, **options: Any) -> float:
        planned = plan(small, machine, Load(1), weights=weights, states=states, **options)
        return timing.rates_of(planned.memory, machine).kernel

    there, on_host = rate("none", "none"), rate("cpu", "cpu")
    assert there == pytest.approx(machine.device_optimizer) and on_host == pytest.approx(machine.optimizer)
    moved = 12 / machine.upload + 12 / machine.download
    gone = 1 / (1 / machine.optimizer + moved)
    part = rate("none", "none", device_memory=int(13e9))
    assert gone < part < there, "gradients of some units have room there"
    assert gone < on_host, "states that live on the GPU are no gain for an update on the host"


def test_auto_is_the_dtype_that_it_takes_by_itself() -> None:
    assert found(*COUNT, *MACHINE, "--dtype", "auto") == found(*COUNT, *MACHINE)
