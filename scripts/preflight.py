"""Say everything that this machine lacks for a build, at once and as one line to paste.

Plain Python of any version 3, so that an old one can say that it is too old.
"""

import os
import shutil
import subprocess
import sys
import sysconfig

OLDEST = (3, 10)
NEEDED_BYTES = 3 << 30  # the CPU build of torch, unpacked, and everything else
PROBE = "#include <bit>\nint main() { return std::bit_cast<int>(0u); }\n"  # C++20 as the native code uses it


def compiler():
    """The C++ compiler that CMake would take."""
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((name for name in names if name and shutil.which(name.split()[0])), None)


def compiles(command):
    probe = subprocess.Popen(
        [*command.split(), "-std=c++20", "-fsyntax-only", "-x", "c++", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    probe.communicate(PROBE.encode())
    return probe.returncode == 0


def missing_packages():
    """Names of Debian packages that would bring what is missing."""
    version = "%d.%d" % sys.version_info[:2]
    system = sys.executable.startswith("/usr/bin")
    python = "python3" if not system or os.path.realpath("/usr/bin/python3").endswith(version) else "python" + version
    packages = []
    if compiler() is None:
        packages.append("g++")
    if not os.path.isfile(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
        packages.append(python + "-dev")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        packages.append(python + "-venv")
    return packages


def problems():
    if sys.version_info < OLDEST:
        yield "this is Python %d.%d, 3.10 or later is needed: make PYTHON=python3.11 ..." % sys.version_info[:2]
    packages = missing_packages()
    if packages:
        yield "missing; paste this line:\n\n    sudo apt install " + " ".join(packages) + "\n"
    command = compiler()
    if command is not None and not compiles(command):
        yield "%s does not compile C++20; g++ 11 or clang++ 14, or later, does: make CXX=g++-12 ..." % command
    free = shutil.disk_usage(".").free
    if free < NEEDED_BYTES:
        yield "%.1f GB are free here, about %.1f are needed" % (free / 1e9, NEEDED_BYTES / 1e9)


def main():
    faults = list(problems())
    for problem in faults:
        sys.stderr.write(problem + "\n")
    return 2 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
