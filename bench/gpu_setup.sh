#!/usr/bin/env bash
# Make a GPU machine without a network ready for the benchmarks and the tests.
#
#   bench/gpu_setup.sh wheels [FOLDER]    on a machine with a package index: fill FOLDER with wheels
#   bench/gpu_setup.sh install [FOLDER]   on the GPU machine, in this tree: install what is missing, then the package
#
# FOLDER is .wheels in this tree unless it is given. The GPU machine must have torch with CUDA, numpy, safetensors,
# transformers, hypothesis, cmake, ninja and a C++20 compiler: they are large, or belong to the machine. PYTHON is the
# interpreter to use (python3), PYTHON_VERSION what the wheels are for (3.12).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
version=${PYTHON_VERSION:-3.12}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

# What the GPU machine may lack. Those without a version have theirs in constraints.txt.
wheels=(
  pydantic pydantic-core annotated-types==0.8.0 typing-inspection==0.4.5 typing-extensions==4.16.0
  typer annotated-doc==0.0.7 shellingham==1.5.4 rich pygments==2.21.0 markdown-it-py==4.3.0 mdurl==0.1.2
  psutil
  pytest iniconfig==2.3.1 pluggy==1.7.0 packaging==26.3 pytest-timeout pytest-repeat
  scikit-build-core pathspec==1.1.1 nanobind
)

# What must be there for the package, its build and its tests, in the ranges of pyproject.toml.
needed=(
  'pydantic>=2.7,<3' 'typer>=0.12' 'rich>=13' 'psutil>=5.9'
  'scikit-build-core>=0.10' 'nanobind>=2.4'
  'pytest>=8' 'pytest-timeout>=2.3' 'pytest-repeat>=0.9'
)

usage() {
  echo "usage: bench/gpu_setup.sh wheels|install [FOLDER]" >&2
  exit 2
}

# Platforms are matched by name, so each that these packages use is given.
fill() {
  local folder=$1
  mkdir -p "$folder"
  "$python" -m pip download -q --no-deps --only-binary=:all: -c "$root/constraints.txt" \
    --python-version "$version" --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    -d "$folder" "${wheels[@]}"
  echo "$(find "$folder" -name '*.whl' | wc -l) wheels for Python $version, $(du -sh "$folder" | cut -f1), in $folder"
}

# pip leaves alone what satisfies its ranges, and takes from the folder what is missing or too old. Nothing is asked
# about torch, so nothing of its many needs is looked for.
install_missing() {
  local folder=$1
  [ -d "$folder" ] || { echo "there is no folder $folder; fill it where there is a package index: $0 wheels" >&2; exit 1; }
  # An environment that a distribution manages refuses otherwise; where none does, this says nothing.
  export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_INDEX=1
  "$python" -m pip install -q --find-links "$folder" "${needed[@]}"
  # Editable: who runs the tests in this tree imports offload from the tree, and there its
  # native modules are found only by an editable installation.
  "$python" -m pip install -q --no-build-isolation --no-deps -e "$root"
  cd "$root"
  "$python" -c "
import platform, offload, offload.aio, offload.kernels, torch
cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else 'no CUDA device'
print(f'Python {platform.python_version()}, offload {offload.__version__}, torch {torch.__version__}, {cuda}')
"
}

[ $# -ge 1 ] && [ $# -le 2 ] || usage
folder=${2:-$root/.wheels}
case $1 in
  wheels) fill "$folder" ;;
  install) install_missing "$folder" ;;
  *) usage ;;
esac
