"""bf16 or fp32 is chosen by the machine's rates, the same at each start, and a run keeps its dtype."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import offload
from offload import precision, testing
from offload.cli.main import app
from offload.config import load_config
from offload.errors import UsageError
from offload.precision import ProductRates
from offload.swapper.store import inspection as look
from tests.support import models
from tests.support.oracle import Job, config, start, train_step
from tests.support.processes.cli_in_process import isolated_cache, run_folder

__all__ = ["isolated_cache", "run_folder"]  # fixtures

FAST, SLOW = ProductRates(2e11, 1e11), ProductRates(7e9, 5e10)


def machine(monkeypatch: pytest.MonkeyPatch, rates: ProductRates) -> None:
    """From here on the processor is of that speed, and nobody was warned of it."""
    testing.replace(monkeypatch, "dtype.rates", lambda half: rates)
    testing.replace(monkeypatch, "dtype.warned", set())


# -- the decision --------------------------------------------------------------------------------------


def test_bf16_is_chosen_where_it_is_at_least_as_fast() -> None:
    rates: ProductRates
    for rates, dtype in (
        (FAST, "bf16"),
        (ProductRates(1e11, 1e11), "bf16"),
        (ProductRates(0.99e11, 1e11), "fp32"),
        (SLOW, "fp32"),
    ):
        print(dtype)
        assert precision.decide(rates) == dtype


def test_the_choice_of_fp32_is_reported_with_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, SLOW)
    line = "dtype fp32: on this processor it is 7.1 times as fast as bf16 (50 and 7.0 Gflop/s in a thread)"
    assert precision.choose(torch.device("cpu")) == ("fp32", line)
    machine(monkeypatch, FAST)
    assert precision.choose(torch.device("cpu")) == ("bf16", None)


@pytest.mark.parametrize(("native", "dtype"), [(True, "bf16"), (False, "fp32")])
def test_a_gpu_is_not_measured(native: bool, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    testing.replace(monkeypatch, "dtype.rates", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: asked.append(including_emulation) or native
    )
    chosen = precision.choose(torch.device("cuda", 0))
    assert chosen.dtype == dtype and asked == [False], "what is emulated does not count"
    assert ("Tesla T4" in (chosen.line or "")) is not native


# -- measured, and kept --------------------------------------------------------------------------------


def test_this_processor_is_measured_and_threads_stay_as_they_were() -> None:
    before = torch.get_num_threads()
    rates = precision.measure("bf16")
    assert min(rates) > 1e6 and torch.get_num_threads() == before


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was measured, each time with another result, by a processor without limits."""
    for limit in precision._ISA_VARIABLES:
        monkeypatch.delenv(limit, raising=False)
    done: list[str] = []

    def measure(half: str) -> ProductRates:
        done.append(half)
        return ProductRates(1e9 * len(done), 1e9)

    testing.replace(monkeypatch, "dtype.measure", measure)
    return done


@pytest.mark.parametrize(
    "rates", [[1, float("nan")], [1e-300, 1e300], [float("inf")] * 2, "52", [True, 1], {"5": 1, "3": 2}, [5e9], None]
)
def test_what_cannot_have_been_measured_is_measured_anew(rates: Any, measured: list[str]) -> None:
    expected = precision.rates("bf16")
    content = json.loads(precision.cache_path().read_text())
    content["products"] = dict.fromkeys(content["products"], rates)
    precision.cache_path().write_text(json.dumps(content))
    assert precision.rates("bf16") == ProductRates(2e9, 1e9) != expected and measured == ["bf16", "bf16"]
    assert precision.rates("bf16") == ProductRates(2e9, 1e9), "it is kept again"


@pytest.mark.parametrize("what", ["processor", "torch"])
def test_another_processor_or_torch_is_measured_anew(
    what: str, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = precision.rates("bf16")
    if what == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9")
    else:
        testing.replace(monkeypatch, "machine.cpuinfo", lambda: "model name : A\nflags : fpu avx2\n\nmodel name : A\n")
        rates = precision.rates("bf16")
        testing.replace(monkeypatch, "machine.cpuinfo", lambda: "model name : A\nflags : fpu avx512_bf16\n")
        assert precision.rates("bf16") != rates, "a guest's processor may have any name"
    assert precision.rates("bf16") != before


# -- a config that leaves it open ----------------------------------------------------------------------


@pytest.mark.parametrize(("rates", "dtype"), [(FAST, "bf16"), (SLOW, "fp32")])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"bf16": {"enabled": "auto"}},
        {"bfloat16": {"enabled": "auto"}},
        {"bf16": None},
        {"bf16": {}},
        {"bf16": "auto", "fp16": "auto"},
        {"bfloat16": "auto"},
    ],
)
def test_an_open_config_gets_what_the_machine_is_fast_in(
    given: dict[str, Any], rates: ProductRates, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, rates)
    content = {"offload": {"device": "cpu"}, **given}
    before = json.dumps(content)
    chosen = offload.auto_dtype(content)
    assert load_config(chosen).dtype == dtype and json.dumps(content) == before
    assert offload.auto_dtype(chosen) == chosen, "it is settled"


@pytest.mark.parametrize(
    "given",
    [
        {"bf16": {"enabled": True}},
        {"bf16": {"enabled": False}},
        {"fp16": {"enabled": True}, "bf16": {"enabled": "auto"}},
        {"torch_autocast": {"enabled": True}, "bf16": {"enabled": "auto"}},
    ],
)
def test_the_dtype_of_a_config_stays(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    testing.replace(monkeypatch, "dtype.rates", None)
    assert offload.auto_dtype(given) == given


@pytest.mark.cpu_only("a new run has the dtype that is the faster on this CPU, and bf16 on another device")
@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", ["bf16", "fp16", "fp32"])
def test_a_run_and_a_checkpoint_keep_the_dtype_that_they_have(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = models.SHALLOW._replace(dtype=mode)
    engine = start(job, ("nvme", "nvme"), tmp_path / "swap")
    train_step(engine, job, 0)
    engine.save_checkpoint(tmp_path / "saved")
    engine.destroy()
    rest = {key: value for key, value in config(job, ("nvme", "nvme"), tmp_path / "swap").items() if key[-2:] != "16"}
    going_on = rest | {"offload": rest["offload"] | {"resume": "auto"}}
    for rates, here in ((FAST, "bf16"), (SLOW, "fp32")):
        machine(monkeypatch, rates)
        for chosen in (offload.auto_dtype(going_on), offload.auto_dtype(rest, tmp_path / "saved")):
            assert load_config(chosen).dtype == mode
        for begins in (rest, going_on | {"offload": going_on["offload"] | {"run": "another"}}):
            assert load_config(offload.auto_dtype(begins)).dtype == here
    again = offload.initialize(model=job.model(), config=offload.auto_dtype(going_on))[0]
    assert again.global_steps == 1
    again.destroy(remove=True)


# -- what was chosen by hand ---------------------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "products" in each.getMessage()]


def begin(folder: Path, dtype: str, **more: Any) -> None:
    content = config(models.SHALLOW._replace(dtype=dtype), ("none", "cpu"), folder) | more
    offload.initialize(model=models.shallow(), config=content)[0].destroy(remove=True)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_slow_dtype_is_warned_of_once(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine(monkeypatch, SLOW)
    for _ in range(2):
        begin(tmp_path, dtype)
    begin(tmp_path, "fp32")
    cure = (
        f'offload train: --dtype fp32; elsewhere leave out the block "{dtype}" of the config, {dtype}=True of '
        f'TrainingArguments, mixed_precision="{dtype}" of Accelerator, or dtype="{dtype}" of initialize'
    )
    slow = f"offload: {dtype} products are 7.1 times slower than fp32 on this processor: {cure}"
    assert warnings_of(caplog) == [slow]
    assert caplog.records[0].levelno == logging.WARNING and caplog.records[0].name == "offload"


def test_autocast_is_warned_of_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine(monkeypatch, SLOW)
    begin(tmp_path, "fp32", torch_autocast={"enabled": True, "dtype": "bf16"})
    (output,) = warnings_of(caplog)
    assert 'leave the block "torch_autocast" out' in output


# -- the command ---------------------------------------------------------------------------------------


def train(*arguments: str) -> str:
    small = ("--text", "text.py", "--batch-size", "2", "--seq-len", "32", "--device", "cpu", "--no-output")
    done = CliRunner().invoke(app, ["train", *small, *arguments])
    assert done.exit_code == 0, done.output
    return str(done.output).removeprefix("the trained model is not saved, as --no-output asks\n")


def mode_of(run: str) -> str:
    manifest = look.look(Path("swap", run, "rank0")).manifest
    assert manifest is not None
    return str(manifest.spec.fingerprint["mode"])


def test_train_chooses_a_dtype_and_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, FAST)
    output = train("--steps", "1")
    assert output.startswith("bf16 on cpu: ")
    machine(monkeypatch, SLOW)
    output = train("--steps", "1")
    assert output.startswith("dtype fp32: on this processor it is 7.1 times as fast") and "\nfp32 on cpu: " in output


@pytest.mark.sample(1)
@pytest.mark.parametrize(("there", "here", "dtype"), [(FAST, SLOW, "bf16"), (SLOW, FAST, "fp32")])
def test_a_run_that_goes_on_elsewhere_stays_as_it_is(
    there: ProductRates,
    here: ProductRates,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine(monkeypatch, there)
    train("--steps", "2", "--keep", "--resume", "auto")
    machine(monkeypatch, here)
    for resume, steps in (("auto", "3"), ("must", "4")):
        output = train("--steps", steps, "--keep", "--resume", resume)
        assert f"{dtype} on cpu: " in output and "resuming after step" in output and mode_of("default") == dtype
    assert [line.split(": ", 2)[2] for line in warnings_of(caplog)] == [
        "a resumed run keeps its dtype; start another run in fp32, or resume this run on another machine"
    ] * (dtype == "bf16")
    assert f"{'fp32' if dtype == 'bf16' else 'bf16'} on cpu: " in train("--steps", "1", "--run", "another")


# --------------------------------------------------------------------------------------------------
# Weights of float64 train in the dtype of the config, and a line reports it.


JOB = Job(nn.Module, lambda model, step, micro: model(torch.ones(1, 4)).sum())


@pytest.mark.parametrize(
    ("dtype", "message"), [("fp32", "trained in fp32;"), ("bf16", "bf16, with masters of 32 bits;")]
)
def test_float64_is_named_once(dtype: str, message: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 1).double())
    content = config(JOB._replace(dtype=dtype), ("none", "none"), tmp_path)
    engine = offload.initialize(model=model, config=content)[0]
    (line,) = [line for line in engine.notices if "float64" in line]
    assert line.startswith("1.weight is float64, which is not supported") and message in line
    assert next(engine.parameters()).dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    assert not isinstance(line, offload.notices.Remark)
    engine.backward(JOB.loss(engine, 0, 0))
    engine.step()
    engine.destroy()


# --------------------------------------------------------------------------------------------------
# Inputs of floating point into a model of 16 bits: cast, with one line, unless the config says otherwise.


def begin_plain(mode: str, folder: Path, **block: Any) -> offload.Engine:
    content: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "offload": {"device": "cpu", "nvme_path": str(folder)},
    }
    if mode != "fp32":
        content[mode] = {"enabled": True, **block}
    torch.manual_seed(0)
    return offload.initialize(model=nn.Linear(4, 1), config=content)[0]


def cast_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "are cast to" in record.getMessage()]


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_inputs_are_cast_and_one_line_reports_it(mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine, rows = begin_plain(mode, tmp_path), torch.randn(2, 4)
    for _ in range(3):
        loss = engine(rows).float().square().mean()
        engine.backward(loss)
        engine.step()
    (line,) = cast_lines(caplog)
    assert line.startswith(f"offload: inputs of fp32 are cast to {mode}, ") and '"auto_cast": true' in line
    engine.destroy()


@pytest.mark.parametrize(("mode", "block"), [("bf16", {"auto_cast": True}), ("fp32", {})])
def test_not_a_word_where_it_is_asked_for_or_not_needed(
    mode: str, block: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = begin_plain(mode, tmp_path, **block)
    assert engine(torch.ones(2, 4)).dtype == (torch.float32 if mode == "fp32" else torch.bfloat16)
    assert cast_lines(caplog) == []
    engine.destroy()


def test_false_leaves_them_and_the_error_names_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = begin_plain("bf16", tmp_path, auto_cast=False)
    with pytest.raises(UsageError, match=r'inputs of fp32 .*weights are bf16; set "auto_cast": true') as caught:
        engine(torch.ones(2, 4))
    assert isinstance(caught.value.__cause__, RuntimeError) and cast_lines(caplog) == []
    engine(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    engine.step()
    engine.destroy()
