"""The GPU benchmark holds a placement against its bound, and says which part failed or gave no figures."""

from __future__ import annotations

from typing import Any

from offload.bench.gpu.parts import add_exposure, bounds, invalid, judge, refused
from tests.bench.gpu_bench import placed


def test_the_exit_code_knows_other_bits_and_failed_parts_but_no_skipped_ones() -> None:
    def compared(**found: Any) -> dict[str, Any]:
        return {"state": "done", "figures": {"jobs": {"gpt2 fp32": {"different": {}, "failed": {}} | found}}}

    assert judge({"bits": compared(), "copies": {"state": "skipped"}, "none/none": {"state": "stopped"}}) == 0
    assert judge({"bits": compared(different={"cpu/cpu": ["loss 1 is 2.0, not 3.0"]})}) == 1
    assert judge({"bits": compared(failed={"cpu/cpu": "OSError: full"})}) == 1
    assert judge({"bits": compared(), "copies": {"state": "failed"}}) == 1
    assert judge({"copies": {"state": "done", "figures": {"upload": {"right": False}}}}) == 1
    assert judge({"copies": {"state": "done", "figures": {"both": {"right": False}}}}) == 1
    assert judge({"tests": {"state": "done", "figures": {"exit_code": 1}}}) == 1


def test_a_placement_is_held_against_none_none_of_the_same_work_alone() -> None:
    parts = {"none/none": placed(1.0), "cpu/cpu": placed(1.5), "nvme/nvme in 24 GiB": placed(9.0, tokens_per_step=8)}
    add_exposure(parts)
    assert parts["cpu/cpu"]["figures"]["exposed_seconds"] == 0.5
    assert "exposed_seconds" not in parts["nvme/nvme in 24 GiB"]["figures"]


def test_without_kernels_of_the_gpu_the_bound_is_invalid_and_nothing_is_held_against_it() -> None:
    """The host would update 12 bytes a parameter over the bus each way, and every exposed second would be nonsense."""
    why = {"no_device_kernels": "no libnvrtc"}
    parts = {"none/none": placed(9.0, **why), "cpu/none": placed(9.0, **why), "cpu/cpu": placed(2.0, **why)}
    parts["cpu/none in 24 GiB"] = placed(1.0, **why)
    add_exposure(parts)
    found = invalid(parts)
    assert found.keys() == {"none/none", "cpu/none", "cpu/none in 24 GiB"} and "no libnvrtc" in found["none/none"]
    assert "exposed_seconds" not in parts["cpu/cpu"]["figures"]
    assert bounds(parts)["step_seconds"] is None and bounds({"none/none": placed(9.0)})["step_seconds"] == 9.0
    assert judge(parts) == 0, "the bits were right"


def test_what_gave_no_figures_is_named_with_the_reason() -> None:
    parts: dict[str, dict[str, Any]] = {
        "bits": {"state": "failed", "exit_code": 1, "last_lines": ["a", "RuntimeError: no"], "figures": None},
        "copies": {"state": "stopped", "figures": None},
        "rates": {"state": "stopped", "figures": {"plain_matmul": 1.0}},
        "7B": {"state": "skipped", "needs_seconds": 240.0},
        "DeepSpeed": {"state": "done", "figures": {"skipped": "DeepSpeed is not installed"}},
        "none/none": placed(1.0),
    }
    assert refused(parts) == {
        "bits": "failed with exit code 1: RuntimeError: no",
        "copies": "stopped when the budget was over, without figures",
        "rates": "stopped when the budget was over",
        "7B": "not run: 240 s did not fit into the budget",
        "DeepSpeed": "DeepSpeed is not installed",
    }
