"""Say everything that this machine lacks for a build, at once and as one line to paste.

Plain Python of any version 3, so that an old one can say that it is too old.
"""

import os
import shutil
import sys
import sysconfig

OLDEST = (3, 10)
NEEDED_BYTES = 3 << 30  # the CPU build of torch, unpacked, and everything else


def missing_packages():
    """Names of Debian packages that would bring what is missing."""
    version = "%d.%d" % sys.version_info[:2]
    system = sys.executable.startswith("/usr/bin")
    python = "python3" if not system or os.path.realpath("/usr/bin/python3").endswith(version) else "python" + version
    packages = []
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        packages.append("g++")
    if not os.path.isfile(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
        packages.append(python + "-dev")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        packages.append(python + "-venv")
    return packages


def main():
    problems = []
    if sys.version_info < OLDEST:
        problems.append(
            "this is Python %d.%d, 3.10 or later is needed: make PYTHON=python3.11 ..." % sys.version_info[:2]
        )
    packages = missing_packages()
    if packages:
        problems.append("missing; paste this line:\n\n    sudo apt install " + " ".join(packages) + "\n")
    free = shutil.disk_usage(".").free
    if free < NEEDED_BYTES:
        problems.append("%.1f GB are free here, about %.1f are needed" % (free / 1e9, NEEDED_BYTES / 1e9))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 2 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
