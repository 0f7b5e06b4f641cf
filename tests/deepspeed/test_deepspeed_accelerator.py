"""Each name of DeepSpeed's accelerator answers without a GPU as DeepSpeed's accelerator of the CPU does."""

from __future__ import annotations

import inspect
import os

import pytest
import torch

from offload.deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator
from offload.errors import ConfigError, UsageError

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
found = get_accelerator()

pytestmark = pytest.mark.skipif(found.device_name() != "cpu", reason="torch finds a GPU")


def test_each_method_has_deepspeeds_arguments_and_those_of_devices_answer() -> None:
    assert isinstance(found, DeepSpeedAccelerator)
    for arguments, names in NAMES.items():
        for name in names:
            method = getattr(found, name)
            assert [*inspect.signature(method).parameters] == arguments.split(), name
            if not arguments:
                method()
            elif arguments == "device_index":
                method(device_index=0)


def test_it_has_no_streams_no_graphs_and_no_ranges() -> None:
    assert (found.Stream, found.Event, found.current_stream(), found.default_stream(0)) == (None,) * 4
    graph = found.create_graph()
    with found.stream(None), found.capture_to_graph(graph):
        assert found.range_push("step", domain="x") is None and found.range_pop() is None
    found.replay_graph(graph)
    assert found.lazy_call(lambda: 7) == 7 and not found.register_host_memory(0, 8)
    assert found.is_synchronized_device() and found.use_host_timers() and not found.is_triton_supported()


def test_the_generator_is_torchs_default_one() -> None:
    found.manual_seed_all(11)
    assert found.initial_seed() == torch.initial_seed() == 11 and found.default_generator(0) is torch.default_generator
    state = found.get_rng_state()
    first = torch.rand(3)
    found.set_rng_state(state, 0)
    assert torch.equal(first, torch.rand(3))


def test_a_peak_is_of_the_process_and_begins_anew() -> None:
    found.reset_peak_memory_stats()
    before = found.max_memory_allocated()
    held = torch.ones(64 << 18)  # 64 MiB
    assert found.memory_reserved() >= before + held.nbytes // 2
    del held
    assert found.max_memory_reserved() >= before + (32 << 20)
    stats = found.memory_stats()
    assert stats["allocated_bytes.all.peak"] >= stats["allocated_bytes.all.current"] > 0
    found.reset_max_memory_cached()
    assert found.max_memory_cached() <= found.total_memory()


def test_devices_are_counted_as_launchers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LOCAL_RANK", "1"), ("LOCAL_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert (found.current_device(), found.device_count(), found.device_name(1)) == (1, 4, "cpu")
    for name in ("LOCAL_RANK", "LOCAL_SIZE"):
        monkeypatch.delenv(name)
    assert found.current_device() == 0 and found.device_count() >= 1
    assert found.device() == torch.device("cpu") and found.on_accelerator(torch.ones(1))
    environ = dict[str, str]()
    found.set_visible_devices_envs(environ, [0, 2])
    assert environ == {"CUDA_VISIBLE_DEVICES": "0,2"} and environ.items().isdisjoint(os.environ.items())


def test_tensors_and_memory_for_copies_are_of_the_cpu() -> None:
    for dtype in ("BFloat16", "Byte", "Double", "Float", "Half", "Int", "Long"):
        assert getattr(found, f"{dtype}Tensor")([1]).dtype == getattr(torch, f"{dtype}Tensor").dtype, dtype
    tensor = torch.ones(2, 3)
    assert found.pin_memory(tensor) is tensor and not found.is_pinned(tensor)
    assert found.pin_empty(2, 3, dtype=torch.int64).shape == found.pin_empty((2, 3), dtype=torch.int8).shape
    assert found.pin_empty_like(tensor, dtype=torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="device must be cpu, got 'meta'"):
        found.pin_empty(2, dtype=torch.int8, device="meta")


def test_backends_and_builders_are_those_there_are() -> None:
    assert found.get_compile_backend() == "inductor"
    with pytest.raises(ConfigError, match=r"set_compile_backend expects .* eager.*; got 'clang'"):
        found.set_compile_backend("clang")
    found.set_compile_backend("eager")
    assert found.get_compile_backend() == "eager"
    found.set_compile_backend("inductor")
    assert found.create_op_builder("AsyncIOBuilder").is_compatible()
    builder = found.create_op_builder("FusedAdamBuilder")
    assert not builder.is_compatible()
    with pytest.raises(UsageError, match="kernels of its own"):
        builder.load()
