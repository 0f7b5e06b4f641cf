#!/bin/sh
# Installs a wheel as a user does, into an empty environment without a compiler, and trains with it:
#     sh packaging/try_wheel.sh dist/offload-….whl
set -eu
root=$(realpath "$(dirname "$0")/..") wheel=$(realpath "$1") place=$(mktemp -d)
trap 'PATH=/usr/bin:/bin rm -rf "$place"' EXIT
"${PYTHON:-python3}" -m venv "$place/venv"
"$place/venv/bin/python" "$root/scripts/install.py" torch
"$place/venv/bin/python" "$root/scripts/install.py" "offload[hf] @ file://$wheel"
mkdir "$place/bin"
ln -s "$place/venv/bin/offload" "$place/bin"
# Another folder, so that nothing of the checkout is imported; no other programs, so that nothing can be compiled.
cd "$place"
sed 's/num_train_epochs=4/num_train_epochs=2/' "$root/examples/trainer.py" > trainer.py
export PATH="$place/bin"
offload --version
offload bench io . --size 64MiB --rounds 1 --op read --block-size 1MiB --depth 8
offload train --run demo --steps 6 --batch-size 2 --seq-len 64 --keep
offload verify swap/demo
offload export swap/demo exported
"$place/venv/bin/python" trainer.py
