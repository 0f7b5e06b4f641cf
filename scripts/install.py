"""Install the project into the virtual environment that runs this: `python scripts/install.py EXTRA`.

torch comes first: PyTorch's CPU build where there is no NVIDIA driver, because the default one is gigabytes of CUDA
libraries. pip's own settings (PIP_* and pip.conf) stay in force.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
DRIVER = ("/proc/driver/nvidia/version", "/dev/nvidia0")
SOURCES = ("index-url", "find-links", "no-index")
"""Settings that tell pip where packages come from; "index-url" is in "extra-index-url" too."""


def has_nvidia_driver() -> bool:
    return shutil.which("nvidia-smi") is not None or any(map(os.path.exists, DRIVER))


def has_own_source() -> bool:
    """Whether pip was told where packages come from, by the environment or its configuration file."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    settings = [line.partition("=")[0] for line in listed.splitlines()]
    return any(setting.endswith(SOURCES) for setting in settings)


def is_reachable(url: str, seconds: float = 3) -> bool:
    """Whether `url` answers in time, through a proxy where there is one; a slow name server counts too."""
    answers: list[bool] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(url, timeout=seconds).close()
            answers.append(True)
        except (OSError, ValueError):
            pass  # an error page, of a proxy perhaps, is no answer either

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(answers)


def torch_source() -> tuple[str, list[str]]:
    """What is about to be downloaded, in words, and pip's arguments for it."""
    if has_own_source():
        return "from where your pip is set to look: about 200 MB for the CPU, 3 GB with CUDA", []
    if has_nvidia_driver():
        return "with CUDA: a download of about 3 GB", []
    if is_reachable(f"{CPU_INDEX}/torch/"):
        # The CPU build's version, 2.13.0+cpu, sorts above PyPI's 2.13.0, so pip takes it.
        return "for the CPU: a download of about 200 MB", ["--extra-index-url", CPU_INDEX]
    return "from PyPI, with CUDA: about 3 GB, since download.pytorch.org with its CPU build does not answer", []


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-q", *arguments]
    print("+ pip", *command[3:], flush=True)
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        sys.exit("pip failed; its words are above, and the same command goes on from here")


def main() -> None:
    extra = sys.argv[1]
    pinned = ("-c", "constraints.txt")
    if subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, check=False).returncode != 0:
        words, arguments = torch_source()
        print("installing torch", words, flush=True)
        pip(*pinned, *arguments, "torch")
    # Built without isolation, so that the pinned build tools are used and an edited source rebuilds in seconds.
    pip(*pinned, "scikit-build-core", "nanobind", "ninja", "cmake")
    pip(*pinned, "--no-build-isolation", "-e", f".[{extra}]")


if __name__ == "__main__":
    main()
