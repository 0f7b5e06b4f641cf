"""Install the project into the environment that runs this: `python scripts/install.py EXTRA`; `torch` or `docs` alone.

torch comes first: PyTorch's CPU build where there is no NVIDIA driver, because the default one is gigabytes of CUDA
libraries. uv installs where the variable UV names it or it is on the PATH, pip otherwise. Settings of pip (PIP_* and
pip.conf) stay in force: uv reads none of them, so it is given them under its own names, unless it has sources of its
own (UV_*). pip installs where one of its settings has no such name. `offload[EXTRA]` adds an extra to what is there.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
DRIVER = ("/proc/driver/nvidia/version", "/dev/nvidia0")
SOURCES = ("index-url", "extra-index-url", "find-links", "no-index")
"""Settings that tell pip where packages come from."""
AS_UV = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "cert": "SSL_CERT_FILE",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
"""Settings of pip, each with the variable by which uv takes it."""
NOT_FOR_UV = (
    "config-file",
    "disable-pip-version-check",
    "no-compile",
    "no-input",
    "progress-bar",
    "root-user-action",
    "verbose",
    "quiet",
)
"""Settings of pip that change nothing of what is installed."""
UV_SOURCES = ("UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_NO_INDEX")
"""Variables that tell uv the same."""


def has_nvidia_driver() -> bool:
    return shutil.which("nvidia-smi") is not None or any(map(os.path.exists, DRIVER))


def pip_settings() -> dict[str, str]:
    """Returns what pip is configured with: variables go before files, the part `[install]` before `[global]`."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    settings = {}
    for section in ("global", "install", ":env:"):
        for line in listed.splitlines():
            name, equals, value = line.partition("=")
            if equals and name.startswith(f"{section}."):
                settings[name.removeprefix(f"{section}.")] = str(ast.literal_eval(value))
    return settings


def as_uv(settings: dict[str, str]) -> dict[str, str] | None:
    """Returns pip's settings as variables of uv; None if uv has no name for one of them."""
    taken = {name: " ".join(value.split()) for name, value in settings.items() if name not in NOT_FOR_UV}
    if not taken.keys() <= AS_UV.keys():
        return None
    # Of several folders pip takes them with blanks between, uv with commas.
    return {AS_UV[name]: value.replace(" ", ",") if name == "find-links" else value for name, value in taken.items()}


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


def choose_installer() -> tuple[str, bool]:
    """Returns the path of uv, or "" for pip; and whether the one that installs was told where packages come from.

    Puts pip's settings into the environment of uv, where uv installs and was told nothing of its own.
    """
    uv = shutil.which(os.environ.get("UV") or "uv")
    settings = pip_settings()
    pip_was_told = any(name in SOURCES for name in settings)
    if uv is None:
        return "", pip_was_told
    if any(os.environ.get(name) for name in UV_SOURCES):
        return uv, True
    variables = as_uv(settings)
    if variables is None and pip_was_told:
        return "", True
    os.environ.update(variables or {})
    return uv, pip_was_told


def torch_source(own_source: bool) -> tuple[str, list[str]]:
    """Returns a description of the download, and the installer's arguments for it."""
    if own_source:
        return "from where your pip or uv is set to look: about 200 MB for the CPU, 3 GB with CUDA", []
    if has_nvidia_driver():
        return "with CUDA: a download of about 3 GB", []
    if is_reachable(f"{CPU_INDEX}/torch/"):
        # The CPU build's version, 2.13.0+cpu, sorts above PyPI's 2.13.0, so it is taken.
        return "for the CPU: a download of about 200 MB", ["--extra-index-url", CPU_INDEX]
    return "from PyPI, with CUDA: about 3 GB, since download.pytorch.org with its CPU build does not answer", []


def install(uv: str, *arguments: str) -> None:
    """Installs by uv, or by pip where `uv` is empty."""
    if uv:
        # As pip does, the newest version of all indexes is taken; uv alone would look no further than the first index.
        tool, options = [uv, "pip", "install"], ["--python", sys.executable, "--index-strategy", "unsafe-best-match"]
    else:
        tool, options = [sys.executable, "-m", "pip", "install"], ["--disable-pip-version-check"]
    name = "uv" if uv else "pip"
    print("+", name, "install", *arguments, flush=True)
    if subprocess.run([*tool, *options, "-q", *arguments], cwd=ROOT, check=False).returncode != 0:
        sys.exit(f"{name} failed; its words are above, and the same command goes on from here")


def packages_of(extra: str) -> list[str]:
    """Returns the requirements of an extra that pyproject.toml lists on one line; Python 3.10 reads no TOML."""
    line = re.search(rf"^{extra} = (\[.*\])$", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert line, f"pyproject.toml has no line of {extra}"
    packages: list[str] = ast.literal_eval(line[1])
    return packages


def main() -> None:
    extra = sys.argv[1]
    pinned = ("-c", "constraints.txt")
    uv, own_source = choose_installer()
    if extra.startswith("offload["):
        install(uv, *pinned, extra)
        return
    if extra == "docs":
        install(uv, *pinned, *packages_of(extra))
        return
    if importlib.util.find_spec("torch") is None:
        words, arguments = torch_source(own_source)
        print("installing torch", words, flush=True)
        # NumPy too: a process may import torch, which imports NumPy, while the rest is installed.
        install(uv, *pinned, *arguments, "torch", "numpy")
    if extra == "torch":
        return
    # Built without isolation, so that the pinned build tools are used and an edited source rebuilds in seconds.
    install(uv, *pinned, "scikit-build-core", "nanobind", "hatch-fancy-pypi-readme", "ninja", "cmake")
    install(uv, *pinned, "--no-build-isolation", "-e", f".[{extra}]")


if __name__ == "__main__":
    main()
