"""DeepSpeed's calls have its arguments and answers: the engine, the accelerator, keywords, names, estimates."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.config import load_config
from offload.deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator
from offload.deepspeed.names import MODULES, public_names
from offload.deepspeed.refused import INSTEAD
from offload.distributed.process_group import Communication
from offload.engine.access import engines
from offload.errors import ConfigError, OffloadError, UsageError
from offload.model_io.deferred import DeferredParameter
from tests.pages import deepspeed_names
from tests.pages.deepspeed_names import ABSENT, REFUSED, RIGHT
from tests.pages.deepspeed_names import NAMES as NAMES_NAMES
from tests.support import models
from tests.support.oracle import PlainEngine, config, start, train_step
from tests.support.ranks.rank_pool import RankPool

MEMORY, DISK = ("none", "none"), ("nvme", "nvme")
JOB = models.MIXTURE


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    engine = start(JOB, DISK, tmp_path_factory.mktemp("store"))
    yield engine
    engine.destroy(remove=True)


def test_the_config_is_complete_and_loads_again(engine: offload.Engine, tmp_path: Path) -> None:
    settings = engine.config
    assert settings["train_batch_size"] == 2 and settings["gradient_accumulation_steps"] == 2
    assert settings["zero_optimization"]["offload_param"]["device"] == "nvme"
    assert settings["optimizer"]["params"]["lr"] == JOB.lr and settings["gradient_clipping"] == JOB.clip
    again = load_config(settings)
    given = load_config(config(JOB, DISK, tmp_path))
    assert again.offload.debug == given.offload.debug and again.optimizer == given.optimizer
    assert load_config(again.model_dump(mode="json")) == again
    settings["zero_optimization"]["stage"] = 1
    assert engine.zero_optimization_stage() == 3


@pytest.mark.parametrize(
    ("optimizer", "params", "kind", "momentum"),
    [
        ("AdamW", {"betas": (0.8, 0.95)}, "AdamW", (0.8, 0.95)),
        ("Adam", {"adam_w_mode": False}, "Adam", (0.9, 0.999)),
        ("Lamb", {}, "Lamb", (0.9, 0.999)),
        ("Lion", {}, "Lion", (0.9, 0.999)),
        ("Adagrad", {}, "Adagrad", 0.0),
        ("SGD", {"momentum": 0.5}, "SGD", 0.5),
        ("SGD", {}, "SGD", 0.0),
    ],
)
def test_the_optimizers_name_and_momentum(
    optimizer: str, params: dict[str, Any], kind: str, momentum: Any, tmp_path: Path
) -> None:
    job = JOB._replace(optimizer=optimizer, params=tuple(params.items()), dtype="bf16")
    engine = start(job, MEMORY, tmp_path)
    assert engine.get_type() == [kind] and engine.get_mom() == [momentum]
    assert engine.bfloat16_enabled() and engine.config["optimizer"]["type"] == optimizer
    engine.destroy()


def test_a_learning_rate_for_each_group(tmp_path: Path) -> None:
    model = models.Mixture()
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trainable[:2]}, {"params": trainable[2:], "lr": 1.0}]
    engine = offload.initialize(model=model, model_parameters=groups, config=config(JOB, MEMORY, tmp_path))[0]
    engine.set_lr([0.25, 0.5])
    assert engine.get_lr() == [0.25, 0.5]
    engine.set_lr(0.125)
    assert engine.get_lr() == [0.125, 0.125]
    for bad in ([0.1], [0.1] * 3, -1.0, math.nan, math.inf, "1", [0.1, None], [0.1, 10**400], True):
        with pytest.raises(UsageError, match="set_lr expects"):
            engine.set_lr(bad)  # type: ignore[arg-type]
    assert engine.get_lr() == [0.125, 0.125]
    engine.destroy()


# -- the model's own ----------------------------------------------------------------------------------


def test_what_the_engine_has_not_is_the_models(tmp_path: Path) -> None:
    job = models.SHALLOW
    engine, plain = start(job, DISK, tmp_path), PlainEngine(job)
    for step in range(2):
        train_step(engine, job, step)
        train_step(plain, job, step)
    ids = models.tokens(9, 9)[:, :4]
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    engine.eval()
    assert torch.equal(engine.generate(ids, **settings), plain.module.eval().generate(ids, **settings))
    assert [n for n, _ in engine.named_parameters()] == [n for n, _ in plain.module.named_parameters()]
    assert engine.training is False and engine.transformer is engine.module.transformer
    assert engine.module.config.n_layer == 2 and engine.config["gradient_accumulation_steps"] == 1
    engine.destroy(remove=True)


def test_what_neither_has_is_an_attribute_error(engine: offload.Engine) -> None:
    with pytest.raises(AttributeError, match=r"'generate_all'.*Mixture"):
        _ = engine.generate_all
    assert not hasattr(engine, "_no_such") and not hasattr(engine, "_parameters")
    with pytest.raises(AttributeError):
        offload.Engine.__new__(offload.Engine).anything  # noqa: B018


@pytest.mark.parametrize(("mode", "enabled"), [("fp16", False), ("bf16", True)])
def test_auto_cast_gives_inputs_the_dtype_of_the_weights(mode: str, enabled: bool, tmp_path: Path) -> None:
    content = config(JOB._replace(dtype=mode), MEMORY, tmp_path)
    content[mode] = {"enabled": True, "auto_cast": enabled}
    seen: list[torch.dtype] = []

    class Two(torch.nn.Linear):
        def forward(self, x: torch.Tensor, at: torch.Tensor, **more: Any) -> torch.Tensor:
            seen.extend((x.dtype, at.dtype, more["inner"][0].dtype))
            return super().forward(x.to(self.weight.dtype))

    engine = offload.initialize(model=Two(4, 4), config=content)[0]
    rows = torch.randn(2, 4)
    output = engine(rows, torch.zeros(2, dtype=torch.int64), inner=[rows.double()])
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[mode]
    assert seen == ([dtype, torch.int64, dtype] if enabled else [torch.float32, torch.int64, torch.float64])
    assert output.dtype == dtype
    engine.destroy()


# -- collectives ---------------------------------------------------------------------------------------


def summaries_of(folder: Path) -> tuple[Any, Any, str, str]:
    """Returns `engine.communication()`, the result of `log_summary`, what it prints, and what `destroy` prints.

    Engines of other tests in this process, which it may still hold, are counted in what the first returns too.
    """
    import offload.deepspeed as deepspeed

    earlier = list(engines())
    content = config(models.SHALLOW, MEMORY, folder) | {"comms_logger": {"enabled": True}}
    engine, *_ = deepspeed.initialize(model=models.SHALLOW.model(), config=content)
    train_step(engine, models.SHALLOW, 0)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        sent = functools.reduce(Communication.plus, (each.sent for each in earlier), engine.communication())
        summary = deepspeed.comm.log_summary(return_dict=True)
        engine.destroy()
    return sent, summary, out.getvalue(), err.getvalue()


def test_log_summary_and_the_block_comms_logger_print_the_collectives_of_rank_0(
    ranks: RankPool, tmp_path: Path
) -> None:
    (sent, summary, printed, at_the_end), (_, no_summary, nothing, neither) = ranks.run(summaries_of, tmp_path)
    assert sent.weights.collectives > 0 and sent.gradients.nbytes > 0
    assert summary["summary"]["weights"] == {"count": sent.weights.collectives, "bytes": sent.weights.nbytes}
    assert (summary["metadata"], no_summary["metadata"]["rank"]) == ({"world_size": 2, "rank": 0}, 1)
    assert re.search(rf"^  gradients +{sent.gradients.collectives} collectives +\S+ \S+ sent$", printed, re.MULTILINE)
    assert "collectives of rank 0 since its engine was created:\n" in at_the_end and "  gradients " in at_the_end
    assert nothing == "" and "collectives of rank" not in neither


# --------------------------------------------------------------------------------------------------
# Keywords of DeepSpeed that this library lacks accept None; any other value is an error.


CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "offload": {"device": "cpu"},
}


def begin(**keywords: Any) -> offload.Engine:
    return offload.initialize(model=nn.Linear(2, 2), config=CONFIG, **keywords).engine


def built(**keywords: Any) -> nn.Linear:
    with offload.init(**keywords):
        return nn.Linear(2, 2)


TAKEN: dict[str, dict[str, Any]] = {
    "initialize": {"mpu": None, "dist_init_required": None, "distributed_port": 29500, "mesh_param": None},
    "initialize, ranks of torchrun": {"dist_init_required": True},
}


@pytest.mark.parametrize("given", TAKEN.values(), ids=TAKEN)
def test_taken_by_initialize(given: dict[str, Any]) -> None:
    begin(**given).destroy()


def test_refused_by_initialize() -> None:
    given: dict[str, Any]
    for given, message in (
        ({"mpu": object()}, "mpu= expects Megatron's parallel_state"),
        ({"mesh_param": (2, 2)}, "mesh_param=.*not split over ranks"),
        ({"distributed_port": 1}, "distributed_port=1: the launcher connects"),
        ({"dist_init_required": "yes"}, "expected None, True or False"),
    ):
        print(message)
        with pytest.raises(UsageError, match=message):
            begin(**given)


def test_keywords_of_zero_init() -> None:
    assert isinstance(
        built(config_dict_or_path=CONFIG, remote_device=None, dtype=None, mpu=None).weight, DeferredParameter
    )
    assert not isinstance(built(enabled=False).weight, DeferredParameter)
    for given in ({"remote_device": "nvme"}, {"dtype": torch.float16}, {"mpu": object()}):
        with pytest.raises(UsageError, match=next(iter(given))):
            built(**given)


def test_keywords_of_gathered_parameters() -> None:
    engine = begin()
    weight = engine.module.weight
    with offload.gathered(weight, modifier_rank=0):
        weight.data.fill_(3.0)
    with offload.gathered(weight, modifier_rank=None):
        assert bool((weight == 3).all())
    with pytest.raises(UsageError, match="modifier_rank=1"), offload.gathered(weight, modifier_rank=1):
        pass
    engine.destroy()


def test_backward_and_step() -> None:
    engine = begin()
    loss = engine(torch.ones(1, 2)).square().mean()
    for given in ({"allreduce_gradients": False}, {"release_loss": True}):
        with pytest.raises(UsageError, match=next(iter(given))):
            engine.backward(loss, **given)
    engine.backward(loss, allreduce_gradients=True, release_loss=False)
    with pytest.raises(UsageError, match=r"lr_kwargs=\{'epoch': 1\}: the schedule's step\(\)"):
        engine.step(lr_kwargs={"epoch": 1})
    engine.step(lr_kwargs=None)
    assert engine.global_steps == 1
    engine.destroy()


def test_keywords_of_load_checkpoint(tmp_path: Path) -> None:
    engine = begin()
    engine.save_checkpoint(tmp_path)
    assert engine.load_checkpoint(tmp_path, custom_load_fn=None)[0] is not None
    with pytest.raises(UsageError, match="custom_load_fn"):
        engine.load_checkpoint(tmp_path, custom_load_fn=print)
    engine.destroy()


def test_names_that_are_not_here_say_what_is() -> None:
    for name, message in (
        ("zero", r"offload\.init is zero\.Init, offload\.gathered"),
        ("comm", r"torch\.distributed"),
        ("init_distributed", "call nothing: initialize"),
        ("add_config_arguments", "config= of initialize takes the path"),
    ):
        print(name)
        with pytest.raises(AttributeError, match=rf"no attribute '{name}': .*{message}"):
            getattr(offload, name)


COLD: dict[str, Callable[..., None]] = {
    "zero2": lambda total, largest: offload.estimate_zero2_model_states_mem_needs_all_cold(total_params=total),
    "zero3": lambda total, largest: offload.estimate_zero3_model_states_mem_needs_all_cold(
        total_params=total, largest_layer_params=largest, num_gpus_per_node=1, num_nodes=1
    ),
}


@pytest.mark.parametrize("name", COLD)
def test_counts_of_an_estimate_may_be_floats(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    COLD[name](2851e6, 32e6)
    output = capsys.readouterr().out
    COLD[name](2_851_000_000, 32_000_000)
    assert output == capsys.readouterr().out and "GiB" in output
    for wrong in (1.5, float("inf"), float("nan"), "13B", -1e6, True):
        with pytest.raises(ConfigError, match="expected a whole number of parameters"):
            COLD[name](wrong, 32e6)
    assert issubclass(ConfigError, OffloadError)


# --------------------------------------------------------------------------------------------------
# DeepSpeed's four estimators exist by its names, with the numbers of a run of this library.


def model(layers: int = 8, width: int = 512) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def rows(text: str) -> dict[str, list[str]]:
    return {
        line.split("| offload_")[1].strip(): line.split("|")[:3] for line in text.splitlines() if "| offload_" in line
    }


def test_live_and_cold_agree(capsys) -> None:
    net = model()
    count = sum(p.numel() for p in net.parameters())
    offload.estimate_zero3_model_states_mem_needs_all_live(net)
    live = rows(capsys.readouterr().out)
    offload.estimate_zero3_model_states_mem_needs_all_cold(count, count // 8)
    assert live == rows(capsys.readouterr().out) and len(live) == 5
    assert next(net.parameters()).is_meta, "the model was only looked at"


def test_zero2_has_its_weights_on_the_gpu(capsys) -> None:
    offload.estimate_zero2_model_states_mem_needs_all_live(model(), num_gpus_per_node=2)
    names = rows(capsys.readouterr().out)
    assert names and all(name.startswith("param=none") for name in names)
    offload.estimate_zero2_model_states_mem_needs_all_cold(10**9)
    assert rows(capsys.readouterr().out).keys() == names.keys()


NAMES: dict[str, tuple[str, ...]] = {
    "": (
        *("is_synchronized_device", "use_host_timers", "resolves_data_dependency", "handles_memory_backpressure"),
        *("current_device", "current_device_name", "device_count", "random", "initial_seed", "empty_cache"),
        *("is_bf16_supported", "is_fp16_supported", "is_fp64_supported", "supported_dtypes", "is_available"),
        *("communication_backend_name", "is_triton_supported", "prefer_triton_grouped_mm", "create_graph"),
        *("is_current_stream_capturing", "pin_memory_alignment", "op_builder_dir", "build_extension", "export_envs"),
        *("visible_devices_envs", "get_compile_backend"),
    ),
    "device_index": (
        *("device_name", "device", "synchronize", "current_stream", "default_stream", "get_rng_state"),
        *("memory_allocated", "max_memory_allocated", "reset_max_memory_allocated", "memory_cached", "memory_stats"),
        *("max_memory_cached", "reset_max_memory_cached", "reset_peak_memory_stats", "memory_reserved"),
        *("max_memory_reserved", "total_memory", "available_memory", "default_generator", "set_device"),
    ),
    "seed": ("manual_seed", "manual_seed_all"),
    "stream": ("stream",),
    "new_state device_index": ("set_rng_state",),
    "msg domain category": ("range_push",),
    "domain": ("range_pop",),
    "callback": ("lazy_call",),
    "graph pool stream": ("capture_to_graph",),
    "graph": ("replay_graph",),
    "address num_bytes": ("register_host_memory",),
    "address": ("unregister_host_memory",),
    "tensor make_copy match_shape": ("pin_memory",),
    "size dtype device": ("pin_empty",),
    "tensor device dtype": ("pin_empty_like",),
    "tensor": ("is_pinned", "unpin_memory", "on_accelerator"),
    "class_name": ("create_op_builder", "get_op_builder"),
    "current_env local_accelerator_ids": ("set_visible_devices_envs",),
    "backend": ("set_compile_backend",),
}
"""Methods of DeepSpeed's `abstract_accelerator` by their arguments."""
accelerator = get_accelerator()


@pytest.mark.skipif(accelerator.device_name() != "cpu", reason="torch finds a GPU")
def test_each_method_has_deepspeeds_arguments_and_those_of_devices_answer() -> None:
    assert isinstance(accelerator, DeepSpeedAccelerator)
    for arguments, names in NAMES.items():
        for name in names:
            method = getattr(accelerator, name)
            assert [*inspect.signature(method).parameters] == arguments.split(), name
            if not arguments:
                method()
            elif arguments == "device_index":
                method(device_index=0)


@pytest.mark.skipif(accelerator.device_name() != "cpu", reason="torch finds a GPU")
def test_it_has_no_streams_no_graphs_and_no_ranges() -> None:
    assert (accelerator.Stream, accelerator.Event, accelerator.current_stream(), accelerator.default_stream(0)) == (
        None,
    ) * 4
    graph = accelerator.create_graph()
    with accelerator.stream(None), accelerator.capture_to_graph(graph):
        assert accelerator.range_push("step", domain="x") is None and accelerator.range_pop() is None
    accelerator.replay_graph(graph)
    assert accelerator.lazy_call(lambda: 7) == 7 and not accelerator.register_host_memory(0, 8)
    assert (
        accelerator.is_synchronized_device() and accelerator.use_host_timers() and not accelerator.is_triton_supported()
    )


@pytest.mark.skipif(accelerator.device_name() != "cpu", reason="torch finds a GPU")
def test_the_generator_is_torchs_default_one() -> None:
    accelerator.manual_seed_all(11)
    assert (
        accelerator.initial_seed() == torch.initial_seed() == 11
        and accelerator.default_generator(0) is torch.default_generator
    )
    state = accelerator.get_rng_state()
    first = torch.rand(3)
    accelerator.set_rng_state(state, 0)
    assert torch.equal(first, torch.rand(3))


@pytest.mark.skipif(accelerator.device_name() != "cpu", reason="torch finds a GPU")
def test_a_peak_is_of_the_process_and_begins_anew() -> None:
    accelerator.reset_peak_memory_stats()
    before = accelerator.max_memory_allocated()
    held = torch.ones(64 << 18)  # 64 MiB
    assert accelerator.memory_reserved() >= before + held.nbytes // 2
    del held
    assert accelerator.max_memory_reserved() >= before + (32 << 20)
    stats = accelerator.memory_stats()
    assert stats["allocated_bytes.all.peak"] >= stats["allocated_bytes.all.current"] > 0
    accelerator.reset_max_memory_cached()
    assert accelerator.max_memory_cached() <= accelerator.total_memory()


@pytest.mark.skipif(accelerator.device_name() != "cpu", reason="torch finds a GPU")
def test_devices_are_counted_as_launchers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LOCAL_RANK", "1"), ("LOCAL_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert (accelerator.current_device(), accelerator.device_count(), accelerator.device_name(1)) == (1, 4, "cpu")
    for name in ("LOCAL_RANK", "LOCAL_SIZE"):
        monkeypatch.delenv(name)
    assert accelerator.current_device() == 0 and accelerator.device_count() >= 1
    assert accelerator.device() == torch.device("cpu") and accelerator.on_accelerator(torch.ones(1))
    environ = dict[str, str]()
    accelerator.set_visible_devices_envs(environ, [0, 2])
    assert environ == {"CUDA_VISIBLE_DEVICES": "0,2"} and environ.items().isdisjoint(os.environ.items())


@pytest.mark.skipif(accelerator.device_name() != "cpu", reason="torch finds a GPU")
def test_tensors_and_memory_for_copies_are_of_the_cpu() -> None:
    for dtype in ("BFloat16", "Byte", "Double", "Float", "Half", "Int", "Long"):
        assert getattr(accelerator, f"{dtype}Tensor")([1]).dtype == getattr(torch, f"{dtype}Tensor").dtype, dtype
    tensor = torch.ones(2, 3)
    assert accelerator.pin_memory(tensor) is tensor and not accelerator.is_pinned(tensor)
    assert accelerator.pin_empty(2, 3, dtype=torch.int64).shape == accelerator.pin_empty((2, 3), dtype=torch.int8).shape
    assert accelerator.pin_empty_like(tensor, dtype=torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="device must be cpu, got 'meta'"):
        accelerator.pin_empty(2, dtype=torch.int8, device="meta")


@pytest.mark.skipif(accelerator.device_name() != "cpu", reason="torch finds a GPU")
def test_backends_and_builders_are_those_there_are() -> None:
    assert accelerator.get_compile_backend() == "inductor"
    with pytest.raises(ConfigError, match=r"set_compile_backend expects .* eager.*; got 'clang'"):
        accelerator.set_compile_backend("clang")
    accelerator.set_compile_backend("eager")
    assert accelerator.get_compile_backend() == "eager"
    accelerator.set_compile_backend("inductor")
    assert accelerator.create_op_builder("AsyncIOBuilder").is_compatible()
    builder = accelerator.create_op_builder("FusedAdamBuilder")
    assert not builder.is_compatible()
    with pytest.raises(UsageError, match="kernels of its own"):
        builder.load()


def found_names(path: str) -> Any:
    """What a dotted name is, by attributes as a script writes it, or by imports; raises where it is nothing."""
    value: Any = importlib.import_module("offload.deepspeed")
    for part in path.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            if not isinstance(value, ModuleType):
                raise
            value = importlib.import_module(f"{value.__name__}.{part}")
    return value


def named(outcome: str) -> list[deepspeed_names.Name]:
    """The names of the table that end so; at least one."""
    found_names = [name for name in NAMES_NAMES if name.outcome == outcome]
    assert found_names
    return found_names


def test_a_name_is_here_with_deepspeeds_arguments_in_their_order() -> None:
    for name in named(RIGHT):
        value = found_names(name.path)
        wanted = name.parameters.split()
        assert not wanted or [*inspect.signature(value).parameters][: len(wanted)] == wanted, name.path
        if callable(value) and not isinstance(value, type):
            assert inspect.getdoc(value), name.path


def test_a_refused_name_can_be_imported_and_its_use_says_what_to_do() -> None:
    for name in named(REFUSED):
        refused = found_names(name.path)
        with pytest.raises(UsageError, match=r": \w.{15}"):
            refused(None, None)
            pytest.fail(f"{name.path} may be used")


def test_each_name_of_the_table_of_modules_is_there() -> None:
    """By import and by attribute, as one object; a module of the table is found as Python finds any other."""
    for module in MODULES:
        print(module)
        imported = importlib.import_module(f"offload.deepspeed.{module}".removesuffix("."))
        assert imported is (found_names(module) if module else importlib.import_module("offload.deepspeed"))
        assert (
            imported.__spec__ is not None
            and imported.__doc__
            and all(hasattr(imported, name) for name in imported.__all__)
        )
        for name in (*public_names(module), *(name for names in MODULES[module].values() for name in names.split())):
            assert getattr(imported, name) is getattr(imported, name), name
        with pytest.raises(AttributeError, match="reference/deepspeed-names"):
            _ = imported.no_such_name


def test_an_absent_name_is_an_error_of_python_and_the_page_says_why() -> None:
    for name in named(ABSENT):
        with pytest.raises((AttributeError, ImportError)):
            found_names(name.path)
            pytest.fail(f"{name.path} is there")
        assert name.words, name.path


MODULES_OF_DEEPSPEED = """
accelerator: abstract_accelerator cpu_accelerator cuda_accelerator hpu_accelerator klxpu_accelerator mlu_accelerator
  mps_accelerator npu_accelerator real_accelerator sdaa_accelerator supa_accelerator xpu_accelerator
autotuning: autotuner
checkpoint: constants deepspeed_checkpoint ds_to_universal universal_checkpoint utils zero_checkpoint
comm: backend ccl comm config constants mori pg_utils reduce_op torch utils
compat:
compile: backend
compression: helper
constants:
datastates: config
env_report:
git_version_info:
git_version_info_installed:
inference: config engine quantization v2
io: fast_file_writer
launcher: runner launch
linear: optimized_linear
model_implementations: transformers
module_inject: auto_tp
moe: layer experts utils
monitor: monitor
nvme: test_ds_aio
ops: adagrad adam aio compile deepspeed4science fp_quantizer gds lamb lion op_builder pin_memory quantizer random_ltd
  transformer triton_ops
pipe:
profiling: config constants flops_profiler
runtime: activation_checkpointing base_optimizer bf16_optimizer checkpoint_engine chunked_cross_entropy comm compiler
  config config_utils constants data_pipeline dataloader domino engine fp16 hybrid_engine hybrid_engine_graph
  keep_in_fp32 lr_schedules model_checkpointing pipe precision_config python_gc rollout sequence_parallel sparse_tensor
  state_dict_factory superoffload swap_tensor tensor_parallel torch_autocast utils weight_quantizer zenflow zero
sequence: layer
utils: bwc comms_logging config debug exceptions groups init_on_device logging mixed_precision_linkage module_utils numa
  nvtx pin_memory pin_memory_tracker static_cache tensor_fragment timer torch types z3_leaf_module zero_to_fp32
  zero_to_torch
"""
"""The packages of DeepSpeed 0.19.8, and modules of them."""


def test_each_module_of_deepspeed_is_there_or_its_import_says_what_to_use() -> None:
    missing: dict[str, str] = {}
    for package, modules in re.findall(r"^(\w+):((?:.|\n )*)", MODULES_OF_DEEPSPEED, re.M):
        for module in ("", *modules.split()):
            path = f"{package}.{module}".removesuffix(".")
            try:
                importlib.import_module(f"offload.deepspeed.{path}")
            except ModuleNotFoundError as error:
                missing[path] = str(error)
    assert {"autotuning", "autotuning.autotuner", "comm.mori", "runtime.zenflow"} <= missing.keys()
    assert not missing.keys() & {"comm.comm", "ops.aio", "runtime.pipe", "checkpoint.ds_to_universal"}
    for path, message in missing.items():
        assert message.startswith("offload has no counterpart of deepspeed.") and INSTEAD[""] not in message, path
    with pytest.raises(ModuleNotFoundError, match=r"counterpart of deepspeed\.utils\.nvtx: torch\.cuda\.nvtx"):
        from offload.deepspeed.utils import nvtx  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="none of the modules"):
        importlib.import_module("offload.deepspeed.no_such_module")


def test_the_page_is_of_this_table() -> None:
    assert deepspeed_names.PAGE.read_text(encoding="utf-8") == deepspeed_names.document(), (
        "run: python -m tests.pages.deepspeed_names"
    )
