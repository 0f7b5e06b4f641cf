"""On a device with streams of its own, code of others computes with bytes that are there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import device
from tests.accelerators.test_device_engine import on_device
from tests.frozen.test_quantized_subclasses import AREA, DISK, KINDS, job
from tests.support.oracle import run, start

pytestmark = pytest.mark.test_device


@pytest.mark.sample(4)
@pytest.mark.works(AREA, "a device with streams of its own (that of the tests)", "right")
@pytest.mark.parametrize("placement", [("none", "cpu"), ("cpu", "cpu"), DISK], ids=str)
@pytest.mark.parametrize("kind", ["wrapper", "wrapper of a wrapper", "parameters of integers"])
def test_late_streams_keep_every_bit(kind: str, placement: tuple[str, str], tmp_path: Path) -> None:
    this = job(KINDS[kind])._replace(accumulation=2)
    expected = run(this, ("none", "none"), tmp_path / "memory", device="cpu")
    for seed, lateness in enumerate((0.5, 1.0)):
        device.seed(seed, lateness)
        # Room for all where weights are on the device; else for two or three units of six.
        options = {} if placement[0] == "none" else {"device_memory": (60 + 24 * seed) << 10}
        found = on_device(this, placement, tmp_path / str(seed), **options)
        assert (expected.losses, expected.norms) == (found.losses, found.norms)


@pytest.mark.parametrize("kind", ["wrapper", "wrapper of a wrapper"])
def test_a_state_dict_is_on_the_cpu_in_the_format_of_the_wrapper(kind: str, tmp_path: Path) -> None:
    """These wrappers lose their format when they are moved as a whole."""
    this = job(KINDS[kind])
    torch.manual_seed(this.seed)
    expected, engine = this.model().state_dict(), start(this, DISK, tmp_path)
    for name, value in engine.module.state_dict().items():
        assert type(value) is type(expected[name]) and value.device.type == "cpu"
        assert torch.equal(value * 1, expected[name] * 1), name
    engine.destroy(remove=True)
