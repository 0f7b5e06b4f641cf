"""Install the project into the virtual environment that runs this: `python scripts/install.py EXTRA`.

torch comes first: PyTorch's CPU build where there is no NVIDIA driver, because the default one is gigabytes of CUDA
libraries. pip's own settings (PIP_* and pip.conf) stay in force.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU_INDEX_HOST = "download.pytorch.org"
CPU_INDEX = f"https://{CPU_INDEX_HOST}/whl/cpu"


def has_nvidia_driver() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()


def has_own_source() -> bool:
    """Whether pip was told where packages come from, by the environment or its configuration file."""
    if any(os.environ.get(f"PIP_{name}") for name in ("INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS", "NO_INDEX")):
        return True
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    return any(word in listed.stdout for word in ("index-url", "find-links", "no-index"))


def is_reachable(host: str) -> bool:
    try:
        socket.create_connection((host, 443), timeout=3).close()
    except OSError:
        return False
    return True


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-q", *arguments]
    print("+ pip", *command[3:], flush=True)
    subprocess.run(command, cwd=ROOT, check=True)


def main() -> None:
    extra = sys.argv[1]
    pinned = ("-c", "constraints.txt")
    torch = [*pinned, "torch"]
    if subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, check=False).returncode != 0:
        if has_nvidia_driver():
            print("installing torch with CUDA: a download of about 3 GB", flush=True)
        elif not has_own_source() and is_reachable(CPU_INDEX_HOST):
            print("installing torch for the CPU: a download of about 200 MB", flush=True)
            torch += ["--index-url", CPU_INDEX, "--extra-index-url", "https://pypi.org/simple"]
        else:
            print("installing torch from your own package index: 200 MB for the CPU, 3 GB with CUDA", flush=True)
        pip(*torch)
    # Built without isolation, so that the pinned build tools are used and an edited source rebuilds in seconds.
    pip(*pinned, "scikit-build-core", "nanobind", "ninja", "cmake")
    pip(*pinned, "--no-build-isolation", "-e", f".[{extra}]")


if __name__ == "__main__":
    main()
