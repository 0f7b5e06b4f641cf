"""The manifest of the Kubernetes guide fits together, and its command starts the torchrun of each pod."""

from __future__ import annotations

import itertools
import re
import shlex
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from typer.testing import CliRunner

from offload.cli.main import app
from tests import ROOT

GUIDE = ROOT / "docs" / "guides" / "kubernetes.md"


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    (text,) = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def faults(manifest: dict[str, Any]) -> list[str]:
    """What does not fit together among the parts of a manifest."""
    service, job = manifest["Service"], manifest["Job"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command = shlex.split(container["args"][0])
    option = {name: value for name, value in itertools.pairwise(command) if name.startswith("--")}
    volumes = {each["name"] for each in pod["volumes"]}
    name = job["metadata"]["name"]
    same = {
        "the service has no name of its own for each pod": service["spec"]["clusterIP"] == "None",
        "the service chooses other pods": service["spec"]["selector"] == {"job-name": name},
        "the pods are in another subdomain": pod["subdomain"] == service["metadata"]["name"],
        "the pods have no numbers": spec["completionMode"] == "Indexed",
        "not all pods run at once": spec["completions"] == spec["parallelism"] == int(option["--num_nodes"]),
        "rank 0 is somewhere else": option["--master_addr"] == f"{name}-0.{service['metadata']['name']}",
        "the command has another number of GPUs": container["resources"]["limits"]["nvidia.com/gpu"]
        == int(option["--num_gpus"]),
        "a volume is missing": {each["name"] for each in container["volumeMounts"]} == volumes,
    }
    return [what for what, right in same.items() if not right]


def test_its_parts_fit_together(manifest: dict[str, Any]) -> None:
    assert faults(manifest) == []


def test_a_manifest_whose_parts_do_not_fit_is_noticed(manifest: dict[str, Any]) -> None:
    other = yaml.safe_load(yaml.safe_dump(manifest))
    other["Job"]["metadata"]["name"] = "other"
    other["Job"]["spec"]["parallelism"] = 3
    assert faults(other) == ["the service chooses other pods", "not all pods run at once", "rank 0 is somewhere else"]


@pytest.mark.parametrize("number", [0, 1])
def test_each_pod_starts_the_torchrun_of_its_number(number: int, manifest: dict[str, Any]) -> None:
    (container,) = manifest["Job"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["sh", "-c"]
    command = shlex.split(container["args"][0].replace("$JOB_COMPLETION_INDEX", str(number)))
    assert command[:3] == ["exec", "offload", "launch"]
    result = CliRunner(env={"COLUMNS": "500"}).invoke(app, ["launch", "--dry_run", *command[3:]])
    assert result.exit_code == 0, result.output
    words = shlex.split(result.output)
    for option in ("--nnodes=2", "--nproc-per-node=8", f"--node-rank={number}", "--master-addr=train-0.train"):
        name, _, value = option.partition("=")
        assert option in words or words[words.index(name) + 1] == value
    assert "train.py" in words
